"""Bags of several tables that are stored together: planned and pooled as the fields of one bag.

Where each table has one bag, their specs are joined to one spec per kind of pooling. A batch then has one input, one
pooled tensor and one gradient, as a bag of one table with all fields. The first bag of a batch pools for all; each of
the others takes its part.

Results are those of separate bags: tables share no key, and one bag per table leaves the order of sums within a key as
it is. A part without a gradient must not be updated, not even by zeros: `MergedTable.add_partial_gradients`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thermocline.batch import Batch
from thermocline.embedding.bag_registry import BagRegistry, sorted_specs
from thermocline.embedding.batch_plan import BagSpec

if TYPE_CHECKING:
    import torch

_BATCHES = 4
"""Batches whose pooled parts are kept until all bags have taken theirs."""
_STATES = 16
"""States of the bags and names of batches whose specs are kept, beside two of each bag: modules of `tc.nn` have batches
of their own."""


class MergedBags(BagRegistry):
    """The bags of a `MergedTable`. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[BagSpec, BagSpec] = {}
        """By spec of a bag: the spec it was joined to last."""
        self._apart: frozenset[BagSpec] = frozenset()
        self._cache: dict[Any, list[BagSpec]] = {}

    def add(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        super().add(bag, specs)
        self._cache = {}

    def keep_apart(self, specs: Sequence[BagSpec]) -> None:
        """Do not join these any more: a loss did not use them."""
        self._apart |= set(specs)
        self._cache = {}

    def joined(self, spec: BagSpec) -> BagSpec | None:
        """Return the spec to which the spec of a bag was joined last; None: to none."""
        return self._joined.get(spec)

    def specs(self, *, trained: bool | None = None, batch: Batch | None = None) -> list[BagSpec]:
        """Return the specs of all bags, or of those that are trained or frozen, joined where possible.

        batch   leave out bags whose fields it lacks: tables may be read from different batches
        """
        with self._lock:
            bags = [bag for bag in self.bags if trained is None or self.trains(bag) == trained]
            state = (*map(id, bags), None if batch is None else (batch.names, batch.fields))
            if state not in self._cache:
                if len(self._cache) > _STATES + 2 * len(self.bags):
                    self._cache = {}
                self._cache[state] = self._join(
                    [spec for bag in bags for spec in self._bag_specs[bag] if has(batch, spec)]
                )
            return self._cache[state]

    def _join(self, specs: Sequence[BagSpec]) -> list[BagSpec]:
        specs = list(dict.fromkeys(specs))
        salts = [spec.salts[:1] for spec in specs]
        groups: dict[Any, list[BagSpec]] = {}
        rest: list[BagSpec] = []
        for spec in specs:
            alone = spec.pooling == "none" or not spec.salts or salts.count(spec.salts[:1]) > 1 or spec in self._apart
            kind = (spec.pooling, isinstance(spec.fields[0], str))
            (rest if alone else groups.setdefault(kind, [])).append(spec)
        for parts in groups.values():
            whole = _whole(parts) if len(parts) > 1 else parts[0]
            self._joined.update(dict.fromkeys(whole.parts, whole))
            rest.append(whole)
        return sorted_specs(rest)


def has(batch: Batch | None, spec: BagSpec) -> bool:
    """Return whether a batch has the fields of a spec."""
    if batch is None:
        return True
    if isinstance(spec.fields[0], str):
        return batch.names is not None and set(spec.fields) <= set(batch.names)
    return max(spec.fields) < batch.fields


def _whole(parts: Sequence[BagSpec]) -> BagSpec:
    fields: Any = tuple(field for spec in parts for field in spec.fields)
    salts = tuple(salt for spec in parts for salt in spec.salts)
    return BagSpec(fields, parts[0].pooling, tuple(range(len(fields))), salts, tuple(parts))


@dataclasses.dataclass(slots=True, eq=False)
class _Pooled:
    """Pooled vectors of a batch that bags have not taken yet."""

    batch: Batch
    weights: torch.Tensor | None
    mode: Any
    parts: dict[BagSpec, torch.Tensor]


class PooledParts:
    """Pooled vectors of the last batches, each part until its bag takes it. Used by the thread that trains."""

    def __init__(self) -> None:
        import torch

        self.anchor = torch.zeros((), requires_grad=True)
        """Makes autograd call backward: see `EmbeddingBag`. One for all bags, as any may pool for the others."""
        self._kept: list[_Pooled] = []

    def put(self, batch: Batch, weights: torch.Tensor | None, mode: Any, parts: dict[BagSpec, torch.Tensor]) -> None:
        """Keep the parts of a batch; those of the oldest batch are dropped."""
        if parts:
            self._kept = [*self._kept[1 - _BATCHES :], _Pooled(batch, weights, mode, parts)]

    def take(self, batch: Batch, weights: torch.Tensor | None, mode: Any, spec: BagSpec) -> torch.Tensor | None:
        """Remove and return a part; None: it was taken before, or its batch has not been pooled so.

        mode   whatever the vectors depend on, beside rows: parts are dropped when rows change
        """
        for pooled in self._kept:
            if pooled.batch is batch and pooled.weights is weights and pooled.mode == mode and spec in pooled.parts:
                part = pooled.parts.pop(spec)
                if not pooled.parts:
                    self._kept.remove(pooled)
                return part
        return None

    def clear(self) -> None:
        """Drop all parts: rows change."""
        self._kept = []
