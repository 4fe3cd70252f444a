"""Run folders written by earlier versions open, evaluate and resume.

fixtures/run_before_redesign: `thermocline train` of commit ac22d9e, 12 steps, rows in int8 with a learned scale, hashed
fields, no ssd. Its config.toml, manifest and store note use the names `learn` and "apart", today `scale_lr` and
"per_field".

fixtures/run_of_two_ranks: 7 steps of k-step Adam over two ranks, k = 4, with batch norm, by commit fd7b4ee, which
averaged the models before every save. One dense model, and every rank's moments, are in one file (format 2).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from helpers.cli import done
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups

RUN = Path(__file__).parent / "fixtures" / "run_before_redesign"
ROWS = "4bbb93ecc4a0dcee1868353b022e746363bc8e3b6ddb449c7025c5a1e794e078"
"""Digest of all rows, read by the version that wrote them."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current directory as when it was written."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def test_rows_are_those_that_were_saved(run_dir: Path) -> None:
    with tc.Run.load(run_dir) as run:
        rows = sorted(
            (int(key), row.tobytes())
            for keys, values in run.table.rows()
            for key, row in zip(keys, values, strict=True)
        )
        assert (run.step, run.table.step_count, len(rows)) == (12, 12, 59)
        assert hashlib.sha256(repr(rows).encode()).hexdigest() == ROWS
        assert run.table.precision.scale_lr == 0.01
        assert run.table.backend.learned_scale is not None


def test_training_resumes_and_saves(run_dir: Path) -> None:
    done("train", run_dir / "config.toml", "--resume", "--set", "train.steps=18")
    assert "step 18" in done("inspect", run_dir)
    text = (run_dir / "config.toml").read_text()
    assert "scale_lr = 0.01" in text
    assert "learn" not in text
    assert 'fields = "per_field"' in text


# ---- several ranks, format 2

RANKS = RUN.with_name("run_of_two_ranks")
AT_STEP_12 = "fd9c042c63d013a089594fef7b88becded2315c202548642beb9ce725d755fba"
"""Digest of the model that the version which wrote the run has after five more steps: merges follow steps 8 and 12."""


def resume_rank(groups: Groups, folder: str) -> str:
    """Train to step 12 and return a digest of the model."""
    os.chdir(folder)
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    sets = ["train.display=false", "train.steps=12", "train.run_dir=run"]
    with tc.Run(tc.Config.load("run/config.toml", sets)) as run:
        run.fit(resume=True)
        tensors = run.model.state_dict().values()
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def test_ranks_resume_a_run_with_one_merged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RANKS, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with tc.Run.load("run") as run:
        assert run.evaluate(run.loader("test"))["auc"] == 0.5631372549019608
    assert run_ranks(((0, 1),), resume_rank, str(tmp_path)) == [AT_STEP_12] * 2
    done("train", "run/config.toml", "--resume", "--set", "train.steps=14")  # one process, from the new format
