"""Sharded tables in loops that skip a batch, or call backward too late."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.rank_training import PAIR
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable

KEYS = np.arange(40, dtype=np.uint64)


def batches(rank: int) -> list[tc.Batch]:
    """Two batches that share a key; ranks share keys, too."""
    lists = ([1, 2, 3, 4, 30 + rank], [4, 10, 11])
    return [tc.Batch(np.array(ids, np.uint64), np.arange(len(ids) + 1), 1) for ids in lists]


def train_second_batch_only(groups: Groups, hbm: str | None) -> bytes:
    device = "cpu" if hbm is None else "interpreter"
    table = ShardedTable(2, tc.SGD(lr=1.0), groups=groups, mem="1MB", hbm=hbm, device=device, threads=1)
    bag = tc.EmbeddingBag(table, fields=1)
    for number, batch in enumerate(tc.prefetch(batches(groups.topology.rank), table, depth=2)):
        if number == 1:
            bag(batch).sum().backward()
            table.step()
    return table.read(KEYS).tobytes()


@pytest.mark.parametrize("hbm", [None, "1MB"])
def test_skipped_batch_is_not_updated(hbm: str | None) -> None:
    """Only keys of the trained batch change, each by the mean over ranks of its gradients."""
    table = tc.Table(2, tc.SGD(lr=1.0), mem="1MB", threads=1)
    bag = tc.EmbeddingBag(table, fields=1)
    bag(batches(0)[1]).sum().backward()
    table.step()
    expected = table.read(KEYS)
    changed = (expected != tc.Table(2, tc.SGD(lr=1.0), mem="1MB").read(KEYS)).any(1)
    assert KEYS[changed].tolist() == [4, 10, 11]
    assert run_ranks(PAIR, train_second_batch_only, hbm) == [expected.tobytes()] * 2


def call_backward_after_step(groups: Groups) -> str:
    table = ShardedTable(2, tc.SGD(lr=1.0), groups=groups, mem="1MB", threads=1)
    bag = tc.EmbeddingBag(table, fields=1)
    with pytest.raises(RuntimeError) as error:  # noqa: PT012
        for batch in tc.prefetch(batches(groups.topology.rank), table, depth=1):
            pooled = bag(batch)
            table.step()
            pooled.sum().backward()
    return str(error.value)


def test_backward_after_the_step_is_an_error() -> None:
    messages = run_ranks(PAIR, call_backward_after_step)
    assert all("a gradient of a batch before the last step: the order is batch, forward" in text for text in messages)
