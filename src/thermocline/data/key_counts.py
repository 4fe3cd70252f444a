"""How often each key occurs, in bounded memory: exact up to a number of keys, beyond it exact for the frequent ones and
estimated for the rest, from a sample of the keys by their hash."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from thermocline.embedding.arrays import Keys

Numbers = npt.NDArray[np.float64]
_BLOCK = 1 << 21
"""Occurrences gathered before they are counted."""


def _mixed(keys: Keys) -> Keys:
    """murmur3's finalizer: raw keys may be anything, samples must not depend on what they are."""
    h = keys ^ np.uint64(0x9E3779B97F4A7C15)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h ^= h >> np.uint64(33)
        h *= np.uint64(factor)
    return h ^ (h >> np.uint64(33))


class KeyCounts:
    """Fed with ids and their fields. Memory is some 100 bytes per key of `limit`, whatever the data."""

    def __init__(self, limit: int = 1 << 21) -> None:
        self._limit = limit
        self.rate = 1.0
        """Share of the infrequent keys that are counted."""
        self._keys: Keys = np.empty(0, np.uint64)
        self._counts: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._fields: npt.NDArray[np.uint16] = np.empty(0, np.uint16)
        self._heavy: Keys = np.empty(0, np.uint64)
        """Sorted. Frequent keys, chosen when the limit was first met, and counted from the beginning."""
        self._waiting: list[tuple[Keys, npt.NDArray[np.uint16]]] = []
        self._waiting_size = 0

    def add(self, ids: Keys, fields: npt.NDArray[np.uint16]) -> None:
        """More occurrences, each with its field."""
        self._waiting.append((ids, fields))
        self._waiting_size += len(ids)
        if self._waiting_size >= _BLOCK:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        ids = np.concatenate([ids for ids, _ in self._waiting])
        fields = np.concatenate([fields for _, fields in self._waiting])
        self._waiting, self._waiting_size = [], 0
        if self.rate < 1:
            counted = self._counted(ids)
            ids, fields = ids[counted], fields[counted]
        new, where, counts = np.unique(ids, return_index=True, return_counts=True)
        joined = np.concatenate([self._keys, new])
        keys, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(inverse, weights=weights, minlength=len(keys)).astype(np.int64)
        self._fields = np.concatenate([self._fields, fields[where]])[first]
        self._keys = keys
        if len(keys) > self._limit:
            self._thin()

    def _counted(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of them are counted: the heavy ones, and those whose hash falls into the sample."""
        place = np.minimum(np.searchsorted(self._heavy, keys), len(self._heavy) - 1)
        sampled: npt.NDArray[np.bool_] = _mixed(keys) < np.uint64(int(self.rate * 2**64))
        sampled |= self._heavy[place] == keys
        return sampled

    def _thin(self) -> None:
        if not len(self._heavy):
            count = self._limit // 4
            self._heavy = np.sort(self._keys[np.argpartition(self._counts, -count)[-count:]])
        kept = np.ones(len(self._keys), np.bool_)
        while kept.sum() > self._limit // 2:
            self.rate /= 2
            kept = self._counted(self._keys)
        self._keys, self._counts, self._fields = self._keys[kept], self._counts[kept], self._fields[kept]

    def result(self) -> Counted:
        """What was found so far, most frequent keys first."""
        self._count()
        weights = np.full(len(self._keys), 1 / self.rate)
        if len(self._heavy):
            place = np.minimum(np.searchsorted(self._heavy, self._keys), len(self._heavy) - 1)
            weights[self._heavy[place] == self._keys] = 1.0
        order = np.argsort(-self._counts, kind="stable")
        return Counted(self._counts[order].astype(np.float64), weights[order], self._fields[order])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Keys in order of falling frequency: each stands for `weights` keys that occur `counts` times."""

    counts: Numbers
    weights: Numbers
    fields: npt.NDArray[np.uint16]

    def of_field(self, field: int) -> Counted:
        mine = self.fields == field
        return Counted(self.counts[mine], self.weights[mine], self.fields[mine])

    @property
    def keys(self) -> float:
        """How many there are."""
        return float(self.weights.sum())

    @property
    def occurrences(self) -> float:
        return float((self.weights * self.counts).sum())

    def share_of_top(self, share: float) -> float:
        """Share of all occurrences that belong to the most frequent `share` of the keys."""
        if not len(self.counts):
            return 0.0
        ranks = np.concatenate([[0.0], np.cumsum(self.weights)])
        sums = np.concatenate([[0.0], np.cumsum(self.weights * self.counts)])
        return float(np.interp(share * ranks[-1], ranks, sums) / sums[-1])

    def zipf(self) -> float:
        """The exponent s for which frequency ~ rank**-s is most likely, over the keys there are."""
        keys = self.keys
        if keys < 2:
            return 0.0
        ends = np.cumsum(self.weights)
        middles = np.maximum(1.0, ends - (self.weights - 1) / 2)
        mean_log = float((self.weights * self.counts * np.log(middles)).sum() / self.occurrences)
        ranks, widths = _ranks(keys)
        logs = np.log(ranks)
        low, high = 0.0, 5.0
        for _ in range(40):
            middle = (low + high) / 2
            mass = widths * ranks**-middle
            low, high = (middle, high) if (mass * logs).sum() / mass.sum() > mean_log else (low, middle)
        return (low + high) / 2


def _ranks(keys: float, exact: int = 100_000) -> tuple[Numbers, Numbers]:
    """Ranks 1 to `keys`: one by one, then in pieces that grow with the rank."""
    first = np.arange(1.0, min(keys, exact) + 1)
    if keys <= exact:
        return first, np.ones(len(first))
    edges = np.geomspace(exact + 0.5, keys + 0.5, 20_000)
    return np.concatenate([first, (edges[1:] + edges[:-1]) / 2]), np.concatenate([np.ones(exact), np.diff(edges)])
