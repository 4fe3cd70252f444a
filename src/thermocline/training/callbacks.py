"""Callbacks of a training run, and the two that write metrics.jsonl and TensorBoard events."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.utils import atomic_file

if TYPE_CHECKING:
    import torch

    from thermocline.checkpoint.manager import Checkpoint
    from thermocline.training.state import Progress
    from thermocline.training.trainer import Trainer

Row = dict[str, Any]
"""One event of a run as JSON values: "event", "step", "epoch" and the figures of the event."""


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None in nested dicts, because JSON has neither."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Callback:
    """Base class with empty methods; override any of them.

    All methods run on the training thread, between steps. `trainer.stop()` ends the run.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called once, before the first step; `trainer.progress` is the position of a resumed run."""

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """Called after every step."""

    def on_wait(self, trainer: Trainer) -> None:
        """Called about every 0.2 s while a loader waits for new files (`data.follow`), at a step boundary."""

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """Called every `log_every` steps with training metrics, throughput, hit rates and stage times."""

    def on_validation(self, trainer: Trainer, row: Row) -> None:
        """Called after every validation and after the final test; row["event"] is "valid", "test" or "progressive"."""

    def on_epoch(self, trainer: Trainer) -> None:
        """Called after every epoch and its validation."""

    def on_checkpoint(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """Called after every save."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once at the end of the run, also after an error; `trainer.progress` is the final position."""


class MetricsFile(Callback):
    """Writes run_dir/metrics.jsonl: one line per event, the test last."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_start(self, trainer: Trainer) -> None:
        # A resumed run repeats the events after its checkpoint: drop them, and the test, from the file.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _precedes(line, trainer.progress)]
        atomic_file.atomic_write(self._path, "".join(f"{line}\n" for line in kept).encode())

    def on_log(self, trainer: Trainer, row: Row) -> None:
        with atomic_file.disk_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    on_validation = on_log


def _precedes(line: str, progress: Progress) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False  # a line truncated by a crash
    # A checkpoint at the end of an epoch may precede the validation of the same step.
    last = progress.validated if row["event"] == "valid" else progress.step
    return bool(row["step"] <= last and row["event"] != "test")


class TensorBoard(Callback):
    """Writes run_dir/tensorboard: every number of every event as a scalar by step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._purge = 0

    def on_start(self, trainer: Trainer) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "TrainConfig.tensorboard needs the package tensorboard: install thermocline[torch], or set it to False",
                name="tensorboard",
            )
        self._purge = trainer.progress.step + 1

    def on_log(self, trainer: Trainer, row: Row) -> None:
        if self._writer is None:  # the import takes a second: delay it until the first log
            from torch.utils.tensorboard import SummaryWriter

            with atomic_file.disk_errors(self._path):
                self._writer = SummaryWriter(str(self._path), purge_step=self._purge)
        with atomic_file.disk_errors(self._path):
            for name, value in _numbers(row["event"], row):
                self._writer.add_scalar(name, value, row["step"])

    on_validation = on_log

    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in ("event", "step"):
                yield from _numbers(f"{path}/{name}", item)
    elif isinstance(value, (int, float)):
        yield path, value
