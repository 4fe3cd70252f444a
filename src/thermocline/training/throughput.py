"""Figures between two logs of a run: training metrics, throughput, rows per tier, time per pipeline stage."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thermocline.embedding.table import Table
from thermocline.pipeline.executor import StageStats
from thermocline.pipeline.lookahead import LookAheadStats
from thermocline.training.metrics import NAN_SCORE, ExactMetrics, StreamingMetrics

_LARGE_EXAMPLES = 8192
"""Examples of a batch from which its metrics are computed alone."""
_MAX_BEHIND = 4
"""Large batches, or groups of small ones, that the thread may have to count."""
_JOINED_EXAMPLES = 16384
"""Examples of smaller batches that are counted together: the calls would cost more than the arithmetic."""


def lookahead_figures(stats: LookAheadStats, before: LookAheadStats | None, seconds: float) -> dict[str, Any]:
    """Return the figures of a look-ahead since `before`, `seconds` ago, as JSON values.

    before   None: since it began
    """
    before = before or LookAheadStats()
    seconds = max(seconds, 1e-9)
    return {
        "batches": stats.batches_ahead,
        "rows": max(0, stats.rows_loaded - before.rows_loaded),
        "late_rows": max(0, stats.late_rows - before.late_rows),
        "mb_per_s": (stats.bytes_read - before.bytes_read) / seconds / 1e6,
        "loading": (stats.load_seconds - before.load_seconds) / seconds,
        "bytes": stats.bytes,
        "budget": stats.budget,
    }


def _copy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Copy values by NumPy: a copy by torch starts all of its threads, which take processors from the pipeline."""
    if values.dtype.itemsize < 4:  # NumPy has no bfloat16
        values = values.float()
    return values.numpy().copy()


