"""Coordinates interrupt, save and stop across ranks, and synchronizes dense parameters; a no-op for one rank.

Ranks must take the same decisions at the same steps. Most decisions follow from the config and the step. The others,
from a signal or the clock of one rank, are flags that travel with the windows of the pipeline (`prefetch(flags_fn=)`),
so that all ranks receive them with the same batch.

Thread     the training thread; `local_flags` also on the thread of the exchange stage
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from thermocline.config.dense_sync import DenseSync
from thermocline.config.rank_rules import rank_settings
from thermocline.config.train import TrainConfig
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.rank_agreement import require_equal, shape_text
from thermocline.embedding.table import Table
from thermocline.training.metrics import ExactMetrics

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.dense_sync import DenseParameters

INTERRUPT, SAVE, STOP, DAMAGE, PUBLISH = 1, 2, 4, 8, 16


class RankCoordinator:
    """One per trainer; every rank has a trainer."""

    def __init__(
        self,
        tables: Sequence[Table],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        dense_sync: DenseSync,
    ) -> None:
        runner = CollectiveRunner.of(tables)
        self.world, self.is_rank0 = runner.world, runner.is_rank0
        self.groups: Groups | None = None
        self.sync: DenseParameters | None = None
        """Synchronizes the dense parameters; None for one rank."""
        groups = tables[0].groups
        if groups is not None and self.world > 1:
            from thermocline.distributed.dense_sync import DenseParameters

            self.groups = groups
            tensors = itertools.chain(model.named_parameters(), model.named_buffers())
            shapes = {f"model.{name}": shape_text(tensor) for name, tensor in tensors}
            require_equal(groups.train, shapes, "the model must be equal on all ranks")
            self.sync = DenseParameters.make(
                model.parameters(), optimizers, self.groups, dense_sync, buffers=model.buffers()
            )
        self._sent = 0
        """Flags of this rank's clock whose request is pending: SAVE, PUBLISH."""
        self._requests = 0
        """Flags received from all ranks."""
        self.publish_due: Callable[[], bool] = lambda: False
        """Whether rank 0's clock requests a publication; also called on the thread of the exchange stage."""

    def require_equal_settings(self, config: TrainConfig, *, saves: bool, resume: bool) -> None:
        """Raise `ConfigError` if ranks have different settings of the loop; `saves`: whether they have a run_dir.

        Data is not compared: in an own loop every rank may read other files.
        """
        if self.groups is not None:
            settings = {**rank_settings(config, "train."), "use of a run_dir": saves, "resume": resume}
            require_equal(self.groups.train, settings, "start all ranks with the same settings of the trainer")

    # ---- flags

    def local_flags(self, interrupted: bool, save: bool, stop: bool, damaged: bool = False) -> int:
        """Return this rank's flags for the next window. Only rank 0's clock counts; what it requests is sent once."""
        clock = (SAVE * save | PUBLISH * self.publish_due()) & ~self._sent if self.is_rank0 else 0
        self._sent |= clock
        return INTERRUPT * interrupted | clock | STOP * stop | DAMAGE * damaged

    def merge_flags(self, flags: int) -> None:
        """Add the combined flags of all ranks, received with the current batch."""
        self._requests |= flags

    def requested(self, flag: int, local: bool) -> bool:
        """Whether to act now: for one rank `local`, else whether all ranks received `flag`."""
        return local if self.world == 1 else bool(self._requests & flag)

    def done(self, flag: int) -> None:
        """Clear the request of a clock: SAVE or PUBLISH."""
        self._sent &= ~flag
        self._requests &= ~flag

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for local work, such as a callback, that other ranks wait for longer than the timeout."""
        return contextlib.nullcontext() if self.groups is None else self.groups.busy()

    # ---- dense parameters

    def begin(self) -> None:
        """Clear all flags and, unless a checkpoint was restored, broadcast rank 0's parameters."""
        self._sent = self._requests = 0
        if self.sync is not None:
            self.sync.begin()

    def after_backward(self) -> None:
        """Synchronize dense gradients, if the mode does."""
        if self.sync is not None:
            self.sync.after_backward()

    def after_step(self, step: int) -> None:
        """Average dense parameters, if due after `step` steps."""
        if self.sync is not None:
            self.sync.after_step(step)

    def merged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model is the mean of all ranks' models; training does not depend on it."""
        return contextlib.nullcontext() if self.sync is None else self.sync.merged()

    def merge(self) -> bool:
        """Make the dense parameters equal on all ranks: at the end of training. Returns whether any were averaged."""
        return self.sync is not None and self.sync.merge_now()

    def norm(self, dense: float) -> float:
        """Return the root mean square over ranks of the dense gradient norm, equal on all ranks."""
        if self.groups is None:
            return dense
        norms = self.groups.train.all_gather(np.array([dense]), "computing the gradient norm")
        return math.hypot(*norms[:, 0].tolist()) / math.sqrt(self.world)

    # ---- metrics

    def joined(self, metrics: ExactMetrics) -> ExactMetrics:
        """Return metrics over the examples of all ranks, equal on all ranks."""
        return metrics if self.groups is None else metrics.joined(self.groups)

    def gather(self, *figures: float) -> list[list[float]]:
        """Return the figures of every rank, in the order of ranks."""
        if self.groups is None:
            return [list(figures)]
        gathered = self.groups.train.all_gather(np.array(figures, np.float64), "gathering metrics")
        per_rank: list[list[float]] = gathered.tolist()
        return per_rank

    def latest(self, time: int | None) -> int | None:
        """Return the newest time of all ranks; None: no rank has one."""
        if self.groups is None:
            return time
        own = np.array([time is not None, time or 0], np.int64)
        gathered = self.groups.train.all_gather(own, "gathering event times")
        known = gathered[gathered[:, 0] != 0, 1]
        return int(known.max()) if len(known) else None

    def total(self, *figures: float) -> list[float]:
        """Return each figure summed over all ranks."""
        return [sum(values) for values in zip(*self.gather(*figures), strict=True)]
