"""Pipelines of several ranks: left early, uneven, with evaluation in between, failing; none waits for ever."""

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


def left_early(groups: Groups, depth: int, window: int) -> Any:
    """Loops left at any batch, by break and by forgetting the iterator; then others."""
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
def test_loops_left_early(depth: int, window: int) -> None:
    results = run_ranks(PAIR, left_early, depth, window)
    assert results[0] == results[1]


def evaluating(groups: Groups) -> Any:
    """Evaluation, of more batches on one rank, while the training pipeline is ahead; and what ranks say."""
    rank = groups.topology.rank
    tables, model = make(groups)
    heard, seen = [], 0
    source = tc.prefetch(JOB.data(rank), *tables.values(), depth=4, flags_fn=lambda: 1 << rank if seen >= 7 else 0)
    for n, batch in enumerate(source, start=1):
        seen = n
        step(model, tables, batch)
        heard.append(source.flags)
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
    norms = []
    for batch in JOB.data(rank)[4:6]:
        loss_of(model, batch).backward()
    norms = [table.gradient_norm() for table in tables.values()]
    for table in tables.values():
        table.step()
    return heard, norms


def test_evaluation_in_between() -> None:
    (heard, norms), (also, same) = run_ranks(PAIR, evaluating)
    assert heard == also
    assert heard[0] == 0  # nobody had said anything
    assert heard[-1] == 3  # both had, each when its own pipeline asked; all hear it with the same batch
    assert heard == sorted(heard, key=lambda word: (word > 0, word == 3))
    assert norms == same
    assert min(norms) > 0


def evaluation_left_early(groups: Groups) -> Any:
    """One rank closes at once; the other's stage has begun more windows by then, of several batches and tables."""
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


def test_evaluation_left_early() -> None:
    results = run_ranks(PAIR, evaluation_left_early, seconds=20)
    assert results[0] == results[1]


def failing(groups: Groups, where: str) -> Any:
    """Rank 1 fails; rank 0 must hear of it."""
    tables, model = make(groups)
    data: Any = JOB.data(groups.topology.rank)
    if groups.topology.rank == 1 and where == "reader":
        data = _broken(data)
    for n, batch in enumerate(tc.prefetch(data, *tables.values(), depth=4), start=1):
        if groups.topology.rank == 1 and where == "loop" and n == 9:
            raise ArithmeticError("of its own")
        step(model, tables, batch)
    return n


def _broken(data: Any) -> Any:
    yield from data[:11]
    raise ArithmeticError("of its own")


@pytest.mark.parametrize("where", ["loop", "reader"])
def test_a_rank_fails(where: str) -> None:
    (zero, words), (one, cause) = run_failing_ranks(PAIR, failing, where)
    assert (zero, one) == ("raised", "raised")
    assert "ArithmeticError: of its own" in cause
    assert "RankError: rank 0 of 2" in words


def twice(groups: Groups) -> Any:
    """A second pipeline beside one that is open; reading beside an evaluation."""
    tables, _ = make(groups)
    said = []
    first = tc.prefetch(JOB.data(groups.topology.rank), *tables.values())
    with pytest.raises(RuntimeError) as error:
        tc.prefetch(JOB.data(groups.topology.rank), *tables.values())
    said.append(str(error.value))
    first.close()
    with tc.prefetch(JOB.data(groups.topology.rank), *tables.values(), training=False) as reading:
        next(reading)
        with pytest.raises(RuntimeError) as error:
            tables["wide"].read(KEYS)
        said.append(str(error.value))
    tc.prefetch(JOB.data(groups.topology.rank), *tables.values()).close()
    return said


def test_one_pipeline_at_a_time() -> None:
    for words, others in run_ranks(PAIR, twice):
        assert "another pipeline over these ranks is still open" in words
        assert "an evaluation pipeline over these ranks is open" in others


def stale(groups: Groups) -> Any:
    """Rows of a batch that came before the last step."""
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


def test_rows_of_before_the_last_step() -> None:
    for words in run_ranks(PAIR, stale):
        assert "the rows of this batch are those before the last step" in words
