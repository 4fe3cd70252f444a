"""How often keys come up: unique keys of any number of examples, and the share of them a cache of any size holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from thermocline.data.key_stats import KeyHistogram
from thermocline.tiers.dram import Policy

Numbers = npt.NDArray[np.float64]
_SINGLES = 1024
_PER_OCTAVE = 32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Keys in groups of equal chance."""

    weights: Numbers
    """Keys of each group."""
    chances: Numbers
    """That an example has such a key."""

    @classmethod
    def zipf(cls, keys: Sequence[int], exponents: Sequence[float], nonzeros: float) -> Self:
        """Of `tc.SyntheticAds`: ids spread evenly over fields, those of one field and example distinct."""
        parts = [_field(k, s, nonzeros / len(keys)) for k, s in zip(keys, exponents, strict=True)]
        return cls(np.concatenate([w for w, _ in parts]), np.concatenate([c for _, c in parts]))

    @classmethod
    def counted(cls, counts: KeyHistogram, examples: int) -> Self:
        """Of data that was read: see data/stats.py. Keys that come up later for the first time are not known."""
        return cls(np.asarray(counts.weights, np.float64), np.minimum(1.0, counts.counts / examples))

    @property
    def keys(self) -> float:
        return float(self.weights.sum())

    @property
    def nonzeros(self) -> float:
        """Ids per example."""
        return float((self.weights * self.chances).sum())

    def within(self, examples: float) -> Numbers:
        """Per group: the chance that so many examples have the key."""
        # log1p(-1) is -inf: a key of every example is surely there.
        with np.errstate(divide="ignore"):
            return -np.expm1(examples * np.log1p(-self.chances))

    def unique(self, examples: float) -> float:
        """Expected unique keys of so many examples."""
        return float((self.weights * self.within(examples)).sum())

    def hit_rate(self, rows: float, examples: float, policy: Policy = "lru_lfu") -> float:
        """Share of the unique keys of `examples` (one pull) that a cache of `rows` rows has, once it is warm.

        LRU by Che's approximation: a row stays for one characteristic number of pulls. LFU has the most popular keys.
        The default policy is an LRU of half the rows, and an LFU of those that left it; but a row's count begins anew
        whenever it comes back, so what it keeps is taken as half way between that and an LRU of all rows.
        """
        if rows >= self.keys:
            return 1.0
        pulled = self.within(examples)
        if policy == "lfu":
            held = self._most_popular(self.weights, rows)
        elif policy == "lru":
            held = self._recent(pulled, rows)
        else:
            recent = self._recent(pulled, rows / 2)
            often = recent + (1 - recent) * self._most_popular(self.weights * (1 - recent), rows / 2)
            held = (often + self._recent(pulled, rows)) / 2
        asked = self.weights * pulled
        return float((asked * held).sum() / asked.sum())

    def _recent(self, pulled: Numbers, rows: float) -> Numbers:
        """Chance to be among the `rows` keys used last."""
        with np.errstate(divide="ignore"):
            log = np.log1p(-pulled)

        def kept(pulls: float) -> Numbers:
            return -np.expm1(pulls * log)

        return kept(_root(lambda pulls: float((self.weights * kept(pulls)).sum()), rows))

    def _most_popular(self, weights: Numbers, rows: float) -> Numbers:
        """1 for groups that fit, most popular first; the group at the edge in part."""
        order = np.argsort(-self.chances, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        held = np.empty_like(weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(weights[order] > 0, (rows - before) / weights[order], 0.0)
        held[order] = np.clip(share, 0.0, 1.0)
        return held


def _field(keys: int, exponent: float, ids: float) -> tuple[Numbers, Numbers]:
    """Groups of one field: the first ranks alone, then 32 groups per power of two."""
    first = np.arange(1, min(keys, _SINGLES) + 1, dtype=np.float64)
    edges = [float(_SINGLES)]
    while edges[-1] < keys:
        edges.append(min(float(keys), edges[-1] * 2 ** (1 / _PER_OCTAVE)))
    cuts = np.unique(np.floor(edges)) if keys > _SINGLES else np.empty(0)
    low, high = cuts[:-1] + 1, cuts[1:]
    weights = np.concatenate([np.ones(len(first)), high - low + 1])
    middle = np.concatenate([first, np.sqrt(low * high)])
    shares = middle**-exponent
    shares /= (weights * shares).sum()
    # Ids of one example are distinct: chances saturate at 1, and still add up to `ids`.
    scale = _root(lambda c: float(-(weights * np.expm1(-c * shares)).sum()), min(ids, 0.999999 * keys))
    return weights, -np.expm1(-scale * shares)


def _root(rising: Callable[[float], float], target: float) -> float:
    """Where a rising function reaches `target`."""
    high = 1.0
    while rising(high) < target and high < 1e30:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return high
