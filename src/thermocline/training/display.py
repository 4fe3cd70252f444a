"""What a run says while it runs: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from thermocline.training.callbacks import Callback, Row

if TYPE_CHECKING:
    from thermocline.checkpoint.manager import Checkpoint
    from thermocline.training.trainer import Trainer

_TIERS = {"hbm": "HBM", "mem": "memory", "ssd": "SSD", "new": "new"}


class Display(Callback):
    """Made by the trainer. `console`: where to; default: stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._task = TaskID(0)
        self._epochs = 1
        self._row: Row | None = None
        self._sources: dict[str, dict[str, float]] = {}
        """Per table, where its rows came from; of an earlier log if the pipeline was ahead and pulled nothing since."""
        self._first = 0
        self._began = 0.0
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, expand=True)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    # ---- events

    def on_start(self, trainer: Trainer) -> None:
        self._epochs = trainer.config.epochs
        self._first = step = trainer.progress.step
        self._began = time.monotonic()
        if step:
            self._say(f"resumed at step {step}")
        if not self._console.is_terminal:
            return
        self._task = self._progress.add_task("training", total=trainer.total_steps, completed=step, left="")
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self.render)
        self._live.start()

    def on_step(self, trainer: Trainer, loss: object) -> None:
        if self._live is not None:
            self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        done = trainer.progress
        self._progress.update(
            self._task,
            completed=done.step,
            total=trainer.total_steps,
            description=f"epoch {min(done.epoch + 1, self._epochs)}/{self._epochs}",
            left=self._left(trainer),
        )

    def on_log(self, trainer: Trainer, row: Row) -> None:
        self._row = row
        self._sources |= {name: shares for name, shares in row["tables"].items() if shares["mem"] is not None}
        if self._live is None:
            self._say(self._line(trainer, row))
        else:
            self._update(trainer)

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

    # ---- what it looks like

    def _left(self, trainer: Trainer) -> str:
        """Time left, at the average speed of this process, validations and checkpoints counted."""
        step, total = trainer.progress.step, trainer.total_steps
        if total is None or step <= self._first or step >= total:
            return ""
        seconds = round((time.monotonic() - self._began) / (step - self._first) * (total - step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours} h {minutes:02} min left" if hours else f"{minutes} min {seconds % 60:02} s left"

    def _line(self, trainer: Trainer, row: Row) -> str:
        named = len(row["tables"]) > 1
        parts = [f"epoch {row['epoch'] + 1}/{self._epochs}  step {row['step']}", *_figures(row)]
        for name, sources in self._sources.items():
            shares = ", ".join(f"{_TIERS[tier]} {100 * share:.1f} %" for tier, share in sources.items())
            parts.append(f"{name if named else 'rows'}: {shares}")
        parts.append(f"queue {_ready(row):.1f}/{trainer.config.depth}")
        if left := self._left(trainer):
            parts.append(left)
        return "  ".join(parts)

    def render(self) -> RenderableType:
        """The display as it is now."""
        parts: list[RenderableType] = [self._progress]
        if self._row is not None:
            parts += [Text("   ".join(_figures(self._row)), style="bold"), Text(), _rows(self._sources)]
            parts += [Text(), _stages(self._row)]
        return Panel(Group(*parts), title="thermocline", title_align="left", border_style="dim")


def _figures(row: Row) -> list[str]:
    scores = (f"{name} {row[key]:.4f}" for name, key in (("AUC", "auc"), ("NE", "ne")) if row.get(key) is not None)
    return [f"loss {row['loss']:.4f}", *scores, f"{row['examples_per_s']:,.0f} examples/s"]


def _ready(row: Row) -> float:
    """Batches that wait for the training step, on average."""
    before = [stage["fill"] for name, stage in row["stages"].items() if name != "train"]
    return before[-1] if before else 0.0


def _grid(*names: str) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(names):
        grid.add_column(name, justify="right" if i else "left", no_wrap=True)
    return grid


def _rows(sources: dict[str, dict[str, float]]) -> Grid:
    """Where the rows of the latest batches came from."""
    grid = _grid("rows from", "share", "")
    for name, shares in sources.items():
        for tier, share in shares.items():
            bar = ProgressBar(total=1, completed=share, width=30)
            grid.add_row(f"{name} " * (len(sources) > 1) + _TIERS[tier], f"{100 * share:.1f} %", bar)
    return grid


def _stages(row: Row) -> Grid:
    """Where the time of each stage went since the last log."""
    grid = _grid("stage", "busy", "waiting", "blocked", "queue")
    for name, stage in row["stages"].items():
        # An item's time is booked when it ends: a long one may have begun before the last log.
        shares = (f"{min(100, 100 * stage[kind]):.0f} %" for kind in ("busy", "wait", "blocked"))
        grid.add_row(name, *shares, f"{stage['fill']:.1f}" if name != "train" else "")
    return grid
