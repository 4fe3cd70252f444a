"""The HBM tier: rows in GPU memory above a DRAM tier, within a byte budget; training updates them in place.

A window of batches is planned in one call, in order (`pin`): kernels assign a slot to every id, list the missing keys
and the evicted rows. Rows then move (`load`, hbm_transfer.py): evicted rows that changed are written back to the DRAM
tier, missing rows are read from it, or from SSD through it. Planning and transfers have their own streams, so training
waits on the GPU for the rows of its batch and never on the host.

Invariant: a resident row is newer than its copies in the tiers below, or equal to them. Nothing reads those copies
while the row is resident.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.embedding.key_hash import ALL_KEYS, KeyPart
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.kernels.evict import CLAIMED, EMPTIED, EVICTED, LOST, NEW, NEWEST, SHORT
from thermocline.kernels.find import find
from thermocline.kernels.hash_part import is_in_part
from thermocline.kernels.index import Index
from thermocline.kernels.insert import BYTES_PER_SLOT, InsertPlan, Residents, find_or_insert
from thermocline.kernels.launch import stream_ahead
from thermocline.kernels.rebuild import entries_reference, rebuild
from thermocline.kernels.rows import copy_in, copy_out
from thermocline.tiers.dram import DramTier
from thermocline.tiers.hbm_transfer import TRANSFER_BYTES, PendingLoad, RowTransfer, as_uint64
from thermocline.utils.recording import OnStream, current_stream
from thermocline.utils.text_format import format_size

_WRITE_BACK_ROWS = 1 << 16  # per copy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HbmStats:
    """Counters of an `HbmTier` since it was created."""

    capacity: int
    """Rows within the budget."""
    resident: int
    windows: int
    """Windows pinned now."""
    ids: int
    """Ids looked up, repetitions included."""
    rows: int
    """Rows of trained batches, unique per batch."""
    misses: int
    """Keys that were not resident; once loaded they count in `from_dram`, `from_ssd` or `initialised`."""
    from_dram: int
    from_ssd: int
    initialised: int
    evictions: int
    written_back: int
    """Changed rows pushed into the DRAM tier."""
    rebuilds: int
    """Rebuilds of the index."""
    bytes_total: int
    """Bytes of rows, index and metadata: at most the budget."""
    budget: int


@dataclasses.dataclass(frozen=True, slots=True)
class StagedIds:
    """Ids of a window for `HbmTier.pin`."""

    keys: torch.Tensor
    """int64 bit patterns on the device, valid after `uploaded`; or the block that `Assign` uploads."""
    count: int
    uploaded: torch.cuda.Event | None
    in_place: tuple[torch.Tensor, ...] = ()
    """Ids in page-locked memory of the batches, which `Assign` uploads before the block."""
    sources: tuple[torch.Tensor, ...] = ()
    """Page-locked memory that is being copied to `keys`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assigned:
    """Slots of a window."""

    plan: InsertPlan
    counts: list[int]
    """`InsertPlan.counts` on the host."""
    batches: Any = None
    """Lists and counts of each batch that were planned with the slots; None: the stage load computes them."""
    planned: torch.cuda.Event | None = None
    """Recorded after the lists of `batches` were written."""
    recycle: Callable[[], None] | None = None
    """Called when `batches` are no longer used: their memory may be used for a later window."""


Assign = Callable[[StagedIds, int, int, int], Callable[[], Assigned]]
"""Launches finding or inserting the ids, given the slots in use, the number of the window and the newest completed
window. Returns a function that waits for the device; it runs once, before the next launch."""


