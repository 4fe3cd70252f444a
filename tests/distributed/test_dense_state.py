"""Saving, evaluating and resuming change no bit of the dense state of several ranks; readers get the mean of the ranks.

The model has batch norm, whose running statistics differ between ranks, and dropout. Training is compared with a run
that neither saved nor evaluated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dense import mean
from helpers.rank_training import DIMS, PAIR, TWO_BY_TWO, Job, RunOptions, make_model, make_table, probe_keys
from helpers.ranks import Nodes, run_ranks
from helpers.train import bits

import thermocline as tc
from thermocline.checkpoint import state_tree
from thermocline.distributed.communicator import Groups
from thermocline.embedding.state_dict import dense_state_dict

JOBS = {nodes: Job(nodes, "adagrad", batches) for nodes, batches in ((PAIR, (24, 19)), (TWO_BY_TWO, (24, 19, 16, 24)))}
SETTINGS = {
    PAIR: [
        tc.DenseSync(exact=True),
        tc.DenseSync(every=16, exact=True),
    ],
    TWO_BY_TWO: [tc.DenseSync(every=16, scope="nodes", exact=True)],
}


class Recorder(tc.Callback):
    """Records digests of this rank's dense state after every step. Makes saves due by the clock after `clock` steps."""

    def __init__(self, clock: tuple[int, ...]) -> None:
        self.clock = clock
        self.digests: dict[int, str] = {}
        self.saves: list[int] = []

    def on_step(self, trainer: Any, loss: object) -> None:
        step = trainer.progress.step
        tensors: state_tree.Tensors = {"random": torch.get_rng_state()}
        state = [dense_state_dict(trainer.model), trainer.optimizers[0].state_dict()]
        values = json.dumps(state_tree.pack(state, tensors, ""))
        content = b"".join(bits(tensor) for tensor in tensors.values())
        self.digests[step] = hashlib.sha256(values.encode() + content).hexdigest()
        if step in self.clock:
            trainer._saves.saved_at = -1e9

    def on_checkpoint(self, trainer: Any, checkpoint: tc.Checkpoint) -> None:
        self.saves.append(checkpoint.step)


