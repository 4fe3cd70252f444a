"""Error messages of the command line: key, cause and fix, in one line."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from helpers.cli import SMALL, done, invoke, start, state_of, write_config

from thermocline.utils.text_format import plural

pytestmark = pytest.mark.usefixtures("command_folder")


def refused(*words: object, code: int = 2) -> str:
    """Return the one line that a failing command prints on stderr."""
    result = invoke(*words)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stderr.startswith("thermocline: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr).removeprefix("thermocline: ").removesuffix("\n")


# ---- folders


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        ("/proc/x", "No such file or directory"),
        ("/proc", "No such file or directory"),
        ("small.toml/inside", "small.toml is a file"),
        ("small.toml", "small.toml is a file"),
    ],
)
@pytest.mark.parametrize("key", ["train.run_dir", "tiers.ssd"])
def test_unwritable_folder_is_an_error_with_its_key(tmp_path: Path, key: str, folder: str, cause: str) -> None:
    """/proc is not writable, also for root."""
    message = refused("train", write_config(tmp_path), "--set", f"{key}={folder}")
    assert message == (
        f"{key} is {folder!r}: it must be a folder that can be created and written to ({cause}); make it writable, or "
        "choose another folder"
    )


def test_locked_store_names_the_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"'))
    flags = ["--set", "train.epochs=1000", "--set", "train.checkpoint_every=3"]
    first = start("train", config, *flags)
    assert first.stdout is not None
    try:
        assert any("saved step 3 " in line for line in first.stdout)
        message = refused("train", config, *flags, "--resume")
        assert message == (
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


def test_sigterm_prints_the_command_that_resumes(tmp_path: Path) -> None:
    write_config(tmp_path)
    flags = ["--set", "train.epochs=1000"]
    process = start("train", "small.toml", *flags)
    assert process.stdout is not None
    assert any("step 8 " in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    command = "thermocline train small.toml --set train.epochs=1000 --resume"
    assert errors == f"thermocline: interrupted; resume with: {command}\n"
    assert re.search(r"^interrupted and saved at step \d+: continue with --resume \(resume=True\)$", out, re.M)


SECOND_SIGINT = """
import os, signal
from thermocline.checkpoint import manager, table_stores
from thermocline.cli.main import main

def failpoint(name):
    if name == os.environ["POINT"]:
        os.kill(os.getpid(), signal.SIGINT)

manager.failpoint = table_stores.failpoint = failpoint
main()
"""
"""Sends a second SIGINT at a failpoint of a save."""


@pytest.mark.parametrize("point", ["run.flushed", "run.published"])
def test_second_ctrl_c_aborts_the_save_without_damage(tmp_path: Path, point: str) -> None:
    config = write_config(tmp_path, SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"'))
    flags = ["--set", "train.epochs=1000"]
    done("train", config, *flags, "--set", "train.steps=2")
    process = start("train", config, *flags, "--resume", program=("-c", SECOND_SIGINT), POINT=point)
    assert process.stdout is not None
    assert any("step 8 " in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == f"thermocline: interrupted; resume with: thermocline train {config} {' '.join(flags)} --resume\n"
    assert out.splitlines()[-1] == "interrupted at once: step 2 is saved"
    assert "healthy" in done("inspect", "run", "--check")
    out = done("train", config, *flags, "--set", "train.steps=12", "--resume")
    assert ("resumed at step 2" in out) == (point != "run.published")


# ---- --set


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=-1", "--set train.lr is -1: it must be a finite number, at least 0"),
        ("data.synth.keys=0", "--set data.synth.keys is 0: it must be at least 1"),
        ("data.train=x.csv", '--set data.train is ["x.csv"]: it must be left out with format'),
        ("dist.dense_sync.every=0", "--set dist.dense_sync.every is 0: it must be at least 1"),
        (
            "model.heads=3",
            "small.toml with --set train.epochs=2 --set model.heads=3: model.attention_dim is 128: it must be a "
            "multiple of heads, 3",
        ),
    ],
)
def test_error_in_an_override_names_the_override(tmp_path: Path, override: str, message: str) -> None:
    write_config(tmp_path)
    assert refused("train", "small.toml", "--set", "train.epochs=2", "--set", override).startswith(message)


def test_error_in_the_file_names_the_file(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL.replace("lr = 0.01", "lr = -0.5"))
    message = refused("train", "small.toml", "--set", "train.epochs=2")
    assert message == "small.toml: train.lr is -0.5: it must be a finite number, at least 0"
    assert refused("train", "small.toml", "--set", "train.lr=-2").startswith("--set train.lr is -2: ")


# ---- columns


def test_files_with_other_columns(tmp_path: Path) -> None:
    rows = [f"{i % 2},u{i % 7},{i % 5}" for i in range(100)]
    Path("train.csv").write_text("\n".join(["label,user,price", *rows]) + "\n")
    _, rest = SMALL.split("[model]")
    done("train", write_config(tmp_path, f'[data]\ntrain = "train.csv"\nnumeric = ["price"]\n[model]{rest}'))
    Path("new.csv").write_text("user,price,shop\nu1,3,x\n")
    message = refused("predict", "run", "new.csv", code=1)
    assert message == (
        "new.csv has different columns than the training data: it also has 'shop' (set data.ignore to [\"shop\"])"
    )
    message = refused("predict", "run", "new.csv", "--set", 'data.ignore=["shop"]', "--out", "new.csv/scores.csv")
    assert message.startswith(
        "the folder of --out is 'new.csv': it must be a folder that can be created and written to (new."
    )
    assert "1 score of" in done("predict", "run", "new.csv", "--set", 'data.ignore=["shop"]')
    message = refused("eval", "run", "new.csv", "--set", 'data.ignore=["shop"]', code=1)
    assert message.endswith("prediction needs no label")
    Path("few.csv").write_text("label,user\n1,u1\n")
    assert "it lacks 'price' (add them; values may be empty)" in refused("eval", "run", "few.csv", code=1)
    Path("few.csv").write_text("label,user,price\n1,u1,\n0,u2,\n")
    done("eval", "run", "few.csv")


# ---- exit codes: 1 runtime failure, 2 usage error


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


def test_plural() -> None:
    assert [plural(n, "rank") for n in (0, 1, 2, 1200)] == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    assert [plural(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]
