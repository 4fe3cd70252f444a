"""Keys of generated data by falling frequency, and a table whose tiers hold them as after a long training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from thermocline.arrays import Keys
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.bulk_load import fill_top

PIECE = 1 << 20
"""Rows placed by one call, approximately."""
_EXACT = 10_000  # terms of a harmonic sum that are added one by one; the others are an integral


class Popularity:
    """The most frequent keys of `SyntheticAds`, by the Zipf law of each field."""

    def __init__(self, ads: SyntheticAds) -> None:
        self._ads = ads
        self._sizes = np.array(ads.keys, np.int64)
        self._zipf = np.array(ads.zipf)
        # Fields have equally many ids per example: a key's frequency is rank ** -zipf / sum over the field's ranks.
        self._scale = 1 / np.array([_harmonic(n, z) for n, z in zip(ads.keys, ads.zipf, strict=True)])
        self._first = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])

    def counts(self, rows: int) -> Any:
        """Return int64[fields]: how many keys of each field are among the `rows` most frequent keys."""
        if rows >= self._sizes.sum():
            return self._sizes.copy()
        low, high = -100.0, 0.0  # logarithms of a frequency
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._above(middle).sum() > rows else (low, middle)
        return self._above(high)

    def _above(self, log_frequency: float) -> Any:
        """Return the number of keys per field whose frequency is at least exp(log_frequency)."""
        ratio = np.log(self._scale) - log_frequency
        with np.errstate(divide="ignore", over="ignore"):
            ranks = np.exp(np.minimum(ratio / np.maximum(self._zipf, 1e-9), 60.0))
        ranks = np.where(ratio >= 0, np.minimum(ranks, self._sizes), 0)
        return ranks.astype(np.int64)

    def pieces(self, begin: int, end: int, piece: int = PIECE) -> Iterator[Keys]:
        """Yield the keys after the `begin` most frequent ones up to `end`, in pieces, the rarest first."""
        cuts = [self.counts(rows) for rows in [*range(begin, end, piece), end]]
        for frequent, rarer in reversed(list(itertools.pairwise(cuts))):
            ranges = zip(self._first + frequent, self._first + rarer, strict=True)
            yield np.concatenate([self._ads.some_keys(int(a), int(b)) for a, b in ranges])


def _harmonic(n: int, z: float) -> float:
    """Return the sum of r ** -z for r = 1 .. n."""
    exact = min(n, _EXACT)
    total = float((np.arange(1, exact + 1) ** -z).sum())
    if n > exact:
        low, high = exact + 0.5, n + 0.5
        total += np.log(high / low) if z == 1 else (high ** (1 - z) - low ** (1 - z)) / (1 - z)
    return total


def place(table: Any, ads: SyntheticAds) -> dict[str, int]:
    """Fill HBM with the most popular rows and DRAM with the next ones, the most popular last; return the row counts.

    The store must have the initial row of every key, and no row may be in a tier above it: rows are placed as clean.
    """
    order, keys = Popularity(ads), sum(ads.keys)
    hot = 0 if table.hbm is None else min(table.hbm.capacity, keys)
    warm = min(table.dram.capacity, keys - hot)
    for piece in order.pieces(0, hot):
        _push(table, piece)  # HBM loads the rows from DRAM, not from SSD
        fill_top(table, [piece])
    for piece in order.pieces(hot, hot + warm):
        _push(table, piece)
    return {"hbm_placed": hot, "dram_placed": warm}


def _push(table: Any, keys: Keys) -> None:
    table.dram.push(keys, table.dram.initial_rows(keys), dirty=False, unique=True)
