"""Position of a training run, and its result."""

from __future__ import annotations

import dataclasses

from thermocline.arrays import Offsets
from thermocline.embedding.row_statistics import limited_time
from thermocline.training.callbacks import Row


@dataclasses.dataclass(slots=True)
class Progress:
    """Position of a run, saved with every checkpoint."""

    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches of the current epoch that were trained."""
    step: int = 0
    examples: int = 0
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """Learning rate per table name, before the schedule's multiplier."""
    validated: int = 0
    """Step of the last validation."""
    event_time: int | None = None
    """Watermark: largest event time of the trained batches; None: the data has no event times."""
    best_auc: float | None = None
    best_step: int = 0
    stale: int = 0
    """Validations since the one with the best AUC."""
    plateau: float = 1.0
    """Multiplier of all learning rates, lowered after validations without a better AUC."""
    stopped: bool = False
    """Whether training stopped early: `stale` reached the patience."""
    valid: Row | None = None
    """Metrics of the last validation, or of the best one if patience is set."""

    def advance_time(self, time: Offsets | None, max_jump: int | None = None) -> None:
        """Advance the watermark to the event times of a batch, at most by `max_jump` seconds."""
        if time is not None and len(time):
            latest = limited_time(time, self.event_time, max_jump)
            self.event_time = latest if self.event_time is None else max(self.event_time, latest)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Return value of `Trainer.fit`. The model and tables hold the last step, or the best with patience."""

    progress: Progress
    test: Row | None
    """auc, logloss, ne, calibration, examples; and examples_per_s of training if this process trained a step."""
    seconds: float
    """Training time of this process, without validations and checkpoints."""
    examples: int
    """Examples trained in `seconds`."""
