"""What commands print and write: the start of a run, warnings, existing output files, disks that cannot be written."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import SMALL, STEPS, done, invoke, lines_of, write_config

import thermocline as tc
from thermocline.cli import startup_progress
from thermocline.utils import atomic_file
from thermocline.utils.startup import listening

pytestmark = pytest.mark.usefixtures("command_folder")


# ---- the start of a run


def test_short_run_logs_its_last_step(tmp_path: Path) -> None:
    """A log is due every 1000 steps, and the run has 16; a step is logged once."""
    config = write_config(tmp_path, SMALL.replace("log_every = 1\n", "log_every = 1000\n"))
    out = done("train", config)
    (line,) = [line for line in out.splitlines() if line.startswith("epoch 1/1  step")]
    assert f"step {STEPS}  loss 0." in line
    assert "AUC 0." in line  # of the epoch that has ended
    assert [row["event"] for row in lines_of(tmp_path / "run")] == ["train", "valid", "test"]
    done("train", config, "--set", "train.steps=3", "--set", "train.run_dir=steps")
    assert [row["step"] for row in lines_of(tmp_path / "steps") if row["event"] == "train"] == [3]
    done("train", config, "--set", "train.log_every=4", "--set", "train.run_dir=due")
    assert [row["step"] for row in lines_of(tmp_path / "due") if row["event"] == "train"] == [4, 8, 12, 16]


def test_phases_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str | None] = []
    config = write_config(tmp_path)
    with listening(phases.append):
        done("train", config)
    assert phases == [
        "loading torch", "opening the data", "loading torch", "opening the table", "building the model",
        "reading the first batches", "computing the first step", None,
    ]  # fmt: skip
    monkeypatch.setattr(startup_progress, "_SECONDS", 0.0)
    assert "opening the data ...\n" in done("train", config, "--set", "train.run_dir=again")
    phases.clear()
    with listening(phases.append):
        done("train", config, "--resume", "--set", "train.epochs=2")
    assert "restoring the checkpoint" in phases


def test_changes_are_printed_under_the_lock(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done("train", config, "--set", "train.steps=2")
    with atomic_file.lock_dir(tmp_path / "run"):
        result = invoke("train", config, "--resume", "--set", "tiers.mem=3MB")
    assert result.exit_code == 2
    assert "another training uses run" in result.stderr
    assert "changed" not in result.stdout
    assert 'changed tiers.mem from "4MB" to "3MB"' in done("train", config, "--resume", "--set", "tiers.mem=3MB")


# ---- warnings


def test_warnings_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(self: tc.Run, **options: object) -> None:
        warnings.warn("the first\n  and second line", stacklevel=1)
        warnings.warn_explicit("is old", UserWarning, "/x/site-packages/torch/nn/a.py", 7)

    monkeypatch.setattr("thermocline.training.run.Run.fit", fit)
    before = warnings.showwarning
    result = invoke("train", write_config(tmp_path))
    lines = ["thermocline: warning: the first and second line", "thermocline: warning: torch: is old"]
    assert result.stderr.splitlines() == lines
    assert warnings.showwarning is before


# ---- output files


def test_predict_replaces_a_file_only_with_overwrite(tmp_path: Path) -> None:
    done("train", write_config(tmp_path), "--set", "train.steps=2")
    done("predict", "run", "--out", "scores.npy")
    written = (tmp_path / "scores.npy").read_bytes()
    (tmp_path / "scores.npy").write_bytes(b"of another run")
    result = invoke("predict", "run", "--out", "scores.npy")
    assert result.exit_code == 2
    assert result.stderr == (
        "thermocline: --out is 'scores.npy', which exists: choose another file, or replace it with --overwrite\n"
    )
    assert (tmp_path / "scores.npy").read_bytes() == b"of another run"
    done("predict", "run", "--out", "scores.npy", "--overwrite")
    assert (tmp_path / "scores.npy").read_bytes() == written
    assert len(np.load(tmp_path / "scores.npy")) == 400


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["export", "run", "--out", "/proc/x"], "--out"),
        (["data", "synth", "/proc/x", "--examples", "10"], "the output folder"),
        (["plan", "--measure", "/proc/x/node.toml"], "the folder of --measure"),
        (["predict", "run", "--out", "/proc/x/scores.csv"], "the folder of --out"),
    ],
)
def test_unwritable_output_is_a_usage_error(tmp_path: Path, words: list[str], name: str) -> None:
    """/proc is not writable, also for root."""
    if "run" in words:
        done("train", write_config(tmp_path), "--set", "train.steps=1")
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr == (
        f"thermocline: {name} is '/proc/x': it must be a folder that can be created and written to (No such file or "
        "directory); make it writable, or choose another folder\n"
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space, or choose a path on another disk, and try again"),
        (errno.EDQUOT, "the disk is full; free some space, or choose a path on another disk, and try again"),
        (errno.EROFS, "make it writable, or choose another path"),
    ],
)
def test_disk_that_cannot_be_written(tmp_path: Path, number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails after the file was opened: the error of the operating system has no path."""

    def fail(point: str) -> None:
        if point == "run.file_written":
            raise OSError(number, "refused")

    monkeypatch.setattr(atomic_file, "failpoint", fail)
    result = invoke("train", write_config(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("thermocline: run/")
    assert result.stderr.endswith(words + "\n")
    assert result.stderr.count("\n") == 1


def test_disk_errors_name_the_path() -> None:
    with (
        pytest.raises(tc.DiskFullError, match=r"^/x/y cannot be written: the disk is full"),
        atomic_file.disk_errors("/x/y"),
        open("/dev/full", "w") as file,
    ):
        file.write("x" * 100_000)


FULL_DISK = """
mount -t tmpfs -o size=64k none "$1/small" || exit 77
run() {
  rm -rf "$1"/small/*; head -c 40960 /dev/zero > "$1/small/fill"; shift
  "$PYTHON" -m thermocline "$@" > /dev/null; echo "exit $?" >&2
}
run "$1" train small.toml --set train.run_dir=small/run
run "$1" data synth small/data --examples 100000 --valid-examples 0 --test-examples 0
run "$1" export run --out small/served
"""


@pytest.mark.faults
def test_full_disk(tmp_path: Path) -> None:
    """A file system of 64 KB in a new mount namespace."""
    write_config(tmp_path)
    done("train", "small.toml")
    (tmp_path / "small").mkdir()
    source = str(Path(tc.__file__).parent.parent)
    result = subprocess.run(
        ["unshare", "-m", "bash", "-c", FULL_DISK, "bash", str(tmp_path)],
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": source, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("mounting a file system is not allowed here")
    lines = result.stderr.splitlines()
    assert lines[1::2] == ["exit 1"] * 3, lines
    for line in lines[::2]:
        assert re.search(r"^thermocline: .*\bsmall/.*; .*free some space.* try again$", line), line
