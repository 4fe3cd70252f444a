"""`DramHorizon`: rows of the coming batches, loaded into the DRAM tier ahead of need. Implements `RowHorizon`."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.backend import ReadCounts
from thermocline.embedding.batch_plan import BagInputs, BagSpec
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.tiers.dram import DramTier

if TYPE_CHECKING:
    from thermocline.tiers.hbm import HbmTier

_PART_KEYS = 1 << 20
"""Most keys of one call of the tier: few enough to stop within about a second. Parts follow each other in hash order:
their size does not change which pages of base files are read, but every part reads in every extent of the log."""
_LEAST_PARTS = 1
"""Parts that are loaded at once, also in a small tier. With two, one reads the store while the rows of the other are
pinned, evicted or published."""
_PARTS_SHARE = 1 / 16
"""Largest share of the look-ahead's bytes for the parts that are being loaded."""
_LEAST_KEYS = 16
_ROWS_SHARE = 7 / 8
"""Share of the tier that the rows of a horizon may fill, also those that are not loaded yet."""
_PINNED_SHARE = 15 / 16
"""Share of the tier that may be pinned; the rest is for rows that batches in flight pull themselves."""


_READ_COST, _PAGE_COST = 10.0, 2.0
"""Microseconds of a request and of a page in it, until the store has measured its device."""


class _Load(threading.Thread):
    """Loads a part of the sweep, when `running` has room."""

    def __init__(self, keys: int, load: Callable[[], None], running: threading.Semaphore) -> None:
        super().__init__(name="thermocline-load-ahead", daemon=True)
        self.keys = keys
        self.error: BaseException | None = None
        self._load, self._running = load, running

    def run(self) -> None:
        try:
            with self._running:
                self._load()
        except BaseException as error:
            self.error = error
        finally:
            del self._load


