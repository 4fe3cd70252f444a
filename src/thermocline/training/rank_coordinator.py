"""The trainers of all ranks, as one of them sees them: what they agree on between steps. One process is a crew of one.

Ranks must take the same decisions at the same steps. Most follow from the config and the step; the others, a signal or
the clock of one rank, travel with the batches ahead (`say`), so that all hear of them with the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.embedding.table import Table
from thermocline.training.metrics import ExactMetrics

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.dense_sync import DenseParameters

INTERRUPT, SAVE, STOP = 1, 2, 4


class RankCoordinator:
    """Made by every rank's trainer."""

    def __init__(
        self,
        tables: Sequence[Table],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        dense_sync: DenseSync,
    ) -> None:
        self._collective = CollectiveRunner.of(tables)
        self.world, self.is_rank0 = self._collective.world, self._collective.is_rank0
        self.groups: Groups | None = None
        self.sync: DenseParameters | None = None
        """Keeps the dense parameters of all ranks together; none: there is one rank."""
        groups = tables[0].groups
        if groups is not None and self.world > 1:
            from thermocline.distributed.dense_sync import DenseParameters

            self.groups = groups
            self.sync = DenseParameters.make(
                model.parameters(), optimizers, self.groups, dense_sync, buffers=model.buffers()
            )
        self._said = self._heard = 0

    # ---- what only one of them knows

    def local_flags(self, interrupted: bool, save: bool, stop: bool) -> int:
        """What this rank asks for; the clock's word is rank 0's. Asked for a save once, it waits for that."""
        save = save and self.is_rank0 and not self._said & SAVE
        self._said |= SAVE * save
        return INTERRUPT * interrupted | SAVE * save | STOP * stop

    def merge_flags(self, said: int) -> None:
        """What all ranks asked for with the batch at hand."""
        self._heard |= said

    def requested(self, what: int, here: bool) -> bool:
        """Whether it is to be done now: because it is so here, or, in a crew, because all have heard of it."""
        return here if self.world == 1 else bool(self._heard & what)

    def saved(self) -> None:
        """What was asked for is done."""
        self._said &= ~SAVE
        self._heard &= ~SAVE

    # ---- dense parameters

    def begin(self) -> None:
        """Every rank takes rank 0's parameters."""
        self._said = self._heard = 0
        if self.sync is not None:
            self.sync.begin()

    def after_backward(self) -> None:
        """Gradients of the step are there."""
        if self.sync is not None:
            self.sync.after_backward()

    def after_step(self, step: int) -> None:
        """So many have been taken."""
        if self.sync is not None:
            self.sync.after_step(step)

    def merge(self) -> None:
        """All ranks have one model: before evaluation, before a checkpoint, at the end."""
        if self.sync is not None:
            self.sync.merge_now()

    def norm(self, dense: float) -> float:
        """Of the dense gradients: the root of the mean square over ranks, which are their own between merges."""
        if self.groups is None:
            return dense
        found = self.groups.train.all_gather(np.array([dense]), "computing the gradient norm")
        return math.hypot(*found[:, 0].tolist()) / math.sqrt(self.world)

    # ---- figures

    def joined(self, metrics: ExactMetrics) -> ExactMetrics:
        """Of all ranks' examples, on all ranks the same."""
        return metrics if self.groups is None else metrics.joined(self.groups)

    def total(self, *figures: float) -> list[float]:
        """Each summed over all ranks."""
        if self.groups is None:
            return list(figures)
        found = self.groups.train.all_gather(np.array(figures, np.float64), "summing metrics")
        total: list[Any] = found.sum(0).tolist()
        return total