def fit(
    groups: Groups, sync: tc.DenseSync, folder: Path | None, *, steps: int | None = None, clock: tuple[int, ...] = (),
    valid_every: int | None = None, resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train one rank; without a folder it never saves, without `valid_every` it never evaluates."""
    rank, job = groups.topology.rank, JOBS[groups.topology.nodes]
    tables, model, dense = make(groups)
    torch.manual_seed(rank)
    config = tc.TrainConfig(
        depth=2, pull_window=2, steps=steps, valid_every=valid_every, checkpoint_minutes=1.0, tensorboard=False,
        display=False, torch_threads=1, clip_norm=0.5,
    )  # fmt: skip
    recorder = Recorder(clock if rank == 0 else ())
    trainer = tc.Trainer(model, dense, run_dir=folder, config=config, callbacks=[recorder], dense_sync=sync)
    data = job.data(rank)
    trainer.fit(data, data[: 3 + rank] if valid_every else None, resume=resume)
    refused = ""
    if folder is not None:
        try:
            trainer.save()
        except tc.ThermoclineError as error:
            refused = str(error)
    rows = {name: bits(table.read(probe_keys(job))) for name, table in tables.items()}
    for table in tables.values():
        table.close()
    return {
        "digests": recorder.digests, "saves": recorder.saves, "rows": rows, "final": floats_of(model),
        "refused": refused,
    }  # fmt: skip


def make(groups: Groups) -> tuple[dict[str, Any], Any, tc.FrozenAdam]:
    tables = {name: make_table(name, JOBS[groups.topology.nodes], RunOptions(), groups, "") for name in DIMS}
    model = make_model(tables)
    model.dense.insert(1, torch.nn.BatchNorm1d(8))
    model.dense.insert(3, torch.nn.Dropout(0.2))
    return tables, model, tc.FrozenAdam(model.dense.parameters(), lr=0.01)


def floats_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in dense_state_dict(model).items() if value.is_floating_point()}


def read(groups: Groups, folder: Path) -> dict[str, bytes]:
    """Return the model that as many ranks read from the last checkpoint."""
    tables, model, dense = make(groups)
    checkpoints = tc.Checkpoints(folder, list(tables.values()), model, dense, read_only=True)
    assert checkpoints.restore() is not None
    checkpoints.close()
    for table in tables.values():
        table.close()
    return floats_of(model)


def train_all_ways(groups: Groups, folder: str) -> list[list[dict[str, Any]]]:
    results = []
    for n, sync in enumerate(SETTINGS[groups.topology.nodes]):
        saving, stopped = (Path(folder) / f"{n}-{name}" for name in ("saving", "stopped"))
        results.append(
            [
                fit(groups, sync, None),
                fit(groups, sync, saving, clock=(3, 7, 17), valid_every=5),
                fit(groups, sync, stopped, steps=13, valid_every=4),
                fit(groups, sync, stopped, resume=True) | {"read": read(groups, stopped)},
            ]
        )
    return results


@pytest.mark.parametrize("nodes", SETTINGS, ids=str)
def test_saving_evaluating_and_resuming_change_no_bit(nodes: Nodes, tmp_path: Path) -> None:
    ranks = run_ranks(nodes, train_all_ways, str(tmp_path))
    for n, sync in enumerate(SETTINGS[nodes]):
        for plain, saving, stopped, resumed in (rank[n] for rank in ranks):
            assert len(plain["digests"]) == 24
            assert plain["saves"] == []
            assert len([step for step in saving["saves"] if step % 16]) >= 3, saving["saves"]
            assert saving["digests"] == plain["digests"], sync
            assert list(stopped["digests"]) == list(range(1, 14))
            assert stopped["digests"] | resumed["digests"] == plain["digests"], sync
            assert list(resumed["digests"]) == list(range(14, 25))
            assert saving["rows"] == resumed["rows"] == plain["rows"]
            assert saving["final"] == resumed["final"] == plain["final"] == resumed["read"]  # the mean
            for run in (saving, stopped, resumed):
                assert "fit has ended, and every rank has the mean" in run["refused"]
        for first, second in itertools.combinations([rank[n][0] for rank in ranks], 2):
            assert all(first["digests"][step] != second["digests"][step] for step in first["digests"])
            assert first["final"] == second["final"]


# ---- readers

CONFIG = """
[data]
format = "synth"
[data.synth]
keys = 60
fields = 3
examples = 400
valid_examples = 0
test_examples = 100
[model]
name = "dnn"
dim = 2
hidden = [3]
batch_norm = true
[tiers]
mem = "1MB"
threads = 1
[train]
batch_size = 8
run_dir = "run"
tensorboard = false
torch_threads = 1
log_every = 100
steps = 7
dense_lr = 0.1
dense_optimizer = "adam"
"""


def run_config(groups: Groups, folder: str, sync: str) -> Any:
    """Train CONFIG on this rank. Returns the test metrics, and the tensors of this rank that were saved."""
    os.chdir(folder)
    topology = groups.topology
    os.environ |= {"RANK": str(topology.rank), "WORLD_SIZE": str(topology.world)}
    os.environ["LOCAL_WORLD_SIZE"] = str(len(topology.nodes[0]))
    saved: list[dict[str, torch.Tensor]] = []

    class Copy(tc.Callback):
        def on_checkpoint(self, trainer: Any, checkpoint: tc.Checkpoint) -> None:
            saved.append({name: value.clone() for name, value in dense_state_dict(trainer.model).items()})

    with tc.Run(tc.Config.parse(CONFIG + f"[dist]\ndense_sync = {sync}\n", ["train.display=false"])) as run:
        test = run.fit(callbacks=[Copy()]).test
        assert test is not None
        return {**test, "examples_per_s": 0}, saved[-1]


@pytest.mark.parametrize(
    ("nodes", "sync", "stored"),
    [
        (((0, 1, 2),), "{every = 4, exact = true}", [True, True, True]),
        (((0, 1, 2),), "{exact = true}", [True, False, False]),
        (TWO_BY_TWO, '{every = 4, scope = "nodes", exact = true}', [True, False, True, False]),
    ],
)
def test_readers_load_the_mean_of_the_ranks(
    nodes: Nodes, sync: str, stored: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved between two merges: one process has the metrics of the test at the end of training.

    stored   whether a rank's file has the parameters: they are stored once for ranks where they are always equal
    """
    results = run_ranks(nodes, run_config, str(tmp_path), sync)
    monkeypatch.chdir(tmp_path)
    with tc.Run.load("run") as run:
        figures = run.evaluate(run.loader("test"))
        loaded = dense_state_dict(run.model)
    expected = results[0][0]
    assert figures == pytest.approx({name: expected[name] for name in figures}, rel=1e-12)  # examples in another order
    different = set()
    for name, value in loaded.items():
        saved = [tensors[name] for _, tensors in results]
        if all(torch.equal(tensor, saved[0]) for tensor in saved):
            assert torch.equal(value, saved[0]), name
        else:
            different.add(name)
            averaged = mean(saved, nodes)
            assert averaged is not None
            assert torch.equal(value, averaged), name
    assert {"net.1.running_mean", "net.1.running_var"} <= different
    assert ("net.0.weight" in different) == ("every" in sync)
    files = sorted((tmp_path / "run" / "checkpoints").glob("*.rank-*.safetensors"))
    assert ["dense/model/net.0.weight" in state_tree.decode(file.read_bytes()) for file in files] == stored
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    with pytest.raises(tc.CorruptionError, match=r"rank-00001-of-0000\d.safetensors is damaged"):
        tc.Run.load("run")
