"""Data behind URLs that only the folder of a run names is contacted with consent only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from helpers.cli import done, invoke, write_config

import thermocline as tc
from thermocline.data import files

CONFIG = """
[data]
train = "memory://ads/train.csv"
test = "memory://ads/test.csv"
numeric = "age"
[model]
name = "lr"
[tiers]
mem = "4MB"
ssd_mem = "16MB"
[train]
batch_size = 50
tensorboard = false
torch_threads = 1
run_dir = "run"
"""
TEXT = "label,user,age\n" + "".join(f"{i % 2},u{i % 7},{i % 5}\n" for i in range(100))


@pytest.fixture
def contacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Train a run on remote data of the user's own config; then record the URLs that are contacted."""
    monkeypatch.chdir(tmp_path)
    remote: Any = fsspec.filesystem("memory")
    for name in ("train", "test"):
        remote.pipe_file(f"/ads/{name}.csv", TEXT.encode())
    done("train", write_config(tmp_path, CONFIG))
    Path("local.csv").write_text(TEXT)
    find, urls = files._find_remote, []

    def find_remote(url: str, scheme: str, rest: str) -> Any:
        urls.append(url)
        return find(url, scheme, rest)

    monkeypatch.setattr(files, "_find_remote", find_remote)
    yield urls
    remote.rm("/ads", recursive=True)


def test_eval_and_predict_contact_no_url_of_the_run_without_consent(contacted: list[str]) -> None:
    for words in (["eval", "run"], ["predict", "run"]):
        refused = invoke(*words)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("thermocline: data.test[0] of run/config.toml is 'memory://ads/test.csv': ")
        assert "--allow-remote-data" in refused.stderr
    with tc.Run.load("run") as run, pytest.raises(tc.ConfigError, match=re.escape("data.train[0] of run/config.toml")):
        run.loader("train")
    assert contacted == []
    done("eval", "run", "local.csv")
    done("eval", "run", "--set", "data.test=local.csv")
    assert contacted == []


def test_without_features_the_training_data_is_refused_as_well(contacted: list[str]) -> None:
    Path("run/features.json").unlink()  # the reader would need the training data
    assert "data.train[0] of run/config.toml is 'memory://ads/train.csv'" in invoke("eval", "run", "local.csv").stderr
    assert contacted == []
    done("eval", "run", "local.csv", "--allow-remote-data")
    assert "memory://ads/train.csv" in contacted


def test_consent(contacted: list[str]) -> None:
    """By the flag, by files on the command line, by --set, and by a config of the caller."""
    for words in (["--allow-remote-data"], ["memory://ads/test.csv"], ["--set", "data.test=memory://ads/test.csv"]):
        contacted.clear()
        done("eval", "run", *words)
        assert set(contacted) == {"memory://ads/test.csv"}
    contacted.clear()
    with tc.Run.load("run", allow_remote_data=True) as run:
        assert run.loader("test") is not None
    with tc.Run.load("run", config=tc.Config.load("small.toml")) as run:
        assert run.loader("test") is not None
    assert len(contacted) == 2
    done("train", "small.toml", "--resume", "--set", "train.epochs=2")  # the config file is the user's own


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("a.csv", False), ("/a/b://c", False), ("file:///a", False), ("FILE://a", False), ("s3://a", True),
        ("HTTP://a", True), ("hdfs://h/a", True), ("s3://a\nb", True), ("simplecache::s3://a", False),
    ],
)  # fmt: skip
def test_remote_paths(path: str, remote: bool) -> None:
    """Chained fsspec URLs are names of local files to the reader."""
    assert files.is_remote(path) == remote
