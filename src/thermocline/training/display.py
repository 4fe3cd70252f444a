"""Progress of a run: a live display on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import math
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
from thermocline.utils.startup import listening, report_phase
from thermocline.utils.text_format import plural

if TYPE_CHECKING:
    from thermocline.checkpoint.manager import Checkpoint
    from thermocline.training.trainer import Trainer

_PRINT_WAIT_SECONDS = 5.0
_TIERS = {"hbm": "HBM", "mem": "memory", "ssd": "SSD", "new": "new"}


class Display(Callback):
    """Prints progress to `console`, by default stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._task = TaskID(0)
        self._epochs = 1
        self._row: Row | None = None
        self._tier_shares: dict[str, dict[str, float]] = {}
        """Per table, the share of rows per tier: from the last log in which the pipeline pulled rows."""
        self._damage: set[str] = set()
        """Damage that was printed."""
        self._phases = contextlib.ExitStack()
        """Listens to the phases before the first step."""
        self._first_step = 0
        self._start_time = 0.0
        self._waiting_since: float | None = None
        """Start of the present wait for files; infinite once it was printed."""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, expand=True)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    # ---- events

    def on_start(self, trainer: Trainer) -> None:
        self._epochs = trainer.config.epochs
        self._first_step = step = trainer.progress.step
        self._start_time = time.monotonic()
        if step:
            self._print(f"resumed at step {step}")
        if not self._console.is_terminal:
            return
        report_phase(None)  # this display shows the phases now
        self._task = self._progress.add_task(
            "preparing the first step", total=trainer.total_steps, completed=step, left=""
        )
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self.render)
        self._live.start()
        self._phases.enter_context(listening(self._show_phase))

    def _show_phase(self, text: str | None) -> None:
        if text is not None:
            self._progress.update(self._task, description=text)

    def on_wait(self, trainer: Trainer) -> None:
        if self._live is not None:
            self._progress.update(self._task, description="waiting for files")
            return
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if time.monotonic() - self._waiting_since >= _PRINT_WAIT_SECONDS:
            self._print(f"waiting for files at step {trainer.progress.step}")
            self._waiting_since = math.inf

    def on_step(self, trainer: Trainer, loss: object) -> None:
        self._phases.close()
        self._waiting_since = None
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
        for name, text in row["damage"].items():
            if text not in self._damage:
                self._print(f"table {name!r} is damaged: {text}")
            self._damage.add(text)
        self._tier_shares |= {name: shares for name, shares in row["tables"].items() if shares["mem"] is not None}
        if self._live is None:
            self._print(self._line(trainer, row))
        else:
            self._update(trainer)

    def on_validation(self, trainer: Trainer, row: Row) -> None:
        figures = "  ".join(
            f"{name} {row[name]:.4f}" for name in ("auc", "logloss", "ne", "calibration") if row.get(name) is not None
        )
        line = f"{row['event']} at step {row['step']}: {figures}  ({row['examples']:,} examples)"
        if row.get("lookahead") is not None:
            line += f"  ahead: {_ahead_text(row['lookahead'], ended=True)}"
        self._print(line)

    def on_checkpoint(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        if checkpoint.tag is None:
            self._print(f"saved step {checkpoint.step} in {trainer.save_seconds:.2f} s")

    def on_epoch(self, trainer: Trainer) -> None:
        if self._live is not None:
            self._update(trainer)  # the epoch has counted its steps: the total is no estimate any more

    def on_end(self, trainer: Trainer) -> None:
        self._phases.close()
        if self._live is not None:
            if trainer.completed_step is not None:  # patience and `stop` end a run before its last step
                self._progress.update(self._task, total=trainer.progress.step, completed=trainer.progress.step)
            self._live.stop()
            self._live = None
        self._print(trainer.ending)

    # ---- rendering

    def _left(self, trainer: Trainer) -> str:
        """Remaining time, from the mean time per step of this process including validations and saves."""
        step, total = trainer.progress.step, trainer.total_steps
        if total is None or step <= self._first_step or step >= total:
            return ""
        seconds = round((time.monotonic() - self._start_time) / (step - self._first_step) * (total - step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours} h {minutes:02} min left" if hours else f"{minutes} min {seconds % 60:02} s left"

    def _line(self, trainer: Trainer, row: Row) -> str:
        named = len(row["tables"]) > 1
        parts = [f"epoch {row['epoch'] + 1}/{self._epochs}  step {row['step']}", *_figures(row)]
        for name, shares in self._tier_shares.items():
            text = ", ".join(f"{_TIERS[tier]} {100 * share:.1f} %" for tier, share in shares.items())
            parts.append(f"{name if named else 'rows'}: {text}")
        parts.append(f"queue {_queue_length(row):.1f}/{trainer.config.depth}")
        if row["lookahead"] is not None:
            parts.append(f"ahead: {_ahead_text(row['lookahead'])}")
        for name, expired in row.get("expired", {}).items():
            kept = f", {expired['kept']:,} kept" if "kept" in expired else ""  # known since a whole expiry
            parts.append(f"{name if named else 'expired'}: {expired['rows']:,} rows deleted{kept}")
        if row["damaged_partitions"]:
            parts.append(_damage_text(row))
        if left := self._left(trainer):
            parts.append(left)
        return "  ".join(parts)

    def render(self) -> RenderableType:
        """Build the current state of the live display."""
        parts: list[RenderableType] = [self._progress]
        if self._row is not None and self._row["damaged_partitions"]:
            parts.append(Text(_damage_text(self._row), style="bold red"))
        if self._row is not None:
            parts += [Text("   ".join(_figures(self._row)), style="bold"), Text(), _tier_grid(self._tier_shares)]
            parts += [Text(), _stage_grid(self._row)]
        if self._row is not None and self._row["lookahead"] is not None:
            parts += [Text(), Text(f"look-ahead  {_ahead_text(self._row['lookahead'])}")]
        return Panel(Group(*parts), title="thermocline", title_align="left", border_style="dim")


def _damage_text(row: Row) -> str:
    return f"DAMAGED: {plural(row['damaged_partitions'], 'partition')} set aside"


def _figures(row: Row) -> list[str]:
    scores = (f"{name} {row[key]:.4f}" for name, key in (("AUC", "auc"), ("NE", "ne")) if row.get(key) is not None)
    return [f"loss {row['loss']:.4f}", *scores, f"{row['examples_per_s']:,.0f} examples/s"]


def _ahead_text(ahead: Row, *, ended: bool = False) -> str:
    """Figures of the look-ahead since the last log, or of one that has ended."""
    batches = [] if ended else [plural(ahead["batches"], "batch", "batches")]
    rows = [f"{ahead['rows']:,} rows loaded", f"{ahead['late_rows']:,} late", f"{ahead['mb_per_s']:,.0f} MB/s"]
    return ", ".join([*batches, *rows])


def _queue_length(row: Row) -> float:
    """Mean number of batches that wait for the training step."""
    before = [stage["fill"] for name, stage in row["stages"].items() if name != "train"]
    return before[-1] if before else 0.0


def _grid(*names: str) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(names):
        grid.add_column(name, justify="right" if i else "left", no_wrap=True)
    return grid


def _tier_grid(tier_shares: dict[str, dict[str, float]]) -> Grid:
    """Share of rows per tier, one line per table and tier."""
    grid = _grid("rows from", "share", "")
    for name, shares in tier_shares.items():
        for tier, share in shares.items():
            bar = ProgressBar(total=1, completed=share, width=30)
            grid.add_row(f"{name} " * (len(tier_shares) > 1) + _TIERS[tier], f"{100 * share:.1f} %", bar)
    return grid


def _stage_grid(row: Row) -> Grid:
    """Shares of the time since the last log that each stage was busy, waiting and blocked."""
    grid = _grid("stage", "busy", "waiting", "blocked", "queue")
    for name, stage in row["stages"].items():
        # Time is added when an item ends, so a long item can add time from before the last log.
        shares = (f"{min(100, 100 * stage[kind]):.0f} %" for kind in ("busy", "wait", "blocked"))
        grid.add_row(name, *shares, f"{stage['fill']:.1f}" if name != "train" else "")
    return grid
