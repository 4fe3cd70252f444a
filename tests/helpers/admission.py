"""The rule of admission on dicts: an oracle beside `Reference`, which shares no code with the filter or the tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

import thermocline as tc
from helpers.train import Reference, ReferenceBag
from thermocline.embedding.admission import SHARED_KEY


class AdmissionReference(Reference):
    """A reference table whose keys are admitted by count, exactly."""

    def __init__(self, like: tc.Table, admission: tc.Admission, *, seed: int = 0) -> None:
        super().__init__(like, seed=seed)
        assert admission.count is not None
        self.admission = admission
        self.counts: dict[int, int] = {}
        self.admitted: set[int] = set()

    def plan(self, batch: tc.Batch, bags: Sequence[AdmissionReferenceBag]) -> None:
        """Count each id once, however many bags read its field."""
        for field in sorted({field for bag in bags for field in bag.fields}):
            for key in batch.select([field])[0].tolist():
                if key not in self.admitted:
                    self.counts[key] = self.counts.get(key, 0) + 1
                    if self.counts[key] >= self.admission.count:
                        self.admitted.add(key)


def count_within(batches: Iterable[tc.Batch], admission: tc.Admission) -> tuple[set[int], int]:
    """Return the keys that exact counters within `admission.memory` admit, and the number of counters dropped.

    The keys of a batch are counted in the order of their first occurrence, each with all its occurrences.
    """
    assert admission.count is not None
    limit = admission.memory_bytes // 12 * 4 // 5
    counts: dict[int, int] = {}
    admitted: set[int] = set()
    dropped = 0
    for batch in batches:
        for key, occurrences in Counter(batch.ids.tolist()).items():
            before = counts.get(key, 0)
            if key in admitted or before + occurrences >= admission.count:
                admitted.add(key)
                counts.pop(key, None)
                continue
            if before == 0 and len(counts) >= limit:
                largest = sorted(counts.values(), reverse=True)[limit // 2]
                kept = {other: value for other, value in counts.items() if value > largest}
                dropped += len(counts) - len(kept)
                counts = kept
            counts[key] = before + occurrences
    return admitted, dropped


class AdmissionReferenceBag(ReferenceBag):
    """Pools admitted rows, then adds initial rows, in Python floats of float32."""

    table: AdmissionReference

    def __call__(self, batch: tc.Batch) -> torch.Tensor:
        rows = self.table.table
        if self.kinds == ["none"]:
            ids, _, weights = batch.select(self.fields)
            pooled = np.stack(
                [self._pool(ids[i : i + 1], None if weights is None else weights[i : i + 1]) for i in range(len(ids))]
                or [np.empty((0, rows.dim), np.float32)]
            ).reshape(-1, rows.dim)
        else:
            pooled = np.empty((len(batch), len(self.fields), rows.dim), np.float32)
            for position, (field, kind) in enumerate(zip(self.fields, self.kinds, strict=True)):
                ids, offsets, weights = batch.select([field])
                for example in range(len(batch)):
                    part = slice(int(offsets[example]), int(offsets[example + 1]))
                    own = ids[part]
                    value = self._pool(own, None if weights is None else weights[part])
                    if kind == "mean" and len(own):
                        value = value / np.float32(len(own))
                    pooled[example, position] = value
        leaf = torch.from_numpy(pooled).requires_grad_()
        self.table.tape.append((self, batch, leaf))
        return leaf

    def _pool(self, ids: Any, weights: Any) -> Any:
        table, otherwise = self.table, self.table.admission.otherwise
        sums: dict[bool, Any] = {}
        for i, key in enumerate(ids.tolist()):
            known = key in table.admitted
            if not known and otherwise == "zero":
                continue
            row = table.table.row(SHARED_KEY if not known and otherwise == "shared" else key)[: table.table.dim]
            known = known or otherwise == "shared"
            if weights is not None:
                row = row * np.float32(weights[i])
            sums[known] = row if known not in sums else sums[known] + row
        zero = np.zeros(table.table.dim, np.float32)
        if False not in sums:
            return sums.get(True, zero)
        return sums.get(True, zero) + sums[False]

    def collect_gradients(self, batch: tc.Batch, grad: Any, keys: list[int], gradients: list[Any]) -> None:
        own_keys: list[int] = []
        own: list[Any] = []
        super().collect_gradients(batch, grad, own_keys, own)
        for key, gradient in zip(own_keys, own, strict=True):
            if key not in self.table.admitted:
                if self.table.admission.otherwise != "shared":
                    continue
                key = SHARED_KEY
            keys.append(key)
            gradients.append(gradient)
