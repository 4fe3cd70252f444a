"""Row transfers between HBM and the DRAM tier: evicted rows out, missing rows in.

Order of one window, whose slots were planned on the planning stream of `HbmTier`:

1. `enqueue` (planning thread) copies the evicted rows into page-locked memory on the *out* stream, after training's
   last use of them, and queues the load of the missing rows.
2. The write-back thread waits for that copy and pushes the changed rows into the DRAM tier.
3. `load` (any thread, in the order of the plans) waits for the write-back of all earlier plans, reads the missing rows
   from the DRAM tier into page-locked memory and copies them into their slots on the *in* stream.

Kernels access page-locked memory over the link, so nothing is staged on the GPU. They do not access the DRAM tier's own
rows: one address translation per row makes that slower than a copy by the CPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
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
from thermocline.tiers.dram import DramTier, KnownSlots
from thermocline.tiers.dram_slots import DramSlots
from thermocline.utils.recording import OnStream, current_stream

TRANSFER_BYTES = 5
"""Bytes of `RowTransfer` on the device per slot, at most: a flag and the DRAM slot."""
_STAGING_BUFFERS = 3  # per direction: transfers in flight


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MissingRows:
    """Rows to load into HBM."""

    keys: torch.Tensor
    """Missing keys in host memory, valid after `planned`."""
    slots: torch.Tensor
    count: torch.Tensor
    planned: torch.cuda.Event | None
    vacated: torch.cuda.Event | None
    """Recorded when the slots may be overwritten."""
    earlier_write_back: concurrent.futures.Future[None] | None
    """Write-back of the rows that earlier plans evicted."""


@dataclasses.dataclass(slots=True, eq=False)
class PendingLoad:
    """Load of the rows that one window misses."""

    number: int
    """Number of the window."""
    missing: MissingRows | None = None
    """None: the window misses no row."""
    ready: torch.cuda.Event | None = None
    """Recorded when the rows of this and all earlier windows are in their slots; None before `RowTransfer.load`,
    without CUDA, and if no row was ever loaded."""
    done: bool = False


class RowTransfer:
    """Moves rows of one table between HBM and the DRAM tier.

    Thread safety: `enqueue`, `staging_rows` and `write_back` are called under the lock of `HbmTier`, on its planning
    stream; the write-back thread also calls `write_back`. `load`, `load_released` and `drain` may be called from any
    thread: `_load_lock` serialises them. `enqueue` appends to the queue without that lock, which a load holds for long.
    """

    def __init__(self, dram: DramTier, arena: torch.Tensor, name: str) -> None:
        self.dram = dram
        self.failure: str | None = None
        """The error that lost rows, after which the tier refuses to work until `reset`."""
        self._failure_kind: type[ThermoclineError] = ThermoclineError
        self.written_back = 0
        """Changed rows pushed into the DRAM tier."""
        self.from_dram = self.from_ssd = self.initialised = 0
        """Loaded rows by source."""
        self.dirty = torch.zeros(len(arena), dtype=torch.uint8, device=arena.device)
        """Per slot: 1 if the row changed since it was loaded or written back."""
        self.dram_slots = DramSlots(dram, len(arena), arena.device)
        self._name = name
        self._arena = arena
        self._cuda = arena.device.type == "cuda"
        self._in = stream_ahead(arena.device)
        self._out = stream_ahead(arena.device)
        # Used in turn: a buffer may still be read while the next one is filled.
        self._in_buffers = deque(StagingBuffer(arena.shape[1], self._cuda) for _ in range(_STAGING_BUFFERS))
        self._out_buffers = deque(StagingBuffer(arena.shape[1], self._cuda) for _ in range(_STAGING_BUFFERS))
        self._write_back_thread = concurrent.futures.ThreadPoolExecutor(1, "thermocline-write-back")
        self._last_write_back: concurrent.futures.Future[None] | None = None
        self._loaded: torch.cuda.Event | None = None
        """Recorded after the newest load; None: it has ended, or there was none."""
        self._load_lock = threading.RLock()
        self._queue: deque[PendingLoad] = deque()

    # ---- called by the planner, on its stream

    def enqueue(
        self, plan: InsertPlan, number: int, new: int, evicted: int, trained: Sequence[torch.cuda.Event]
    ) -> PendingLoad:
        """Copy the evicted rows out of their slots after the events `trained`, and queue the load of the new rows."""
        if new == 0:  # then nothing is evicted: the rows are in HBM, or on their way there for earlier windows
            pending = PendingLoad(number)
            self._queue.append(pending)
            return pending
        slots, count = plan.new_slots[:new], plan.counts[NEW.value :]
        try:
            keys = self._to_host(plan.new_keys[:new])
            planned = self._event()
            earlier_write_back = self._last_write_back
            with self._on(self._out, [planned, *trained], plan.memory):
                if evicted:
                    self._write_back_evicted(plan, evicted)
                set_flags(self.dirty, slots, count, 0)
                vacated = self._event()
        except BaseException as error:  # the index already lacks the evicted keys: their rows are lost
            self.record_failure(error)
            raise
        missing = MissingRows(keys, slots, count, planned, vacated, earlier_write_back)
        pending = PendingLoad(number, missing)
        self._queue.append(pending)
        return pending

    def _write_back_evicted(self, plan: InsertPlan, evicted: int) -> None:
        buffer, rows = self._out_rows(evicted)
        victims = plan.victims[:evicted]
        index = victims.long()
        dirty = self._to_host(self.dirty[index])
        slots = self.dram_slots.known(index)
        known = self.dram_slots.for_push(None if slots is None else self._to_host(slots))
        keys = self._to_host(plan.victim_keys[:evicted])
        copy_out(self._arena, victims, rows, plan.counts[EVICTED.value :])
        copied = self._event()

        def write_back() -> None:
            try:
                self._wait_for(copied)
                changed = dirty.numpy().astype(bool)
                some = slice(None) if changed.all() else changed
                self.write_back(keys.numpy()[some], rows.numpy()[some], None if known is None else known[some])
            except BaseException as error:  # now: only the last write-back is waited for, and it may succeed
                self.record_failure(error)
                raise

        self._last_write_back = self._write_back_thread.submit(write_back)
        buffer.wait_for_reader = functools.partial(self._wait_write_back, self._last_write_back)

    def write_back(self, keys: Any, rows: Floats, known: KnownSlots | None = None) -> None:
        """Push changed rows into the DRAM tier."""
        if len(keys):
            self.dram.push_stored(keys, rows, dirty=True, unique=True, known=known)
            self.written_back += len(keys)

    def staging_rows(self, rows: int) -> torch.Tensor:
        """Return page-locked float32[rows, floats] for rows to write back, valid until the next call."""
        return self._out_buffers[0].reserve(rows)

    # ---- called from any thread

    def load(self, pending: PendingLoad) -> None:
        """Load the rows of this window and of all earlier ones. They are in their slots at `pending.ready`."""
        with self._load_lock:
            while not pending.done:
                self._load_next()

    def load_released(self, completed: int) -> None:
        """Run the loads of windows up to `completed` that were released unloaded: their slots may be reused next."""
        first = next(iter(tuple(self._queue)), None)
        if first is not None and first.number <= completed:
            with self._load_lock:
                while self._queue and self._queue[0].number <= completed:
                    self._load_next()

    def drain(self) -> None:
        """Finish all queued transfers and make the current stream wait for them. Raises if rows were lost."""
        self.check()
        with self._load_lock:
            while self._queue:
                self._load_next()
            self._wait_write_back(self._last_write_back)
            for stream in (self._in, self._out):
                if stream is not None:
                    current_stream(self._arena.device).wait_stream(stream)

    def wait_for_write_back(self) -> None:
        """Wait for the write-backs submitted so far. The next load or `drain` raises their errors."""
        if (write_back := self._last_write_back) is not None:
            concurrent.futures.wait([write_back])

    def _load_next(self) -> None:
        pending = self._queue[0]
        try:
            if pending.missing is not None:
                self._load_rows(pending.missing)
            elif self._loaded is not None and self._loaded.query():  # type: ignore[no-untyped-call]
                self._loaded = None  # training need not wait for it again
            pending.ready = self._loaded
            pending.done = True
        except BaseException as error:
            self.record_failure(error)
            raise
        finally:
            self._queue.popleft()  # now: `load_released` waits for loads that are in the queue

    def _load_rows(self, missing: MissingRows) -> None:
        self._wait_write_back(missing.earlier_write_back)
        self._wait_for(missing.planned)
        with self._on(self._in, [missing.vacated], [missing.slots, missing.count]):
            buffer, rows = self._in_rows(len(missing.keys))
            dram_slots = self.dram_slots.buffer(len(missing.keys))
            self._read(missing.keys, rows, dram_slots)
            copy_in(self._arena, missing.slots, rows, missing.count)
            self.dram_slots.note(missing.slots, dram_slots)
            self._loaded = self._event()
            buffer.wait_for_reader = None if self._loaded is None else self._loaded.synchronize

    def _read(self, keys: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None) -> None:
        """Read rows from the tiers below, and their DRAM slots."""
        noted = None if slots is None else slots.numpy().view(np.uint32)
        from_dram, from_ssd = self.dram.read_into(as_uint64(keys), rows.numpy(), noted)
        self.from_dram += from_dram
        self.from_ssd += from_ssd
        self.initialised += len(rows) - from_dram - from_ssd

    def _wait_write_back(self, write_back: concurrent.futures.Future[None] | None) -> None:
        if write_back is not None:
            write_back.result()
            self.check()  # of those before it

    def reset(self, dram: DramTier) -> None:
        """Drop all queued transfers and continue above another DRAM tier."""
        with self._load_lock:
            if self._last_write_back is not None:
                concurrent.futures.wait([self._last_write_back])  # it writes to the old tier
            for pending in self._queue:
                pending.done = True
            self._queue.clear()
            self._last_write_back = None
            self.dram = dram
            self.failure = None
            self.dirty.zero_()
            if self._in is not None:
                current_stream(self._arena.device).wait_stream(self._in)  # it may still set slots of the old tier
            self.dram_slots.reset(dram)

    def check(self) -> None:
        """Raise `ThermoclineError` if rows were lost, of the kind of the error that lost them."""
        if self.failure is not None:
            raise self._failure_kind(
                f"table {self._name!r}: rows were lost between HBM and DRAM ({self.failure}). Reopen the table on its "
                "last commit"
            )

    def record_failure(self, error: BaseException) -> None:
        """Refuse to work until `reset`: rows may be lost."""
        self._failure_kind = type(error) if isinstance(error, ThermoclineError) else ThermoclineError
        self.failure = f"{type(error).__name__}: {error}"

    # ---- the device

    @contextlib.contextmanager
    def _on(
        self,
        stream: torch.cuda.Stream | None,
        after: Sequence[torch.cuda.Event | None],
        memory: Sequence[torch.Tensor],
    ) -> Iterator[None]:
        """Run on `stream` after the events; `memory`, allocated on another stream, is not reused before that."""
        if stream is None:
            yield
            return
        with OnStream(stream):
            for event in after:
                stream.wait_event(event)  # type: ignore[arg-type]
            for tensor in memory:
                tensor.record_stream(stream)
            yield

    def _in_rows(self, rows: int) -> tuple[StagingBuffer, torch.Tensor]:
        """Return the next buffer for missing rows. Blocks until the device has read it."""
        buffer = self._in_buffers[0]
        self._in_buffers.rotate()
        return buffer, buffer.reserve(rows)

    def _out_rows(self, rows: int) -> tuple[StagingBuffer, torch.Tensor]:
        """Return the next buffer for evicted rows. Blocks until its rows are written back."""
        buffer = self._out_buffers[0]
        self._out_buffers.rotate()
        return buffer, buffer.reserve(rows)

    @staticmethod
    def _wait_for(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        return current_stream(self._arena.device).record_event() if self._cuda else None


class StagingBuffer:
    """Rows in page-locked memory; grows to the largest request."""

    def __init__(self, floats: int, pinned: bool) -> None:
        self._floats = floats
        self._pinned = pinned
        self._rows = torch.empty(0, floats)
        self.wait_for_reader: Callable[[], object] | None = None
        """Blocks until the last transfer has read the buffer."""

    def reserve(self, rows: int) -> torch.Tensor:
        """Return float32[rows, floats]. Blocks until the last transfer has read the buffer."""
        if self.wait_for_reader is not None:
            wait, self.wait_for_reader = self.wait_for_reader, None
            wait()
        if len(self._rows) < rows:
            self._rows = torch.empty(rows + rows // 4, self._floats, pin_memory=self._pinned)
        return self._rows[:rows]


def as_uint64(keys: torch.Tensor) -> Any:
    """Return int64 bit patterns as uint64 keys in host memory."""
    return keys.cpu().numpy().view(np.uint64)
