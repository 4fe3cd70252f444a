"""Trainers of several ranks: signals and save requests of one rank reach all; figures cover all ranks."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from helpers.rank_training import DIMS, PAIR, TWO_BY_TWO, Job, RunOptions, make_model, make_table
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups

JOB = Job(PAIR, "sgd", (12, 10))
EXAMPLES = 2 * (12 + 10)


class Recorder(tc.Callback):
    """Records saves and logs. At a step it sends this process SIGTERM, or makes a save due by the clock."""

    def __init__(self, step: int = 0, event: str = "") -> None:
        self.step, self.event = step, event
        self.saves: list[int] = []
        self.logs: list[tuple[int, int]] = []

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step == self.step and self.event == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.progress.step == self.step and self.event == "clock":
            exchange = next(stage for stage in trainer._stages if stage.name == "exchange")
            end = time.monotonic() + 30
            while exchange.items <= self.step and time.monotonic() < end:  # else the flag travels with the next batch
                time.sleep(0.001)
            trainer._saves.saved_at = -1e9

    def on_checkpoint(self, trainer: Any, checkpoint: tc.Checkpoint) -> None:
        self.saves.append(checkpoint.step)

    def on_log(self, trainer: Any, row: Any) -> None:
        self.logs.append((row["step"], row["examples"]))


def fit(groups: Groups, folder: str, recorder: Recorder, *, resume: bool = False, **settings: Any) -> Any:
    """Train one rank. Four ranks have twice the data of two. Only on rank 0 does `recorder` trigger its event."""
    rank = groups.topology.rank
    if rank:
        recorder.step = 0
    tables = {name: make_table(name, JOB, RunOptions(), groups, folder) for name in DIMS}
    model = make_model(tables)
    config = tc.TrainConfig(depth=2, tensorboard=False, display=False, torch_threads=1, log_every=5, **settings)
    dense = torch.optim.Adam(model.dense.parameters())
    trainer = tc.Trainer(model, dense, run_dir=Path(folder) / "run", config=config, callbacks=[recorder])
    data = JOB.data(rank % 2)
    try:
        trainer.fit(data, None, data, resume=resume)
        outcome = "finished"
    except (KeyboardInterrupt, SystemExit) as error:
        outcome = type(error).__name__
    return outcome, trainer.ending, recorder.saves, recorder.logs


def test_save_due_in_the_last_window_of_an_epoch(tmp_path: Path) -> None:
    """The flag arrives when all ranks have no more batches; the next step saves."""
    run = functools.partial(fit, checkpoint_minutes=1.0, epochs=3)
    for _, _, saves, _ in run_ranks(PAIR, run, str(tmp_path), Recorder(11, "clock")):
        assert saves == [13, 36]


def test_signal_to_one_rank_ends_all(tmp_path: Path) -> None:
    """No rank enters a collective that the others skip."""
    rank_0, rank_1 = run_ranks(PAIR, functools.partial(fit, epochs=3), str(tmp_path), Recorder(5, "signal"), seconds=20)
    assert rank_0[0] == "SystemExit"
    assert rank_1[0] == "SystemExit"
    assert rank_0[1:3] == rank_1[1:3]
    assert "interrupted and saved at step" in rank_0[1]


def test_figures_cover_all_ranks_after_their_number_changes(tmp_path: Path) -> None:
    """One epoch with two ranks, then one with four: every example is counted once."""
    for _, ending, _, logs in run_ranks(PAIR, functools.partial(fit, epochs=1), str(tmp_path), Recorder()):
        assert logs == [(5, 20), (10, 40), (12, EXAMPLES)]
        assert ending == f"finished after 12 steps, {EXAMPLES:,} examples"
    resumed = functools.partial(fit, resume=True, epochs=2)
    for _, ending, _, logs in run_ranks(TWO_BY_TWO, resumed, str(tmp_path), Recorder()):
        assert logs == [(15, EXAMPLES + 3 * 8), (20, EXAMPLES + 8 * 8), (24, 3 * EXAMPLES)]
        assert ending == f"finished after 24 steps, {3 * EXAMPLES:,} examples"
