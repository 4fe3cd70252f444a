"""Restart attempts of a run over several ranks: trained by `tc.Trainer`, killed, resumed, loaded by other ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import thermocline as tc
from helpers.rank_training import DIMS, Job, RunOptions, make_model, make_table, probe_keys
from helpers.train import bits, weights_of
from thermocline.distributed.communicator import Groups
from thermocline.utils import atomic_file

EVERY_STEP = tc.DenseSync(exact=True)


class SendSignal(tc.Callback):
    """Sends a signal to its own process after a step, and records the end of the run."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), self.number)

    def on_end(self, trainer: Any) -> None:
        self.ended = trainer.progress.step, trainer.ending


def train_and_terminate(groups: Groups, job: Job, options: RunOptions, folder: str, step: int) -> Any:
    """Train; rank 1 gets SIGTERM after `step`. Returns the last step, the ending and the exit code."""
    callback = SendSignal(step if groups.topology.rank == 1 else -1, signal.SIGTERM)
    try:
        train(groups, job, options, folder, resume=False, callbacks=[callback], only_fit=True)
    except SystemExit as exit:
        return *callback.ended, exit.code
    return *callback.ended, 0


class FindDamage(tc.Callback):
    """Lets the stores of its process report damage after a step, as a merge does, and records the end of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step == self.step:
            mock.patch.object(tc.Table, "damage", "page 7 of base-1: run thermocline repair").start()

    def on_end(self, trainer: Any) -> None:
        self.ended = trainer.progress.step, trainer.ending


def train_and_damage(groups: Groups, job: Job, options: RunOptions, folder: str, step: int) -> Any:
    """Train; the stores of rank 1 report damage after `step`. Returns the last step, the ending and the error."""
    callback = FindDamage(step if groups.topology.rank == 1 else -1)
    try:
        train(groups, job, options, folder, resume=False, callbacks=[callback], only_fit=True)
    except tc.CorruptionError as error:
        return *callback.ended, str(error)
    return *callback.ended, ""


def train(
    groups: Groups | None, job: Job, options: RunOptions, folder: str, *, resume: bool,
    kill_at: str | int | None = None, callbacks: Sequence[tc.Callback] = (), only_fit: bool = False,
    sync: tc.DenseSync = EVERY_STEP,
) -> Any:  # fmt: skip
    """Run one attempt on this rank; without groups, in one process. Returns hashes of rows and weights, and figures.

    kill_at   kills rank 1: after this step, or at this failpoint ("name:n", its n-th time)
    """
    rank = 0 if groups is None else groups.topology.rank
    tables = {name: make_table(name, job, options, groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)  # equals torch's Adam unless `sync` freezes it
    callbacks = list(callbacks)
    if isinstance(kill_at, int) and rank == 1:
        callbacks.append(SendSignal(kill_at, signal.SIGKILL))
    elif isinstance(kill_at, str) and rank == 1:
        set_failpoint(kill_at)
    config = tc.TrainConfig(
        depth=options.depth, pull_window=options.pull_window, checkpoint_every=10, accumulate=job.accumulate,
        tensorboard=False, display=False, torch_threads=1, log_every=7, clip_norm=0.5,
    )  # fmt: skip
    trainer = tc.Trainer(
        model, dense, run_dir=Path(folder) / "run", config=config, callbacks=callbacks,
        dense_sync=sync,
    )  # fmt: skip
    data = job.data(rank)
    result = trainer.fit(data, data[: 3 + rank], resume=resume)
    if only_fit:
        return result
    rows = {name: bits(table.read(probe_keys(job))) for name, table in tables.items()}
    for table in tables.values():
        table.dram.check()
        table.close()
    digests = {
        name: hashlib.sha256(content).hexdigest() for name, content in {**rows, "dense": weights_of(model)}.items()
    }
    return {**digests, "steps": result.progress.step, "valid": result.progress.valid, "examples": result.examples}


def set_failpoint(failpoint: str) -> None:
    """Kill this process when it reaches a failpoint: "name:n" means for the n-th time."""
    name, _, count = failpoint.partition(":")
    atomic_file._kill_at, atomic_file._left = name, int(count)


def load_and_save(groups: Groups, job: Job, options: RunOptions, folder: str, *, kill_at: str = "") -> Any:
    """Restore the last checkpoint with any number of ranks, save it again, and return its rows and this rank's share.

    kill_at   kills rank 0 at this failpoint
    """
    if kill_at and groups.topology.rank == 0:
        set_failpoint(kill_at)
    tables = {name: make_table(name, job, options, groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)
    checkpoints = tc.Checkpoints(Path(folder) / "run", list(tables.values()), model, dense)
    saved = checkpoints.restore()
    assert saved is not None
    rows = {name: bits(table.read(probe_keys(job))) for name, table in tables.items()}
    owned = {name: sum(len(keys) for keys, _ in table.rows()) for name, table in tables.items()}
    checkpoints.save(saved.step, None, saved.extra)
    assert {name: bits(table.read(probe_keys(job))) for name, table in tables.items()} == rows
    for table in tables.values():
        table.close()
    checkpoints.close()
    return {"rows": rows, "dense": weights_of(model), "owned": owned, "steps": [t.step_count for t in tables.values()]}


def load_moments(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Restore the last checkpoint with any number of ranks and return this rank's optimizer state and parameters."""
    options = dataclasses.replace(options, memory=None)
    tables = {name: make_table(name, job, options, groups, folder) for name in DIMS}
    model = make_model(tables)
    dense = tc.FrozenAdam(model.dense.parameters(), lr=0.01)
    checkpoints = tc.Checkpoints(Path(folder) / "run", list(tables.values()), model, dense)
    assert checkpoints.restore() is not None
    state = {f"{n}/{name}": value for n, values in enumerate(dense.state.values()) for name, value in values.items()}
    for table in tables.values():
        table.close()
    checkpoints.close()
    return {**state, **{f"{n}/x": value.detach() for n, value in enumerate(model.dense.parameters())}}
