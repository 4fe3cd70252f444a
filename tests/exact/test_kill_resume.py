"""Killed at random moments and resumed: final rows and dense weights are the reference's, as if never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exact.kills import digests
from exact.run import Ways, reference

SCRIPT = Path(__file__).parent / "kills.py"


def check(optimizer: str, ways: Ways, kills: int, seed: int, folder: Path) -> None:
    """As many runs as the kills take: each must end with the same bits."""
    numbers = [ways.memory, ways.depth, ways.pull_window, ways.threads, kills, seed]
    command = [sys.executable, str(SCRIPT), str(folder), optimizer, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert len(report["resumed"]) >= len(report["results"])
    assert any(step > 0 for step in report["resumed"]), "no life went on from a checkpoint"
    expected = reference(optimizer)
    for result in report["results"]:
        assert result == digests(expected.rows, expected.dense)


@pytest.mark.parametrize(
    ("optimizer", "ways"), [("adagrad", Ways(0.05, 4, 1, 2)), ("adam", Ways(None, 2, 8))], ids=["ssd", "memory"]
)
def test_killed_and_resumed(optimizer: str, ways: Ways, tmp_path: Path) -> None:
    check(optimizer, ways, 3, 1, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("optimizer", "ways"),
    [
        ("sgd", Ways(0.05, 2, 8)),
        ("adagrad", Ways(None, 4, 1)),
        ("rowwise", Ways(0.05, 8, 1, 2)),
        ("adam", Ways(0.05, 4, 8, 2)),
        ("adam", Ways(0.05, 1, 1)),
    ],
    ids=str,
)
def test_killed_fifty_times(optimizer: str, ways: Ways, tmp_path: Path) -> None:
    """Ten of the fifty each."""
    check(optimizer, ways, 10, 2, tmp_path)
