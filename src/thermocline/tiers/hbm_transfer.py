"""Rows on their way between HBM and the memory tier: out behind training, in ahead of it.

A plan says who leaves and who comes. Those who leave are copied into page-locked memory at once, on a stream of their
own, and pushed down by a thread of its own. Those who come are fetched later, in the order of the plans: read below,
after all that left in earlier plans has arrived there, and copied in on a third stream. Kernels reach page-locked
memory over the link: nothing is staged on the GPU. They do not reach the memory tier's own rows: one address
translation per row makes that slower than a processor's copy.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats
from thermocline.errors import ThermoclineError
from thermocline.kernels.dirty_flags import set_flags
from thermocline.kernels.evict import EVICTED, NEW
from thermocline.kernels.insert import InsertPlan
from thermocline.kernels.launch import stream_ahead
from thermocline.kernels.rows import copy_in, copy_out
from thermocline.tiers.dram import DramTier

_STAGINGS = 3  # of rows on their way, in each direction


@dataclasses.dataclass(slots=True, eq=False)
class Fetch:
    """The rows that one plan lacks. `number`: of its window; `ready`: when they are in their slots."""

    number: int
    keys: torch.Tensor
    """On the host, once `planned` has passed."""
    slots: torch.Tensor
    count: torch.Tensor
    planned: torch.cuda.Event | None
    vacated: torch.cuda.Event | None
    """When the slots are free."""
    after: concurrent.futures.Future[None] | None
    """What left in earlier plans has arrived below."""
    ready: torch.cuda.Event | None = None
    done: bool = False


class Mover:
    """Moves rows of one table. `leave` belongs to the planner; `fetch` and `drain` may be called by any thread."""

    def __init__(self, mem: DramTier, arena: torch.Tensor, name: str) -> None:
        self.mem = mem
        self.failed: str | None = None
        """Why rows were lost: nothing here can be trusted any more."""
        self.written = 0
        """Changed rows that were pushed down."""
        self.from_mem = self.from_ssd = self.initialised = 0
        """Rows that came, by where they were."""
        self.dirty = torch.zeros(len(arena), dtype=torch.uint8, device=arena.device)
        """Per slot: whether its row was changed since it came, or was written down."""
        self._name = name
        self._arena = arena
        self._cuda = arena.device.type == "cuda"
        self._in = stream_ahead(arena.device)
        self._out = stream_ahead(arena.device)
        # By turns: some may still be read while the next is filled.
        self._coming = deque(_Staging(arena.shape[1], self._cuda) for _ in range(_STAGINGS))
        self._leaving = deque(_Staging(arena.shape[1], self._cuda) for _ in range(_STAGINGS))
        self._pusher = concurrent.futures.ThreadPoolExecutor(1, "thermocline-write-back")
        self._pushing: concurrent.futures.Future[None] | None = None
        self._fetching = threading.RLock()  # who takes from the queue; held until the rows are on their way
        self._queue: deque[Fetch] = deque()

    # ---- the planner's side; on its stream

    def leave(
        self, plan: InsertPlan, number: int, new: int, evicted: int, trained: Sequence[torch.cuda.Event]
    ) -> Fetch:
        """Takes the victims out of their slots once training has passed these events; queues who comes instead."""
        slots, count = plan.new_slots[:new], plan.counts[NEW.value :]
        try:
            keys = self._to_host(plan.new_keys[:new])
            planned = self._event()
            after = self._pushing
            with self._on(self._out, [planned, *trained], plan.memory):
                if evicted:
                    self._push_later(plan, evicted)
                if new:
                    set_flags(self.dirty, slots, count, 0)
                vacated = self._event()
        except BaseException as error:  # the plan is made: the victims' rows are nobody's now
            self.failed = f"{type(error).__name__}: {error}"
            raise
        fetch = Fetch(number, keys, slots, count, planned, vacated, after)
        self._queue.append(fetch)  # without the lock: whoever fetches holds it for long
        return fetch

    def _push_later(self, plan: InsertPlan, evicted: int) -> None:
        staging = self._leaving[0]
        self._leaving.rotate()
        rows = staging.room(evicted)
        victims = plan.victims[:evicted]
        dirty = self._to_host(self.dirty[victims.long()])
        keys = self._to_host(plan.victim_keys[:evicted])
        copy_out(self._arena, victims, rows, plan.counts[EVICTED.value :])
        copied = self._event()

        def push() -> None:
            if copied is not None:
                copied.synchronize()
            changed = dirty.numpy().astype(bool)
            if changed.all():
                self.push(keys.numpy(), rows.numpy())
            else:
                self.push(keys.numpy()[changed], rows.numpy()[changed])

        self._pushing = self._pusher.submit(push)
        staging.busy = self._pushing.result

    def push(self, keys: Any, rows: Floats) -> None:
        """Changed rows into the memory tier."""
        if len(keys):
            self.mem.push_stored(keys, rows, dirty=True, unique=True)
            self.written += len(keys)

    # ---- anyone's side

    def fetch(self, wanted: Fetch) -> None:
        """Sends the rows into their slots, after those of earlier plans; on the GPU they are there at `ready`."""
        with self._fetching:
            while not wanted.done:
                self._fetch_next()

    def fetch_released(self, completed: int) -> None:
        """Fetches what windows up to this one never did: their slots may be given away next."""
        first = next(iter(tuple(self._queue)), None)
        if first is not None and first.number <= completed:
            with self._fetching:
                while self._queue and self._queue[0].number <= completed:
                    self._fetch_next()

    def drain(self) -> None:
        """Everything planned so far is in its slots or below; the current stream sees it. Raises if rows were lost."""
        self.check()
        with self._fetching:
            while self._queue:
                self._fetch_next()
            self._settle(self._pushing)
            for stream in (self._in, self._out):
                if stream is not None:
                    torch.cuda.current_stream(self._arena.device).wait_stream(stream)

    def _fetch_next(self) -> None:
        fetch = self._queue.popleft()
        try:
            self._settle(fetch.after)
            if fetch.planned is not None:
                fetch.planned.synchronize()
            with self._on(self._in, [fetch.vacated], [fetch.slots, fetch.count]):
                if len(fetch.keys):
                    self._copy_in(fetch)
                fetch.ready = self._event()
            fetch.done = True
        except BaseException as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise

    def _copy_in(self, fetch: Fetch) -> None:
        staging = self._coming[0]
        self._coming.rotate()
        rows = staging.room(len(fetch.keys))
        here, stored = self.mem.read_into(as_words(fetch.keys), rows.numpy())
        self.from_mem += here
        self.from_ssd += stored
        self.initialised += len(rows) - here - stored
        copy_in(self._arena, fetch.slots, rows, fetch.count)
        event = self._event()
        staging.busy = None if event is None else event.synchronize

    def _settle(self, pushing: concurrent.futures.Future[None] | None) -> None:
        if pushing is not None:
            try:
                pushing.result()
            except BaseException as error:
                self.failed = f"{type(error).__name__}: {error}"
                raise

    def reset(self, mem: DramTier) -> None:
        """Forgets what is on its way, and goes on above another memory tier."""
        with self._fetching:
            if self._pushing is not None:
                concurrent.futures.wait([self._pushing])  # it leads to the old one
            for fetch in self._queue:
                fetch.done = True
            self._queue.clear()
            self._pushing = None
            self.mem = mem
            self.failed = None
            self.dirty.zero_()

    def check(self) -> None:
        """Raises if rows were lost."""
        if self.failed is not None:
            raise ThermoclineError(
                f"table {self._name!r}: rows were lost on their way between HBM and memory ({self.failed}): reopen "
                "the table on its last commit"
            )

    def staging(self, rows: int) -> torch.Tensor:
        """Page-locked room for rows that leave; the caller is done with it when it asks again."""
        return self._leaving[0].room(rows)

    @contextlib.contextmanager
    def _on(
        self,
        stream: torch.cuda.Stream | None,
        after: Sequence[torch.cuda.Event | None],
        memory: Sequence[torch.Tensor],
    ) -> Iterator[None]:
        """Work goes to a stream, after these events; the memory, made on another, is not reused before it is done."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)  # type: ignore[arg-type]
            for tensor in memory:
                tensor.record_stream(stream)
            yield

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._arena.device).record_event() if self._cuda else None


class _Staging:
    """Rows in page-locked memory, as many as were needed at most."""

    def __init__(self, floats: int, pinned: bool) -> None:
        self._floats = floats
        self._pinned = pinned
        self._rows = torch.empty(0, floats)
        self.busy: Callable[[], object] | None = None
        """Waits for who reads it."""

    def room(self, rows: int) -> torch.Tensor:
        """float32[rows, floats], once nobody reads it any more."""
        if self.busy is not None:
            busy, self.busy = self.busy, None
            busy()
        if len(self._rows) < rows:
            self._rows = torch.empty(rows + rows // 4, self._floats, pin_memory=self._pinned)
        return self._rows[:rows]


def as_words(keys: torch.Tensor) -> Any:
    """Keys on the host as uint64."""
    return keys.cpu().numpy().view(np.uint64)
