"""A training killed at random times and resumed ends with the rows and dense weights of an uninterrupted one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exact.kills import digests
from exact.run import RunOptions, reference

SCRIPT = Path(__file__).parent / "kills.py"


def check(optimizer: str, options: RunOptions, kills: int, seed: int, folder: Path) -> None:
    """Repeat the training until all kills have happened: every run must give the bits of the reference."""
    arguments = [options.dram, options.depth, options.pull_window, options.threads, options.lookahead, kills, seed]
    command = [sys.executable, str(SCRIPT), str(folder), optimizer, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert len(report["resumed"]) >= len(report["results"])
    assert any(step > 0 for step in report["resumed"]), "no attempt resumed from a checkpoint"
    expected = reference(optimizer)
    for result in report["results"]:
        assert result == digests(expected.rows, expected.dense)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adagrad", RunOptions(0.05, 4, 1, 2)),
        ("adam", RunOptions(None, 2, 8)),
        ("adagrad", RunOptions(0.05, 4, lookahead=32)),
    ],
    ids=["ssd", "dram", "look-ahead"],
)
def test_killed_and_resumed(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    check(optimizer, options, 3, 1, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", RunOptions(0.05, 2, 8)),
        ("adagrad", RunOptions(None, 4, 1)),
        ("rowwise", RunOptions(0.05, 8, 1, 2)),
        ("adam", RunOptions(0.05, 4, 8, 2)),
        ("adam", RunOptions(0.05, 1, 1)),
        ("adam+catch_up", RunOptions(0.05, 4, 8, 2, lookahead=16)),
    ],
    ids=str,
)
def test_killed_sixty_times(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    """Each of six cases is killed ten times."""
    check(optimizer, options, 10, 2, tmp_path)
