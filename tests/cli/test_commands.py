"""Commands of the command line: results, output and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from helpers.cli import SMALL, STEPS, done, invoke, lines_of, start, state_of, write_config

import thermocline as tc
from thermocline import serving
from thermocline.cli import inspect
from thermocline.config.schema import Config
from thermocline.serving.snapshot import find, open_state
from thermocline.utils import atomic_file

pytestmark = pytest.mark.usefixtures("command_folder")


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new process has loaded after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_help_and_config_errors_load_no_torch() -> None:
    loaded = modules_after("from thermocline.cli import commands, inspect; from thermocline.training import run")
    assert loaded >= {"thermocline.cli.commands", "thermocline.config.schema"}
    assert "torch" not in loaded
    heavy = {"torch", "numpy", "pyarrow", "pydantic", "thermocline.core._core"}
    for statement in ("import thermocline", "import thermocline.cli.main"):
        assert not heavy & modules_after(statement)


def test_help_and_version() -> None:
    for words in (
        [],
        ["data"],
        ["train"],
        ["eval"],
        ["predict"],
        ["export"],
        ["versions"],
        ["inspect"],
        ["data", "synth"],
        ["data", "stats"],
    ):
        assert "Usage" in done(*words, "--help")
    assert done("--version") == f"thermocline {tc.__version__}\n"


# ---- train


def test_train_writes_the_files_of_a_run(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    out = done("train", config, "--set", "train.tensorboard=true", "--set", "model.hidden=[6]")
    seconds = re.search(r"first step after (\d+\.\d) s", out)
    assert seconds is not None
    assert f"finished after {STEPS} steps" in out
    run_dir = tmp_path / "run"
    assert {path.name for path in run_dir.iterdir()} == {
        "config.toml", "metrics.jsonl", "tensorboard", "checkpoints", "stores", "status.json",
    }  # fmt: skip
    resolved = Config.load(run_dir / "config.toml")
    assert resolved == Config.load(config, ["train.tensorboard=true", "model.hidden=[6]"]).resolve()
    assert list((run_dir / "tensorboard").iterdir())
    *_, last = rows = lines_of(run_dir)
    assert [row["event"] for row in rows] == ["train"] * STEPS + ["valid", "test"]
    assert last.keys() >= {"auc", "logloss", "examples_per_s"}
    assert last["examples_per_s"] > 0
    assert last["examples"] == 400


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done("train", config, "--set", "train.steps=2")
    before = state_of(tmp_path / "run")
    result = invoke("train", config)
    assert result.exit_code == 2
    assert result.stderr == (
        "thermocline: run already has a run: continue it with --resume (resume=True), or start a new one in another "
        "train.run_dir\n"
    )
    for override in ("train.lr=0.5", "model.dim=8", "data.synth.keys=500", "train.seed=1"):
        result = invoke("train", config, "--resume", "--set", override)
        assert result.exit_code == 2
        assert result.stderr.startswith("thermocline: run was trained with another config: it cannot be resumed with ")
        assert f"{override.partition('=')[0]} from " in result.stderr
        assert result.stderr.count("\n") == 1
    assert state_of(tmp_path / "run") == before
    out = done("train", config, "--resume", "--set", "tiers.mem=3MB")
    assert 'changed tiers.mem from "4MB" to "3MB"' in out
    assert 'changed train.steps from 2 to "none"' in out
    assert "resumed at step 2" in out
    assert f"finished after {STEPS} steps" in out


def test_folder_of_a_run_is_locked(tmp_path: Path) -> None:
    """The second process fails before it changes a file; without SSD there is no lock of a store."""
    config = write_config(tmp_path)
    with atomic_file.lock_dir(tmp_path / "run"):
        result = invoke("train", config, "--set", "model.dim=4")
        assert result.exit_code == 2
        assert result.stderr.startswith("thermocline: another training uses run: wait until it ends, or end it with ")
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "run" / "config.toml").exists()
    done("train", config, "--set", "train.steps=2")


def test_existing_run_is_not_overwritten_from_python(tmp_path: Path) -> None:
    config = Config.load(write_config(tmp_path), ["train.steps=2"])
    with tc.Run(config) as run:
        run.fit()
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with tc.Run(Config.load("run/config.toml", ["train.steps=4"])) as run:
        with pytest.raises(tc.ConfigError, match="already has a run"):
            run.fit()
        assert (tmp_path / "run" / "config.toml").read_bytes() == before
        assert run.fit(resume=True).progress.step == 4


def test_resume_of_a_finished_run_repeats_the_test(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done("train", config)
    before = lines_of(tmp_path / "run")
    done("train", config, "--resume")
    after = lines_of(tmp_path / "run")
    assert after[-1].pop("examples_per_s") is None
    assert before[-1].pop("examples_per_s") > 0
    assert after[-1] == before[-1]


@pytest.mark.parametrize(("number", "tier"), [(signal.SIGKILL, "ssd"), (signal.SIGINT, "memory")])
def test_interrupted_run_resumes_with_the_same_bits(tmp_path: Path, number: signal.Signals, tier: str) -> None:
    text = SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"') if tier == "ssd" else SMALL
    config = write_config(tmp_path, text)
    flags = ["--set", "train.epochs=2", "--set", "train.checkpoint_every=3"]
    process = start("train", config, *flags)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 8 " in line:
            process.send_signal(number)
            break
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        words = f"train {config} --set train.epochs=2 --set train.checkpoint_every=3 --resume"
        assert errors == f"thermocline: interrupted; resume with: thermocline {words}\n"
    else:
        assert process.returncode == -signal.SIGKILL
    assert "resumed at step " in done("train", config, *flags, "--resume")
    store = tmp_path / "run" / "store" if tier == "ssd" else None
    stopped = state_of(tmp_path / "run", store)
    whole = [*flags, "--set", "train.run_dir=whole"]
    if tier == "ssd":
        whole += ["--set", "tiers.ssd=whole/store"]
    done("train", config, *whole)
    store = tmp_path / "whole" / "store" if tier == "ssd" else None
    expected = state_of(tmp_path / "whole", store)
    assert sorted(name for name in expected if expected[name] != stopped.get(name)) == []
    last, other = lines_of(tmp_path / "run")[-1], lines_of(tmp_path / "whole")[-1]
    assert {**last, "examples_per_s": 0} == {**other, "examples_per_s": 0}


# ---- errors

WRONG = [
    ("[train]\nepoch = 2\n", [], 2, 'small.toml: [train] has no key "epoch" (did you mean "epochs"?)'),
    ("", ["--set", "train.epochs=ten"], 2, '--set train.epochs is "ten": it must be a whole number'),
    ("", ["--set", "data.format=csv"], 2, "data.train is missing: it must name at least one file"),
    ("", ["--set", "data.format=csv", "--set", "data.train=no.csv"], 2, "data.train[0]: no.csv: no such file"),
    ("", ["--set", "data.synth.keys=2"], 2, "[data.synth]: 2 keys are too few"),
    ("", ["--set", "data.synth.preset=Z"], 2, "[data.synth]: unknown preset 'Z'"),
    ("", ["--set", "tiers.mem=10KB"], 1, "does not fit: the budget of 10000 bytes holds"),
    ("", ["--set", "train.patience=1", "--set", "data.synth.valid_examples=1"], 1, "patience needs an AUC"),
]


@pytest.mark.parametrize(("text", "flags", "code", "message"), WRONG)
def test_error_is_one_line_and_an_exit_code(
    tmp_path: Path, text: str, flags: list[str], code: int, message: str
) -> None:
    result = invoke("train", write_config(tmp_path, text or SMALL), *flags)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stderr.startswith("thermocline: ")
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = invoke("train", tmp_path / "no.toml")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    result = invoke("train", tmp_path / "no.toml", "--debug")
    assert isinstance(result.exception, tc.ConfigError)


@pytest.mark.parametrize("name", ["torch", "tensorboard"])
def test_missing_package_is_an_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    if name == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    result = invoke("train", config, "--set", "train.tensorboard=true")
    assert result.exit_code == 1
    assert name in result.stderr
    assert "install it with `pip install thermocline[torch]`" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["eval", "predict", "inspect"])
def test_folder_without_a_run_is_an_error(tmp_path: Path, command: str) -> None:
    for folder in ("nowhere", "."):
        result = invoke(command, folder)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def test_run_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with tc.Run(Config.load(write_config(tmp_path))) as run:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.toml").write_text(run.config.to_toml())
        assert "has no checkpoints: train it first" in invoke("eval", "run").stderr
        tc.Checkpoints("run", [run.table], run.model, run.optimizers).close()
        result = invoke("eval", "run")
    assert result.exit_code == 1
    assert "nothing saved yet" in result.stderr


# ---- eval, predict


@pytest.fixture(params=["memory", "ssd"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run whose best checkpoint is not its last."""
    text = SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"') if request.param == "ssd" else SMALL
    flags = ["--set", "train.valid_every=2", "--set", "train.patience=50", "--set", "train.epochs=4"]
    done("train", write_config(tmp_path, text), *flags, "--set", "train.lr=0.1")
    return tmp_path / "run"


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_eval_equals_the_test_metrics_and_is_read_only(trained: Path) -> None:
    before = everything_in(trained)
    test = lines_of(trained)[-1]
    report = json.loads(done("eval", "run", "--json"))
    assert test["step"] < 4 * STEPS
    for name in ("step", "auc", "logloss", "ne", "calibration", "examples"):
        assert report[name] == test[name], name
    last = json.loads(done("eval", "run", "--json", "--checkpoint", "last"))
    assert last["step"] == 4 * STEPS
    assert json.loads(done("eval", "run", "--json", "--checkpoint", 4 * STEPS)) == last
    assert f"auc {test['auc']:.6f}" in done("eval", "run")
    result = invoke("eval", "run", "--checkpoint", "7")
    assert result.exit_code == 1
    assert "has no checkpoint 7; it has step" in result.stderr
    assert everything_in(trained) == before


