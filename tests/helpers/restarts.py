"""Lives of a run over several ranks: trained by `tc.Trainer`, killed, resumed, loaded by another number of ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import thermocline as tc
from helpers.rank_training import DIMS, Job, Way, keys_of, make_model, make_table, probe
from helpers.train import bits, weights_of
from thermocline.distributed.communicator import Groups
from thermocline.utils import atomic_file

EVERY_STEP = tc.DenseSync(exact=True)


class Send(tc.Callback):
    """A signal to its own rank after a step; notes where the run ends."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), self.number)

    def on_end(self, trainer: Any) -> None:
        self.ended = trainer.progress.step, trainer.ending


def interrupted(groups: Groups, job: Job, way: Way, folder: str, step: int) -> Any:
    """SIGTERM to rank 1 only."""
    send = Send(step if groups.topology.rank == 1 else -1, signal.SIGTERM)
    try:
        live(groups, job, way, folder, resume=False, listening=[send], only_fit=True)
    except SystemExit as exit:
        return *send.ended, exit.code
    return *send.ended, 0


def live(
    groups: Groups | None, job: Job, way: Way, folder: str, *, resume: bool, dies: str | int | None = None,
    listening: Sequence[tc.Callback] = (), only_fit: bool = False, sync: tc.DenseSync = EVERY_STEP,
) -> Any:  # fmt: skip
    """One life of a rank; without groups, of one process. `dies`: after which step rank 1 does, or at a named point."""
    rank = 0 if groups is None else groups.topology.rank
    tables = {name: make_table(name, job, way, groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)  # torch's Adam, unless `sync` freezes it
    callbacks = list(listening)
    if isinstance(dies, int) and rank == 1:
        callbacks.append(Send(dies, signal.SIGKILL))
    elif isinstance(dies, str) and rank == 1:
        die_at(dies)
    config = tc.TrainConfig(
        depth=way.depth, pull_window=way.pull_window, checkpoint_every=10, accumulate=job.accumulate,
        tensorboard=False, display=False, torch_threads=1, log_every=7, clip_norm=0.5,
    )  # fmt: skip
    trainer = tc.Trainer(
        model, dense, run_dir=Path(folder) / "run", config=config, callbacks=callbacks,
        dense_sync=sync,
    )  # fmt: skip
    mine = job.data(rank)
    result = trainer.fit(mine, mine[: 3 + rank], resume=resume)
    if only_fit:
        return result
    rows = {name: bits(table.read(probe(job))) for name, table in tables.items()}
    for table in tables.values():
        table.dram.check()
        table.close()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in {**rows, "dense": weights_of(model)}.items()}
    return {**digests, "steps": result.progress.step, "valid": result.progress.valid, "examples": result.examples}


def die_at(point: str) -> None:
    """`name:n`: this process is killed when it comes to a named point for the n-th time."""
    name, _, count = point.partition(":")
    atomic_file._kill_at, atomic_file._left = name, int(count)


def load(groups: Groups, job: Job, way: Way, folder: str, *, dies: str = "") -> Any:
    """Opens the run as it was saved, by any number of ranks; what all of them read, and what this one holds."""
    if dies and groups.topology.rank == 0:
        die_at(dies)
    tables = {name: make_table(name, job, way, groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)
    checkpoints = tc.Checkpoints(Path(folder) / "run", list(tables.values()), model, dense)
    saved = checkpoints.restore()
    assert saved is not None
    rows = {name: bits(table.read(probe(job))) for name, table in tables.items()}
    held = {name: sum(len(keys) for keys, _ in table.rows()) for name, table in tables.items()}
    checkpoints.save(saved.step, None, saved.extra)
    again = {name: bits(table.read(probe(job))) for name, table in tables.items()}
    assert again == rows
    for table in tables.values():
        table.close()
    checkpoints.close()
    return {"rows": rows, "dense": weights_of(model), "held": held, "steps": [t.step_count for t in tables.values()]}


def moments(groups: Groups, job: Job, way: Way, folder: str) -> dict[str, Any]:
    """What a rank, of any number of them, would go on with: its optimizer's tensors, by parameter and name."""
    tables = {name: make_table(name, job, dataclasses.replace(way, memory=None), groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)
    checkpoints = tc.Checkpoints(Path(folder) / "run", list(tables.values()), model, dense)
    assert checkpoints.restore() is not None
    state = {f"{n}/{name}": value for n, own in enumerate(dense.state.values()) for name, value in own.items()}
    for table in tables.values():
        table.close()
    checkpoints.close()
    return {**state, "dense": weights_of(model)}


def trained_keys(job: Job, name: str) -> np.ndarray[Any, Any]:
    return keys_of(job, name)
