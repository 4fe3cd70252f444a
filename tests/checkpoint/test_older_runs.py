"""A run folder written by the version before the redesign (commit ac22d9e) opens, evaluates and resumes.

fixtures/run_before_redesign: `thermocline train`, 12 steps, rows in int8 with a learned scale, hashed fields, no ssd.
Its config.toml, manifest and store note use the names `learn` and "apart", today `scale_lr` and "per_field".
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from helpers.cli import done

import thermocline as tc

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
