"""Pipelines over several ranks: early exit, uneven data, interleaved evaluation, failures; no rank hangs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from exact.run import DIMS
from helpers.rank_training import PAIR, Job, RunOptions, make_model, make_table
from helpers.ranks import run_failing_ranks, run_ranks
from helpers.train import bits, loss_of

import thermocline as tc
from thermocline.distributed.communicator import Groups

JOB = Job(PAIR, "sgd", (30, 30))
KEYS = np.arange(8, dtype=np.uint64)


def make(groups: Groups) -> tuple[dict[str, Any], Any]:
    tables = {name: make_table(name, JOB, RunOptions(), groups, "") for name in DIMS}
    return tables, make_model(tables)


def step(model: Any, tables: dict[str, Any], batch: tc.Batch) -> None:
    if batch.examples:
        loss_of(model, batch).backward()
    for table in tables.values():
        table.step()


def exit_loops_early(groups: Groups, depth: int, window: int) -> Any:
    """Run loops that end at different batches, by break with and without close."""
    tables, model = make(groups)
    data = JOB.data(groups.topology.rank)
    for turn, leave in enumerate([1, 5, 2, 30, 7]):
        source = tc.prefetch(data[turn:], *tables.values(), depth=depth, pull_window=window)
        for n, batch in enumerate(source, start=1):
            step(model, tables, batch)
            if n == leave:
                break
        if turn % 2:
            source.close()
        del source
    for table in tables.values():
        table.dram.check()
    return [bits(table.read(KEYS)) for table in tables.values()]


@pytest.mark.parametrize(("depth", "window"), [(1, 1), (4, 1), (3, 4)])
def test_early_exit_from_loops(depth: int, window: int) -> None:
    results = run_ranks(PAIR, exit_loops_early, depth, window)
    assert results[0] == results[1]


def evaluate_while_training(groups: Groups) -> Any:
    """Evaluate, with more batches on one rank, while the training pipeline prefetches; return the flags received."""
    rank = groups.topology.rank
    tables, model = make(groups)
    flags, trained = [], 0
    source = tc.prefetch(JOB.data(rank), *tables.values(), depth=4, flags_fn=lambda: 1 << rank if trained >= 7 else 0)
    for n, batch in enumerate(source, start=1):
        trained = n
        step(model, tables, batch)
        flags.append(source.flags)
        if n in (10, 20):
            model.eval()
            with torch.no_grad(), tc.prefetch(
                JOB.data(rank)[: 2 + 5 * rank], *tables.values(), depth=1 + n // 10, training=False
            ) as batches:  # fmt: skip
                scores = [model(b) for b in batches if b.examples]
            assert len(scores) == 2 + 5 * rank
            model.train()
    before = [bits(table.read(KEYS)) for table in tables.values()]
    direct = JOB.data(rank)[3]  # without a pipeline
    step(model, tables, direct)
    assert [bits(table.read(KEYS)) for table in tables.values()] != before
    for batch in JOB.data(rank)[4:6]:
        loss_of(model, batch).backward()
    norms = [table.gradient_norm() for table in tables.values()]
    for table in tables.values():
        table.step()
    return flags, norms


def test_evaluation_while_training() -> None:
    (flags, norms), (other_flags, other_norms) = run_ranks(PAIR, evaluate_while_training)
    assert flags == other_flags
    assert flags[0] == 0  # before any rank set its flag
    assert flags[-1] == 3  # both ranks set theirs, at different windows
    assert flags == sorted(flags, key=lambda value: (value > 0, value == 3))
    assert norms == other_norms
    assert min(norms) > 0


def exit_evaluation_early(groups: Groups) -> Any:
    """One rank closes immediately, while the other has already started more windows."""
    rank = groups.topology.rank
    tables, model = make(groups)
    model.eval()
    for _ in range(5):
        with torch.no_grad(), tc.prefetch(
            JOB.data(rank), *tables.values(), depth=6, pull_window=4, training=False
        ) as batches:  # fmt: skip
            model(next(batches))
            time.sleep(0.1 * (rank == 0))
    return [bits(table.read(KEYS)) for table in tables.values()]


def test_early_exit_from_evaluation() -> None:
    results = run_ranks(PAIR, exit_evaluation_early, seconds=20)
    assert results[0] == results[1]


def fail_on_rank_1(groups: Groups, where: str) -> Any:
    """Raise on rank 1; rank 0 must get a RankError."""
    tables, model = make(groups)
    data: Any = JOB.data(groups.topology.rank)
    if groups.topology.rank == 1 and where == "reader":
        data = _failing_reader(data)
    for n, batch in enumerate(tc.prefetch(data, *tables.values(), depth=4), start=1):
        if groups.topology.rank == 1 and where == "loop" and n == 9:
            raise ArithmeticError("injected")
        step(model, tables, batch)
    return n


def _failing_reader(data: Any) -> Any:
    yield from data[:11]
    raise ArithmeticError("injected")


@pytest.mark.parametrize("where", ["loop", "reader"])
def test_failure_of_one_rank_raises_on_the_other(where: str) -> None:
    (status_0, error_0), (status_1, error_1) = run_failing_ranks(PAIR, fail_on_rank_1, where)
    assert (status_0, status_1) == ("raised", "raised")
    assert "ArithmeticError: injected" in error_1
    assert "RankError: rank 0 of 2" in error_0


def open_two_pipelines(groups: Groups) -> Any:
    """Open a second pipeline while one is open; read rows during an evaluation. Return the errors."""
    tables, _ = make(groups)
    messages = []
    first = tc.prefetch(JOB.data(groups.topology.rank), *tables.values())
    with pytest.raises(RuntimeError) as error:
        tc.prefetch(JOB.data(groups.topology.rank), *tables.values())
    messages.append(str(error.value))
    first.close()
    with tc.prefetch(JOB.data(groups.topology.rank), *tables.values(), training=False) as reading:
        next(reading)
        with pytest.raises(RuntimeError) as error:
            tables["wide"].read(KEYS)
        messages.append(str(error.value))
    tc.prefetch(JOB.data(groups.topology.rank), *tables.values()).close()
    return messages


def test_only_one_pipeline_may_be_open() -> None:
    for pipeline_error, read_error in run_ranks(PAIR, open_two_pipelines):
        assert "another pipeline over these ranks is still open" in pipeline_error
        assert "an evaluation pipeline over these ranks is open" in read_error


def use_batch_after_step(groups: Groups) -> Any:
    """Use a batch again after the step that changed its rows. Return the error."""
    tables, model = make(groups)
    source = tc.prefetch(JOB.data(groups.topology.rank), *tables.values(), depth=2)
    first = next(source)
    loss_of(model, first).backward()
    for table in tables.values():
        table.step()
    try:
        model(first)
    except RuntimeError as error:
        source.close()
        return str(error)


def test_batch_from_before_the_last_step_is_refused() -> None:
    for message in run_ranks(PAIR, use_batch_after_step):
        assert "the rows of this batch are those before the last step" in message
