"""The command line's words for what goes wrong: whose mistake it is, the key and the cause, and what helps."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from helpers.cli import SMALL, done, invoke, start, state_of, write_config

from thermocline.utils.text_format import plural

pytestmark = pytest.mark.usefixtures("command_folder")


def refused(*words: object, code: int = 2) -> str:
    """The one line a failing command says."""
    result = invoke(*words)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stderr.startswith("thermocline: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr).removeprefix("thermocline: ").removesuffix("\n")


# ---- folders


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        ("/proc/x", "No such file or directory"),
        ("/proc", "No such file or directory"),
        ("small.toml/inside", "small.toml is a file"),
        ("small.toml", "small.toml is a file"),
    ],
)
@pytest.mark.parametrize("key", ["train.run_dir", "tiers.ssd"])
def test_a_folder_that_cannot_be_written_to_is_told_with_its_key(
    tmp_path: Path, key: str, place: str, cause: str
) -> None:
    """Not even root makes files in /proc."""
    told = refused("train", write_config(tmp_path), "--set", f"{key}={place}")
    assert told == (
        f"{key} is {place!r}: it must be a folder that can be created and written to ({cause}); make it writable, or "
        "choose another folder"
    )


def test_a_second_training_is_told_who_has_the_store(tmp_path: Path) -> None:
    config = write_config(tmp_path, SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"'))
    flags = ["--set", "train.epochs=1000", "--set", "train.checkpoint_every=3"]
    first = start("train", config, *flags)
    assert first.stdout is not None
    try:
        assert any("saved step 3 " in line for line in first.stdout)
        told = refused("train", config, *flags, "--resume")
        assert told == (
            f"another training (process {first.pid}) uses run/store: wait until it ends, or end it with Ctrl-C, which "
            "saves; a new run needs another tiers.ssd"
        )
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    assert first.returncode == 130
    done("train", config, *flags, "--set", "train.steps=1", "--resume")
    assert state_of(tmp_path / "run", tmp_path / "run" / "store")


# ---- signals


def test_sigterm_says_the_command_that_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path)
    flags = ["--set", "train.epochs=1000"]
    process = start("train", "small.toml", *flags)
    assert process.stdout is not None
    assert any("step 8 " in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert (
        errors == "thermocline: interrupted; to go on: thermocline train small.toml --set train.epochs=1000 --resume\n"
    )
    assert re.search(r"^interrupted and saved at step \d+: --resume \(resume=True\) goes on from there$", out, re.M)


IMPATIENT = """
import os, signal
from thermocline.checkpoint.manager import manager
from thermocline.checkpoint import table_stores
from thermocline.cli.main import main

def reached(point):
    if point == os.environ["POINT"]:
        os.kill(os.getpid(), signal.SIGINT)