class HbmPins:
    """Pinned slots of one window, with a reference count: no plan reuses them before the last holder releases them.

    Garbage collection of an unreleased object releases it too.
    """

    __slots__ = (
        "_holders", "_lock", "_tier", "batches", "dram", "failure", "number", "pending", "planned", "recycle", "slots",
    )  # fmt: skip

    def __init__(self, tier: HbmTier, number: int) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._holders = 1
        self.dram = tier.dram
        """The tier below: reopening a table replaces it."""
        self.number = number
        self.slots: torch.Tensor | None = None
        """int32 per id of the window."""
        self.batches: Any = None
        """`Assigned.batches`."""
        self.planned: torch.cuda.Event | None = None
        """`Assigned.planned`."""
        self.recycle: Callable[[], None] | None = None
        """`Assigned.recycle`."""
        self.pending: PendingLoad | None = None
        self.failure: str | None = None
        """Why the window could not be pinned: it exceeds the budget."""

    @property
    def loaded(self) -> bool:
        """Whether `HbmTier.load` ran."""
        return self.pending is not None and self.pending.done

    @property
    def ready(self) -> torch.cuda.Event | None:
        """Event after which the rows are in their slots, once `loaded`; None: they are, or there is no CUDA."""
        return None if self.pending is None else self.pending.ready

    def acquire(self) -> bool:
        """Add a holder; return False if the pins were already released."""
        with self._lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._end()

    def _end(self) -> None:
        self._tier._release(self.number)
        recycle, self.recycle = self.recycle, None
        if recycle is not None:
            recycle()

    def __del__(self) -> None:
        if self._holders > 0:
            self._holders = 0
            self._end()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A window that the device plans."""

    pins: HbmPins
    ids: StagedIds
    assign: Assign
    completed: int
    """The newest completed window."""
    trained: list[torch.cuda.Event]
    """Recorded after training's last uses of the rows of completed windows."""
    wait: Callable[[], Assigned]


class _Planning:
    """See `HbmTier._planned`. A class, because a generator would take several times as long."""

    __slots__ = ("_on_stream", "_tier")

    def __init__(self, tier: HbmTier) -> None:
        self._tier = tier
        self._on_stream = None if tier._stream is None else OnStream(tier._stream)

    def __enter__(self) -> None:
        self._tier._lock.acquire()
        try:
            if self._on_stream is not None:
                self._on_stream.__enter__()
            try:
                if self._tier._launched is not None:
                    self._tier._finish_launched()
            except BaseException:
                if self._on_stream is not None:
                    self._on_stream.__exit__(None, None, None)
                raise
        except BaseException:
            self._tier._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        if self._on_stream is not None:
            self._on_stream.__exit__(None, None, None)
        self._tier._lock.release()


def row_capacity(budget: int, floats: int) -> int:
    """Return the number of rows of `floats` floats that a budget holds, with their index and metadata."""
    low, high = 0, budget // (4 * floats + BYTES_PER_SLOT + TRANSFER_BYTES) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle, floats) <= budget else (low, middle)
    return low


def bytes_for(rows: int, floats: int) -> int:
    """Return the budget that `rows` rows need, with their index and metadata."""
    return rows * (4 * floats + BYTES_PER_SLOT + TRANSFER_BYTES) + Index.bytes_for(2 * rows)


