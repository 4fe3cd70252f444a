"""`data.follow` over ranks: every example once, batches of all ranks of one file, exact resumption."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.stream import CONFIG, write_file
from helpers.train import weights_of

import thermocline as tc
from thermocline.data.follow import FollowReader
from thermocline.distributed.communicator import Groups
from thermocline.errors import DataError, RankError
from thermocline.training.run import Run

THREE = ((0, 1, 2),)
SIZES = (900, 0, 5, 0, 330, 2000)
"""Examples of the files: some have none, one is too small for all ranks."""
FOLLOW = ["data.follow=true", "data.follow_idle=2s", "train.checkpoint_every=4"]


def write(folder: Path, number: int) -> None:
    values = np.random.default_rng(number).zipf(1.3, (SIZES[number], 2)) % 90
    # Long lines, so that files have several blocks.
    rows = ((int((a + b) % 3 == 0), 10_000 * number + i, a, f"{b:0100}") for i, (a, b) in enumerate(values))
    write_file(folder / "in" / f"{number}.csv", rows)  # type: ignore[arg-type]


class Times(tc.Callback):
    """Records the event times of each batch of this rank; may stop the run or write files."""

    def __init__(self, folder: Path, kill: int | None, arriving: int, rank: int) -> None:
        self.batches: list[list[int]] = []
        self._folder, self._kill, self._next, self._rank = folder, kill, len(SIZES) - arriving, rank

    def on_start(self, trainer: tc.Trainer) -> None:
        original = trainer.train_step

        def train_step(batch: tc.Batch) -> Any:
            assert batch.time is not None
            self.batches.append(batch.time.tolist())
            return original(batch)

        trainer.train_step = train_step  # type: ignore[method-assign]

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self._kill:
            raise InterruptedError

    def on_wait(self, trainer: tc.Trainer) -> None:
        if self._rank == 0 and self._next < len(SIZES):
            write(self._folder, self._next)
            self._next += 1


def train_rank(
    groups: Groups, folder: str, sets: list[str], resume: bool = False, kill: int | None = None, arriving: int = 0
) -> dict[str, Any]:
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    times = Times(Path(folder), kill, arriving, groups.topology.rank)
    with Run(tc.Config.parse(CONFIG.format(folder=folder), [*FOLLOW, *sets]), resume=resume) as run:
        try:
            run.fit(resume=resume, callbacks=[times])
        except InterruptedError:
            return {"batches": times.batches}
        rows = sorted((int(k), r.tobytes()) for keys, rows in run.table.rows() for k, r in zip(keys, rows, strict=True))
        return {"dense": weights_of(run.model), "rows": rows, "batches": times.batches}


def test_every_example_once_in_the_order_of_the_files_and_resumed_exactly(tmp_path: Path) -> None:
    """The files appear while the run waits, or all before: the bits are the same."""
    sets = ["data.shuffle=true", f"train.run_dir={tmp_path}/run"]
    write(tmp_path, 0)
    # A wait of rank 0 begins while it still trains: a busy machine may take seconds until it writes the next file.
    whole = run_ranks(THREE, train_rank, str(tmp_path), [*sets, "data.follow_idle=15s"], False, None, 5)
    per_rank = [result["batches"] for result in whole]
    assert len({len(batches) for batches in per_rank}) == 1
    steps = [[*itertools.chain(*batches)] for batches in zip(*per_rank, strict=True)]
    seen = [at // 10_000 for step in steps for at in step[:1]]
    assert seen == sorted(seen), "files out of order"
    assert all(len({at // 10_000 for at in step}) == 1 for step in steps), "a step of several files"
    expected = [10_000 * number + i for number, size in enumerate(SIZES) for i in range(size)]
    assert sorted(at for step in steps for at in step) == expected
    assert all(sum(map(len, batches)) > 600 for batches in per_rank), "a rank has read little"
    # Stopped without a save, in the middle of a file and at the end of one, and resumed.
    sets[-1] = f"train.run_dir={tmp_path}/again"
    first = steps.index(next(step for step in steps if step[0] // 10_000 == 4))
    run_ranks(THREE, train_rank, str(tmp_path), sets, False, 6)
    run_ranks(THREE, train_rank, str(tmp_path), sets, True, first + 3)
    resumed = run_ranks(THREE, train_rank, str(tmp_path), sets, True)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["dense"] == theirs["dense"]
        assert ours["rows"] == theirs["rows"]
        assert ours["batches"] == theirs["batches"][-len(ours["batches"]) :]


def wait_and_interrupt(groups: Groups, folder: str) -> tuple[str, int]:
    """Rank 1 receives SIGTERM while all ranks wait for a file."""
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    sets = [*FOLLOW, "data.follow_idle=none", f"train.run_dir={folder}/run"]
    waits = 0

    class Wait(tc.Callback):
        def on_wait(self, trainer: tc.Trainer) -> None:
            nonlocal waits
            waits += 1
            if waits == 3 and groups.topology.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_end(self, trainer: tc.Trainer) -> None:
            self.ending = trainer.ending
            self.step = trainer.progress.step

    callback = Wait()
    with Run(tc.Config.parse(CONFIG.format(folder=folder), sets)) as run, contextlib.suppress(SystemExit):
        run.fit(callbacks=[callback])
    return callback.ending, callback.step


def fail_on_rank1(groups: Groups, folder: str) -> str:
    """Rank 1 cannot read the second file, while the others may wait for it outside of a collective."""
    original = FollowReader._open

    def open_file(self: FollowReader, source: Any, features: Any, number: int) -> Any:
        if groups.topology.rank == 1 and number == 2:
            time.sleep(4)  # the other ranks have trained the batch of the first file, and wait for this one's
            raise DataError("no such column")
        return original(self, source, features, number)

    FollowReader._open = open_file  # type: ignore[method-assign]
    try:
        train_rank(groups, folder, [f"train.run_dir={folder}/run", "data.follow_idle=none", "dist.timeout=20"])
    except (DataError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_an_error_of_one_reader_ends_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, 2)
    shutil.copy(tmp_path / "in" / "2.csv", tmp_path / "in" / "3.csv")  # read by rank 1 alone
    texts = run_ranks(THREE, fail_on_rank1, str(tmp_path), seconds=60)
    assert texts[1] == "DataError: no such column"
    assert texts[0] == texts[2] == "RankError: rank 1 failed while following files: DataError: no such column"


def test_a_signal_ends_the_wait_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (first, step), (second, _) = run_ranks(((0, 1),), wait_and_interrupt, str(tmp_path), seconds=60)
    assert first == second
    assert first.startswith(f"interrupted and saved at step {step}")
    with pytest.raises(AssertionError, match=r"the checkpoint is of 2 ranks.*this run has 3 ranks: resume with"):
        run_ranks(THREE, train_rank, str(tmp_path), [f"train.run_dir={tmp_path}/run"], True)
