"""Killed with SIGKILL while rows are on the GPU, and resumed: the bits of a run that was never stopped."""

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
from exact.run import Ways, reference

LIFE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from exact.kills import live
from exact.run import Ways
live(Path({folder!r}), {optimizer!r}, {ways}, {every})
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "ways"),
    [("adagrad", Ways(0.05, 4, 1, 2, hbm=0.05)), ("adam", Ways(None, 2, 8, 2, hbm=0.2))],
    ids=["ssd", "memory"],
)
def test_killed_and_resumed(optimizer: str, ways: Ways, tmp_path: Path) -> None:
    """Lives are processes of their own: one that has used a GPU cannot fork."""
    rng = random.Random(1)
    tests, lives, saves = str(Path(__file__).parent.parent), tmp_path / "lives", tmp_path / "run" / "checkpoints"
    killed = 0
    while not (tmp_path / "result").exists():
        code = LIFE.format(tests=tests, folder=str(tmp_path), optimizer=optimizer, ways=ways.__repr__(), every=10)
        saved = set(saves.glob("*.json"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        life = subprocess.Popen([sys.executable, "-c", code], env=environment)
        if killed < 3:  # after it has saved something (the very first file is of no save), so that the next one resumes
            while life.poll() is None and len(set(saves.glob("*.json")) - saved) < 2:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.2))
            life.kill()
            killed += 1
        assert life.wait() in (0, -9)
    resumed = [int(step) for step in lives.read_text().split()]
    assert max(resumed) > 0, "no life went on from a checkpoint"
    expected = reference(optimizer, 320, "cuda")
    assert json.loads((tmp_path / "result").read_text()) == digests(expected.rows, expected.dense)
