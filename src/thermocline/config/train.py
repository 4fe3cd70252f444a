"""How to train: the settings of `tc.Trainer`, and the [train] section of a config file. Loads no torch."""

from __future__ import annotations

import dataclasses

from thermocline.config.lr_schedule import Schedule
from thermocline.errors import require


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. Every field has a default that trains one epoch and saves at its end."""

    epochs: int = 1
    """Passes over the training data."""
    steps: int | None = None
    """The run ends after so many steps, wherever in an epoch that is; endless data needs it."""
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    """What the learning rates of dense parameters and tables are multiplied by, step by step."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm: that of all of them together, dense parameters and tables."""
    accumulate: int = 1
    """Batches whose gradients make one step, by their mean. What an epoch leaves over makes its last step."""
    valid_every: int | None = None
    """Steps between validations; none: after each epoch."""
    patience: int | None = None
    """The run ends after so many validations without a better AUC; at its end, the best validated state is restored."""
    plateau_factor: float = 1.0
    """Learning rates are multiplied by this after each validation without a better AUC."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    checkpoint_minutes: float | None = 10.0
    """Minutes between checkpoints. Whatever is set here, the end is saved."""
    keep: int = 2
    """Checkpoints that stay, beside the best."""
    depth: int = 4
    """Of the pipeline: see `tc.prefetch`."""
    pull_window: int = 1
    """Of the pipeline: see `tc.prefetch`."""
    log_every: int = 100
    """Steps between lines of training metrics."""
    torch_threads: int | None = None
    """Threads of torch, on which its bits depend; none: as they are. A resumed run gets those it was saved with."""
    tensorboard: bool = True
    """Scalars in run_dir/tensorboard."""
    display: bool = True
    """A live display, or lines where there is no terminal."""

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "keep", "depth", "pull_window", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("steps", "valid_every", "patience", "checkpoint_every", "torch_threads"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1, or None")
        for name in ("clip_norm", "checkpoint_minutes"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "above 0, or None")
        self._require("plateau_factor", 0 < self.plateau_factor <= 1, "above 0, and at most 1")

    @property
    def needs_validation(self) -> str | None:
        """The first setting that is nothing without validation data."""
        if self.patience is not None:
            return "patience"
        return "plateau_factor" if self.plateau_factor < 1 else None

    def _require(self, name: str, fine: bool, rule: str) -> None:
        require(fine, f"TrainConfig.{name}", getattr(self, name), rule)
