"""What a run says while it runs: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from thermocline.callbacks import Callback, Row

if TYPE_CHECKING:
    from thermocline.checkpoint import Checkpoint
    from thermocline.train import Trainer


class Display(Callback):
    """Made by the trainer. `console`: where to; default: stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._epochs = 1

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def on_start(self, trainer: Trainer) -> None:
        self._epochs = trainer.config.epochs
        step = trainer.progress.step
        if step:
            self._say(f"resumed at step {step}")
        if not self._console.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("training", total=trainer.total_steps, completed=step)
        self._live = Live(self._progress, console=self._console, refresh_per_second=4)
        self._live.start()

    def on_log(self, trainer: Trainer, row: Row) -> None:
        if self._live is None or self._progress is None:
            self._say(self._line(row))
            return
        self._progress.update(self._task, completed=row["step"], description=self._line(row))
        self._live.update(Group(self._progress, _stages(row)))

    def _line(self, row: Row) -> str:
        named = len(row["tables"]) > 1
        parts = [
            f"epoch {row['epoch'] + 1}/{self._epochs}  step {row['step']}  loss {row['loss']:.4f}",
            *(f"{name} {row[key]:.4f}" for name, key in (("AUC", "auc"), ("NE", "ne")) if row.get(key) is not None),
            f"{row['examples_per_s']:,.0f} examples/s",
        ]
        for name, sources in row["tables"].items():
            if sources["mem"] is not None:
                parts.append(f"{name if named else 'memory'} hits {100 * sources['mem']:.1f} %")
        return "  ".join(parts)

    def on_validation(self, trainer: Trainer, row: Row) -> None:
        figures = "  ".join(
            f"{name} {row[name]:.4f}" for name in ("auc", "logloss", "ne", "calibration") if row.get(name) is not None
        )
        self._say(f"{row['event']} at step {row['step']}: {figures}  ({row['examples']:,} examples)")

    def on_checkpoint(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        if checkpoint.tag is None:
            self._say(f"saved step {checkpoint.step} in {trainer.save_seconds:.2f} s")

    def on_end(self, trainer: Trainer) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._say(trainer.ending)


def _stages(row: Row) -> Grid:
    """Where the time of each stage went since the last log."""
    grid = Grid(box=None, padding=(0, 2), title_justify="left")
    for name in ("stage", "busy", "waiting", "blocked", "queue"):
        grid.add_column(name, justify="left" if name == "stage" else "right")
    for name, stage in row["stages"].items():
        shares = (f"{100 * stage[kind]:.0f} %" for kind in ("busy", "wait", "blocked"))
        grid.add_row(name, *shares, f"{stage['fill']:.1f}")
    return grid
