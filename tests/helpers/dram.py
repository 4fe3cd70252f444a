"""Training on a `DramTier` without a table, one call per operation of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from thermocline.arrays import Floats, Offsets, Slots, as_numpy
from thermocline.batch import WorkingSet
from thermocline.tiers.dram import DramTier

Pooling = Literal["sum", "mean", "none"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Pinned rows of a batch and the plan of its gradient sums."""

    working_set: WorkingSet
    slots: Slots
    """Per unique key."""
    id_slots: Slots
    """Per id."""
    offsets: Offsets | None
    weights: Floats | None
    mean: bool
    grad_rows: Slots
    """Per occurrence in the working set's order: the row of its gradient."""
    coefs: Floats | None
    """Per occurrence: the factor of that gradient."""

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return len(self.id_slots) if self.offsets is None else len(self.offsets) - 1


def lookup(
    tier: DramTier, ids: Any, offsets: Any = None, *, pooling: Pooling | None = None, weights: Any = None
) -> Lookup:
    """Pull the rows of `ids`, or of their `WorkingSet`, and plan the batch. Release the result when done."""
    working_set = ids if isinstance(ids, WorkingSet) else WorkingSet.of(ids)
    cuts = None if offsets is None else np.asarray(offsets, np.int64)
    factors, mean = None if weights is None else np.asarray(weights, np.float32), pooling == "mean"
    slots = tier.pull(working_set.keys)
    try:
        planned = tier.core.plan(slots, working_set.inverse, working_set.order, cuts, factors, mean)
    except BaseException:
        tier.unpin(slots)
        raise
    id_slots, grad_rows, coefs = planned
    return Lookup(working_set, slots, id_slots, cuts, factors, mean, grad_rows, coefs)


def pool(tier: DramTier, batch: Lookup, *, out: Any = None) -> Floats:
    """Return float32[bags, dim]."""
    result = np.empty((batch.bags, tier.dim), np.float32) if out is None else as_numpy(out, "out")
    tier.core.pool(batch.id_slots, batch.offsets, batch.weights, batch.mean, result)
    return result


def update(
    tier: DramTier, batch: Lookup, grad: Any, *, step: int = 1, lr: float | None = None, scale: float = 1.0
) -> None:
    """Apply one optimizer step, given the gradient of what `pool` returned."""
    grads = as_numpy(grad, "grad")
    starts = batch.working_set.starts
    applied = tier.step(step, lr, scale)
    tier.learn(tier.core.update(batch.slots, starts, batch.grad_rows, batch.coefs, grads, applied), step)


def sum_gradients(tier: DramTier, batch: Lookup, grad: Any, *, out: Any = None) -> Floats:
    """Return float32[keys, dim]: the summed gradient of every unique key."""
    sums = np.empty((len(batch.slots), tier.dim), np.float32) if out is None else out
    grads = as_numpy(grad, "grad")
    tier.core.sum_gradients(batch.working_set.starts, batch.grad_rows, batch.coefs, grads, sums)
    return sums


def release(tier: DramTier, batch: Lookup, *, dirty: bool = True) -> None:
    """Unpin the rows; `dirty` marks them as updated."""
    tier.core.unpin(batch.slots, dirty, batch.working_set.keys)


def weight_gradient(tier: DramTier, lookup: Lookup, grad: Any, rows: Floats | None = None) -> Floats:
    """Return the gradient of the weight of each id, from the tier or from copies of the unique rows."""
    slots = lookup.id_slots if rows is None else lookup.working_set.inverse
    out = np.empty(len(slots), np.float32)
    tier.core.weight_gradient(rows, slots, lookup.offsets, lookup.mean, np.asarray(grad, np.float32), out)
    return out


def evaluate(
    tier: DramTier, ids: Any, offsets: Any = None, *, pooling: Pooling | None = None, weights: Any = None
) -> Floats:
    """Return what `pool` would return, without inserting."""
    working_set = ids if isinstance(ids, WorkingSet) else WorkingSet.of(ids)
    cuts = None if offsets is None else np.asarray(offsets, np.int64)
    factors, mean = None if weights is None else np.asarray(weights, np.float32), pooling == "mean"
    rows = tier.read(working_set.keys)
    result = np.empty((len(working_set.inverse) if cuts is None else len(cuts) - 1, tier.dim), np.float32)
    tier.core.pool_buffer(rows, working_set.inverse, cuts, factors, mean, result)
    return result