manager.reached = table_stores.reached = reached
main.main()
"""
"""Presses Ctrl-C a second time when a save has come to a point."""


@pytest.mark.parametrize("point", ["run.flushed", "run.published"])
def test_a_second_ctrl_c_ends_the_save_and_harms_nothing(tmp_path: Path, point: str) -> None:
    config = write_config(tmp_path, SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"'))
    flags = ["--set", "train.epochs=1000"]
    done("train", config, *flags, "--set", "train.steps=2")
    process = start("train", config, *flags, "--resume", program=("-c", IMPATIENT), POINT=point)
    assert process.stdout is not None
    assert any("step 8 " in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == f"thermocline: interrupted; to go on: thermocline train {config} {' '.join(flags)} --resume\n"
    assert out.splitlines()[-1] == "interrupted at once: step 2 is saved"
    assert "healthy" in done("inspect", "run", "--check")
    out = done("train", config, *flags, "--set", "train.steps=12", "--resume")
    assert ("resumed at step 2" in out) == (point != "run.published")


# ---- --set


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr=-1", "--set train.lr is -1.0: it must be a finite number, not negative"),
        ("data.synth.keys=0", "--set data.synth.keys is 0: it must be at least 1"),
        ("data.train=x.csv", "--set data.train is ['x.csv']: it must be left out with format"),
        (
            "dist.dense_sync.every=0",
            "small.toml with --set train.epochs=2 --set dist.dense_sync.every=0: [dist.dense_sync]: dense_sync.every",
        ),
    ],
)
def test_a_wrong_override_is_not_the_files_mistake(tmp_path: Path, override: str, says: str) -> None:
    write_config(tmp_path)
    assert refused("train", "small.toml", "--set", "train.epochs=2", "--set", override).startswith(says)


def test_a_wrong_file_is_not_an_overrides_mistake(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL.replace("lr = 0.01", "lr = -0.5"))
    told = refused("train", "small.toml", "--set", "train.epochs=2")
    assert told == "small.toml: train.lr is -0.5: it must be a finite number, not negative"
    assert refused("train", "small.toml", "--set", "train.lr=-2").startswith("--set train.lr is -2.0")


# ---- columns


def test_files_with_other_columns_are_told_and_mended(tmp_path: Path) -> None:
    rows = [f"{i % 2},u{i % 7},{i % 5}" for i in range(100)]
    Path("train.csv").write_text("\n".join(["label,user,price", *rows]) + "\n")
    _, rest = SMALL.split("[model]")
    done("train", write_config(tmp_path, f'[data]\ntrain = "train.csv"\nnumeric = ["price"]\n[model]{rest}'))
    Path("new.csv").write_text("user,price,shop\nu1,3,x\n")
    told = refused("predict", "run", "new.csv", code=1)
    assert told == (
        "new.csv has different columns than the training data: it also has 'shop' (set data.ignore to [\"shop\"])"
    )
    told = refused("predict", "run", "new.csv", "--set", 'data.ignore=["shop"]', "--out", "new.csv/scores.csv")
    assert told.startswith(
        "the folder of --out is 'new.csv': it must be a folder that can be created and written to (new."
    )
    assert "1 score of" in done("predict", "run", "new.csv", "--set", 'data.ignore=["shop"]')
    told = refused("eval", "run", "new.csv", "--set", 'data.ignore=["shop"]', code=1)
    assert told.endswith("prediction needs no label")
    Path("few.csv").write_text("label,user\n1,u1\n")
    assert "it lacks 'price' (add them; values may be empty)" in refused("eval", "run", "few.csv", code=1)
    Path("few.csv").write_text("label,user,price\n1,u1,\n0,u2,\n")
    done("eval", "run", "few.csv")


# ---- exit codes: 2 what was asked for is wrong, 1 what was found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ["train", "no.toml"]),
        (2, ["train"]),
        (2, ["train", "small.toml", "--set", "train.patience=1", "--set", "data.synth.valid_examples=0"]),
        (1, ["train", "small.toml", "--set", "tiers.mem=10KB"]),
        (2, ["eval", "nowhere"]),
        (2, ["eval", "run", "--set", "train.lr=-1"]),
        (2, ["predict", "run", "--out", "scores.txt"]),
        (1, ["eval", "run"]),
        (2, ["inspect", "nowhere"]),
        (2, ["inspect", "run", "--mem", "much"]),
        (2, ["data", "stats", "no.csv"]),
        (2, ["data", "stats", "small.toml", "--examples", "0"]),
        (1, ["data", "stats", "bad.csv"]),
        (2, ["data", "synth", "out", "--keys", "0"]),
        (2, ["data", "synth", "out", "--keys", "20", "--fields", "26"]),
        (2, ["data", "synth", "out", "--zipf", "inf"]),
        (2, ["data", "synth", "out", "--examples-per-file", "0"]),
        (2, ["data", "synth", "out", "--preset", "Z"]),
        (2, ["plan", "small.toml", "--hardware", "no.toml"]),
        (2, ["reproduce", "--only", "nothing"]),
    ],
)
def test_exit_codes(tmp_path: Path, code: int, words: list[str]) -> None:
    write_config(tmp_path)
    Path("run").mkdir()
    Path("run/config.toml").write_text(SMALL)
    Path("bad.csv").write_text("label,a\nx,y\n")
    result = invoke(*words)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("out").exists()


def test_counts_have_their_words() -> None:
    assert [plural(n, "rank") for n in (0, 1, 2, 1200)] == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    assert [plural(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]