def test_predict_writes_the_scores_in_order(trained: Path, tmp_path: Path) -> None:
    before = everything_in(trained)
    for ending in ("npy", "csv", "parquet"):
        assert "400 scores of step" in done("predict", "run", "--out", f"out/scores.{ending}")
    scores = np.load(tmp_path / "out" / "scores.npy")
    assert (scores.dtype, scores.shape) == (np.float32, (400,))
    assert np.array_equal(scores, pq.read_table("out/scores.parquet")["score"].to_numpy())
    text = csv.read_csv("out/scores.csv")["score"].to_numpy()
    assert np.array_equal(scores, text.astype(np.float32))
    with tc.Run.load("run") as run:
        labels = np.concatenate([batch.label.numpy() for batch in run.loader("test")])
    test = lines_of(trained)[-1]
    assert tc.auc(scores, labels) == pytest.approx(test["auc"], abs=1e-9)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"scores.npy", "scores.csv", "scores.parquet"}
    result = invoke("predict", "run", "--out", "scores.txt")
    assert result.exit_code == 2
    assert "its suffix must be one of .csv, .parquet, .npy" in result.stderr
    assert everything_in(trained) == before


def test_export_publishes_the_rows_of_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    before = everything_in(trained)
    assert re.search(
        r"version 1 \(base\) of step \d+ in out: [\d,]+ rows, 0 deleted", done("export", "run", "--out", "out")
    )
    first, last = json.loads(done("eval", "run", "--json"))["step"], 4 * STEPS
    options = ["--checkpoint", "last", "--format", "parquet", "--format", "safetensors", "--json"]
    result = invoke("export", "run", "--out", "out", "--delta", *options)
    assert "compared" not in result.stderr  # the changes were in the log
    report = json.loads(result.stdout)
    assert {path.suffix for path in Path("out/v0000000002-delta").glob("table-0-rows-*")} == {
        ".parquet",
        ".safetensors",
    }
    assert (report["version"], report["kind"], report["step"]) == (2, "delta", last)
    for number, checkpoint in ((1, first), (2, last)):
        with tc.Run.load("run", checkpoint=checkpoint) as run:
            keys, rows = (np.concatenate(parts) for parts in zip(*run.table.rows(), strict=True))
            dim = run.table.dim
        state = open_state(tmp_path / "out", number)
        served, found = find(state, keys, None, "error")
        assert found.all()
        assert served.tobytes() == np.ascontiguousarray(rows[:, :dim]).tobytes()
    Path("file").write_text("x")
    Path("folder").mkdir()
    Path("folder/file").write_text("x")
    for arguments, text in [
        (["--out", "new", "--delta"], "publish a base first"),
        (["--out", "out", "--delta", "--precision", "int8"], "precision is int8, that of the current version"),
        (["--out", "file"], "is a file"),
        (["--out", "folder"], "not a publication"),
        (["--out", "new", "--max-rows", "0"], "max_rows is 0"),
        (["--out", "out", "--consumer", "a"], "--consumer needs --delta"),
    ]:
        result = invoke("export", "run", *arguments)
        assert result.exit_code == 2
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not Path("new").exists()
    assert everything_in(trained) == before


