"""A training killed with SIGKILL while rows are on the GPU, then resumed, gives the bits of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exact.kills import digests
from exact.run import RunOptions, reference

ATTEMPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from exact.kills import attempt
from exact.run import RunOptions
attempt(Path({folder!r}), {optimizer!r}, {options}, {every})
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adagrad", RunOptions(0.05, 4, 1, 2, hbm=0.05)),
        ("adam", RunOptions(None, 2, 8, 2, hbm=0.2)),
        ("adagrad", RunOptions(0.05, 4, 1, 2, hbm=0.05, lookahead=64)),  # killed inside a horizon
        ("adam", RunOptions(0.05, 4, 8, 2, hbm=0.05, lookahead="auto")),
    ],
    ids=["ssd", "dram", "ahead", "auto"],
)
def test_killed_and_resumed(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    """Each attempt is a new process: a process that has used a GPU cannot fork."""
    rng = random.Random(1)
    tests = str(Path(__file__).parent.parent)
    steps, saves = tmp_path / "attempts", tmp_path / "run" / "checkpoints"
    killed = 0
    while not (tmp_path / "result").exists():
        code = ATTEMPT.format(tests=tests, folder=str(tmp_path), optimizer=optimizer, options=repr(options), every=10)
        saved = set(saves.glob("*.json"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        if killed < 3:  # after a save (the first file is not one), so that the next attempt resumes
            while process.poll() is None and len(set(saves.glob("*.json")) - saved) < 2:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.2))
            process.kill()
            killed += 1
        assert process.wait() in (0, -9)
    resumed = [int(step) for step in steps.read_text().split()]
    assert max(resumed) > 0, "no attempt resumed from a checkpoint"
    expected = reference(optimizer, 320, "cuda")
    assert json.loads((tmp_path / "result").read_text()) == digests(expected.rows, expected.dense)
