"""A training with statistics, expiry and admission that is killed and resumed has the bits of an uninterrupted one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exact.expiry_kills import CASES, expected

SCRIPT = Path(__file__).parent / "expiry_kills.py"


def check(case: str, kills: int, seed: int, folder: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(folder), case, str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert any(step > 0 for step in report["resumed"]), "no attempt resumed from a checkpoint"
    uninterrupted = expected(case)
    for result in report["results"]:
        assert result == uninterrupted


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(case: str, tmp_path: Path) -> None:
    check(case, 3, 1, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("case", CASES)
def test_killed_thirty_times(case: str, tmp_path: Path) -> None:
    """Each of three cases is killed ten times."""
    check(case, 10, 2, tmp_path)
