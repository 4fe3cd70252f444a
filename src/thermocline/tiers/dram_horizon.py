"""`DramHorizon`: rows of the coming batches, loaded into the DRAM tier ahead of need. Implements `RowHorizon`."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thermocline.arrays import Keys
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.backend import ReadCounts
from thermocline.embedding.batch_plan import BagInputs, BagSpec
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.tiers.dram import DramTier

if TYPE_CHECKING:
    from thermocline.tiers.hbm import HbmTier

_PART_KEYS = 1 << 18
"""Most keys of one call of the tier: few enough to stop within a fraction of a second. Parts follow each other in hash
order, so their size does not change what is read."""
_ROWS_SHARE = 3 / 4
"""Share of the tier that the rows of a horizon may fill."""
_PINNED_SHARE = 7 / 8
"""Share of the tier that may be pinned; the rest is for rows that batches in flight pull themselves."""


_READ_COST, _PAGE_COST = 10.0, 2.0
"""Microseconds of a request and of a page in it, until the store has measured its device."""


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
        self._above_from_ssd = 0 if above is None else above.stats().from_ssd
        self._dedup = training and above is None
        self._sweeping = threading.Lock()  # held while a part is chosen and loaded: over ranks two threads load
        self._loading = threading.Lock()  # held while a part is loaded
        self._part = max(1, min(_PART_KEYS, dram.capacity // 16))
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
        return self._core.unique >= self._dram.capacity * _ROWS_SHARE

    @property
    def dropped(self) -> bool:
        return self._dropped or self._host.dram is not self._dram

    def load(self, share: float = 1.0) -> bool:
        with self._sweeping:
            return self._load(share)

    def _load(self, share: float) -> bool:
        before = self._core.position
        keys = self._core.next_part(self._part, max(1, math.ceil(share * self._core.partitions)))
        if len(keys) == 0:
            return self._core.position > before
        # Without the lock: the tier above may wait for a write-back, which may wait in `drop`.
        skip = None if self._above is None else self._above.resident(keys)
        with self._loading:
            if self._dropped:
                return False
            pinned, capacity = self._dram.stats().pinned, self._dram.capacity
            if pinned + len(keys) > capacity * _PINNED_SHARE:
                raise BudgetError(
                    f"look-ahead: {pinned} rows of {capacity} are pinned: rows are loaded as others are released"
                )
            self._core.load_part(len(keys), skip)
            return True

    def drop(self) -> bool:
        first, self._dropped = not self._dropped, True
        self._dram.hints.pop(id(self), None)
        self._core.drop()
        with self._loading:  # a part that is being loaded is unpinned at its end
            return first

    @property
    def position(self) -> float:
        return self._core.position / self._core.partitions

    @property
    def late_rows(self) -> int:
        return self._core.late if self._above is None else self._above.stats().from_ssd - self._above_from_ssd

    @property
    def read_counts(self) -> ReadCounts:
        with contextlib.suppress(ThermoclineError):  # closed: the table is being reopened
            if (store := self._dram.store) is not None:
                s = store.stats()
                return ReadCounts(s.reads, s.bytes_read, s.read_cost_us or _READ_COST, s.page_cost_us or _PAGE_COST)
        return ReadCounts(0, 0, _READ_COST, _PAGE_COST)

    @property
    def rows_loaded(self) -> int:
        stats = self._dram.stats()
        return stats.loaded_ahead + stats.read_ahead

    @property
    def bytes(self) -> int:
        return self._core.bytes + core.Horizon.SCRATCH_BYTES * self._most_ids
