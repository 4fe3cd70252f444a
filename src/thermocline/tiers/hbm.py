"""The HBM tier: rows on the GPU above a memory tier, within a byte budget; trained on in place.

A window of batches is planned in one go, in order (`pin`): kernels give every id a slot, say which keys are missing and
whose slots they take. Then rows move (`load`, hbm_move.py): what was trained and leaves goes down into the memory tier,
what is missing comes from there, or from SSD through it. Planning and moving have streams of their own: training waits
on the GPU for the rows of its batch, never on the host.

One truth: a row that is here is newer than any copy below, or equal to it. Nobody reads the one below meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.kernels.dirty_flags import set_flags
from thermocline.kernels.evict import CLAIMED, EMPTIED, EVICTED, LOST, NEW, NEWEST, SHORT
from thermocline.kernels.find import find
from thermocline.kernels.index import Index
from thermocline.kernels.insert import BYTES_PER_SLOT, InsertPlan, Residents, find_or_insert
from thermocline.kernels.launch import stream_ahead
from thermocline.kernels.rebuild import entries_reference, rebuild
from thermocline.kernels.rows import copy_out
from thermocline.tiers.dram import DramTier
from thermocline.tiers.hbm_transfer import Fetch, Mover, as_words
from thermocline.utils.text_format import format_size

_PIECE = 1 << 16  # rows of one copy when all changed ones are written down


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HbmStats:
    """A tier's counters at one moment; work is counted from the tier's beginning."""

    capacity: int
    """Rows the budget holds."""
    resident: int
    windows: int
    """Planned and not yet let go."""
    ids: int
    """Looked up, repetitions included."""
    rows: int
    """Of the batches that were trained, each of a batch's once."""
    misses: int
    """Keys that were not here; those that have come were `from_mem`, `from_ssd` or `initialised`."""
    from_mem: int
    from_ssd: int
    initialised: int
    evictions: int
    written_down: int
    """Changed rows pushed into the memory tier."""
    rebuilds: int
    """Of the index."""
    bytes_total: int
    """Rows, index and metadata: never above the budget."""
    budget: int


@dataclasses.dataclass(frozen=True, slots=True)
class StagedIds:
    """The ids of a window, for `HbmTier.pin`: int64 bit patterns on the device, once the event has passed."""

    keys: torch.Tensor
    there: torch.cuda.Event | None


