"""Live display and plain lines: figures, rows per tier, queues, and the remaining time of data without a length."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run import Ads, World
from rich.console import Console

from thermocline.batch import Batch
from thermocline.cli.progress_bar import count_examples, progress
from thermocline.training.callbacks import Callback
from thermocline.training.display import Display
from thermocline.training.trainer import TrainConfig, Trainer


class EstimatedLoader:
    """Six batches, without a length but with an estimate of it."""

    def __init__(self, estimate: int) -> None:
        self.estimate = estimate

    def __iter__(self) -> Iterator[Batch]:
        return iter(Ads(6))

    def estimated_batches(self) -> int:
        return self.estimate


class RecordTotals(Callback):
    """Records `total_steps` per step and, at step 9, a frame of the display."""

    def __init__(self, display: Display | None = None) -> None:
        self.display = display
        self.totals: list[int | None] = []
        self.frame = ""

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self.totals.append(trainer.total_steps)
        if self.display is not None and trainer.progress.step == 9:
            self.frame = rendered(self.display)


def rendered(display: Display) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(display.render())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def fit(world: World, data: Any, callbacks: list[Callback], **config: Any) -> None:
    settings = TrainConfig(**{"epochs": 2, "log_every": 3, "display": False, **config})
    Trainer(world.model, world.optimizer, config=settings, callbacks=callbacks).fit(data)


def test_live_display(world: World) -> None:
    text = io.StringIO()
    display = Display(Console(file=text, force_terminal=True, width=100))
    recorder = RecordTotals(display)
    fit(world, EstimatedLoader(5), [display, recorder])
    for words in ("epoch 2/2", "9/12", "s left", "loss 0.", "AUC 0.", "examples/s", "rows from", "a memory", "a SSD"):
        assert words in recorder.frame, recorder.frame
    shares = [float(share) for share in re.findall(r"[ab] (?:memory|SSD|new)\s+(\d+\.\d) %", recorder.frame)]
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(200, abs=0.5)
    assert re.search(r"stage\s+busy\s+waiting\s+blocked\s+queue", recorder.frame)
    assert re.search(r"pull\s+\d+ %\s+\d+ %\s+\d+ %\s+\d+\.\d", recorder.frame)
    assert "finished after 12 steps" in text.getvalue()


def test_total_steps_are_estimated_in_the_first_epoch(world: World) -> None:
    recorder = RecordTotals()
    fit(world, EstimatedLoader(5), [recorder])
    assert recorder.totals == [10] * 6 + [12] * 6


def test_total_steps_are_limited_by_config_and_data(world: World) -> None:
    recorder = RecordTotals()
    fit(world, EstimatedLoader(5), [recorder], steps=7)
    assert recorder.totals == [7] * 7
    recorder = RecordTotals()
    fit(world, Ads(3), [recorder], steps=100)  # neither a length nor an estimate
    assert recorder.totals == [100] * 3 + [6] * 3


def test_plain_lines(world: World) -> None:
    text = io.StringIO()
    fit(world, EstimatedLoader(6), [Display(Console(file=text, width=100))])
    lines = [line for line in text.getvalue().splitlines() if line.startswith("epoch")]
    assert len(lines) == 4
    assert re.fullmatch(
        r"epoch 1/2  step 3  loss \d\.\d{4}  AUC \d\.\d{4}  NE \d\.\d{4}  [\d,]+ examples/s"
        r"  a: memory [\d.]+ %, SSD [\d.]+ %, new [\d.]+ %  b: memory [\d.]+ %, SSD [\d.]+ %, new [\d.]+ %"
        r"  queue \d\.\d/4  0 min \d\d s left",
        lines[0],
    ), lines[0]
    assert "left" not in lines[-1]


@pytest.mark.parametrize(("seconds", "text"), [(7300.0, "2 h 01 min left"), (59.0, "0 min 59 s left")])
def test_time_left(world: World, seconds: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(Console(file=io.StringIO()))
    trainer = Trainer(world.model, world.optimizer, config=TrainConfig(steps=2))
    clock = [0.0]
    monkeypatch.setattr("thermocline.training.display.time.monotonic", lambda: clock[0])
    display.on_start(trainer)
    assert display._left(trainer) == ""
    clock[0], trainer.progress.step = seconds, 1
    assert display._left(trainer) == text


def test_progress_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr("thermocline.cli.progress_bar.time.monotonic", lambda: clock[0])
    with progress("counting", 5000) as advance:
        for _ in count_examples([[0] * 1000] * 5, advance):
            clock[0] += 4
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == "counting: 3,000 of about 5,000 examples\ncounting: 5,000 examples, done\n"


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("counting", 5000) as advance:
        advance(4000)
    text = capsys.readouterr().err
    assert "counting" in text
    assert "4000/4000" in text  # the total was an estimate


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            trainer.stop()


@pytest.mark.parametrize(("callbacks", "last"), [([], "12/12"), ([StopAt(4)], "4/4")])
def test_live_display_ends_at_its_total(world: World, callbacks: list[Callback], last: str) -> None:
    """An estimate of 500 steps, and a run that stops early."""
    text = io.StringIO()
    display = Display(Console(file=text, force_terminal=True, width=100))
    fit(world, EstimatedLoader(250), [display, *callbacks])
    shown = re.findall(r"\d+/\d{2,}|\d+/\d+ ", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text.getvalue()))
    steps = [pair.strip() for pair in shown if pair.strip() not in ("1/2", "2/2")]
    assert steps[-1] == last


def test_live_display_shows_the_phases_before_the_first_step(world: World) -> None:
    display = Display(Console(file=io.StringIO(), force_terminal=True, width=100))
    frames = []

    class Frames(Ads):
        def __iter__(self) -> Iterator[Batch]:
            frames.append(rendered(display))
            return super().__iter__()

    recorder = RecordTotals(display)
    fit(world, Frames(6), [display, recorder])
    assert "reading the first batches" in frames[0]
    assert "epoch 2/2" in recorder.frame


def test_figures_of_the_look_ahead(tmp_path: Path) -> None:
    """On the terminal, in plain lines, in metrics.jsonl; of training and of validation."""
    world, text, live = World(tmp_path / "rows", lookahead=4), io.StringIO(), io.StringIO()
    display = Display(Console(file=live, force_terminal=True, width=160))
    recorder = RecordTotals(display)
    settings = TrainConfig(epochs=2, log_every=3, display=False, tensorboard=False)
    callbacks = [Display(Console(file=text, width=160)), display, recorder]
    trainer = Trainer(world.model, world.optimizer, run_dir=tmp_path / "run", config=settings, callbacks=callbacks)
    result = trainer.fit(Ads(6), Ads(4))
    words = r"\d+ batch(?:es)?, [\d,]+ rows loaded, [\d,]+ late, [\d,]+ MB/s"
    assert re.search(rf"look-ahead  {words}", recorder.frame), recorder.frame
    lines = text.getvalue().splitlines()
    assert re.search(rf"queue \d\.\d/4  ahead: {words}", lines[0]), lines[0]
    (valid, *_) = [line for line in lines if line.startswith("valid")]
    assert re.search(r"examples\)  ahead: [\d,]+ rows loaded, [\d,]+ late, [\d,]+ MB/s$", valid)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train, evaluated = ([row["lookahead"] for row in rows if row["event"] == event] for event in ("train", "valid"))
    assert len(train) == 4
    assert len(evaluated) == 2
    for figures in (*train, *evaluated):
        assert 0 <= figures["bytes"] <= figures["budget"]
        assert min(figures.values()) >= 0
    assert sum(figures["rows"] for figures in train) > 0
    assert result.progress.valid is not None
    assert "lookahead" not in result.progress.valid  # saved in checkpoints: it depends on time
    world.close()
