"""`DramHorizon`: rows of the coming batches, loaded into the DRAM tier together. Implements `RowHorizon`."""

from __future__ import annotations

import threading
import weakref

from thermocline.arrays import Keys, Slots
from thermocline.core import core
from thermocline.embedding.batch_plan import BagInputs
from thermocline.errors import BudgetError
from thermocline.tiers.dram import DramTier

_PART_KEYS = 1 << 18
"""Most keys of one call of the tier: few enough to stop within a fraction of a second. Parts follow each other in hash
order, so their size does not change what is read."""
_ROWS_SHARE = 3 / 4
"""Share of the tier that one horizon may pin. The next one is loaded as the rows of this one are released."""
_PINNED_SHARE = 7 / 8
"""Share of the tier that all horizons may pin; the rest is for rows that batches in flight pull themselves."""


class DramHorizon:
    """See `RowHorizon`."""

    def __init__(self, dram: DramTier, *, training: bool) -> None:
        self._core = core.Horizon(dram.core, training)
        self._dram = dram
        self._loading = threading.Lock()  # held while a part is loaded
        self._part = max(1, min(_PART_KEYS, dram.capacity // 32))

    def add(self, inputs: BagInputs) -> list[Slots]:
        numbers = [self._core.add(source.ids) for source in inputs.values()]
        self._core.end_batch()
        return numbers

    def add_keys(self, keys: Keys) -> None:
        """See `KeyHorizon`."""
        self._core.add(keys)
        self._core.end_batch()

    def keys_by_owner(self, world: int) -> tuple[Keys, Slots]:
        """See `KeyHorizon`."""
        return self._core.keys_by_owner(world)

    @property
    def full(self) -> bool:
        return self._core.unique >= self._dram.capacity * _ROWS_SHARE

    def seal(self) -> None:
        self._core.seal()
        hints, number = self._dram.hints, id(self)
        hints[number] = weakref.ref(self, lambda _: hints.pop(number, None))

    def load(self) -> bool:
        with self._loading:
            pinned, capacity = self._dram.stats().pinned, self._dram.capacity
            if pinned + self._part > capacity * _PINNED_SHARE:
                raise BudgetError(
                    f"look-ahead: {pinned} rows of {capacity} are pinned: rows are loaded as others are released"
                )
            return self._core.load(self._part)

    def release(self, batch: int) -> None:
        self._core.release(batch)

    def drop(self) -> bool:
        first = self._dram.hints.pop(id(self), None) is not None
        self._core.drop()
        with self._loading:  # a part that is being loaded is unpinned at its end
            return first

    def ids_of(self, numbers: Slots) -> Keys:
        return self._core.keys_of(numbers)

    @property
    def bytes(self) -> int:
        return self._core.bytes
