"""What may listen to a run, and two that always do: metrics.jsonl and TensorBoard."""

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
"""One event of a run, as JSON: "event", "step", "epoch" and the event's own figures."""


def finite(value: Any) -> Any:
    """The same figures with None for what is not defined: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Callback:
    """Override what you need; all are called on the training thread, between steps. `trainer.stop()` ends the run."""

    def on_start(self, trainer: Trainer) -> None:
        """Once, before the first step; `trainer.progress` says where a resumed run stands."""

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """After every step."""

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """Every `log_every` steps: training metrics, speed, hit rates, stages."""

    def on_validation(self, trainer: Trainer, row: Row) -> None:
        """After every validation, and after the test at the end ("event" tells)."""

    def on_epoch(self, trainer: Trainer) -> None:
        """After every epoch and its validation."""

    def on_checkpoint(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """After every save."""

    def on_end(self, trainer: Trainer) -> None:
        """Once, however the run ended: `trainer.progress` says how far it came."""


class MetricsFile(Callback):
    """run_dir/metrics.jsonl: one line per event; the test's is the last."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_start(self, trainer: Trainer) -> None:
        # A resumed run writes again what came after its checkpoint, and its end.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _is_of_the_past(line, trainer.progress)]
        atomic_file.atomic_write(self._path, "".join(f"{line}\n" for line in kept).encode())

    def on_log(self, trainer: Trainer, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    on_validation = on_log


def _is_of_the_past(line: str, progress: Progress) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False  # the line that a crash tore
    # The checkpoint may be older than a validation at its own step: at the end of an epoch.
    last = progress.validated if row["event"] == "valid" else progress.step
    return bool(row["step"] <= last and row["event"] != "test")


class TensorBoard(Callback):
    """run_dir/tensorboard: every number of every event, as a scalar by step."""

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
        if self._writer is None:  # not before the first step: the import takes a second
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._path), purge_step=self._purge)
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
