"""The command line over several ranks: torchrun starts it, one rank is killed, the restart goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import outcomes, play

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.launch import first_to_say
from thermocline.distributed.topology import Topology
from thermocline.training import run as running
from thermocline.utils import atomic_file

CONFIG = """
[data]
format = "synth"
[data.synth]
keys = 3000
fields = 5
examples = 1500
valid_examples = 330
test_examples = 200
[model]
name = "deepfm"
dim = 4
hidden = [8]
[tiers]
mem = "1MB"
ssd = "store"
ssd_mem = "16MB"
threads = 1
[train]
batch_size = 32
run_dir = "run"
tensorboard = false
torch_threads = 1
checkpoint_every = 5
log_every = 10
[dist]
timeout = 60
[dist.dense_sync]
exact = true
"""


def run_rank(groups: Groups, folder: str) -> Any:
    """The same run, never killed, its ranks started otherwise."""
    os.chdir(folder)
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    config = tc.Config.parse(CONFIG, ["train.display=false"])
    with tc.Run(config) as run:
        seed = torch.initial_seed()
        result = run.fit()
        assert result.test is not None
        return {**result.test, "examples_per_s": 0}, result.examples, seed


def rows_of(folder: Path) -> tuple[dict[int, bytes], list[bytes], Any]:
    """What a process by itself finds: rows, dense weights, and their AUC."""
    os.chdir(folder)
    with tc.Run.load("run") as run:
        pairs = ((key, row) for keys, found in run.table.rows() for key, row in zip(keys, found, strict=True))
        rows = {int(key): row.tobytes() for key, row in pairs}
        keys = np.array(sorted(rows), np.uint64)
        assert run.table.read(keys).tobytes() == b"".join(rows[int(key)] for key in keys)
        return rows, [p.detach().numpy().tobytes() for p in run.model.parameters()], run.evaluate(run.loader("test"))


def test_torchrun(tmp_path: Path, command_folder: None) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        (folder / "config.toml").write_text(CONFIG)
    script = Path(__file__).with_name("cli_rank.py")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command, str(script), "train", "config.toml"],
        cwd=killed, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "thermocline: rank 0 of 2 (node 0) cannot go on" in done.stderr
    assert "resumed at step 10" in done.stdout
    assert done.stdout.count("finished after 24 steps") == 1  # one rank prints
    results = play(((0, 1),), run_rank, str(whole))
    assert results[0][:2] == results[1][:2]
    assert results[0][2] != results[1][2]  # they do not drop out the same
    test, examples, _ = results[0]
    assert (test["examples"], examples) == (200, 1500)
    first, again = rows_of(whole), rows_of(killed)
    assert first == again
    assert len(first[0]) > 500
    assert first[2]["auc"] == test["auc"]  # over all ranks' parts, and over the whole in one process


# ---- what goes wrong


def test_what_all_ranks_have_to_say_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.replace("keys = 3000", "kyes = 3000"))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", "-m", "thermocline"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tc.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *command, "train", "config.toml"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    words = 'config.toml: [data.synth] has no key "kyes" (did you mean "keys"?)'
    assert done.stderr.count(words) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr  # of the rank that torchrun names


def test_words_of_one_rank_alone_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert all(first_to_say("no launcher") for _ in range(2))
    said = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        said.append([first_to_say("of all"), first_to_say(f"of rank {rank}")])
    assert said == [[True, True], [False, True]]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert first_to_say("no folder")


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch, command_folder: None) -> None:
    """Runs join torch.distributed, as a world of one."""
    monkeypatch.setattr(running, "saved_by_ranks", lambda run_dir: True)


FAILING = ["data.synth.keys=2", "tiers.mem=1KB", "tiers.ssd=config.toml/store", "train.patience=1", ""]


@pytest.mark.parametrize("override", FAILING)
def test_a_run_leaves_no_process_group_behind(override: str, joining: None, tmp_path: Path) -> None:
    """Whether it fails over its data, its table or its model, while it trains, or not at all."""
    Path("config.toml").write_text(CONFIG)
    sets = [override] if override else []
    sets += ["train.display=false", "train.steps=2", "data.synth.valid_examples=1"]
    config = tc.Config.load("config.toml", sets)
    try:
        with tc.Run(config) as run:
            assert dist.is_initialized()
            run.fit()
        assert not override
    except (ValueError, OSError, tc.ThermoclineError):
        assert override
    assert not dist.is_initialized()


def test_nor_does_one_that_is_closed_by_hand(joining: None) -> None:
    run = tc.Run(tc.Config.parse(CONFIG))
    assert dist.is_initialized()
    run.close()
    assert not dist.is_initialized()


def test_nor_do_groups_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_group(*args: Any, **options: Any) -> None:
        raise RuntimeError("no more groups")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="no more groups"):
        Groups.make(Topology.alone())
    assert not dist.is_initialized()


def run_ranks_failing(groups: Groups, folder: str) -> Any:
    try:
        return run_rank(groups, folder)
    except tc.ThermoclineError as error:
        return type(error).__name__, str(error)


def test_all_ranks_hear_that_another_process_trains_in_the_folder(tmp_path: Path) -> None:
    with atomic_file.lock_dir(tmp_path / "run"):
        found = [value for _, value in outcomes(((0, 1),), run_ranks_failing, str(tmp_path), seconds=60)]
    assert found[0][0] == "ConfigError"
    assert found[1][0] == "RankError"
    assert "rank 0 failed while it took the run's folder: ConfigError: another training uses run: " in found[1][1]
