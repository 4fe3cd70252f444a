"""The number of batches that a look-ahead may hold."""

from __future__ import annotations

from typing import NamedTuple

_MOST_LOSS = 0.05
"""The length is doubled unless the last doubling raised the cost of reads per batch by this share."""
_LEAST_JUDGED = 64
"""Shorter horizons are always doubled: the first ones find rows in DRAM that were there before, and seem cheap."""
_TRY_AGAIN = 4
"""Sweeps after which a longer horizon is tried again."""


class SweepReads(NamedTuple):
    """Reads of a sweep, or their costs in microseconds."""

    reads: float
    pages: float


class HorizonLength:
    """Doubles from one batch, so that the first step is not delayed, unless that makes reads dearer.

    A doubling that saves nothing is not the last: while a sweep needs a row of every hundredth page, twice as many rows
    share no more pages; at a row per page they do.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.batches = 1
        """Batches that may be ahead."""
        self._reads: dict[int, SweepReads] = {}  # per batch, by length
        self._held = 0  # sweeps since the last attempt to grow

    def swept(self, batches: int, read: SweepReads, cost: SweepReads) -> None:
        """Record the batches that a sweep has loaded, and its reads.

        Lengths are compared by the present costs of a read and a page: those at the time of another sweep may differ
        by more than its length changes.
        """
        if 2 * batches < self.batches:
            return  # another limit, or the loader, kept the horizon short
        length = self.batches
        now = self._reads[length] = SweepReads(read.reads / batches, read.pages / batches)
        shorter = self._reads.get(length // 2)
        dearer = shorter is not None and _price(now, cost) > (1 + _MOST_LOSS) * _price(shorter, cost)
        if dearer and length >= _LEAST_JUDGED and self._held < _TRY_AGAIN:
            self._held += 1
            return
        self._held = 0
        self.batches = 2 * length if self._most is None else min(2 * length, self._most)


def _price(read: SweepReads, cost: SweepReads) -> float:
    return read.reads * cost.reads + read.pages * cost.pages