def test_versions_are_listed_compacted_rolled_back_and_deleted(trained: Path) -> None:
    done("export", "run", "--out", "out")
    serving.open("out", consumer="slow")
    done("export", "run", "--out", "out", "--delta", "--checkpoint", "last")
    result = invoke("export", "run", "--out", "out", "--delta", "--checkpoint", "last", "--consumer", "slow")
    assert result.stdout.startswith("version 3 (delta since version 1) of step ")
    assert not result.stderr
    lines = done("versions", "out").splitlines()
    assert [line.split(",")[0] for line in lines] == ["1: base", "2: delta since 1", "3: delta since 1"]
    assert [line.partition(" <- ")[2] for line in lines] == ["slow", "", "current"]

    def numbers(*flags: str) -> tuple[list[int], int]:
        report = json.loads(done("versions", "out", "--json", *flags))
        return [row["version"] for row in report["versions"]], report["current"]

    expected = serving.open("out").lookup(np.arange(100))
    assert numbers("--compact") == ([1, 2, 3, 4], 4)
    assert np.array_equal(serving.open("out").lookup(np.arange(100)), expected)
    assert "the next version must be a base" in done("versions", "out", "--roll-back", "2").splitlines()[-1]
    assert invoke("export", "run", "--out", "out", "--delta", "--checkpoint", "last").exit_code == 1
    assert numbers("--roll-back", "4", "--retire", "1") == ([4], 4)
    assert done("versions", "out").splitlines()[-1] == "1: deleted or damaged <- slow"
    result = invoke("export", "run", "--out", "out", "--delta", "--checkpoint", "last", "--consumer", "slow")
    assert "warning: out: a base is published: version 1 of consumer 'slow' was deleted" in result.stderr
    assert result.stdout.startswith("version 5 (base) of step ")
    for arguments, text in [
        (["run"], "it is the folder of a run"),
        (["out", "--roll-back", "9"], "--roll-back is 9: out has the versions 4, 5"),
        (["out", "--roll-back", "4", "--compact"], "exclude each other"),
        (["out", "--retire", "0"], "--retire is 0"),
    ]:
        result = invoke("versions", *arguments)
        assert result.exit_code == 2
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1
    with serving.Publication("out"):
        assert invoke("versions", "out", "--compact").exit_code == 1
        assert invoke("versions", "out").exit_code == 0
    Path("out/v0000000004-base/manifest.json").write_text("{}")
    assert invoke("versions", "out").exit_code == 1


