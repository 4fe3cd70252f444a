"""Figures of a run between two logs: training metrics, speed, where rows came from, what the stages did."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from thermocline.embedding.table import Table
from thermocline.pipeline.executor import StageStats
from thermocline.training.metrics import StreamingMetrics


class Meter:
    """Fed by every step, read by every log. Examples are scored before they are trained on, so its AUC is honest."""

    def __init__(self, tables: Sequence[Table], state: dict[str, Any] | None = None) -> None:
        """state: of a meter whose epoch this one goes on with."""
        self._tables = tables
        self._began = time.perf_counter()
        self._away = self._away_before = 0.0
        self.new_epoch()
        if state is not None:
            self._metrics.load_state_dict(state)
        self.restart()

    def new_epoch(self) -> None:
        """Metrics are of one epoch: later ones have seen the examples."""
        self._metrics = StreamingMetrics()

    def state(self) -> dict[str, Any]:
        """The epoch's metrics, as JSON."""
        return self._metrics.state_dict()

    def restart(self) -> None:
        """Counts from now on."""
        self._since = time.perf_counter()
        self._away_before += self._away
        self._away = 0.0
        self._examples = 0
        self._loss = 0.0
        self._steps = 0
        self._rows = {table.name: table.tier_counts() for table in self._tables}
        self._stages: dict[str, StageStats] = {}

    @property
    def seconds(self) -> float:
        """Of training, from the meter's beginning."""
        return time.perf_counter() - self._began - self._away_before - self._away

    def add(self, logits: torch.Tensor, label: torch.Tensor, loss: float) -> None:
        """One step."""
        self._metrics.update(logits, label)
        self._loss += loss
        self._examples += len(label)
        self._steps += 1

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Time that is not training: validation, checkpoints."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - start

    def row(self, stages: Sequence[StageStats]) -> dict[str, Any]:
        """Everything since the last one, and then counts anew; metrics since the epoch's beginning."""
        wall = time.perf_counter() - self._since
        row = {
            "loss": self._loss / max(1, self._steps),
            **self._metrics.compute(),
            "examples_per_s": self._examples / max(wall - self._away, 1e-9),
            "tables": {table.name: self._sources(table) for table in self._tables},
            "stages": {stage.name: self._shares(stage, wall) for stage in stages},
        }
        self.restart()
        self._stages = {
            stage.name: StageStats(**{n: getattr(stage, n) for n in StageStats.__slots__}) for stage in stages
        }
        return row

    def _sources(self, table: Table) -> dict[str, float | None]:
        """Shares of the rows by where they were (`Table.sources`); none: there were no rows."""
        before = self._rows[table.name]
        # With a GPU rows are pulled before they count as trained: at the beginning more come than were used.
        counts = {tier: max(0, now - before[tier]) for tier, now in table.tier_counts().items()}
        total = sum(counts.values())
        return {tier: count / total if total else None for tier, count in counts.items()}

    def _shares(self, stage: StageStats, wall: float) -> dict[str, float]:
        """Shares of the time; `fill`: items ready for the next stage, on average."""
        before = self._stages.get(stage.name)
        if before is None or before.items > stage.items:  # another epoch's pipeline
            before = StageStats(stage.name)
        shares = {}
        for name in ("busy", "wait", "blocked"):
            field = f"{name}_seconds"
            shares[name] = (getattr(stage, field) - getattr(before, field)) / max(wall, 1e-9)
        return {**shares, "fill": stage.fill}
