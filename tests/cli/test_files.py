"""Runs on files: bits equal to generated data, shuffling, resuming, order of scores, labels, malformed lines."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import SMALL, done, invoke, lines_of, state_of, write_config

import thermocline as tc

SIZES = ["--keys", 3000, "--fields", 4, "--examples", 1600, "--valid-examples", 400, "--test-examples", 400]


pytestmark = pytest.mark.usefixtures("command_folder")


def config_of(tmp_path: Path, format: str = "libsvm", more: str = "") -> Path:
    """Write SMALL with data in files of `data synth`, and with the [data] section that it prints."""
    section = done("data", "synth", "data", "--format", format, *SIZES)
    _, rest = SMALL.split("[model]")
    return write_config(tmp_path, f"{section}\n{more}\n[model]{rest}", f"{format}.toml")


@pytest.mark.parametrize("format", ["libsvm", "libffm", "parquet"])
def test_files_and_generated_data_train_to_the_same_bits(tmp_path: Path, format: str) -> None:
    done("train", config_of(tmp_path, format), "--set", "data.shuffle=false", "--set", "train.run_dir=files")
    done("train", write_config(tmp_path), "--set", "train.run_dir=made")
    files, made = state_of(tmp_path / "files"), state_of(tmp_path / "made")
    assert sorted(name for name in made if made[name] != files[name]) == []
    last, other = lines_of(tmp_path / "files")[-1], lines_of(tmp_path / "made")[-1]
    assert (last["auc"], last["logloss"]) == (other["auc"], other["logloss"])


def test_shuffled_files_resume_to_the_same_bits(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    flags = ["--set", "train.epochs=2", "--set", "data.shuffle_buffer=500"]
    done("train", config, *flags, "--set", "train.run_dir=whole")
    done("train", config, *flags, "--set", "train.steps=7")
    done("train", config, *flags, "--set", "train.steps=21", "--resume")
    done("train", config, *flags, "--resume")
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "run")
    assert sorted(name for name in whole if whole[name] != parts[name]) == []
    done("train", config, *flags, "--set", "train.run_dir=other", "--set", "train.seed=1")
    assert state_of(tmp_path / "other")["rows"] != whole["rows"]


def test_scores_are_in_the_order_of_the_files(tmp_path: Path) -> None:
    done("train", config_of(tmp_path))
    lines = Path("data/test.libsvm").read_text().splitlines()
    Path("a.libsvm").write_text("\n".join(lines[:150]) + "\n")
    Path("b.libsvm").write_text("\n".join(lines[150:]) + "\n")
    Path("back.libsvm").write_text("\n".join(reversed(lines)) + "\n")
    assert "400 scores" in done("predict", "run", "--out", "all.npy")
    done("predict", "run", "a.libsvm", "b.libsvm", "--out", "ab.npy", "--set", "train.batch_size=70")
    done("predict", "run", "back.libsvm", "--out", "back.npy", "--set", "train.batch_size=64")
    scores = np.load("all.npy")
    assert len(np.unique(scores)) > 300
    # The batch size changes the last bits of torch's matrix products.
    assert np.allclose(np.load("ab.npy"), scores, atol=1e-6)
    assert np.allclose(np.load("back.npy"), scores[::-1], atol=1e-6)
    report = json.loads(done("eval", "run", "back.libsvm", "--json"))
    assert report["auc"] == pytest.approx(lines_of(tmp_path / "run")[-1]["auc"], abs=1e-5)


def test_trained_run_needs_no_training_files(tmp_path: Path) -> None:
    """Prediction needs no labels, and uses the statistics of the training data."""
    rng = np.random.default_rng(0)
    for split, rows in (("train", 900), ("test", 200)):
        price, user = rng.lognormal(2, 1, rows), rng.integers(0, 50, rows)
        click = (rng.random(rows) < 1 / (1 + np.exp(np.log(price) - user % 3))).astype(int)
        table = [f"{c},{u},{p:.3f}" for c, u, p in zip(click, user, price, strict=True)]
        Path(f"{split}.csv").write_text("\n".join(["click,user,price", *table]) + "\n")
    data = '[data]\ntrain = "train.csv"\ntest = "test.csv"\nlabel = "click"\nnumeric = ["price"]\n'
    _, rest = SMALL.split("[model]")
    done("train", write_config(tmp_path, f"{data}[model]{rest}"))
    done("predict", "run", "--out", "with.npy")
    features = json.loads(Path("run/features.json").read_text())
    assert features["fields"] == ["user"]
    assert set(features["statistics"]) == {"price"}
    Path("train.csv").unlink()
    lines = [line.split(",") for line in Path("test.csv").read_text().splitlines()]
    Path("unlabelled.csv").write_text("".join(f"{price},{user}\n" for _, user, price in lines))  # columns also swapped
    done("predict", "run", "unlabelled.csv", "--out", "without.npy")
    assert np.array_equal(np.load("with.npy"), np.load("without.npy"))
    assert json.loads(done("eval", "run", "--json"))["auc"] == lines_of(tmp_path / "run")[-1]["auc"]
    result = invoke("eval", "run", "unlabelled.csv")
    assert result.exit_code == 1
    assert "click" in result.stderr
    result = invoke("train", "run/config.toml", "--resume")
    assert result.exit_code == 2
    assert result.stderr.startswith("thermocline: data.train[0]: train.csv: no such file")


def test_malformed_lines_are_an_error_or_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    path = Path("data/train.libsvm")
    lines = path.read_text().splitlines()
    lines[700] = "click 17:1 18:1 19:1 20:1"
    path.write_text("\n".join(lines) + "\n")
    result = invoke("train", config)
    assert result.exit_code == 1
    assert "data/train.libsvm" in result.stderr
    assert "701" in result.stderr
    assert result.stderr.count("\n") == 1
    result = invoke("train", config, "--set", "data.on_error=skip", "--set", "train.run_dir=other")
    assert result.exit_code == 0
    assert result.stderr.startswith("train data: 1 malformed line was skipped; the first: ")
    assert "701" in result.stderr
    # A skipped line would shift the scores after it: predict skips lines only with --set.
    Path("odd.libsvm").write_text("\n".join([*lines[:5], "bad", *lines[5:9]]) + "\n")
    result = invoke("predict", "other", "odd.libsvm", "--out", "odd.npy")
    assert result.exit_code == 1
    assert "odd.libsvm, line 6" in result.stderr
    assert not Path("odd.npy").exists()
    result = invoke("predict", "other", "odd.libsvm", "--out", "odd.npy", "--set", "data.on_error=skip")
    assert result.exit_code == 0
    assert "1 malformed line was skipped" in result.stderr
    assert len(np.load("odd.npy")) == 9


def test_files_with_another_number_of_fields_are_an_error(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    done("train", config)
    done("data", "synth", "wide", "--format", "libsvm", *SIZES[:2], "--fields", 5, *SIZES[4:])
    result = invoke("eval", "run", "wide/test.libsvm")
    assert result.exit_code == 1
    assert "wide/test.libsvm" in result.stderr
    result = invoke("eval", "run", "nothing.libsvm")
    assert result.exit_code == 2
    assert result.stderr.startswith("thermocline: data.test[0]: nothing.libsvm: no such file")


def test_data_commands_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        config = config_of(tmp_path, "parquet", "")
        for source in (config, write_config(tmp_path)):
            assert "48 bytes per key (dnn, adam)" in done("data", "stats", source)


def test_synth_writes_folders_of_files(tmp_path: Path) -> None:
    section = done("data", "synth", "parts", *SIZES, "--examples-per-file", 500, "--dense", 2)
    assert [path.name for path in sorted(Path("parts/train").iterdir())] == [f"part-0000{i}.parquet" for i in range(4)]
    config = tc.Config.parse(section)
    assert config.data.raw_keys
    _, rest = SMALL.split("[model]")
    done("train", write_config(tmp_path, f"{section}\n[model]{rest}"))
    assert lines_of(tmp_path / "run")[-1]["examples"] == 400
    result = invoke("data", "synth", "x", "--format", "libsvm", "--dense", 2)
    assert result.exit_code == 2
    assert "--dense is 2, but libsvm files contain keys only: use --format parquet" in result.stderr
    assert not Path("x").exists()


def test_synth_replaces_files_only_with_force(tmp_path: Path) -> None:
    """It also removes old files that have no new version."""
    for flags, first in (([], "data/train.parquet"), (["--examples-per-file", 500], "data/train/part-00000.parquet")):
        done("data", "synth", "data", *SIZES, *flags)
        before = {path: path.read_bytes() for path in Path("data").rglob("*.parquet")}
        result = invoke("data", "synth", "data", *SIZES, *flags, "--seed", 1)
        assert result.exit_code == 2
        assert result.stderr.startswith(
            f"thermocline: {first} and {2 + 3 * bool(flags)} more would be replaced: add --force, "
        )
        assert {path: path.read_bytes() for path in Path("data").rglob("*.parquet")} == before
        done("data", "synth", "data", *SIZES, *flags, "--seed", 1, "--force")
        assert Path(first).read_bytes() != before[Path(first)]
    done("data", "synth", "data", *SIZES[:5], 600, *SIZES[6:], *flags, "--force")
    assert [path.name for path in sorted(Path("data/train").iterdir())] == ["part-00000.parquet", "part-00001.parquet"]
    result = invoke("data", "synth", "other", "--format", "csv")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in ("'csv' is not one of", "'parquet'", "'libsvm'", "'libffm'"))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "train.parquet/part-00000-4a5b.snappy.parquet"),  # as Spark writes it
        (["--examples-per-file", 500], "valid/part-00000-4a5b.snappy.parquet"),
        (["--examples-per-file", 500], "test/mine.parquet"),
        (["--examples-per-file", 500], "train"),
    ],
)
def test_synth_does_not_remove_other_files(tmp_path: Path, flags: list[Any], name: str) -> None:
    """Also with --force; and nothing is removed before all files are checked."""
    done("data", "synth", "data", *SIZES, "--examples-per-file", 600, "--format", "libsvm")
    if name == "train":
        shutil.rmtree("data/train")
    other = Path("data") / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("other")
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    result = invoke("data", "synth", "data", *SIZES, *flags, "--force")
    assert result.exit_code == 2
    assert result.stderr.startswith("thermocline: data/")
    assert "exists and was not written by `data synth`: choose another folder" in result.stderr
    assert {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()} == before


def test_failed_resume_changes_no_file_of_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    done("train", config, "--set", "tiers.ssd=store")
    before = Path("run/config.toml").read_bytes()
    for folder in ("elsewhere", "none"):
        result = invoke("train", "run/config.toml", "--resume", "--set", f"tiers.ssd={folder}")
        assert result.exit_code == 1
        assert Path("run/config.toml").read_bytes() == before
    assert "400 scores" in done("predict", "run", "--out", "all.npy")


def test_resumed_run_keeps_the_statistics_of_its_training_data(tmp_path: Path) -> None:
    lines = ["label,user,price", *(f"{i % 2},u{i % 9},{i % 5}" for i in range(300))]
    Path("train.csv").write_text("\n".join(lines) + "\n")
    data = '[data]\ntrain = "train.csv"\nnumeric = ["price"]\n'
    _, rest = SMALL.split("[model]")
    config = write_config(tmp_path, f"{data}[model]{rest}")
    done("train", config)
    before = Path("run/features.json").read_bytes()
    with Path("train.csv").open("a") as file:
        file.writelines(f"0,u1,{1000 + i}\n" for i in range(300))
    done("train", config, "--resume", "--set", "train.epochs=2")
    assert Path("run/features.json").read_bytes() == before


def test_moved_run_reads_the_store_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("train", write_config(tmp_path), "--set", "tiers.ssd=run/store")
    before = done("eval", "run")
    shutil.copytree("run", "copy")
    for file in Path("copy/store").glob("*"):
        if file.is_file():
            file.write_bytes(bytes(file.stat().st_size))
    assert invoke("inspect", "copy", "--check").exit_code == 1
    assert invoke("inspect", "run", "--check").exit_code == 0
    Path("run").rename("moved")
    assert done("eval", "moved") == before
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert done("eval", "../moved") == before


def test_store_outside_the_run_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    done("train", config, "--set", "tiers.ssd=rows", "--set", "train.steps=5")
    assert "changed tiers.ssd" not in done("train", config, "--set", "tiers.ssd=rows", "--resume")
    before = done("eval", "run")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert done("eval", "../run") == before


def test_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    lines = Path("data/train.libsvm").read_text().splitlines()
    Path("bad.libsvm").write_text("\n".join([*lines[:300], "1 x:y", *lines[300:]]))
    assert invoke("train", config, "--set", 'data.train=["bad.libsvm"]', "--set", "data.shuffle=false").exit_code == 1
    done("train", config)  # the same folder, without --resume
    done("train", config, "--set", "train.run_dir=other")
    assert state_of(tmp_path / "run") == state_of(tmp_path / "other")
    assert invoke("train", config).exit_code == 2  # the folder now has a run


def test_resume_without_a_run_starts_a_new_one(tmp_path: Path) -> None:
    assert "run has nothing saved to resume" in done("train", write_config(tmp_path), "--resume")