def _join_all(threads: Sequence[threading.Thread]) -> None:
    """Wait until all threads that were started have ended. Ctrl-C meanwhile is raised afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        try:
            alive[0].join()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class TierOwner(Protocol):
    """Has a DRAM tier, which it may replace."""

    @property
    def dram(self) -> DramTier: ...


class DramBatchAhead:
    """See `BatchAhead`."""

    __slots__ = ("_dedup", "_specs", "core", "dram", "working_set")

    def __init__(self, batch: core.HorizonBatch, dram: DramTier, specs: tuple[BagSpec, ...], dedup: bool) -> None:
        self.core = batch
        self.dram = dram
        """The tier of the rows: reopening the table replaces it."""
        self.working_set: WorkingSet | None = None
        """Set by `restore`, unless rows are trained in a tier above."""
        self._specs = specs
        self._dedup = dedup

    def restore(self) -> Keys:
        ids: Keys
        ids, *working_set = self.core.expand(self._dedup)
        if working_set:
            self.working_set = WorkingSet(*working_set)
        return ids

    def belongs_to(self, inputs: BagInputs) -> bool:
        """Return whether the working set is that of these inputs: bags may have been added or frozen since."""
        return self._specs == tuple(inputs)

    @property
    def to_visit(self) -> float:
        return self.core.to_visit

    def release(self) -> None:
        self.core.release()

    @property
    def bytes(self) -> int:
        return self.core.bytes


class DramHorizon:
    """See `RowHorizon`."""

    def __init__(self, host: TierOwner, *, training: bool, above: HbmTier | None = None) -> None:
        """
        training   False: rows will only be read; keys that the store does not have are not inserted
        above      the tier where rows are trained: the rows that it has are not loaded
        """
        dram = host.dram
        self._core = core.Horizon(dram.core, training)
        self._host = host
        self._dram = dram
        self._above = above
        self._training = training
        self._late_before = 0
        self._late_before = self.late_rows
        self._dedup = training and above is None
        self._sweeping = threading.Lock()  # held by `load`: over ranks two threads call it
        self._loading = threading.Lock()  # held while a part is loaded, in a tier that loads one at a time
        self._lock = threading.Lock()  # protects `_loads` and `_dropped`
        self._loads: deque[_Load] = deque()
        self._parts = max(_LEAST_PARTS, dram.core.calls_at_once // 2)
        self._behind = self._parts if self._parts > 1 else 0  # parts that may be loading when `load` returns
        most_keys = int(_PARTS_SHARE * dram.reserved) // ((self._behind + 1) * core.Horizon.PART_BYTES)
        self._part = max(_LEAST_KEYS, min(_PART_KEYS, dram.capacity // 16, most_keys))
        self._running = threading.Semaphore(self._parts)
        self._most_ids = 0  # of a batch
        self._dropped = False
        hints, number = dram.hints, id(self)
        hints[number] = weakref.ref(self, lambda _: hints.pop(number, None))

    def add_keys(self, keys: Keys) -> DramBatchAhead:
        """See `KeyHorizon`."""
        return DramBatchAhead(self._core.add(keys), self._dram, (), dedup=False)

    def add(self, inputs: BagInputs, *, frozen: bool = False) -> DramBatchAhead:
        lists = [source.ids for source in inputs.values()]
        ids = lists[0] if len(lists) == 1 else np.concatenate([np.empty(0, np.uint64), *lists])
        self._most_ids = max(self._most_ids, len(ids))
        return DramBatchAhead(self._core.add(ids), self._dram, tuple(inputs), self._dedup)

    @property
    def full(self) -> bool:
        # Rows that the tier above has need no room here.
        return self._core.unique - self._core.absent >= self._dram.capacity * _ROWS_SHARE

    @property
    def dropped(self) -> bool:
        return self._dropped or self._host.dram is not self._dram

    def load(self, share: float = 1.0) -> bool:
        """See `RowHorizon`. The last parts may still be loading at the return: `position` shows which are loaded."""
        with self._sweeping:
            before = self._core.position
            ahead = self._core.gathered - before
            part = max(1, math.ceil(share * self._core.partitions)) - ahead
            visited = part > 0 and self._start(part)
            waited = self._wait(self._behind if visited else max(0, len(self._loads) - 1))
            return visited or waited or self._core.position > before

    def _start(self, partitions: int) -> bool:
        """Begin to load the next part. False: it has no keys."""
        part = self._core.next_part(self._part, partitions)
        if len(part) == 0:
            return False
        # Without the lock: the tier above may wait for a write-back, which may wait in `drop`.
        skip = None
        if self._above is not None:
            skip = self._above.resident(part.keys())
            # Rows on their way down are in neither tier: to load them would read old rows, and their write-back would
            # wait until the whole part is read.
            self._above.wait_for_write_back()
        if not self._fits(len(part)) and (not self._wait(0) or not self._fits(len(part))):
            raise BudgetError(
                f"look-ahead: {self._dram.pinned} rows of {self._dram.capacity} are pinned: "
                "rows are loaded as others are released"
            )
        load = functools.partial(self._load_part, part, skip)
        if not self._behind:
            with self._loading:
                load()
            return not self._dropped
        with self._lock:
            if self._dropped:
                return False
            thread = _Load(len(part), load, self._running)
            self._loads.append(thread)
            thread.start()
        return True

    def _load_part(self, part: core.HorizonPart, skip: npt.NDArray[np.uint8] | None) -> None:
        if not self._dropped:
            self._core.load_part(part, skip)

    def _fits(self, keys: int) -> bool:
        loading = sum(load.keys for load in tuple(self._loads))
        return self._dram.pinned + loading + keys <= self._dram.capacity * _PINNED_SHARE

    def _wait(self, most: int) -> bool:
        """Wait until at most this many parts are loading, and raise their errors. False: none has ended."""
        ended = False
        while True:
            with self._lock:
                over = [load for load in self._loads if not load.is_alive()]
                for load in over:
                    self._loads.remove(load)
                left = list(self._loads)
            ended = ended or bool(over)
            for load in over:
                if load.error is not None:
                    raise load.error
            if len(left) <= most:
                return ended
            left[0].join()

    def drop(self) -> bool:
        with self._lock:
            first, self._dropped = not self._dropped, True
            loads = list(self._loads)
        self._dram.hints.pop(id(self), None)
        self._core.drop()
        with self._loading:  # a part that is being loaded is unpinned at its end
            pass
        _join_all(loads)
        return first

    @property
    def position(self) -> float:
        return self._core.position / self._core.partitions

    @property
    def late_rows(self) -> int:
        if not self._training:  # rows that evaluation has read from the store itself
            late = self._dram.read_from_store
        else:
            late = self._core.late if self._above is None else self._above.stats().from_ssd
        return late - self._late_before

    @property
    def read_counts(self) -> ReadCounts:
        with contextlib.suppress(ThermoclineError):  # closed: the table is being reopened
            if (store := self._dram.store) is not None:
                s = store.stats()
                return ReadCounts(s.reads, s.bytes_read, s.read_cost_us or _READ_COST, s.page_cost_us or _PAGE_COST)
        return ReadCounts(0, 0, _READ_COST, _PAGE_COST)

    @property
    def rows_loaded(self) -> int:
        return self._dram.loaded_ahead

    @property
    def bytes(self) -> int:
        parts = (self._behind + 1) * self._part * core.Horizon.PART_BYTES
        return self._core.bytes + core.Horizon.SCRATCH_BYTES * self._most_ids + parts
