"""Trainers of several ranks: what one of them alone is told reaches all; figures are of all of them."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import torch
from helpers.rank_training import DIMS, PAIR, TWO_BY_TWO, Job, RunOptions, make_model, make_table
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups

JOB = Job(PAIR, "sgd", (12, 10))
EXAMPLES = 2 * (12 + 10)


class Watch(tc.Callback):
    """What came of it; and at a step: a signal to this rank, or the clock's word that a save is due."""

    def __init__(self, step: int = 0, what: str = "") -> None:
        self.step, self.what = step, what
        self.saves: list[int] = []
        self.logs: list[tuple[int, int]] = []

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step == self.step and self.what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.progress.step == self.step and self.what == "clock":
            trainer._saves.saved_at = -1e9

    def on_checkpoint(self, trainer: Any, checkpoint: tc.Checkpoint) -> None:
        self.saves.append(checkpoint.step)

    def on_log(self, trainer: Any, row: Any) -> None:
        self.logs.append((row["step"], row["examples"]))


def fit(groups: Groups, folder: str, watch: Watch, *, resume: bool = False, **settings: Any) -> Any:
    """Four ranks have two times the data of two. Rank 0 alone has what `watch` does at a step."""
    rank = groups.topology.rank
    if rank:
        watch.step = 0
    tables = {name: make_table(name, JOB, RunOptions(), groups, folder) for name in DIMS}
    model = make_model(tables)
    config = tc.TrainConfig(depth=2, tensorboard=False, display=False, torch_threads=1, log_every=5, **settings)
    dense = torch.optim.Adam(model.dense.parameters())
    trainer = tc.Trainer(model, dense, run_dir=Path(folder) / "run", config=config, callbacks=[watch])
    data = JOB.data(rank % 2)
    try:
        trainer.fit(data, None, data, resume=resume)
        how = "fine"
    except (KeyboardInterrupt, SystemExit) as error:
        how = type(error).__name__
    return how, trainer.ending, watch.saves, watch.logs


def test_the_clocks_word_with_an_epochs_last_window(tmp_path: Path) -> None:
    """It comes when all have run out of batches; the next step saves."""
    run = functools.partial(fit, checkpoint_minutes=1.0, epochs=3)
    for _, _, saves, _ in run_ranks(PAIR, run, str(tmp_path), Watch(11, "clock")):
        assert saves == [13, 36]


def test_a_signal_to_one_rank_ends_all_alike(tmp_path: Path) -> None:
    """None goes on to a collective that the others have left for ever."""
    zero, one = run_ranks(PAIR, functools.partial(fit, epochs=3), str(tmp_path), Watch(5, "signal"), seconds=20)
    assert zero[0] == "SystemExit"
    assert one[0] == "SystemExit"
    assert zero[1:3] == one[1:3]
    assert "interrupted and saved at step" in zero[1]


def test_figures_are_of_all_ranks_whatever_their_number(tmp_path: Path) -> None:
    """An epoch of two ranks, then one of four: examples are counted once."""
    for _, ending, _, logs in run_ranks(PAIR, functools.partial(fit, epochs=1), str(tmp_path), Watch()):
        assert logs == [(5, 20), (10, 40)]
        assert ending == f"finished after 12 steps, {EXAMPLES:,} examples"
    again = functools.partial(fit, resume=True, epochs=2)
    for _, ending, _, logs in run_ranks(TWO_BY_TWO, again, str(tmp_path), Watch()):
        assert logs == [(15, EXAMPLES + 3 * 8), (20, EXAMPLES + 8 * 8)]
        assert ending == f"finished after 24 steps, {3 * EXAMPLES:,} examples"
