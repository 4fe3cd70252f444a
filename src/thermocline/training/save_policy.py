"""When a run saves, and how it resumes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thermocline.checkpoint.manager import Checkpoint, Checkpoints
from thermocline.config.train import TrainConfig
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.training.rank_coordinator import SAVE, RankCoordinator
from thermocline.training.run_restore import watermark_of
from thermocline.training.state import Progress
from thermocline.training.throughput import ThroughputMeter


class SavePolicy:
    """The checkpoints of one trainer. Without a run_dir nothing is saved."""

    def __init__(self, run_dir: Path | None, config: TrainConfig, ranks: RankCoordinator) -> None:
        if run_dir is None and config.patience is not None:
            raise ValueError("TrainConfig.patience needs a run_dir: the best state is kept in a checkpoint")
        self._run_dir = run_dir
        self._config = config
        self._ranks = ranks
        self.checkpoints: Checkpoints | None = None
        self.saved: Progress | None = None
        """Progress at the last save or at the restored checkpoint; None before the first."""
        self.saved_at = 0.0
        """Time of the last save, or of the start: `time.monotonic()`."""
        self.seconds = 0.0
        """Duration of the last save."""

    # ---- start and resume

    def open(
        self,
        tables: Sequence[Table],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        resume: bool,
        trained: bool,
    ) -> Checkpoint | None:
        """Open the run folder; with `resume`, restore the newest checkpoint and return it, or None if there is none.

        Raises if the folder has a run and `resume` is False. `trained` means that the model is no longer in its
        initial state, so that it cannot restart without a checkpoint.
        """
        self.saved = None
        if self._run_dir is None:
            self._require_no_run_dir_needed(tables, resume)
            return None
        reused = self.checkpoints is not None
        if self.checkpoints is None:
            self.checkpoints = Checkpoints(
                self._run_dir, tables, model, optimizers, keep=self._config.keep, dense_sync=self._ranks.sync
            )
        if resume:
            checkpoints, runner = self.checkpoints, CollectiveRunner.of(tables)
            if trained and not runner.broadcast("listing checkpoints", lambda: len(checkpoints.saved())):
                raise ThermoclineError(
                    f"{self._run_dir} has no checkpoint, and the model is already trained: create a new model"
                )
            return self.checkpoints.restore()
        if reused or self.checkpoints.exists:
            raise ThermoclineError(
                f"{self._run_dir} already has a run: continue it with resume=True, or use another folder"
            )
        return None

    @staticmethod
    def _require_no_run_dir_needed(tables: Sequence[Table], resume: bool) -> None:
        if resume:
            raise ValueError("resume=True needs a run_dir")
        for table in tables:
            if table.store is not None and table.store.epoch > 0:
                raise ValueError(f"{table.store.path} already has commits: pass the run_dir of its run")

    def resumed(self, checkpoint: Checkpoint) -> tuple[Progress, Any, Any]:
        """Return the progress and the states of metrics and progressive validation to continue from.

        With another number of ranks each rank has a different shard of the data, so the epoch restarts.
        """
        progress, metrics = Progress(**checkpoint.extra["trainer"]), checkpoint.extra["metrics"]
        progressive = checkpoint.extra.get("progressive")  # earlier versions saved none
        if checkpoint.world != self._ranks.world:
            progress.batch, metrics, progressive = 0, None, None
            examples = sum(extra["trainer"]["examples"] for extra in checkpoint.extras)
            progress.examples = examples if self._ranks.is_rank0 else 0
            progress.event_time = watermark_of(checkpoint)
        self.saved = dataclasses.replace(progress)
        return progress, metrics, progressive

    def start_clock(self) -> None:
        """Start the first `checkpoint_minutes` interval."""
        self.saved_at = time.monotonic()

    # ---- save

    def interval_elapsed(self) -> bool:
        """Whether `checkpoint_minutes` have passed since the last save."""
        limit = self._config.checkpoint_minutes
        return limit is not None and (time.monotonic() - self.saved_at) / 60 >= limit

    def due_by_time(self) -> bool:
        """Whether to save because of `checkpoint_minutes`. Equal on all ranks."""
        return self._ranks.requested(SAVE, self.interval_elapsed())

    def due(self, step: int) -> bool:
        """Whether to save after this step. Equal on all ranks."""
        every = self._config.checkpoint_every
        by_step = every is not None and step % every == 0
        return by_step or self.due_by_time()

    def save(
        self, progress: Progress, position: Any, meter: ThroughputMeter, progressive: Any, tag: str | None
    ) -> Checkpoint | None:
        """Save a checkpoint; without a run_dir, return None."""
        if self.checkpoints is None:
            return None
        start = time.monotonic()
        with meter.paused():
            extra = {"trainer": dataclasses.asdict(progress), "metrics": meter.state(), "progressive": progressive}
            checkpoint = self.checkpoints.save(progress.step, position, extra, tag=tag)
        self._ranks.done(SAVE)
        self.saved, self.saved_at = dataclasses.replace(progress), time.monotonic()
        self.seconds = self.saved_at - start
        return checkpoint