class ThroughputMeter:
    """Accumulates figures per step and returns them per log.

    Metrics are progressive: every example is scored before the step that trains on it.
    """

    def __init__(
        self, tables: Sequence[Table], state: dict[str, Any] | None = None, window: ExactMetrics | None = None
    ) -> None:
        """
        state    `state()` of the meter whose epoch is continued
        window   further metrics to which every batch is added; `settle` before they are used
        """
        self._tables = tables
        self._admitting = {table.name: table for table in tables if table.admission is not None}
        self._window = window
        self._thread: ThreadPoolExecutor | None = None
        self._updates: deque[Future[None]] = deque()
        """Updates that the thread has not made yet, oldest first."""
        self._joined, self._spare = np.empty((2, 2, 0, 0), np.float32)
        """Logits and labels of batches that are not counted yet, and memory for those after them."""
        self._joined_size = self._joined_count = 0
        self._began = time.perf_counter()
        self._paused = self._paused_before = 0.0
        self.new_epoch()
        if state is not None:
            self._metrics.load_state_dict(state)
        self.restart()

    def new_epoch(self) -> None:
        """Reset the metrics: from the second epoch on, the model was already trained on every example."""
        self.settle()
        self._metrics = StreamingMetrics()

    def state(self) -> dict[str, Any]:
        """Metrics of the current epoch as JSON values."""
        self.settle()
        return self._metrics.state_dict()

    def restart(self) -> None:
        """Reset all figures except the metrics of the epoch."""
        self._since = time.perf_counter()
        self._paused_before += self._paused
        self._paused = 0.0
        self._examples = 0
        self._loss = 0.0
        self._steps = 0
        self._rows = {table.name: table.tier_counts() for table in self._tables}
        self._expired = {table.name: (table.expired.rows, table.expired.seconds) for table in self._tables}
        self._admission = {name: table.admission_stats for name, table in self._admitting.items()}
        self._stages: dict[str, StageStats] = {}
        self._lookahead: tuple[LookAheadStats, LookAheadStats] | None = None
        """The pipeline's figures at the last log: their object, and a copy."""

    @property
    def seconds(self) -> float:
        """Training time since construction, without pauses."""
        return time.perf_counter() - self._began - self._paused_before - self._paused

    def add(self, logits: torch.Tensor, label: torch.Tensor, loss: float) -> None:
        """Add one step whose labels are checked. The caller may overwrite `logits` and `label` afterwards.

        Batches are counted on another thread, several small ones together; what that raises is raised by a later call.
        """
        if len(label) < _LARGE_EXAMPLES:
            self._join(logits, label)
        else:
            self._count_kept()
            self._start(self._count, _copy(logits), _copy(label))
        self._loss += loss
        self._examples += len(label)
        self._steps += 1

    def _join(self, logits: torch.Tensor, label: torch.Tensor) -> None:
        """Keep a copy of a batch; count the batches kept when their number is sufficient."""
        size = len(label)
        if logits.dtype != torch.float32 or size == 0:
            self.settle()
            self._count(logits, label)
            return
        if size != self._joined_size:
            self.settle()
            self._joined_size = size
            self._joined, self._spare = np.empty((2, 2, max(1, _JOINED_EXAMPLES // size), size), np.float32)
        scores = self._joined[0, self._joined_count]
        scores[:] = logits.numpy()
        self._joined[1, self._joined_count] = label.numpy()
        if math.isnan(scores.min()):
            raise ValueError(NAN_SCORE)
        self._joined_count += 1
        if self._joined_count == self._joined.shape[1]:
            self._wait()
            self._joined_count = 0
            self._start(self._count_joined, self._joined)
            self._joined, self._spare = self._spare, self._joined  # counted until the next `_wait`

    def _count(self, logits: Any, label: Any) -> None:
        self._metrics.update(logits, label, check=False)
        if self._window is not None:
            self._window.update(logits, label, check=False)

    def _count_joined(self, batches: npt.NDArray[np.float32]) -> None:
        self._metrics.update_joined(*batches)
        if self._window is not None:
            self._window.update_joined(*batches)

    def _start(self, count: Callable[..., None], *args: Any) -> None:
        """Count on another thread, which may be some batches behind."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "thermocline-metrics")
        while len(self._updates) >= _MAX_BEHIND or (self._updates and self._updates[0].done()):
            self._updates.popleft().result()
        self._updates.append(self._thread.submit(count, *args))

    def _wait(self) -> None:
        while self._updates:
            self._updates.popleft().result()

    def settle(self) -> None:
        """Wait until all steps are counted."""
        self._wait()
        self._count_kept()

    def _count_kept(self) -> None:
        """Count small batches that are kept, after those before them."""
        count, self._joined_count = self._joined_count, 0
        if count:
            self._wait()
            self._count_joined(self._joined[:, :count])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a block from training time: validation, checkpoints."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def row(self, stages: Sequence[StageStats], lookahead: LookAheadStats | None = None) -> dict[str, Any]:
        """Return the figures since the last call and reset them; metrics cover the epoch so far."""
        self.settle()
        wall = time.perf_counter() - self._since
        row = {
            "loss": self._loss / max(1, self._steps),
            **self._metrics.compute(),
            "examples_per_s": self._examples / max(wall - self._paused, 1e-9),
            "tables": {table.name: self._tier_shares(table) for table in self._tables},
            "stages": {stage.name: self._stage_shares(stage, wall) for stage in stages},
            "lookahead": self._lookahead_figures(lookahead, wall),
        }
        if expired := {table.name: self._expired_figures(table) for table in self._tables if table.expiry is not None}:
            row["expired"] = expired
        if admission := {name: self._admission_figures(table) for name, table in self._admitting.items()}:
            row["admission"] = admission
        self.restart()
        self._lookahead = None if lookahead is None else (lookahead, dataclasses.replace(lookahead))
        self._stages = {
            stage.name: StageStats(**{n: getattr(stage, n) for n in StageStats.__slots__}) for stage in stages
        }
        return row

    def _lookahead_figures(self, stats: LookAheadStats | None, wall: float) -> dict[str, Any] | None:
        if stats is None:
            return None
        last = self._lookahead
        # Another object: the pipeline of another epoch.
        return lookahead_figures(stats, last[1] if last is not None and last[0] is stats else None, wall)

    def _tier_shares(self, table: Table) -> dict[str, float | None]:
        """Share of rows per tier (`Table.tier_counts`); None if no row was trained."""
        before = self._rows[table.name]
        # With a GPU, rows are counted when pulled, before they are trained: a count may lag behind at the start.
        counts = {tier: max(0, now - before[tier]) for tier, now in table.tier_counts().items()}
        total = sum(counts.values())
        return {tier: count / total if total else None for tier, count in counts.items()}

    def _expired_figures(self, table: Table) -> dict[str, float]:
        """Rows of this rank that expiry deleted since the last log, and its seconds; rows after the last expiry."""
        rows, seconds = self._expired[table.name]
        now = table.expired
        kept = {} if now.last_kept is None else {"kept": now.last_kept}
        return {"rows": now.rows - rows, **kept, "seconds": now.seconds - seconds}

    def _admission_figures(self, table: Table) -> dict[str, int]:
        """Keys and occurrences since the last log, and memory in bytes, of one table."""
        now, before = table.admission_stats, self._admission[table.name]
        assert now is not None
        assert before is not None
        return {
            "keys_admitted": now.keys_admitted - before.keys_admitted,
            "ids_admitted": now.ids_admitted - before.ids_admitted,
            "ids_refused": now.ids_refused - before.ids_refused,
            "counters": now.counters,
            "counters_dropped": max(0, now.counters_dropped - before.counters_dropped),
            "bytes": now.counter_bytes + now.admitted_bytes + now.log_bytes + now.working_bytes,
        }

    def _stage_shares(self, stage: StageStats, wall: float) -> dict[str, float]:
        """Shares of the wall time; `fill` is the mean number of items ready for the next stage."""
        before = self._stages.get(stage.name)
        if before is None or before.items > stage.items:  # the pipeline of another epoch
            before = StageStats(stage.name)
        shares = {}
        for name in ("busy", "wait", "blocked"):
            field = f"{name}_seconds"
            shares[name] = (getattr(stage, field) - getattr(before, field)) / max(wall, 1e-9)
        return {**shares, "fill": stage.fill}
