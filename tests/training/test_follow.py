"""Training on a growing folder: exact resumption, interruption while it waits, the end by silence."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich
import torch
from helpers import stream
from helpers.train import weights_of
from rich.console import Console

import thermocline as tc
from thermocline import serving
from thermocline.cli import commands
from thermocline.data.follow import FollowReader
from thermocline.data.open_data import open_data
from thermocline.training.display import Display
from thermocline.training.run import Run

CONFIG = stream.CONFIG.replace("[model]", "follow = true\nfollow_idle = 0.2\n[model]") + "log_every = 1000\n"


def write(folder: Path, number: int, examples: int = 40) -> None:
    """Write file `number`; it appears by a rename."""
    values = np.random.default_rng(number).zipf(1.5, (examples, 2)) % 50
    rows = ((int(a % 3 == 0), 100 * number + i, a, b) for i, (a, b) in enumerate(values))
    stream.write_file(folder / f"{number:04}.csv", rows)


class At(tc.Callback):
    """Calls `action` after step `step`, or while the loader waits at it."""

    def __init__(self, step: int, action: Any, *, waiting: bool = False) -> None:
        self.step, self.action, self.waiting = step, action, waiting

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step and not self.waiting:
            self.action()

    def on_wait(self, trainer: tc.Trainer) -> None:
        if trainer.progress.step == self.step and self.waiting:
            self.action()


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def train(folder: Path, *callbacks: tc.Callback, resume: bool = False, **sets: Any) -> tuple[bytes, Any]:
    """Train, and return the bits of all rows and weights, and the progress."""
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    with Run(tc.Config.parse(CONFIG.format(folder=folder), overrides), resume=resume) as run:
        torch.manual_seed(5)
        progress = run.fit(resume=resume, callbacks=callbacks).progress
        stored = (pair for keys, rows in run.table.rows() for pair in zip(keys.tolist(), rows, strict=True))
        rows = b"".join(row.tobytes() for _, row in sorted(stored, key=lambda pair: pair[0]))
        return rows + weights_of(run.model), progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Result of training on four files without interruption: 3 steps each."""
    folder = tmp_path_factory.mktemp("whole")
    for number in range(4):
        write(folder / "in", number)
    result, progress = train(folder)
    assert (progress.step, progress.examples, progress.epoch, progress.event_time) == (12, 160, 0, 339)
    return result


@pytest.mark.parametrize(("step", "depth"), [(1, 4), (4, 1), (7, 4), (9, 4), (12, 1)])
def test_killed_after_any_step_and_resumed(tmp_path: Path, whole: bytes, step: int, depth: int) -> None:
    for number in range(4):
        write(tmp_path / "in", number)
    sets = {"train__depth": depth, "train__checkpoint_every": 2}
    with pytest.raises(Killed):
        train(tmp_path, At(step, kill), **sets)
    for number in range((step - 1) // 2 * 2 // 3):  # files read to their end at the last checkpoint
        (tmp_path / "in" / f"{number:04}.csv").unlink()
    assert train(tmp_path, resume=True, **sets)[0] == whole


@pytest.mark.parametrize("ssd", [False, True])
def test_interrupted_while_it_waits_then_resumed_with_new_files(tmp_path: Path, whole: bytes, ssd: bool) -> None:
    for number in range(2):
        write(tmp_path / "in", number)
    sets = {"data__follow_idle": "60s", **({"tiers__ssd": tmp_path / "store"} if ssd else {})}
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, At(6, interrupt, waiting=True), **sets)
    assert time.monotonic() - started < 50
    for number in (2, 3):
        write(tmp_path / "in", number)
    assert train(tmp_path, resume=True, **sets | {"data__follow_idle": "0.2s"})[0] == whole


@pytest.mark.parametrize("depth", [1, 4])
def test_files_that_arrive_during_training(tmp_path: Path, whole: bytes, depth: int) -> None:
    write(tmp_path / "in", 0)
    arrivals = [At(3 * i, lambda i=i: write(tmp_path / "in", i), waiting=True) for i in (1, 2, 3)]  # type: ignore[misc]
    assert train(tmp_path, *arrivals, train__depth=depth, train__steps=12, data__follow_idle="60s")[0] == whole


