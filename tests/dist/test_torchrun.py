"""The command line over several ranks: torchrun starts it, one rank is killed, the restart goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks_helpers import play

import thermocline as tc
from thermocline.dist.groups import Groups

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
