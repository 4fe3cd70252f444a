"""Unique keys of a number of examples, and cache hit rates, computed from the distribution of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from thermocline.data.key_stats import KeyHistogram
from thermocline.embedding.table_spec import Policy

Floats64 = npt.NDArray[np.float64]
_SINGLE_RANKS = 1024
"""Most popular keys of a field that form a group each."""
_GROUPS_PER_OCTAVE = 32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeyDistribution:
    """Distribution of keys over examples: groups of keys with equal probability.

    For a key with probability p per example, examples taken as independent:

        P(key in n examples)   = 1 - (1 - p)^n
        unique keys U(n)       = sum over keys of 1 - (1 - p)^n
    """

    group_keys: Floats64
    """Number of keys per group."""
    probabilities: Floats64
    """Per group: probability that one example contains a given key of the group."""

    @classmethod
    def zipf(cls, keys: Sequence[int], exponents: Sequence[float], ids_per_example: float) -> Self:
        """Distribution of `tc.SyntheticAds`: keys and Zipf exponent per field, ids spread evenly over the fields.

        The ids of one field and example are distinct.
        """
        per_field = ids_per_example / len(keys)
        fields = [_zipf_field(count, exponent, per_field) for count, exponent in zip(keys, exponents, strict=True)]
        return cls(np.concatenate([sizes for sizes, _ in fields]), np.concatenate([chances for _, chances in fields]))

    @classmethod
    def counted(cls, counts: KeyHistogram, examples: int) -> Self:
        """Distribution of `counts` over `examples` that were read. Keys that were not read are unknown to it."""
        return cls(np.asarray(counts.weights, np.float64), np.minimum(1.0, counts.counts / examples))

    @property
    def num_keys(self) -> float:
        return float(self.group_keys.sum())

    @property
    def ids_per_example(self) -> float:
        return float((self.group_keys * self.probabilities).sum())

    def probability_within(self, examples: float) -> Floats64:
        """Per group: probability 1 - (1 - p)^n that at least one of n = `examples` contains a given key."""
        # log1p(-1) is -inf: a key with p = 1 is in every example.
        with np.errstate(divide="ignore"):
            return -np.expm1(examples * np.log1p(-self.probabilities))

    def unique_keys(self, examples: float) -> float:
        """Expected number of unique keys U(n) of n = `examples`."""
        return float((self.group_keys * self.probability_within(examples)).sum())

    def hit_rate(self, rows: float, examples: float, policy: Policy = "lru_lfu") -> float:
        """Fraction of the unique keys of `examples` (one pull) that a warm cache of `rows` rows contains.

        lru       Che's approximation: a row stays for one characteristic number of pulls
        lfu       the cache contains the most probable keys
        lru_lfu   mean of (LRU of half the rows, then LFU of the rows that left it) and (LRU of all rows): the count of
                  a row restarts when it returns, which makes the LFU half less exact than a full LFU
        """
        if rows >= self.num_keys:
            return 1.0
        pulled = self.probability_within(examples)
        if policy == "lfu":
            cached = self._cached_by_lfu(self.group_keys, rows)
        elif policy == "lru":
            cached = self._cached_by_lru(pulled, rows)
        else:
            recent = self._cached_by_lru(pulled, rows / 2)
            frequent = recent + (1 - recent) * self._cached_by_lfu(self.group_keys * (1 - recent), rows / 2)
            cached = (frequent + self._cached_by_lru(pulled, rows)) / 2
        requested = self.group_keys * pulled
        return float((requested * cached).sum() / requested.sum())

    def _cached_by_lru(self, pulled: Floats64, rows: float) -> Floats64:
        """Per group: probability that a key is among the `rows` most recently used; `pulled`: probability per pull."""
        with np.errstate(divide="ignore"):
            log_absent = np.log1p(-pulled)

        def cached_after(pulls: float) -> Floats64:
            return -np.expm1(pulls * log_absent)

        return cached_after(_solve(lambda pulls: float((self.group_keys * cached_after(pulls)).sum()), rows))

    def _cached_by_lfu(self, group_keys: Floats64, rows: float) -> Floats64:
        """Per group: fraction of its keys that fit, most probable group first."""
        order = np.argsort(-self.probabilities, kind="stable")
        preceding = np.cumsum(group_keys[order]) - group_keys[order]
        cached = np.empty_like(group_keys)
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(group_keys[order] > 0, (rows - preceding) / group_keys[order], 0.0)
        cached[order] = np.clip(fraction, 0.0, 1.0)
        return cached


def _zipf_field(keys: int, exponent: float, ids: float) -> tuple[Floats64, Floats64]:
    """Groups of one field: the first ranks one by one, then 32 groups per power of two of the rank."""
    first = np.arange(1, min(keys, _SINGLE_RANKS) + 1, dtype=np.float64)
    edges = [float(_SINGLE_RANKS)]
    while edges[-1] < keys:
        edges.append(min(float(keys), edges[-1] * 2 ** (1 / _GROUPS_PER_OCTAVE)))
    cuts = np.unique(np.floor(edges)) if keys > _SINGLE_RANKS else np.empty(0)
    low, high = cuts[:-1] + 1, cuts[1:]
    group_keys = np.concatenate([np.ones(len(first)), high - low + 1])
    rank = np.concatenate([first, np.sqrt(low * high)])
    shares = rank**-exponent
    shares /= (group_keys * shares).sum()
    # The ids of one example are distinct: probabilities saturate at 1 while their sum stays `ids`.
    scale = _solve(lambda c: float(-(group_keys * np.expm1(-c * shares)).sum()), min(ids, 0.999999 * keys))
    return group_keys, -np.expm1(-scale * shares)


def _solve(increasing: Callable[[float], float], target: float) -> float:
    """Argument at which an increasing function reaches `target`, by bisection."""
    high = 1.0
    while increasing(high) < target and high < 1e30:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < target else (low, middle)
    return high