def test_eval_and_inspect_while_a_process_trains(trained: Path) -> None:
    """The stores are locked for writing; readers need no lock."""
    test = lines_of(trained)[-1]
    with tc.Run(tc.Config.load("run/config.toml")) as run:
        checkpoints = tc.Checkpoints("run", [run.table], run.model, run.optimizers)
        checkpoints.restore()
        assert json.loads(done("eval", "run", "--json"))["auc"] == test["auc"]
        assert "no problems found" in done("inspect", "run")
        assert "healthy" in done("inspect", "run", "--check")
        checkpoints.close()


def test_restore_after_checkpoints_were_replaced(trained: Path) -> None:
    """A store opened before a save has old commits, which the save may have removed."""
    with tc.Run(tc.Config.load("run/config.toml"), read_only=True) as run:
        done("train", "run/config.toml", "--resume", "--set", "train.epochs=6", "--set", "train.checkpoint_every=5")
        assert run.restore("last") == 6 * STEPS


# ---- inspect


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_inspect_a_run_a_store_and_a_checkpoint(trained: Path) -> None:
    report = json.loads(done("inspect", "run", "--json"))
    assert report["kind"] == "run"
    assert [c["tag"] for c in report["checkpoints"]].count("best") == 1
    (store,) = report["stores"]
    with tc.Run.load("run", checkpoint="last") as run:
        keys = sum(len(keys) for keys, _ in run.table.rows())
    assert store["keys"] == keys
    assert store["row_bytes"] == 4 * 3 * 4
    assert json.loads(done("inspect", store["path"], "--json"))["keys"] == keys
    text = done("inspect", report["checkpoints"][0]["path"], "--check")
    assert "dim 4, Adam" in text
    assert "healthy: every byte verified" in text
    assert f"{keys:,} keys, 48 bytes per row" in done("inspect", "run")


