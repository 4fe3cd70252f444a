"""Progressive validation: metrics of windows of training examples, each scored before the step that trains on it.

The forward pass of a training step computes the predictions, so that they cost nothing. A window ends after
`train.progressive_steps` steps, or with the first step whose watermark reaches the next multiple of
`train.progressive_time`. Over ranks that is the newest watermark of all ranks, which they exchange after each step. A
partial window is saved in checkpoints, 5 bytes per example before compression, so that a resumed run has the same
windows.
"""

from __future__ import annotations

from typing import Any

from thermocline.config.train import TrainConfig
from thermocline.errors import ConfigError
from thermocline.training.callbacks import Row
from thermocline.training.metrics import ExactMetrics
from thermocline.training.rank_coordinator import RankCoordinator
from thermocline.training.state import Progress
from thermocline.utils.text_format import parse_duration


class ProgressiveValidation:
    """The present window of one trainer. Without settings in the config no window ends."""

    def __init__(
        self, config: TrainConfig, ranks: RankCoordinator, step: int = 0, state: dict[str, Any] | None = None
    ) -> None:
        """step, state: step and `state()` of the checkpoint that training continues from."""
        self._steps = config.progressive_steps
        self._seconds = None if config.progressive_time is None else parse_duration(config.progressive_time)
        self._ranks = ranks
        self.metrics = None if self._steps is None and self._seconds is None else ExactMetrics()
        """Metrics of the examples of the window; None: there are no windows."""
        self._first_step = step + 1
        self._window: int | None = None
        """Number of the window by event time; None before its first step."""
        self._latest: int | None = None
        """Watermark of all ranks after the last step, for windows by event time."""
        if self.metrics is not None and state is not None:
            self.metrics.load_state_dict(state["metrics"])
            self._first_step, self._window = state["first_step"], state["window"]

    def state(self) -> dict[str, Any] | None:
        """Return the partial window as JSON values."""
        if self.metrics is None:
            return None
        return {"metrics": self.metrics.state_dict(), "first_step": self._first_step, "window": self._window}

    def ended(self, progress: Progress) -> bool:
        """Whether the window ends with the step that `progress` ends with. Collective for windows by event time."""
        if self._steps is not None:
            return progress.step % self._steps == 0
        if self._seconds is None:
            return False
        self._latest = self._ranks.latest(progress.event_time)
        if self._latest is None:
            raise ConfigError(
                "train.progressive_time needs event times: set data.time, or `Batch.time` in an own loader"
            )
        present = int(self._latest // self._seconds)
        if self._window is None:
            self._window = present
        return present > self._window

    def close(self, progress: Progress) -> Row:
        """Return the figures of the window over all ranks, and begin the next one."""
        assert self.metrics is not None
        row: Row = {**self._ranks.joined(self.metrics).compute(), "first_step": self._first_step}
        latest = self._latest if self._seconds is not None else self._ranks.latest(progress.event_time)
        if latest is not None:
            row["event_time"] = latest
        self.metrics.reset()
        self._first_step = progress.step + 1
        if self._seconds is not None and latest is not None:
            self._window = int(latest // self._seconds)
        return row
