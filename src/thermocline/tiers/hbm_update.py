"""`HbmUpdate`: what a training step does to rows in GPU memory, on the caller's current stream.

Gradients of each key are summed, missed steps replayed, rows, optimizer state and statistics updated, and the learned
scale of quantized rows, which is on the device and saved to the DRAM tier on demand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from thermocline.embedding.batch_plan import Gradient, ReducedGradients
from thermocline.embedding.quant_scale import UNIT, LearnedScale
from thermocline.embedding.row_statistics import StatisticsState, click_units
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import NotRecordable
from thermocline.kernels.catch_up import catch_up_rows
from thermocline.kernels.codec import Codec
from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.optimizer_rules import BIAS_CORRECTED, OptimizerStep, StoredStep
from thermocline.kernels.random import table_mix
from thermocline.kernels.segments import Segments, find_segments
from thermocline.kernels.statistics import StatisticsStep, StoredStatistics, count_occurrences, update_statistics
from thermocline.kernels.update import RowUpdate, apply_gradients, sum_gradients, update_rows
from thermocline.tiers.hbm import HbmTier
from thermocline.tiers.hbm_plan import HbmBag, HbmBatchPlan
from thermocline.tiers.hbm_recorded import fixed_click_units
from thermocline.tiers.host_rows import HostRows


class HbmUpdate:
    """Updates of the rows of one table."""

    def __init__(self, spec: TableSpec, host: HostRows, hbm: HbmTier) -> None:
        self.rates = StepRates.of(spec.optimizer)
        self.statistics = StatisticsState()
        mix = table_mix(host.dram.seed, host.dram.table)
        tail = int(spec.optimizer.catches_up) + spec.statistics.words
        self.codec = Codec.of(spec.precision, spec.dim, hbm.residents.keys, mix, tail)
        self.weights = self.codec.weights(hbm.arena)
        """Weights of all slots, as they are stored."""
        self.recorded_step: StoredStep | None = None
        """While a training step is recorded: the constants of all its replays."""
        self.recorded_statistics: StoredStatistics | None = None
        """While a training step is recorded: the constants of the statistics of rows."""
        self._state = self.codec.state(hbm.arena)
        self._spec, self._host, self._hbm = spec, host, hbm
        self._step_rule: OptimizerStep | None = None
        """The constants of the last step."""
        self._rows_only = self.rates is None and not spec.statistics and self.codec.gradient is None
        self._scale: LearnedScale | None = None
        """The learned scale as float64 tensors on the device, so that no step waits for the host."""
        self.load_scale()

    def record_use(self) -> None:
        """Note that rows or plans are used on the current stream, except while a step is recorded."""
        if self.recorded_step is None:
            self._hbm.record_use()

    def catch_up(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor | None = None,
        *,
        counts: torch.Tensor | None = None,
        step: int | None = None,
    ) -> None:
        """Replay missed steps: of slots of the arena, or of all `rows`.

        step   the step that is applied next, which the rates do not have yet; default: none
        """
        if self.rates is not None:
            shared = OptimizerStep.of(self._spec.optimizer, 1)
            catch_up_rows(
                rows, self._spec.dim, shared, to_device(self.rates.ring, self._hbm.device), self.rates.step,
                slots=slots, counts=counts, dirty=None if slots is None else self._hbm.dirty, stamp=step,
            )  # fmt: skip

    # ---- gradients

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        """See `RowBackend.reduce`. Blocks on the device."""
        if not gradients:
            return None
        segments, rows, coefs, values = self._combine(gradients)
        segments = segments.known(*segments.counts.tolist())
        sums = sum_gradients(segments, values, rows, coefs)
        occurrences = self._occurrences(gradients, segments, rows) if self._spec.statistics else None
        self.record_use()  # of the plans
        return ReducedGradients(segments.slots[: segments.sizes[0]], sums, occurrences=occurrences)

    def gradient_index(self, bag: HbmBag) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return per id of a bag the row of its gradients, and its coefficient."""
        return index_gradients(len(bag.slots), None, bag.offsets, bag.weights, bag.mean, self._hbm.device)

    def _combine(
        self, gradients: Sequence[Gradient]
    ) -> tuple[Segments, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Return the segments of all ids and, per occurrence in segment order, the row of the concatenated gradients
        and its coefficient."""
        for gradient in gradients:
            gradient.plan.use()
        first = gradients[0].plan
        if _is_whole(first, gradients):
            return first.segments, *first.gradient_index, _joined(gradients)
        if self.recorded_step is not None:
            raise NotRecordable(
                f"the model does not read each bag of table {self._spec.name!r} once, in the order of its fields"
            )
        indices = [self.gradient_index(g.bag) for g in gradients]
        values = _joined(gradients)
        starts = np.cumsum([0, *(len(g.values) for g in gradients[:-1])]).tolist()
        rows = torch.cat([index[0] + start for index, start in zip(indices, starts, strict=True)])
        coefs = None
        if any(index[1] is not None for index in indices):
            coefs = torch.cat(
                [torch.ones(len(index[0]), device=values.device) if index[1] is None else index[1] for index in indices]
            )
        same = [id(g.bag.slots) for g in gradients] == [id(bag.slots) for bag in first.bags.values()]
        if all(g.plan is first for g in gradients) and same:
            segments = first.segments
        else:
            segments = find_segments(torch.cat([g.bag.slots for g in gradients]))
        order = segments.order.long()
        return segments, rows[order], None if coefs is None else coefs[order], values

    # ---- steps

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        """See `RowBackend.apply`."""
        rule = OptimizerStep.of(self._spec.optimizer, step, lr=lr, scale=scale)
        self.catch_up(self._hbm.arena, reduced.slots, step=step)
        apply_gradients(self.weights, self._state, reduced.slots, reduced.values, rule, self.codec, self._hbm.dirty)
        if self._spec.statistics:
            self._update_statistics(reduced.slots, reduced.occurrences, None, step)
        self._update_scale(step)
        self.record_use()

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        """See `RowBackend.update`."""
        if not gradients:
            return
        if self._rows_only and self.recorded_step is None and self._update_whole(gradients, step, lr, scale):
            return
        segments, rows, coefs, values = self._combine(gradients)
        rule: OptimizerStep | StoredStep | None = self.recorded_step
        if rule is None:
            rule = OptimizerStep.of(self._spec.optimizer, step, lr=lr, scale=scale)
        self.catch_up(self._hbm.arena, segments.slots[: segments.sizes[0]], counts=segments.counts, step=step)
        update_rows(self.weights, self._state, segments, values, rows, coefs, rule, self.codec, self._hbm.dirty)
        if self._spec.statistics:
            occurrences = self._occurrences(gradients, segments, rows)
            self._update_statistics(segments.slots, occurrences, segments.counts, step)
        self._update_scale(step)
        self.record_use()

    def _update_whole(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> bool:
        """Update by launches that are prepared once per plan memory, if the gradients are those of one batch."""
        plan = gradients[0].plan
        if plan.lists is None or plan.rows is not None or not _is_whole(plan, gradients):
            return False
        plan.use()
        rule, lists = self.step_rule(step, lr, scale), plan.lists
        if lists.update is None:
            rows, coefs = lists.gradient_index()
            lists.update = RowUpdate(
                self.weights, self._state, lists.segments(), rows, coefs, rule, self.codec, self._hbm.dirty
            )
        lists.update(_joined(gradients), rule.constants, step, plan.known_counts())
        self.record_use()
        return True

    def step_rule(self, step: int, lr: float, scale: float) -> OptimizerStep:
        """Return the constants of a step. `number` may be that of an earlier step with the same constants."""
        optimizer, last = self._spec.optimizer, self._step_rule
        if last is None or optimizer.code in BIAS_CORRECTED or (last.lr, last.scale) != (lr, scale):
            last = self._step_rule = OptimizerStep.of(optimizer, step, lr=lr, scale=scale)
        return last

    # ---- statistics

    def statistics_step(self, step: int) -> StatisticsStep:
        """Return the constants of the statistics of step `step`."""
        kept, state = self._spec.statistics, self.statistics
        return StatisticsStep(kept.names, kept.words, step, state.step_time, state.runs)

    def _occurrences(
        self, gradients: Sequence[Gradient], segments: Segments, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `ReducedGradients.occurrences` on the device; undefined past segments.counts[0]."""
        units = None
        if "click" in self._spec.statistics:
            if self.recorded_step is not None:
                units = torch.cat([fixed_click_units(gradient) for gradient in gradients])
            else:
                units = to_device(click_units(self._spec.name, gradients), self._hbm.device)
        return count_occurrences(segments, rows, units)

    def _update_statistics(
        self, slots: torch.Tensor, occurrences: torch.Tensor, limit: torch.Tensor | None, step: int
    ) -> None:
        rule = self.recorded_statistics or self.statistics_step(step)
        update_statistics(self._hbm.arena, slots, occurrences, limit, rule)

    # ---- the learned scale

    def load_scale(self) -> None:
        """Copy the scale from the DRAM tier."""
        learned = self._host.dram.learned
        if learned is not None:
            values = (torch.tensor([value], dtype=torch.float64) for value in dataclasses.astuple(learned))
            self._scale = LearnedScale(*(value.to(self._hbm.device) for value in values))
            self.codec.scale.copy_(self._scale.scale)

    def save_scale(self) -> None:
        """Copy the scale to the DRAM tier. Blocks on the device."""
        if self._scale is not None:
            values = torch.cat([self._scale.scale, self._scale.mean, self._scale.size])
            self._host.dram.set_scale(LearnedScale(*values.tolist()))

    def _update_scale(self, step: int) -> None:
        if self._scale is not None and self.codec.gradient is not None:
            gradient = self.codec.gradient.double() * UNIT
            self._scale = self._scale.after(gradient, step, self._spec.precision.scale_lr)
            self.codec.scale.copy_(self._scale.scale)
            self.codec.gradient.zero_()


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, to a GPU through page-locked memory and without waiting."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _is_whole(plan: HbmBatchPlan, gradients: Sequence[Gradient]) -> bool:
    """Return whether the gradients are those of all bags of the plan, in order."""
    bags = plan.bags.values()
    return len(gradients) == len(bags) and all(g.bag is bag for g, bag in zip(gradients, bags, strict=True))


def _joined(gradients: Sequence[Gradient]) -> torch.Tensor:
    return gradients[0].values if len(gradients) == 1 else torch.cat([g.values for g in gradients])
