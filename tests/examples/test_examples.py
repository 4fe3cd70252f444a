"""Every file in examples/ runs: data made by its own script, each config by the command line, each program as it is."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import done

import thermocline as tc

EXAMPLES = Path(__file__).parents[2] / "examples"
FORMATS = ["synth", "libsvm", "libffm", "criteo", "csv", "parquet"]
SMALL = {"synth": ["data.synth.examples=20000", "data.synth.valid_examples=2000", "data.synth.test_examples=2000"]}
AUC = {"synth": 0.6, "libsvm": 0.55, "libffm": 0.6, "criteo": 0.65, "csv": 0.52, "parquet": 0.52}
"""Smallest AUC accepted on the small data of these tests; a model that learned nothing has 0.5."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/ with its data made."""
    path = tmp_path_factory.mktemp("examples") / "examples"
    shutil.copytree(EXAMPLES, path, ignore=shutil.ignore_patterns("data", "runs", "__pycache__"))
    run(path / "make_data.py", "--rows", "4000", "--folder", str(path / "data"))
    return path


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STEPS", "60")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(program: Path, *words: str) -> None:
    argv = sys.argv
    sys.argv = [str(program), *words]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.argv = argv


def test_there_is_a_config_and_a_program_per_format() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {*FORMATS, "online"}
    assert {path.stem for path in EXAMPLES.glob("train_*.py")} == {f"train_{format}" for format in FORMATS}
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in text for path in [*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.py")])


@pytest.mark.parametrize("format", FORMATS)
def test_config(folder: Path, format: str) -> None:
    flags = [word for override in SMALL.get(format, []) for word in ("--set", override)]
    done("train", f"{format}.toml", *flags, "--set", "train.tensorboard=false")
    last = json.loads((folder / "runs" / format / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "test"
    assert last["auc"] > AUC[format]
    report = json.loads(done("eval", f"runs/{format}", "--json"))
    assert report["auc"] == last["auc"]
    assert "scores of step" in done("predict", f"runs/{format}", "--out", f"runs/{format}.csv")
    assert "healthy" in done("inspect", f"runs/{format}", "--check")


@pytest.mark.parametrize("format", FORMATS)
def test_program(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(Path(f"train_{format}.py"))
    words = {"synth": "done at step 60", "csv": "finished after"}.get(format, "test AUC 0.")
    assert words in capsys.readouterr().out


def test_fuxictr_settings_without_a_counterpart_are_refused() -> None:
    convert = runpy.run_path("port_fuxictr.py")["convert"]
    model = {"model": "DNN", "embedding_dim": 4, "hidden_units": [8], "learning_rate": 0.01}
    columns = [{"name": "user", "type": "categorical"}, {"name": "age", "type": "numeric"}]
    dataset: dict[str, Any] = {
        "data_format": "csv",
        "feature_cols": columns,
        "label_col": {"name": "y"},
        **{f"{split}_data": f"{split}.csv" for split in ("train", "valid", "test")},
    }
    config = convert(model, dataset, "runs/x")
    assert (config.model.name, config.model.hidden, config.train.clip_norm) == ("dnn", (8,), 10.0)
    assert (config.data.categorical, config.data.numeric) == (("user",), ("age",))
    assert not config.data.numeric_features.standardize
    assert convert({**model, "optimizer": "Adam"}, dataset, "runs/x").train.optimizer == "adam"
    sequence = {"name": "tags", "type": "sequence", "splitter": "^"}
    for changed, message in [
        (({**model, "model": "MaskNet"}, dataset), "model is MaskNet"),
        (({**model, "hidden_activations": "dice"}, dataset), "hidden_activations is 'dice': it must be 'relu'"),
        (({**model, "num_blocks": 3}, dataset), "num_blocks is 3: it has no counterpart"),
        ((model, {**dataset, "min_categr_count": 10}), "min_categr_count is 10"),
        ((model, {**dataset, "feature_cols": [sequence]}), r"column 'tags' has type 'sequence' and \['splitter'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert(*changed, "runs/x")


@pytest.mark.parametrize("library", ["torchrec", "dlrm", "fuxictr"])
def test_ported_program(library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "150")
    run(Path(f"port_{library}.py"))
    out = capsys.readouterr().out
    auc = re.search(r"AUC (0\.\d+)(?!.*AUC)", out, re.DOTALL)
    assert auc is not None
    assert float(auc[1]) > 0.55
    if library == "dlrm":
        (difference,) = re.findall(r"losses differ by at most (\S+)", out)
        assert float(difference) <= 1e-6


def test_missing_yaml_is_an_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SystemExit, match="pip install pyyaml"):
        run(Path("port_fuxictr.py"))


def test_a_program_that_is_run_again_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    run(Path("train_synth.py"))
    assert "done at step" in capsys.readouterr().out


def torchrun(ranks: int, program: str, steps: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), program]
    env = {"STEPS": str(steps), "PYTHONPATH": str(Path(tc.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_own_loop_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks; stopped between two checkpoints and run again; then one rank, with what the two have saved."""
    torchrun(2, "own_loop_ranks.py", 70)
    out = torchrun(2, "own_loop_ranks.py", 120)
    assert "step 100: saved by 2 ranks" in out
    assert "step 50:" not in out
    assert "done at step 120: test AUC 0." in out
    assert "on 10,000 examples" in out
    auc = float(out.partition("test AUC ")[2].split()[0])
    assert auc > 0.6
    before = torch.distributed.is_initialized()  # another test of this process may have joined ranks
    run(Path("own_loop_ranks.py"))  # one rank, from the two's step 100: 60 steps of an epoch that begins anew
    assert "done at step 160: test AUC 0." in capsys.readouterr().out
    assert torch.distributed.is_initialized() == before
