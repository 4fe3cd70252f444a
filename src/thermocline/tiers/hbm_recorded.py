"""`HbmRecordedRows`: one batch plan and the constants of the step at fixed addresses, for a recorded training step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from thermocline.embedding.batch_plan import Gradient
from thermocline.embedding.row_statistics import CLICK_UNIT
from thermocline.errors import NotRecordable
from thermocline.kernels.optimizer_rules import StoredStep
from thermocline.kernels.segments import capacities
from thermocline.kernels.statistics import StoredStatistics
from thermocline.tiers.hbm_plan import HbmBatchPlan, PlanLists

if TYPE_CHECKING:
    from thermocline.tiers.hbm_backend import HbmBackend


class _NoPins:
    """Pins of the plan at fixed addresses: the batch that is copied there owns its rows."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def fixed_click_units(gradient: Gradient) -> torch.Tensor:
    """Return `click_units` of a batch at fixed addresses, computed on the device in each replay."""
    if gradient.spec.pooling == "none":
        raise NotRecordable(
            "rows have the statistic click, and the labels of a bag with pooling 'none' are on the host"
        )
    units = torch.round(torch.nan_to_num(gradient.batch.label.double()) / CLICK_UNIT).long()
    return units.reshape(-1).repeat_interleave(len(gradient.spec.fields))


class HbmRecordedRows:
    """See `RecordedRows`."""

    def __init__(self, backend: HbmBackend, like: HbmBatchPlan) -> None:
        assert like.lists is not None
        layout, device = like.lists.layout, backend.device
        memory = torch.zeros(layout.words, dtype=torch.int32, device=device)
        self._lists = PlanLists(layout, memory, [bag.ids for bag in layout.bags])
        self._backend = backend
        self.plan = HbmBatchPlan(
            like.dram, like.specs, lists=self._lists, pins=_NoPins(), counts=list(capacities(layout.ids))
        )
        self.plan.counted = True
        optimizer = backend.spec.optimizer
        constants = torch.zeros(StoredStep.WORDS, dtype=torch.int32, device=device)
        self._step = StoredStep(optimizer.code, optimizer.weight_decay, constants)
        self._stochastic = backend.spec.precision.stochastic
        self._content: object = None
        """Content of `_constants`."""
        self._constants = torch.zeros(StoredStep.WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._statistics: StoredStatistics | None = None
        if kept := backend.spec.statistics:
            memory = torch.zeros(StoredStatistics.WORDS, dtype=torch.int32, device=device)
            self._statistics = StoredStatistics(kept.names, kept.words, memory)
            self._statistics_words = torch.zeros(len(memory), dtype=torch.int32, pin_memory=device.type == "cuda")

    @staticmethod
    def shape(plan: Any) -> Any:
        """Return what two plans must have in common to share the addresses; None: the plan cannot be copied."""
        if not isinstance(plan, HbmBatchPlan) or plan.lists is None or plan.pins is None or plan.rows is not None:
            return None
        return plan.lists.shape(plan.specs)

    def load(self, plan: HbmBatchPlan) -> None:
        """Copy a plan with the same shape, on the current stream, after its rows are ready."""
        assert plan.lists is not None
        plan.use()
        self.plan.dram = plan.dram
        self._lists.memory.copy_(plan.lists.memory, non_blocking=True)

    def set_constants(self, step: int, lr: float, scale: float) -> None:
        """Set the constants of the next step. The upload before must have ended."""
        rule = self._backend.updates.step_rule(step, lr, scale)
        content = rule, step if self._stochastic else 0
        if content != self._content:  # most optimizers have the same constants in each step
            self._constants.numpy()[:] = dataclasses.replace(rule, number=step).words()
            self._step.memory.copy_(self._constants, non_blocking=True)
            self._content = content
        if self._statistics is not None:
            self._statistics_words.numpy()[:] = self._backend.updates.statistics_step(step).content()
            self._statistics.memory.copy_(self._statistics_words, non_blocking=True)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While the step is recorded, or run in its place: updates read `set_constants`, and no event is recorded."""
        updates = self._backend.updates
        updates.recorded_step, updates.recorded_statistics = self._step, self._statistics
        try:
            yield
        finally:
            updates.recorded_step = updates.recorded_statistics = None

    def launched(self, plan: HbmBatchPlan) -> None:
        """Note that a replay with this plan was launched on the current stream."""
        self._backend.hbm.record_use()
        self._backend.count_rows(plan)