class HbmPins:
    """The slots of one window: they stay as they are until the last holder lets go, or drops it."""

    __slots__ = ("_holders", "_lock", "_tier", "fetch", "mem", "number", "slots")

    def __init__(self, tier: HbmTier, number: int) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._holders = 1
        self.mem = tier.mem
        """The tier below: reopening a table replaces it."""
        self.number = number
        self.slots: torch.Tensor | None = None
        """int32 per id of the window."""
        self.fetch: Fetch | None = None

    @property
    def ready(self) -> torch.cuda.Event | None:
        """When the rows are in their slots; none on a CPU, or before they were loaded."""
        return None if self.fetch is None else self.fetch.ready

    def acquire(self) -> bool:
        """One more holder; false if all have let go already."""
        with self._lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """One holder fewer."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._tier._release(self.number)

    def __del__(self) -> None:
        if self._holders > 0:
            self._holders = 0
            self._tier._release(self.number)


def row_capacity(budget: int, floats: int) -> int:
    """How many rows of so many floats a budget holds, their share of index and metadata included."""
    low, high = 0, budget // (4 * floats + BYTES_PER_SLOT + 1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle, floats) <= budget else (low, middle)
    return low


def bytes_for(rows: int, floats: int) -> int:
    """What so many rows take."""
    return rows * (4 * floats + BYTES_PER_SLOT + 1) + Index.bytes_for(2 * rows)


class HbmTier:
    """Rows of one table on the GPU.

    Thread safety: windows are planned by one thread at a time; `read` and `write_back` may be called by another,
    between steps. Training may go on meanwhile, on slots that are pinned.
    """

    def __init__(self, mem: DramTier, *, budget: int, device: torch.device, name: str) -> None:
        """A tier with no rows yet; `device` "cpu" is for tests, under Triton's interpreter."""
        floats = mem.row_bytes // 4
        capacity = row_capacity(budget, floats)
        if not 1 <= capacity < 2**31:
            raise BudgetError(
                f"table {name!r}: hbm is {format_size(budget)}: needed are {bytes_for(1, floats)} bytes for one row of "
                f"{4 * floats} bytes with its index, at most 2**31 - 1 rows"
            )
        self.device = device
        self.capacity = capacity
        self.budget = budget
        self._name = name
        self._cuda = device.type == "cuda"
        self.arena = torch.empty(capacity, floats, dtype=torch.float32, device=device)
        self.index = Index.empty(2 * capacity, device)
        self.residents = Residents.empty(capacity, device)
        self._stream = stream_ahead(device)
        self._staging = stream_ahead(device)
        self._mover = Mover(mem, self.arena, name)
        self._lock = threading.RLock()  # planning, reading and writing down
        self._used = 0
        self._occupied = 0
        self._books = threading.RLock()  # protects the four below
        self._number = 0
        self._first = 0  # what the kernels call number 0
        self._outstanding: set[int] = set()
        self._events: dict[int, torch.cuda.Event] = {}  # per training stream: its last use of rows
        self.rows = 0
        """`HbmStats.rows`; counted by who trains."""
        self._ids = self._misses = self._evictions = self._rebuilds = 0
        if self._cuda:
            torch.cuda.synchronize(device)  # once: everything above was filled on the caller's stream

    @property
    def mem(self) -> DramTier:
        """The tier below."""
        return self._mover.mem

    # ---- a window's life

    def stage(self, ids: Sequence[Keys]) -> StagedIds:
        """All ids of a window in one list, on their way to the GPU. May be called by any thread, ahead."""
        listed = torch.empty(sum(map(len, ids)), dtype=torch.int64, pin_memory=self._cuda)
        np.concatenate([np.empty(0, np.uint64), *ids], out=listed.numpy().view(np.uint64))
        if self._staging is None:
            return StagedIds(listed, None)
        with torch.cuda.stream(self._staging):
            return StagedIds(listed.to(self.device, non_blocking=True), self._staging.record_event())

    def pin(self, ids: StagedIds) -> HbmPins:
        """Slots for all ids of a window, as from `stage`, in order. `load` brings their rows.

        Raises `BudgetError`, and has changed nothing, when the rows do not fit beside those of other windows.
        """
        with self._lock, self._on_stream():
            self._mover.check()
            self._mover.fetch_released(self._completed())
            with self._books:
                self._number += 1
                self._outstanding.add(self._number)
                pins = HbmPins(self, self._number)
            try:
                self._fill(pins, ids)
            except BaseException:
                pins.release()  # not when the garbage collector finds it: a traceback may hold it for long
                raise
            return pins

    def _fill(self, pins: HbmPins, ids: StagedIds) -> None:
        keys = ids.keys
        if self._stream is not None and ids.there is not None:
            self._stream.wait_event(ids.there)
            keys.record_stream(self._stream)
        if self._occupied > 0.8 * self.index.entries:
            self._rebuild()
        plan, counts = self._plan(keys, pins.number)
        self._used = min(self.capacity, self._used + counts[NEW.value])
        self._ids += len(keys)
        self._misses += counts[NEW.value]
        self._evictions += counts[EVICTED.value]
        pins.slots = plan.slots
        pins.fetch = self._mover.leave(plan, pins.number, counts[NEW.value], counts[EVICTED.value], self._trained())

    def load(self, pins: HbmPins) -> None:
        """Brings the rows of the window and of those planned before it; on the GPU they are there at `pins.ready`."""
        assert pins.fetch is not None
        self._mover.check()
        self._mover.fetch(pins.fetch)

    def _plan(self, keys: torch.Tensor, number: int) -> tuple[InsertPlan, list[int]]:
        completed = self._completed()
        if number - self._first >= NEWEST:
            self.residents.renumber(completed - self._first)
            self._first = completed
        if self.mem.precision.stochastic and self._used + len(keys) > self.capacity:
            # A plan that may evict renames slots; rounding asks whose row is there, in steps that may not have run yet.
            self._wait_for_training()
        for attempt in range(2):
            plan = find_or_insert(
                self.index,
                self.residents,
                keys,
                used=self._used,
                now=number - self._first,
                completed=completed - self._first,
                count_visits=True,
            )
            counts: list[int] = plan.counts.tolist()  # the one read per window; waits for this stream only
            self._occupied += counts[CLAIMED.value] - counts[EMPTIED.value]
            if counts[LOST.value] == 0 and counts[SHORT.value] == 0:
                return plan, counts
            if counts[LOST.value] == 0 or attempt == 1:
                break
            self._rebuild()  # keys that have left crowded the index
        with self._books:
            others = len(self._outstanding) - 1
        raise BudgetError(
            f"table {self._name!r}: a window of batches brings {counts[NEW.value]} rows that are not in HBM, "
            f"{max(counts[SHORT.value], 1)} more than there is room for: hbm={format_size(self.budget)} holds "
            f"{self.capacity} rows of {self.mem.row_bytes} bytes, and what this window and {others} others in flight "
            "use stays. Raise hbm, or lower the batch size, pull_window or depth"
        )

    # ---- training's side

    def used_by_training(self) -> None:
        """Training has launched work on pinned rows, on the current stream: later plans overwrite none before it."""
        if self._cuda:
            stream = torch.cuda.current_stream(self.device)
            event = stream.record_event()
            with self._books:
                self._events[stream.cuda_stream] = event

    def mark_dirty(self, slots: torch.Tensor, count: torch.Tensor) -> None:
        """The rows of the first `count` slots, a number in device memory, are about to change."""
        set_flags(self._mover.dirty, slots, count, 1)

    def _release(self, number: int) -> None:
        with self._books:
            self._outstanding.discard(number)

    def _completed(self) -> int:
        with self._books:
            return min(tuple(self._outstanding), default=self._number + 1) - 1

    def _trained(self) -> list[torch.cuda.Event]:
        """When training will be done with rows, as far as it has come."""
        with self._books:
            return list(self._events.values())

    def _wait_for_training(self) -> None:
        if self._stream is not None:
            for event in self._trained():
                self._stream.wait_event(event)

    # ---- rows as they are

    def read(self, keys: Any) -> Floats:
        """float32[n, dim + state], as `DramTier.read`: rows that are here, or those below."""
        wanted = as_keys(keys)
        with self._lock, self._on_stream():
            self._mover.drain()
            rows = self.mem.read_stored(wanted)
            here, buffer = self._read_here(wanted)
            if len(here):
                rows[here] = buffer.cpu().numpy()
            return self.mem.decode(rows)

    def _read_here(self, wanted: Keys) -> tuple[Any, torch.Tensor]:
        """Which of the keys are here, and their rows on the device."""
        slots = find(self.index, self._upload(wanted))
        here = torch.nonzero(slots >= 0).flatten()
        slots = slots[here]
        buffer = torch.empty(len(slots), self.arena.shape[1], device=self.device)
        self._wait_for_training()
        copy_out(self.arena, slots, buffer, torch.full((1,), len(slots), device=self.device))
        return here.cpu().numpy(), buffer

    def read_to_device(self, keys: Keys) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The same on the device, as rows are stored, and when it is ready: for evaluation."""
        with self._lock, self._on_stream():
            self._mover.drain()
            rows = self._upload(self.mem.read_stored(keys))
            here, buffer = self._read_here(keys)
            rows[torch.from_numpy(here).to(self.device)] = buffer
            return rows, None if self._stream is None else self._stream.record_event()

    def write_back(self) -> None:
        """Pushes every changed row into the memory tier; between steps."""
        with self._lock, self._on_stream():
            self._mover.drain()
            self._wait_for_training()
            dirty = self._mover.dirty
            slots = torch.nonzero(dirty[: self._used]).flatten().to(torch.int32)
            for piece in torch.split(slots, _PIECE):
                rows = self._mover.staging(len(piece))
                copy_out(self.arena, piece, rows, torch.full((1,), len(piece), device=self.device))
                keys = as_words(self.residents.keys[piece.long()])
                self._synchronize()
                self._mover.push(keys, rows.numpy())
                dirty[piece.long()] = 0
            self._synchronize()

    def reset(self, mem: DramTier) -> None:
        """Forgets all rows, and goes on above another memory tier."""
        with self._lock, self._on_stream():
            self._wait_for_training()
            self._mover.reset(mem)
            self.index.clear()
            self.residents.clear()
            self._used = self._occupied = 0
            self._synchronize()

    # ---- books

    def check(self) -> None:
        """Raises `ThermoclineError` unless nothing is pinned and the index holds exactly the residents."""
        with self._lock, self._on_stream():
            self._mover.drain()
            with self._books:
                if self._outstanding:
                    raise ThermoclineError(
                        f"table {self._name!r}: windows {sorted(self._outstanding)} are still pinned"
                    )
            keys, slots = entries_reference(self.index)
            order = torch.sort(slots).indices
            expected = torch.arange(self._used, dtype=torch.int32, device=self.device)
            if not torch.equal(slots[order], expected) or not torch.equal(
                keys[order], self.residents.keys[: self._used]
            ):
                raise ThermoclineError(
                    f"table {self._name!r}: the HBM index has {len(keys)} keys, the slots {self._used}, and they differ"
                )

    def stats(self) -> HbmStats:
        """Counters and bytes."""
        with self._books:
            windows = len(self._outstanding)
        tensors = (self.arena, self.index.words, self.residents.keys, self.residents.last_use, self._mover.dirty)
        return HbmStats(
            capacity=self.capacity,
            resident=self._used,
            windows=windows,
            ids=self._ids,
            rows=self.rows,
            misses=self._misses,
            from_mem=self._mover.from_mem,
            from_ssd=self._mover.from_ssd,
            initialised=self._mover.initialised,
            evictions=self._evictions,
            written_down=self._mover.written,
            rebuilds=self._rebuilds,
            bytes_total=sum(tensor.nbytes for tensor in tensors),
            budget=self.budget,
        )

    # ---- the device

    def _rebuild(self) -> None:
        rebuild(self.index, self.residents, self._used)
        self._occupied = self._used
        self._rebuilds += 1

    def _upload(self, values: Keys | Floats) -> torch.Tensor:
        """Keys as int64 bit patterns, rows as they are."""
        host = torch.from_numpy(values.view(np.int64) if values.dtype == np.uint64 else values)
        return host.pin_memory().to(self.device, non_blocking=True) if self._cuda else host

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
