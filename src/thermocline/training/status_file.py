"""run_dir/status.json: position and state of a run, replaced at most once per second. `thermocline watch` reads it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.training.callbacks import Callback, Row, finite
from thermocline.utils.atomic_file import atomic_path

if TYPE_CHECKING:
    import torch

    from thermocline.checkpoint.manager import Checkpoint
    from thermocline.training.trainer import Trainer

INTERVAL = 1.0
"""Seconds between two writes during training."""


class StatusFile(Callback):
    """Replaces the file at the start, every second, after saves and validations, and at the end.

    Not durable: after a crash of the machine an older state may remain. Readers see a whole file at any time. A write
    that fails, for example on a full disk, is left out: training does not depend on the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._status: dict[str, Any] = {}
        self._last = 0.0
        self._handled: BaseException | None = None
        """The exception that the caller of `fit` was handling: not one of the run."""

    def on_start(self, trainer: Trainer) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handled = sys.exc_info()[1]
        self._status = {
            "state": "training", "ending": "", "error": "", "process": os.getpid(), "host": socket.gethostname(),
            "started": time.time(), "first_step": trainer.progress.step, "epochs": trainer.config.epochs, "saved": None,
            "valid": None, "waiting": False,
        }  # fmt: skip
        self._write(trainer)

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self._tick(trainer, waiting=False)

    def on_wait(self, trainer: Trainer) -> None:
        self._tick(trainer, waiting=True)

    def _tick(self, trainer: Trainer, *, waiting: bool) -> None:
        """Write if the last write is old enough. `waiting`: whether the loader waits for new files."""
        self._status["waiting"] = waiting
        if time.monotonic() - self._last >= INTERVAL:
            self._write(trainer)

    def on_validation(self, trainer: Trainer, row: Row) -> None:
        figures = ("event", "step", "auc", "logloss", "ne", "calibration", "examples")
        self._status["valid"] = {name: row.get(name) for name in figures}
        self._write(trainer)

    def on_checkpoint(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        self._status["saved"] = {"step": checkpoint.step, "seconds": trainer.save_seconds, "time": time.time()}
        self._write(trainer)

    def on_end(self, trainer: Trainer) -> None:
        error = sys.exc_info()[1]
        error = None if error is self._handled else error
        if isinstance(error, Exception):
            self._status["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finished = error is None and trainer.ending.startswith("finished")
        state = "finished" if finished else "stopped"
        self._status |= {"state": state, "ending": trainer.ending, "waiting": False}
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        self._last = time.monotonic()
        done = trainer.progress
        self._status |= {
            "step": done.step, "epoch": done.epoch, "total_steps": trainer.total_steps, "best_auc": done.best_auc,
            "best_step": done.best_step, "updated": time.time(),
        }  # fmt: skip
        with contextlib.suppress(OSError), atomic_path(self._path) as temporary:
            temporary.write_text(json.dumps(finite(self._status)))
