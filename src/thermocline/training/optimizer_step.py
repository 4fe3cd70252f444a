"""One optimizer step of all tables and dense parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thermocline.config.train import TrainConfig
from thermocline.embedding.table import Table
from thermocline.training.dense_optimizers import set_rate
from thermocline.training.rank_coordinator import RankCoordinator
from thermocline.training.state import Progress
from thermocline.utils.lazy_dynamo import optimizer_step


class OptimizerStep:
    """Applies accumulated gradients: learning rate, reduction over ranks, clipping, update."""

    def __init__(
        self,
        tables: Sequence[Table],
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: RankCoordinator,
        config: TrainConfig,
    ) -> None:
        self._tables = tables
        self._optimizers = optimizers
        self._ranks = ranks
        self._config = config

    def apply(self, progress: Progress, batches: int) -> None:
        """Update all parameters with the mean gradient of `batches` batches, and clear the gradients."""
        self.set_rates(progress)
        if self._ranks.sync is not None:
            for table in self._tables:  # first: autograd may share memory between row and dense gradients
                table.reduce_gradients()
            self._ranks.after_backward()
        grads = [p.grad for p in self._dense_parameters() if p.grad is not None]
        scale = self._clipped_scale(1 / batches, grads, progress.step)
        for table in self._tables:  # before dense gradients are scaled in place: the memory may be shared
            table.step(scale=scale)
        if scale != 1 and grads:
            torch._foreach_mul_(grads, scale)
        for optimizer in self._optimizers:
            optimizer_step(optimizer)
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Clear all gradients without an update."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for table in self._tables:
            table.discard_gradients()

    def rate_factor(self, progress: Progress, step: int) -> float:
        """Return the multiplier of all learning rates at a step."""
        return self._config.schedule(step) * progress.plateau

    def set_rates(self, progress: Progress) -> None:
        """Set the learning rates of the next step."""
        factor = self.rate_factor(progress, progress.step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                set_rate(group, group["initial_lr"] * factor)
        for table in self._tables:
            table.lr = progress.rates[table.name] * factor

    def _clipped_scale(self, scale: float, grads: list[torch.Tensor], step: int) -> float:
        """Return `scale`, reduced so that the norm of all scaled gradients is at most `clip_norm`."""
        clip = self._config.clip_norm
        if clip is None:
            return scale
        dense = self._ranks.norm(float(torch.nn.utils.get_total_norm(grads)))
        norm = scale * math.hypot(dense, *(table.gradient_norm() for table in self._tables))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm of step {step} is {norm}: the step was not applied")
        return scale * clip / norm if norm > clip else scale

    def _dense_parameters(self) -> list[torch.nn.Parameter]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))
