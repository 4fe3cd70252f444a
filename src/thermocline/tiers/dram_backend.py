"""A batch in the memory tier: pooled vectors, and one update per unique key, on the rows where they lie.

`hbm_train.py` is the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thermocline.arrays import Floats, Slots
from thermocline.batch import WorkingSet
from thermocline.embedding.batch_plan import BagSpec, Gradient, Part, Prepared
from thermocline.tiers.dram import DramTier, Pins


class DramBackend:
    """Batches of one table on its memory tier."""

    def __init__(self, tier: DramTier, threads: int | None) -> None:
        self._tier = tier
        self._threads = threads

    # ---- ahead of training

    @staticmethod
    def prepare(
        tier: DramTier, parts: dict[BagSpec, Part], working_set: WorkingSet, slots: Slots, pins: Pins
    ) -> Prepared:
        """Ready to train: the slots of the working set's keys in `tier`, which `pins` hold."""
        if len(parts) == 1:  # the usual case, in one go
            (part,) = parts.values()
            part.id_slots, rows, coefs = tier.core.plan(
                slots, working_set.inverse, working_set.order, part.offsets, part.weights, part.mean
            )
            return Prepared(tier, parts, working_set, slots, pins, plan=(rows, coefs))
        id_slots = slots[working_set.inverse]
        for part in parts.values():
            part.id_slots = id_slots[part.first_id : part.first_id + len(part.ids)]
            part.gradient_plan(tier.core)
        return Prepared(tier, parts, working_set, slots, pins)

    def prepare_read(self, parts: dict[BagSpec, Part], working_set: WorkingSet) -> Prepared:
        """Copies of a batch's rows, for evaluation."""
        return Prepared(self._tier, parts, working_set, None, None, self._tier.read(working_set.keys))

    # ---- training

    def pool(self, prepared: Prepared, part: Part) -> Floats:
        """float32[bags, dim]."""
        out = np.empty((part.bags, self._tier.dim), np.float32)
        if prepared.rows is None:
            assert part.id_slots is not None
            self._tier.core.pool(part.id_slots, part.offsets, part.weights, part.mean, out)
        else:
            index = prepared.working_set.inverse[part.first_id : part.first_id + len(part.ids)]
            self._tier.core.pool_buffer(prepared.rows, index, part.offsets, part.weights, part.mean, out)
        return out

    def weights(self, slots: Slots, out: Floats) -> None:
        """float32[slots, dim]: copies of pinned rows, without their state, into `out`."""
        self._tier.core.pool(slots, None, None, False, out)

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        """One step: sums and optimizer in one pass."""
        slots, starts, rows, coefs, grads = self._combine(gradients)
        self._tier.core.mark_dirty(slots)  # first: whatever happens next, a row that changed is known to have
        gradient = self._tier.core.update(slots, starts, rows, coefs, grads, self._tier.step(step, lr, scale))
        self._tier.learn(gradient, step)

    def sums(self, gradients: Sequence[Gradient]) -> tuple[Slots, Floats]:
        """Slots and summed gradients of the unique keys."""
        slots, starts, rows, coefs, grads = self._combine(gradients)
        sums = np.empty((len(slots), self._tier.dim), np.float32)
        self._tier.core.sum_gradients(starts, rows, coefs, grads, sums)
        return slots, sums

    @staticmethod
    def norm(sums: Floats) -> float:
        """In double, so that no order of threads shows."""
        return float(np.sqrt(np.square(sums, dtype=np.float64).sum()))

    def apply(self, slots: Slots, sums: Floats, step: int, lr: float, scale: float) -> None:
        """The second half of a step whose sums were asked for."""
        self._tier.core.mark_dirty(slots)
        self._tier.apply_gradients(slots, sums, step=step, lr=lr, scale=scale)

    def _combine(self, gradients: Sequence[Gradient]) -> tuple[Slots, Slots, Slots, Floats | None, Floats]:
        """Slots of the unique keys, and which rows of the joined gradients belong to each, in example order."""
        one = gradients[0].prepared
        if len(gradients) == 1 and one.plan is not None:
            assert one.slots is not None
            return one.slots, one.working_set.starts, *one.plan, gradients[0].grad
        plans = [g.part.gradient_plan(self._tier.core) for g in gradients]
        grads = gradients[0].grad if len(gradients) == 1 else np.concatenate([g.grad for g in gradients])
        firsts = np.cumsum([0, *(len(g.grad) for g in gradients[:-1])]).astype(np.uint32)
        rows = [plan[0] + first for plan, first in zip(plans, firsts, strict=True)]
        grad_rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
        coefs = None
        if any(plan[1] is not None for plan in plans):
            coefs = np.concatenate(
                [np.ones(len(plan[0]), np.float32) if plan[1] is None else plan[1] for plan in plans]
            )
        if all(g.prepared is one for g in gradients) and [g.part for g in gradients] == list(one.parts.values()):
            # Every part of one batch, once. Its working set is the one needed.
            working_set, slots = one.working_set, one.slots
            assert slots is not None
        else:
            working_set = WorkingSet.of(np.concatenate([g.part.ids for g in gradients]), threads=self._threads)
            id_slots = np.concatenate([g.part.id_slots for g in gradients])
            slots = id_slots[working_set.order[working_set.starts[:-1]]]
        order = working_set.order
        return slots, working_set.starts, grad_rows[order], None if coefs is None else coefs[order], grads
