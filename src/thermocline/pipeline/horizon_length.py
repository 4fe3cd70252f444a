"""The number of batches that a look-ahead may hold."""

from __future__ import annotations

_LEAST_GAIN = 0.05
"""The length is doubled only if the last doubling lowered the cost of reads per batch by this share."""
_TRY_AGAIN = 16
"""Sweeps after which a longer horizon is tried again."""


class HorizonLength:
    """Doubles from one batch, so that the first step is not delayed, while that makes reads cheaper."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.batches = 1
        """Batches that may be ahead."""
        self._costs: dict[int, float] = {}  # per batch, by length
        self._held = 0  # sweeps since the last attempt to grow

    def swept(self, batches: int, cost: float) -> None:
        """Record the batches that a sweep has loaded, and the cost of its reads."""
        if 2 * batches < self.batches:
            return  # another limit, or the loader, kept the horizon short
        length = self.batches
        self._costs[length] = cost / batches
        shorter = self._costs.get(length // 2)
        if shorter is not None and self._costs[length] > (1 - _LEAST_GAIN) * shorter and self._held < _TRY_AGAIN:
            self._held += 1
            return
        self._held = 0
        self.batches = 2 * length if self._most is None else min(2 * length, self._most)
