"""Statistics of a data set: number and skew of its keys, and the tier sizes that its rows need.

Keys are counted in bounded memory: exactly up to a limit; above it exactly for frequent keys, and by a sample of key
hashes for the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Doubles, Keys, Mask, as_numpy
from thermocline.batch import Batch
from thermocline.embedding.key_hash import hash_keys

Report = dict[str, Any]
FieldIds = npt.NDArray[np.uint16]
_BLOCK = 1 << 21
"""Occurrences buffered before they are counted."""


# ---- counting


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeyHistogram:
    """Key frequencies in descending order: entry i stands for weights[i] keys that occur counts[i] times each."""

    counts: Doubles
    weights: Doubles
    fields: FieldIds

    def of_field(self, field: int) -> KeyHistogram:
        """Return the histogram of one field's keys."""
        mask = self.fields == field
        return KeyHistogram(self.counts[mask], self.weights[mask], self.fields[mask])

    @property
    def keys(self) -> float:
        """Number of keys; an estimate if keys were sampled."""
        return float(self.weights.sum())

    @property
    def occurrences(self) -> float:
        return float((self.weights * self.counts).sum())

    def share_of_top(self, share: float) -> float:
        """Fraction of all occurrences that belong to the most frequent `share` of the keys."""
        if not len(self.counts):
            return 0.0
        ranks = np.concatenate([[0.0], np.cumsum(self.weights)])
        sums = np.concatenate([[0.0], np.cumsum(self.weights * self.counts)])
        return float(np.interp(share * ranks[-1], ranks, sums) / sums[-1])

    def zipf(self) -> float:
        """Maximum-likelihood exponent s of frequency ~ rank**-s over the keys present."""
        keys = self.keys
        if keys < 2:
            return 0.0
        ends = np.cumsum(self.weights)
        middles = np.maximum(1.0, ends - (self.weights - 1) / 2)
        mean_log = float((self.weights * self.counts * np.log(middles)).sum() / self.occurrences)
        ranks, widths = _rank_groups(keys)
        logs = np.log(ranks)
        low, high = 0.0, 5.0
        for _ in range(40):
            middle = (low + high) / 2
            mass = widths * ranks**-middle
            low, high = (middle, high) if (mass * logs).sum() / mass.sum() > mean_log else (low, middle)
        return (low + high) / 2


def _rank_groups(keys: float, exact: int = 100_000) -> tuple[Doubles, Doubles]:
    """Group the ranks 1 to `keys`: singly up to `exact`, then in growing groups; return their middles and widths."""
    first = np.arange(1.0, min(keys, exact) + 1)
    if keys <= exact:
        return first, np.ones(len(first))
    edges = np.geomspace(exact + 0.5, keys + 0.5, 20_000)
    return np.concatenate([first, (edges[1:] + edges[:-1]) / 2]), np.concatenate([np.ones(exact), np.diff(edges)])


