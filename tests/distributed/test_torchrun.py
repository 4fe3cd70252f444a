"""The command line under torchrun: a killed rank, the automatic restart, errors, and clean-up of process groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_failing_ranks, run_ranks

import thermocline as tc
from thermocline.distributed import communicator
from thermocline.distributed.communicator import Groups
from thermocline.distributed.launch import is_first_report
from thermocline.distributed.topology import Topology
from thermocline.training import run as run_module
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
    """Run CONFIG without torchrun and without a kill. Returns test metrics, trained examples and torch's seed."""
    os.chdir(folder)
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    config = tc.Config.parse(CONFIG, ["train.display=false"])
    with tc.Run(config) as run:
        seed = torch.initial_seed()
        result = run.fit()
        assert result.test is not None
        return {**result.test, "examples_per_s": 0}, result.examples, seed


def load_run(folder: Path) -> tuple[dict[int, bytes], list[bytes], Any]:
    """Load a run in one process. Returns rows by key, dense weights and test metrics."""
    os.chdir(folder)
    with tc.Run.load("run") as run:
        pairs = ((key, row) for keys, values in run.table.rows() for key, row in zip(keys, values, strict=True))
        rows = {int(key): row.tobytes() for key, row in pairs}
        keys = np.array(sorted(rows), np.uint64)
        assert run.table.read(keys).tobytes() == b"".join(rows[int(key)] for key in keys)
        return rows, [p.detach().numpy().tobytes() for p in run.model.parameters()], run.evaluate(run.loader("test"))


def test_a_killed_rank_restarts_and_ends_with_the_same_bits(tmp_path: Path, command_folder: None) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, undisturbed):
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
    # torchrun may end rank 0 before that has noticed that its peer is gone. Without torchrun, rank 0 must raise
    # RankError: test_a_killed_rank of test_restarts.py. No test requires the line of the command.
    reports = ("thermocline: rank 0 of 2 (node 0) cannot continue", "closing signal SIGTERM")
    assert any(report in done.stderr for report in reports), done.stderr
    assert "resumed at step 10" in done.stdout
    assert done.stdout.count("finished after 24 steps") == 1  # only rank 0 prints
    results = run_ranks(((0, 1),), run_rank, str(undisturbed))
    assert results[0][:2] == results[1][:2]
    assert results[0][2] != results[1][2]  # dropout differs between ranks
    test, examples, _ = results[0]
    assert (test["examples"], examples) == (200, 1500)
    expected, resumed = load_run(undisturbed), load_run(killed)
    assert resumed == expected
    assert len(expected[0]) > 500
    assert expected[2]["auc"] == test["auc"]  # of one process, and over the parts of two ranks
    evaluated = subprocess.run(
        [sys.executable, *command[:-3], "--standalone", "-m", "thermocline", "eval", "run", "--json"],
        cwd=killed, env={**env, "PYTHONPATH": str(Path(tc.__file__).parents[1])}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    report = json.loads(evaluated.stdout)  # printed once
    assert (report["auc"], report["examples"]) == (test["auc"], 200)


# ---- errors


def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.replace("keys = 3000", "kyes = 3000"))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", "-m", "thermocline"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tc.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *command, "train", "config.toml"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    message = 'config.toml: [data.synth] has no key "kyes" (did you mean "keys"?)'
    assert done.stderr.count(message) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr  # of the rank that torchrun reports


def test_is_first_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert all(is_first_report("no launcher") for _ in range(2))
    reports = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        reports.append([is_first_report("of all"), is_first_report(f"of rank {rank}")])
    assert reports == [[True, True], [False, True]]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert is_first_report("no folder")


@pytest.fixture
def join_one_rank(monkeypatch: pytest.MonkeyPatch, command_folder: None, no_process_group: None) -> None:
    """Make runs join torch.distributed as a job of one rank."""
    monkeypatch.setattr(run_module, "saved_by_ranks", lambda run_dir: True)


OVERRIDES = ["data.synth.keys=2", "tiers.mem=1KB", "tiers.ssd=config.toml/store", "train.patience=1", ""]


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_run_destroys_its_process_group(override: str, join_one_rank: None, tmp_path: Path) -> None:
    """Whether it fails in its data, its table, its store or its training, or succeeds."""
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


def test_close_destroys_the_process_group(join_one_rank: None) -> None:
    run = tc.Run(tc.Config.parse(CONFIG))
    assert dist.is_initialized()
    run.close()
    assert not dist.is_initialized()


def test_failed_groups_destroy_the_process_group(monkeypatch: pytest.MonkeyPatch, no_process_group: None) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("creating groups failed")

    monkeypatch.setattr(communicator, "make_channels", fail)
    with pytest.raises(RuntimeError, match="creating groups failed"):
        Groups.make(Topology.single())
    assert not dist.is_initialized()


def run_rank_error(groups: Groups, folder: str) -> Any:
    try:
        return run_rank(groups, folder)
    except tc.ThermoclineError as error:
        return type(error).__name__, str(error)


def test_all_ranks_raise_if_the_run_folder_is_locked(tmp_path: Path) -> None:
    with atomic_file.lock_dir(tmp_path / "run"):
        errors = [value for _, value in run_failing_ranks(((0, 1),), run_rank_error, str(tmp_path), seconds=60)]
    assert errors[0][0] == "ConfigError"
    assert errors[1][0] == "RankError"
    assert "rank 0 failed while locking the run folder: ConfigError: another training uses run: " in errors[1][1]
