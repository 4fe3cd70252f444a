"""`Table.load_rows` and `read_rows`: on every backend, through every tier, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.backends import BACKENDS, open_table
from helpers.rank_training import PAIR
from helpers.ranks import run_ranks
from helpers.ssd import SMALL
from helpers.train import OPTIMIZERS, make_batches

import thermocline as tc


def rows_for(table: tc.Table, keys: Any, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    state = table.optimizer.state_floats(table.dim)
    return rng.random((len(keys), table.dim), np.float32), rng.random((len(keys), state), np.float32)


def train(table: tc.Table, batches: list[tc.Batch]) -> None:
    bag = tc.EmbeddingBag(table, 3)
    for batch in batches:
        bag(batch).square().sum().backward()
        table.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loaded_rows_are_read_and_trained(backend: str, optimizer: Any) -> None:
    batches = make_batches(4)
    source, table = open_table("reference", optimizer=optimizer), open_table(backend, optimizer=optimizer)
    train(source, batches[:2])
    train(table, batches[1:2])  # rows in the top tier that are replaced, and one step
    keys = np.concatenate([keys for keys, _ in source.rows()])
    weights, state = source.read_rows(keys)
    table.load_rows(keys, weights, state)
    table.step_count = source.step_count
    for got, wanted in zip(table.read_rows(keys), (weights, state), strict=True):
        assert got.tobytes() == wanted.tobytes()
    train(source, batches[2:])
    train(table, batches[2:])
    later = np.unique(np.concatenate([batch.ids for batch in batches]))
    assert table.read(later).tobytes() == source.read(later).tobytes()


def test_more_rows_than_memory_are_loaded_through_the_store(tmp_path: Path) -> None:
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="128KB", ssd=tmp_path / "rows", ssd_options=SMALL)
    keys = np.arange(20_000, dtype=np.uint64)
    assert len(keys) > 4 * table.dram.capacity
    weights, state = rows_for(table, keys)
    table.load_rows(keys, weights, state)
    table.commit()
    assert sum(len(part) for part, _ in table.rows()) == len(keys)
    table.close()
    again = tc.Table(4, tc.Adagrad(lr=0.1), mem="128KB", ssd=tmp_path / "rows", ssd_options=SMALL)
    for got, wanted in zip(again.read_rows(keys), (weights, state), strict=True):
        assert np.array_equal(got, wanted)


def test_rows_without_state_begin_as_new_rows() -> None:
    table = tc.Table(4, tc.Adagrad(lr=0.1, initial_accumulator=0.5), mem="1MB")
    table.load_rows([1, 1], torch.tensor([[1.0] * 4, [2.0] * 4]))  # the last row of a key counts
    weights, state = table.read_rows([1])
    assert weights.tolist() == [[2.0] * 4]
    assert state.tolist() == [[0.5] * 4]
    rowwise = tc.Table(4, tc.RowWiseAdagrad(lr=0.1), mem="1MB")
    rowwise.load_rows(torch.tensor([-1]), np.ones((1, 4), np.float32), np.full(1, 3, np.float32))
    assert rowwise.read_rows([2**64 - 1])[1].tolist() == [[3.0]]


def test_rows_that_catch_up_are_loaded_as_of_the_last_step() -> None:
    optimizer = tc.Adam(lr=0.1, lazy="catch_up")
    table = tc.Table(4, optimizer, mem="1MB")
    train(table, make_batches(2))
    weights, state = rows_for(tc.Table(4, tc.Adam(), mem="1MB"), [1])
    table.load_rows([1], weights, state)
    got = table.read_rows([1])
    assert np.array_equal(got[0], weights)
    assert np.array_equal(got[1], state)
    train(table, make_batches(3)[2:])  # without the key: its moments move it
    assert not np.array_equal(table.read_rows([1])[0], weights)


def test_other_rows_stay() -> None:
    batch = make_batches(1)[0]
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
    train(table, [batch])
    before = table.read(batch.ids)
    table.load_rows([12345], np.ones((1, 4), np.float32))
    assert table.read(batch.ids).tobytes() == before.tobytes()
    assert table.step_count == 1


def test_rows_are_rounded_to_the_stored_precision() -> None:
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB", precision="bf16")
    table.load_rows([1], np.full((1, 4), 1 + 2**-12, np.float32))
    assert table.read_rows([1])[0].tolist() == [[1.0] * 4]


def test_an_earlier_state_dict_is_refused_after_load_rows() -> None:
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", name="ads")
    bag = tc.EmbeddingBag(table, 3)
    state = bag.state_dict()
    table.load_rows([1], np.ones((1, 4), np.float32))
    with pytest.raises(tc.FormatError, match="belongs to the rows of table 'ads' untrained"):
        bag.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], np.ones((1, 3), np.float32)), "rows has shape (1, 3): expected (1, 4)"),
        (([1], np.ones((1, 4))), "rows has dtype float64: it must be float32"),
        (([1], np.ones((1, 4), np.float32), np.ones((1, 2), np.float32)), "state has shape (1, 2): expected (1, 4)"),
        ((["a"], np.ones((1, 4), np.float32)), "keys[0] is 'a'"),
    ],
)
def test_arguments_are_checked(arguments: Any, message: str) -> None:
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        table.load_rows(*arguments)


def test_refused_within_a_step_and_while_rows_are_pinned() -> None:
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", name="ads")
    bag, row = tc.EmbeddingBag(table, 3), np.ones((1, 4), np.float32)
    out = bag(make_batches(1)[0])
    with pytest.raises(tc.ThermoclineError, match=r"'ads' has \d+ rows pinned: close tc.prefetch"):
        table.load_rows([1], row)
    out.sum().backward()
    with pytest.raises(tc.ThermoclineError, match=r"'ads': load_rows\(\) with gradients that no step has applied"):
        table.load_rows([1], row)
    table.step()
    table.load_rows([1], row)


def load_on_rank(groups: tc.Groups) -> Any:
    table = tc.ShardedTable(4, tc.Adagrad(lr=0.1), mem="1MB", groups=groups)
    keys = np.arange(100, dtype=np.uint64)
    weights, state = rows_for(table, keys)
    table.load_rows(keys, weights, state)
    equal = [np.array_equal(got, wanted) for got, wanted in zip(table.read_rows(keys), (weights, state), strict=True)]
    own = sum(len(part) for part, _ in table.rows())
    try:
        table.load_rows(keys, weights + groups.topology.rank, state)
    except tc.ConfigError as error:
        return equal, own, str(error)
    return None


def test_ranks_take_the_rows_they_own() -> None:
    results = run_ranks(PAIR, load_on_rank)
    assert sum(own for _, own, _ in results) == 100
    assert all(own for _, own, _ in results)
    for equal, _, message in results:
        assert equal == [True, True]
        assert "load_rows must get the same keys and rows on all ranks" in message