class HbmTier:
    """Rows of one table on the GPU.

    Thread safety: one thread at a time plans windows; another may call `read` and `write_back` between steps. Training
    may use pinned slots meanwhile. `_lock` protects planning, reads and write-back. `_window_lock` protects the pinned
    windows and training's events; it is held briefly, and is reentrant because garbage collection may release pins at
    any point.

    A window is planned in two parts: `launch` starts the kernels, `finish` reads their counts. Between the two the
    index has keys whose rows nobody loads yet, so every other call ends a launched plan first.

    Streams: `_stream` plans and reads; `_staging` uploads ids ahead; `RowTransfer` has one per direction.
    """

    def __init__(self, dram: DramTier, *, budget: int, device: torch.device, name: str) -> None:
        """Create an empty tier; `device` "cpu" is for tests under Triton's interpreter."""
        floats = dram.row_bytes // 4
        capacity = row_capacity(budget, floats)
        if not 1 <= capacity < 2**31:
            raise BudgetError(
                f"table {name!r}: hbm is {format_size(budget)}: it must hold 1 to 2**31 - 1 rows; one row of "
                f"{4 * floats} bytes needs {bytes_for(1, floats)} bytes with its index"
            )
        self.device = device
        self.capacity = capacity
        self.budget = budget
        self._name = name
        self._cuda = device.type == "cuda"
        self._device_index = 0 if device.index is None else device.index
        self.arena = torch.empty(capacity, floats, dtype=torch.float32, device=device)
        self.index = Index.empty(2 * capacity, device)
        self.residents = Residents.empty(capacity, device)
        self._stream = stream_ahead(device)
        self._staging = stream_ahead(device)
        self._transfer = RowTransfer(dram, self.arena, name)
        self._lock = threading.RLock()
        # Protected by _lock:
        self._used = 0  # slots that have a row
        self._occupied = 0  # entries of the index, deleted ones included
        self._first_number = 0  # the window that kernels count as 0
        self._launched: _Launched | None = None
        self._window_lock = threading.RLock()
        # Protected by _window_lock:
        self._number = 0  # of the last window
        self._outstanding: set[int] = set()
        self._training_streams: dict[int, torch.cuda.Stream] = {}  # by handle: used since the last `_last_uses`
        self._training_events: dict[int, torch.cuda.Event] = {}  # by handle: after the last uses of rows
        self._all_streams: dict[int, torch.cuda.Stream] = {}  # by handle: used since the tier was created
        self.rows = 0
        """`HbmStats.rows`, counted by `HbmBackend`."""
        self._ids = self._misses = self._evictions = self._rebuilds = 0
        if self._cuda:
            torch.cuda.synchronize(device)  # once: the tensors above were filled on the caller's stream

    @property
    def dram(self) -> DramTier:
        """The tier below."""
        return self._transfer.dram

    # ---- planning and loading windows

    def stage(self, ids: Sequence[Keys]) -> StagedIds:
        """Concatenate the ids of a window and start their upload. May be called from any thread, ahead of `pin`."""
        listed = torch.empty(sum(map(len, ids)), dtype=torch.int64, pin_memory=self._cuda)
        np.concatenate([np.empty(0, np.uint64), *ids], out=listed.numpy().view(np.uint64))
        return self.upload((listed,), len(listed))

    def upload(self, sources: tuple[torch.Tensor, ...], count: int) -> StagedIds:
        """Start to copy `sources`, int64 in page-locked memory, to the device, one after the other. Any thread.

        Their memory must not change until a plan with the result has ended.
        """
        if self._staging is None:
            return StagedIds(torch.cat(sources), count, None, sources=sources)
        with OnStream(self._staging):
            keys = torch.empty(sum(map(len, sources)), dtype=torch.int64, device=self.device)
            first = 0
            for part in sources:
                keys[first : first + len(part)].copy_(part, non_blocking=True)
                first += len(part)
            return StagedIds(keys, count, self._staging.record_event(), sources=sources)

    def pin(self, ids: StagedIds, assign: Assign | None = None) -> HbmPins:
        """Assign and pin a slot for every id of a window, in order; `load` fills the slots.

        assign   plans the window on the tier's stream; by default `find_or_insert` and nothing else
        Raises `BudgetError`, without any change, if the rows do not fit beside those of other pinned windows.
        """
        return self.finish(self.launch(ids, assign))

    def launch(self, ids: StagedIds, assign: Assign | None = None) -> HbmPins:
        """Begin `pin`, without waiting for the device. The pins have slots after `finish`."""
        with self._planned():
            self._transfer.check()
            completed = self._completed()
            self._transfer.load_released(completed)
            with self._window_lock:
                self._number += 1
                self._outstanding.add(self._number)
                pins = HbmPins(self, self._number)
            try:
                self._launched = self._launch(pins, ids, assign or self._find_or_insert, completed)
            except BaseException as error:
                pins.release()  # now: the traceback may keep the object alive for long
                self._transfer.record_failure(error)  # the index may have keys without rows
                raise
            return pins

    def finish(self, pins: HbmPins) -> HbmPins:
        """Wait for a plan that was launched; return its pins. Raises `BudgetError` as `pin`."""
        with self._planned():
            if pins.failure is not None:
                raise BudgetError(pins.failure)
            return pins

    def _launch(self, pins: HbmPins, ids: StagedIds, assign: Assign, completed: int) -> _Launched:
        if self._stream is not None and ids.uploaded is not None:
            self._stream.wait_event(ids.uploaded)
            ids.keys.record_stream(self._stream)
        if self._occupied > 0.8 * self.index.entries:
            self._rebuild()
        if pins.number - self._first_number >= NEWEST:
            self.residents.renumber(completed - self._first_number)
            self._first_number = completed
        if self.dram.precision.stochastic and self._used + ids.count > self.capacity:
            # Eviction changes a slot's key, which stochastic rounding reads in steps that may not have run yet.
            self.wait_for_training()
        wait = self._assign(assign, pins, ids, completed)
        return _Launched(pins, ids, assign, completed, self._last_uses(), wait)

    def _assign(self, assign: Assign, pins: HbmPins, ids: StagedIds, completed: int) -> Callable[[], Assigned]:
        first = self._first_number
        return assign(ids, self._used, pins.number - first, completed - first)

    def _finish_launched(self) -> None:
        launched = self._launched
        if launched is None:
            return
        pins = launched.pins
        try:
            assigned = self._assigned(launched)
            new, evicted = assigned.counts[NEW.value], assigned.counts[EVICTED.value]
            self._used = min(self.capacity, self._used + new)
            self._ids += launched.ids.count
            self._misses += new
            self._evictions += evicted
            pins.slots, pins.batches = assigned.plan.slots, assigned.batches
            pins.planned, pins.recycle = assigned.planned, assigned.recycle
            pins.pending = self._transfer.enqueue(assigned.plan, pins.number, new, evicted, launched.trained)
        except BudgetError as error:
            pins.failure = str(error)  # raised by `finish`: another call may have come first
            pins.release()
        except BaseException as error:
            pins.release()
            self._transfer.record_failure(error)
            raise
        finally:
            self._launched = None

    def load(self, pins: HbmPins) -> None:
        """Load the rows of this window and of all earlier ones. They are in their slots at `pins.ready`."""
        assert pins.pending is not None
        self._transfer.check()
        self._transfer.load(pins.pending)

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Exclude all other planning; the current stream is the one that plans."""
        with self._planned():
            yield

    def _find_or_insert(self, ids: StagedIds, used: int, now: int, completed: int) -> Callable[[], Assigned]:
        plan = find_or_insert(
            self.index, self.residents, ids.keys, used=used, now=now, completed=completed, count_visits=True
        )
        # The only device read per window; blocks on this stream only.
        return lambda: Assigned(plan, plan.counts.tolist())

    def _assigned(self, launched: _Launched) -> Assigned:
        wait = launched.wait
        for attempt in range(2):
            assigned = wait()
            counts = assigned.counts
            self._occupied += counts[CLAIMED.value] - counts[EMPTIED.value]
            if counts[LOST.value] == 0 and counts[SHORT.value] == 0:
                return assigned
            if assigned.recycle is not None:
                assigned.recycle()
            if counts[LOST.value] == 0 or attempt == 1:
                break
            self._rebuild()  # deleted keys filled the index
            wait = self._assign(launched.assign, launched.pins, launched.ids, launched.completed)
        with self._window_lock:
            others = len(self._outstanding) - 1
        raise BudgetError(
            f"table {self._name!r}: HBM budget exceeded: the window needs {counts[NEW.value]} more slots, "
            f"{max(counts[SHORT.value], 1)} more than available: hbm={format_size(self.budget)} holds {self.capacity} "
            f"rows of {self.dram.row_bytes} bytes, and rows of this window and of {others} others in flight cannot be "
            "evicted. Raise hbm, or lower batch_size, pull_window or depth"
        )

    def resident(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """Return, per key, 1 if its row is here or on its way. Any thread."""
        with self._planned():
            return (find(self.index, self._upload(keys)) >= 0).to(torch.uint8).cpu().numpy()

    def wait_for_write_back(self) -> None:
        """Wait until the DRAM tier has the rows that were evicted so far. Any thread."""
        self._transfer.wait_for_write_back()

    # ---- called by training, on its stream

    def record_use(self) -> None:
        """Note that work on pinned rows or on their plans was launched on the current stream: later plans overwrite
        them after it."""
        if self._cuda:
            handle = torch._C._cuda_getCurrentRawStream(self._device_index)
            if handle not in self._training_streams:
                with self._window_lock:
                    stream = current_stream(self.device)
                    self._training_streams[handle] = self._all_streams[handle] = stream

    @property
    def dirty(self) -> torch.Tensor:
        """uint8 per slot: 1 if the row changed since it was loaded or written back. Updates set it."""
        return self._transfer.dirty

    def _release(self, number: int) -> None:
        with self._window_lock:
            self._outstanding.discard(number)

    def _completed(self) -> int:
        with self._window_lock:
            return min(tuple(self._outstanding), default=self._number + 1) - 1

    def _last_uses(self) -> list[torch.cuda.Event]:
        """Return an event per training stream, recorded after its last use of rows. The next call records it again."""
        with self._window_lock:
            while self._training_streams:
                handle, stream = self._training_streams.popitem()  # first: a use that is noted from now on counts again
                event = self._training_events.get(handle)
                if event is None:
                    event = self._training_events[handle] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            return list(self._training_events.values())

    def record_uses(self, events: dict[int, torch.cuda.Event]) -> None:
        """Record an event per training stream, by its handle, after what was launched so far. Any thread."""
        with self._window_lock:
            for handle, stream in self._all_streams.items():
                if handle not in events:
                    events[handle] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                events[handle].record(stream)

    def wait_for_training(self) -> None:
        """Make the planning stream wait for what training has launched so far on pinned rows and their plans."""
        if self._stream is not None:
            for event in self._last_uses():
                self._stream.wait_event(event)

    # ---- reading and writing back

    def read(self, keys: Any) -> Floats:
        """Return float32[n, dim + state], as `DramTier.read`: resident rows from HBM, others from the tiers below."""
        wanted = as_keys(keys)
        with self._planned():
            self._transfer.drain()
            rows = self.dram.read_stored(wanted)
            resident, buffer = self._read_resident(wanted)
            if len(resident):
                rows[resident] = buffer.cpu().numpy()
            return self.dram.decode(rows)

    def _read_resident(self, wanted: Keys) -> tuple[Any, torch.Tensor]:
        """Return the indices of the resident keys, and their rows on the device."""
        slots = find(self.index, self._upload(wanted))
        resident = torch.nonzero(slots >= 0).flatten()
        slots = slots[resident]
        buffer = torch.empty(len(slots), self.arena.shape[1], device=self.device)
        self.wait_for_training()
        copy_out(self.arena, slots, buffer, torch.full((1,), len(slots), device=self.device))
        return resident.cpu().numpy(), buffer

    def read_to_device(self, keys: Keys) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return the stored rows on the device, for evaluation, and the event after which they are valid."""
        with self._planned():
            self._transfer.drain()
            rows = self._upload(self.dram.read_stored(keys))
            resident, buffer = self._read_resident(keys)
            rows[torch.from_numpy(resident).to(self.device)] = buffer
            return rows, None if self._stream is None else self._stream.record_event()

    def write_back(self, part: KeyPart = ALL_KEYS) -> None:
        """Push every changed row of a part of the keys into the DRAM tier. Call between steps."""
        with self._planned():
            self._transfer.drain()
            self.wait_for_training()
            dirty = self._transfer.dirty
            changed = dirty[: self._used] != 0
            if part != ALL_KEYS:
                changed &= is_in_part(self.residents.keys[: self._used], part.lo, part.hi)
            slots = torch.nonzero(changed).flatten().to(torch.int32)
            for piece in torch.split(slots, _WRITE_BACK_ROWS) if len(slots) else ():
                rows = self._transfer.staging_rows(len(piece))
                copy_out(self.arena, piece, rows, torch.full((1,), len(piece), device=self.device))
                keys = as_uint64(self.residents.keys[piece.long()])
                self._synchronize()
                self._transfer.write_back(keys, rows.numpy())
                dirty[piece.long()] = 0
            self._synchronize()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude planning, reads and write-back by other threads."""
        with self._lock:
            yield

    def erase(self, keys: Keys) -> None:
        """Replace the rows of `keys` that are here by their initial rows, not dirty. Call between steps, after
        `write_back`, under `exclusive`."""
        if len(keys) == 0:
            return
        with self._planned():
            self._transfer.drain()
            self.wait_for_training()
            for first in range(0, len(keys), _WRITE_BACK_ROWS):
                piece = keys[first : first + _WRITE_BACK_ROWS]
                slots = find(self.index, self._upload(piece))
                resident = torch.nonzero(slots >= 0).flatten()
                slots = slots[resident]
                rows = self._upload(self.dram.initial_stored(piece[resident.cpu().numpy()]))
                copy_in(self.arena, slots, rows, torch.full((1,), len(slots), device=self.device))
                self.dirty[slots.long()] = 0
                self._synchronize()  # before the next piece, and before training reads the rows

    def reset(self, dram: DramTier) -> None:
        """Drop all rows and continue above another DRAM tier."""
        with self._planned():
            self.wait_for_training()
            self._transfer.reset(dram)
            self.index.clear()
            self.residents.clear()
            self._used = self._occupied = 0
            self._synchronize()

    # ---- inspection

    def check(self) -> None:
        """Raise `ThermoclineError` unless nothing is pinned and the index matches the keys of the slots."""
        with self._planned():
            self._transfer.drain()
            with self._window_lock:
                if self._outstanding:
                    raise ThermoclineError(
                        f"table {self._name!r}: windows {sorted(self._outstanding)} are pinned: close the pipeline"
                    )
            keys, slots = entries_reference(self.index)
            order = torch.sort(slots).indices
            expected = torch.arange(self._used, dtype=torch.int32, device=self.device)
            if not torch.equal(slots[order], expected) or not torch.equal(
                keys[order], self.residents.keys[: self._used]
            ):
                raise ThermoclineError(
                    f"table {self._name!r}: the HBM index ({len(keys)} keys) does not match its {self._used} slots"
                )

    def stats(self) -> HbmStats:
        with self._window_lock:
            windows = len(self._outstanding)
        metadata = (
            self.residents.keys,
            self.residents.last_use,
            self._transfer.dirty,
            self._transfer.dram_slots.memory,
        )
        tensors = (self.arena, self.index.words, *metadata)
        return HbmStats(
            capacity=self.capacity,
            resident=self._used,
            windows=windows,
            ids=self._ids,
            rows=self.rows,
            misses=self._misses,
            from_dram=self._transfer.from_dram,
            from_ssd=self._transfer.from_ssd,
            initialised=self._transfer.initialised,
            evictions=self._evictions,
            written_back=self._transfer.written_back,
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
        """Copy keys, as int64 bit patterns, or rows to the device."""
        host = torch.from_numpy(values.view(np.int64) if values.dtype == np.uint64 else values)
        return host.pin_memory().to(self.device, non_blocking=True) if self._cuda else host

    def _planned(self) -> _Planning:
        """Exclude all other planning; end a plan that was launched; run on the planning stream."""
        return _Planning(self)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