def test_inspect_retries_after_a_concurrent_commit(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = json.loads(done("inspect", "run", "--json"))["stores"][0]["path"]
    find_damage, failures = tc.SsdStore.find_damage, [2]

    def fail_after_commit(self: tc.SsdStore) -> list[str]:
        if failures[0]:
            failures[0] -= 1
            Path(store, f"MANIFEST-{10**6 + failures[0]:012}").touch()
            raise tc.IoError("MANIFEST-000000000001: No such file or directory")
        return find_damage(self)

    monkeypatch.setattr(tc.SsdStore, "find_damage", fail_after_commit)
    monkeypatch.setattr("thermocline.cli.inspect._read_store", _without_fakes(inspect._read_store))
    assert "healthy" in done("inspect", store, "--check")
    failures[0] = 100
    result = invoke("inspect", store, "--check")
    assert result.exit_code == 1
    assert "cannot be read between two commits of its writer" in result.stderr
    monkeypatch.setattr(Path, "touch", lambda self: None)  # without a commit the error is damage
    result = invoke("inspect", store, "--check")
    assert result.exit_code == 1
    assert "PROBLEM  MANIFEST-000000000001: No such file" in result.stdout


def _without_fakes(look: Any) -> Any:
    """Remove the manifests of the test before the store is opened."""

    def clean(path: Path, *args: Any) -> Any:
        for file in path.glob("MANIFEST-000001*"):
            file.unlink()
        return look(path, *args)

    return clean


def test_inspect_names_damaged_files(trained: Path) -> None:
    report = json.loads(done("inspect", "run", "--json"))
    (log,) = list(Path(report["stores"][0]["path"]).glob("log-*.tc"))[:1]
    flip(log, 4096 + 100)
    for words in (["inspect", "run", "--check"], ["inspect", report["stores"][0]["path"], "--check"]):
        result = invoke(*words)
        assert result.exit_code == 1
        assert "PROBLEM" in result.stdout
        assert log.name in result.stdout
    flip(log, 4096 + 100)
    dense = trained / "checkpoints" / next(iter(report["checkpoints"][-1]["files"]))
    flip(dense, 300)
    assert "no problems found" in done("inspect", "run")
    result = invoke("inspect", "run", "--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == [
        f"{dense.relative_to(trained.parent)} is damaged: its checksum differs from the manifest"
    ]
    flip(dense, 300)
    flip(Path(report["checkpoints"][-1]["path"]), 30)
    result = invoke("inspect", "run")
    assert result.exit_code == 1
    assert "PROBLEM" in result.stdout
