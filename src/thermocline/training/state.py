"""How far a run has come, and what came of it."""

from __future__ import annotations

import dataclasses

from thermocline.training.callbacks import Row


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a run has come: saved with every checkpoint."""

    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches trained of the current epoch."""
    step: int = 0
    examples: int = 0
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """Learning rate of each table before the schedule."""
    validated: int = 0
    """Step of the last validation."""
    best_auc: float | None = None
    best_step: int = 0
    stale: int = 0
    """Validations since the best."""
    plateau: float = 1.0
    """What learning rates are multiplied by, for validations without a better AUC."""
    stopped: bool = False
    """Whether patience has run out."""
    valid: Row | None = None
    """The last validation; where patience is set, the best."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What `Trainer.fit` returns; the model and its tables hold what was trained, or the best of it."""

    progress: Progress
    test: Row | None
    """auc, logloss, ne, calibration, examples; examples_per_s: of training in this process, if there was any."""
    seconds: float
    """Of training in this process; validation and checkpoints not counted."""
    examples: int
    """Trained in that time."""