def test_a_run_that_ended_by_silence_continues(tmp_path: Path, whole: bytes) -> None:
    for number in range(3):
        write(tmp_path / "in", number)
    assert train(tmp_path)[1].step == 9
    write(tmp_path / "in", 3)
    result, progress = train(tmp_path, resume=True)
    assert (result, progress.event_time) == (whole, 339)


def test_versions_have_the_dense_model_although_the_files_were_deleted(tmp_path: Path) -> None:
    def delete() -> None:
        for path in (tmp_path / "in").glob("*.csv"):
            path.unlink()

    options = {"publish__folder": f"{tmp_path}/served", "publish__every_steps": 1000, "data__follow_idle": "1s"}
    for number, step in ((1, 3), (2, 6)):  # the second run is resumed, and reads the format from the first
        write(tmp_path / "in", number)
        train(tmp_path, At(step, delete, waiting=True), resume=number > 1, **options)
        version = serving.open(f"{tmp_path}/served").version
        assert version.step == step
        assert not any((tmp_path / "in").iterdir())
        assert {file.name for file in version.files} == {"config.toml", "features.json", "dense.safetensors"}


def test_a_position_of_ranks_is_refused_by_one_process(tmp_path: Path) -> None:
    write(tmp_path / "in", 1)
    data = tc.Config.parse(CONFIG.format(folder=tmp_path)).data
    reader = FollowReader(data, batch_size=16)
    position = next(iter(reader)).position
    assert position is not None
    ranks = {**position, "shards": 3, "within": None, "batches": 2}  # of a rank that read nothing of the file
    with pytest.raises(tc.DataError, match="its shards is 3, but this reader's is None"):
        reader.seek(ranks)
    assert len(list(reader.seek(position))) == 2


def test_the_end_by_steps(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "in", number)
    threads = threading.active_count()
    assert train(tmp_path, train__steps=5, data__follow_idle="60s")[1].step == 5
    assert threading.active_count() == threads


class KillWhen(tc.Callback):
    """Raises `Killed` while the run waits, as soon as `condition` holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition
        self.saved: list[int] = []

    def on_checkpoint(self, trainer: tc.Trainer, checkpoint: Any) -> None:
        self.saved.append(checkpoint.step)

    def on_wait(self, trainer: tc.Trainer) -> None:
        if self.condition():
            raise Killed


@pytest.mark.parametrize("depth", [1, 4])
def test_saves_by_time_while_it_waits(tmp_path: Path, depth: int) -> None:
    write(tmp_path / "in", 0)
    killer = KillWhen(lambda: 3 in killer.saved)  # a slow machine also saves before
    with pytest.raises(Killed):
        train(tmp_path, killer, data__follow_idle="60s", train__checkpoint_minutes=0.01, train__depth=depth)
    assert killer.saved[-1] == 3


def test_display_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thermocline.training.display._PRINT_WAIT_SECONDS", 0.1)
    write(tmp_path / "in", 0)
    lines, live = io.StringIO(), io.StringIO()
    shown = Display(Console(file=live, force_terminal=True, width=100))
    waits: list[str] = []

    def seen_often() -> bool:
        rich.print(shown.render(), file=live)
        waits.append(lines.getvalue())
        return len(waits) > 4

    with pytest.raises(Killed):
        train(tmp_path, Display(Console(file=lines)), shown, KillWhen(seen_often), data__follow_idle="60s")
    assert lines.getvalue().count("waiting for files at step 3") == 1
    assert "waiting for files" in live.getvalue()


def test_shards_need_the_agreement_of_ranks(tmp_path: Path) -> None:
    """Each would list the files by itself. `tests/distributed/test_follow_ranks.py` has ranks that agree."""
    data = tc.Data(train=[str(tmp_path)], follow=True)
    with pytest.raises(tc.ConfigError, match=r"data\.follow = true: 2 shards need the agreement of 2 ranks"):
        open_data(data, "train", batch_size=2, shard=(0, 2))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", 0)
    (tmp_path / "online.toml").write_text(CONFIG.format(folder=tmp_path))
    commands.train(tc.Config.load(tmp_path / "online.toml", ["train.log_every=3"]), resume=False)
    assert f"following {tmp_path}/in\n" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["event_time"] for row in rows if row["event"] == "train"] == [39]
