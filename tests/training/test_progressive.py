"""Progressive validation: figures before training, windows by steps and event time, resumption."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.training.run import Run

CONFIG = """
[data]
train = "{folder}/ads.csv"
time = "at"
shuffle = false
[model]
name = "deepfm"
dim = 4
hidden = [8]
dropout = 0.0
batch_norm = false
[tiers]
device = "cpu"
mem = "16MB"
[train]
batch_size = 32
lr = 0.05
run_dir = "{folder}/run"
tensorboard = false
display = false
"""


@pytest.fixture
def ads(tmp_path: Path) -> Path:
    """12 batches of 32 examples; an example every 10 seconds of event time."""
    values = np.random.default_rng(3).zipf(1.4, (384, 2)) % 30
    rows = [f"{int((a + b) % 3 == 0)},{10 * i},{a},{b}" for i, (a, b) in enumerate(values)]
    (tmp_path / "ads.csv").write_text("\n".join(["label,at,a,b", *rows, ""]))
    return tmp_path


class EvaluateAhead(tc.Callback):
    """Evaluates each batch with the model and rows before the step that trains on it."""

    def __init__(self, batches: list[tc.Batch]) -> None:
        self.batches, self.figures = batches, []  # type: ignore[var-annotated]

    def on_start(self, trainer: tc.Trainer) -> None:
        self.on_step(trainer, torch.zeros(()))

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step < len(self.batches):
            self.figures.append(trainer.evaluate(self.batches[trainer.progress.step : trainer.progress.step + 1]))


class Kill(tc.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            raise InterruptedError


def train(folder: Path, *callbacks: tc.Callback, resume: bool = False, **sets: Any) -> list[dict[str, Any]]:
    """Train; return the events of progressive validation in metrics.jsonl."""
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    with Run(tc.Config.parse(CONFIG.format(folder=folder), overrides), resume=resume) as run:
        run.fit(resume=resume, callbacks=callbacks)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "progressive"]


@pytest.mark.parametrize("depth", [1, 4])
def test_figures_are_of_predictions_before_training(ads: Path, depth: int) -> None:
    batches = list(tc.Reader(ads / "ads.csv", time="at", batch_size=32))
    ahead = EvaluateAhead(batches)
    rows = train(ads, ahead, train__progressive_steps=1, train__depth=depth)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row, figures in zip(rows, ahead.figures, strict=True):
        assert row["auc"] == figures["auc"]
        assert row["logloss"] == pytest.approx(figures["logloss"], rel=1e-6)
        assert row["examples"] == 32
    # Not the figures of the model after the step.
    assert rows[1]["auc"] != ahead.figures[2]["auc"]


def test_windows_by_steps(ads: Path) -> None:
    rows = train(ads, train__progressive_steps=5)
    assert [(row["first_step"], row["step"], row["examples"], row["event_time"]) for row in rows] == [
        (1, 5, 160, 1590), (6, 10, 160, 3190)]  # fmt: skip


def test_windows_by_event_time_are_the_same_in_a_resumed_run(ads: Path) -> None:
    # A window ends with the first step that reaches a multiple of 1,200 s; a step has 320 s.
    whole = train(ads, train__progressive_time="20m", train__log_every=4)
    assert [(row["first_step"], row["step"], row["event_time"]) for row in whole] == [
        (1, 4, 1270), (5, 8, 2550), (9, 12, 3830)]  # fmt: skip
    (ads / "run").rename(ads / "whole")
    for step in (3, 7, 11):
        with pytest.raises(InterruptedError):
            train(ads, Kill(step), resume=True, train__progressive_time="20m", train__checkpoint_every=2)
    assert train(ads, resume=True, train__progressive_time="20m") == whole


def test_settings() -> None:
    with pytest.raises(tc.ConfigError, match=r"train\.progressive_time is '1h': it must be left out if progressive_st"):
        tc.TrainConfig(progressive_steps=3, progressive_time="1h")
    with pytest.raises(
        tc.ConfigError, match=r"train\.progressive_time .* it must be left out unless data\.time is set"
    ):
        tc.Config(train=tc.Train(progressive_time="1h"))


class Start(tc.Callback):
    """Keeps the watermark with which a run begins."""

    watermark: int | None = None

    def on_start(self, trainer: tc.Trainer) -> None:
        self.watermark = trainer.progress.event_time


def fit_rank(groups: Groups, folder: str, steps: int, window: str = "progressive_steps=2") -> int | None:
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    files = json.dumps([f"{folder}/{number}.csv" for number in range(2)])
    sets = [f"data.train={files}", f"train.steps={steps}", f"train.{window}"]
    start = Start()
    with Run(tc.Config.parse(CONFIG.format(folder=folder), sets), resume=steps > 2) as run:
        run.fit(resume=steps > 2, callbacks=[start])
    return start.watermark


def test_the_watermark_is_that_of_all_ranks_and_stays_with_another_number_of_ranks(tmp_path: Path) -> None:
    """The ranks read examples of different times; rank 1 has the newest ones."""
    for number in range(2):
        lines = [f"{i % 2},{1000 * number + i},{i % 7},{i % 5}" for i in range(128)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["label,at,a,b", *lines, ""]))
    run_ranks(((0, 1),), fit_rank, str(tmp_path), 2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["event_time"] for row in rows if row["event"] in ("progressive", "train") and "event_time" in row]
    assert len(times) > 1
    assert len(set(times)) == 1, "metrics of one step have different watermarks"
    assert run_ranks(((0,),), fit_rank, str(tmp_path), 3) == times[:1]


def test_windows_by_event_time_end_on_all_ranks_at_once(tmp_path: Path) -> None:
    """Rank 1 is 700 s ahead: its watermarks, 1010, 1330, 1650 and 1970 s, end the windows of both, in a resumed run
    too. Those of rank 0 alone would end windows with the steps 2 and 4."""
    for number in range(2):
        lines = [f"{i % 2},{700 * number + 10 * i},{i % 7},{i % 5}" for i in range(128)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["label,at,a,b", *lines, ""]))
    for steps in (2, 4):
        run_ranks(((0, 1),), fit_rank, str(tmp_path), steps, "progressive_time=500s")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    windows = [row for row in rows if row["event"] == "progressive"]
    assert [(row["first_step"], row["step"], row["examples"], row["event_time"]) for row in windows] == [
        (1, 3, 192, 1650)]  # fmt: skip