class KeyCounter:
    """Counts the occurrences of keys in about 100 bytes per key of `limit`, for any amount of data."""

    def __init__(self, limit: int = 1 << 21) -> None:
        self._limit = limit
        self.rate = 1.0
        """Fraction of the infrequent keys that is counted; 1 means that all counts are exact."""
        self._keys: Keys = np.empty(0, np.uint64)
        self._counts: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._fields: FieldIds = np.empty(0, np.uint16)
        self._frequent: Keys = np.empty(0, np.uint64)
        """Frequent keys, sorted: chosen when the limit is first exceeded, never dropped, counted exactly."""
        self._buffer: list[tuple[Keys, FieldIds]] = []
        self._buffered = 0

    def add(self, ids: Keys, fields: FieldIds) -> None:
        """Add occurrences of `ids`; fields[i] is the field of ids[i]."""
        self._buffer.append((ids, fields))
        self._buffered += len(ids)
        if self._buffered >= _BLOCK:
            self._count()

    def _count(self) -> None:
        if not self._buffer:
            return
        ids = np.concatenate([ids for ids, _ in self._buffer])
        fields = np.concatenate([fields for _, fields in self._buffer])
        self._buffer, self._buffered = [], 0
        if self.rate < 1:
            mask = self._is_counted(ids)
            ids, fields = ids[mask], fields[mask]
        new, first_seen, counts = np.unique(ids, return_index=True, return_counts=True)
        keys, first, inverse = np.unique(np.concatenate([self._keys, new]), return_index=True, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(inverse, weights=weights, minlength=len(keys)).astype(np.int64)
        self._fields = np.concatenate([self._fields, fields[first_seen]])[first]
        self._keys = keys
        if len(keys) > self._limit:
            self._drop_keys()

    def _is_counted(self, keys: Keys) -> Mask:
        """Select the frequent keys, and the keys whose hash falls into the sample."""
        sampled: Mask = hash_keys(keys) < np.uint64(int(self.rate * 2**64))
        sampled |= self._is_frequent(keys)
        return sampled

    def _is_frequent(self, keys: Keys) -> Mask:
        index = np.minimum(np.searchsorted(self._frequent, keys), len(self._frequent) - 1)
        return np.asarray(self._frequent[index] == keys)

    def _drop_keys(self) -> None:
        """Halve the sampling rate until at most half the limit is left."""
        if not len(self._frequent):
            count = self._limit // 4
            self._frequent = np.sort(self._keys[np.argpartition(self._counts, -count)[-count:]])
        kept = np.ones(len(self._keys), np.bool_)
        while kept.sum() > self._limit // 2:
            self.rate /= 2
            kept = self._is_counted(self._keys)
        self._keys, self._counts, self._fields = self._keys[kept], self._counts[kept], self._fields[kept]

    def result(self) -> KeyHistogram:
        """Return the histogram of all occurrences added so far."""
        self._count()
        weights = np.full(len(self._keys), 1 / self.rate)
        if len(self._frequent):
            weights[self._is_frequent(self._keys)] = 1.0
        order = np.argsort(-self._counts, kind="stable")
        return KeyHistogram(self._counts[order].astype(np.float64), weights[order], self._fields[order])


def count_keys(
    batches: Iterable[Batch], advance: Callable[[int], None] = lambda examples: None
) -> tuple[Report, KeyHistogram]:
    """Compute statistics of examples and keys in one pass; `advance` is called with the examples of each batch."""
    counter = KeyCounter()
    examples = nonzeros = fields = dense = steps = 0
    positive = 0.0
    least, most = math.inf, 0
    for batch in batches:
        per_bag = np.diff(batch.offsets)
        per_example = per_bag.reshape(-1, batch.fields).sum(1)
        bag_fields = np.tile(np.arange(batch.fields, dtype=np.uint16), batch.examples)
        counter.add(batch.ids, np.repeat(bag_fields, per_bag))
        steps += 1
        examples += batch.examples
        nonzeros += len(batch.ids)
        least, most = min(least, int(per_example.min())), max(most, int(per_example.max()))
        if batch.label is not None:
            positive += float((as_numpy(batch.label, "label") > 0).sum())
        fields, dense = batch.fields, 0 if batch.dense is None else batch.dense.shape[1]
        advance(batch.examples)
    if not examples:
        raise ValueError("the data has no examples")
    histogram = counter.result()
    report: Report = {
        "examples": examples,
        "positive": positive / examples,
        "fields": fields,
        "dense": dense,
        "nonzeros": nonzeros,
        "nonzeros_per_example": {"mean": nonzeros / examples, "least": least, "most": most},
        "keys": round(histogram.keys),
        "exact": counter.rate == 1,
        "share_of_top_1_percent": histogram.share_of_top(0.01),
        "share_of_top_10_percent": histogram.share_of_top(0.1),
        "zipf": histogram.zipf(),
        "batches": steps,
        "per_field": [
            {
                "field": i,
                "keys": round(part.keys),
                "share_of_top_1_percent": part.share_of_top(0.01),
                "zipf": part.zipf(),
            }
            for i, part in ((i, histogram.of_field(i)) for i in range(fields))
        ],
    }
    return report, histogram
