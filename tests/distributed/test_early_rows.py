"""Rows of the next batch that are exchanged while the network computes (`dist.overlap`) have the same bits."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rank_training import (
    ONE_RANK,
    PAIR,
    TWO_BY_TWO,
    TWO_NODES,
    Job,
    RunOptions,
    assert_matches_reference,
    train_rank,
)
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.early_rows import EarlyRows, _among
from thermocline.distributed.row_exchange import RowExchange, TrafficCounter
from thermocline.distributed.row_reduce import take_rows
from thermocline.distributed.sharded_table import ShardedTable


def overlapping(groups: Groups) -> Groups:
    return Groups.make(groups.topology, timeout=groups.timeout, overlap=True)


def train_overlapped(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    with overlapping(groups) as made:
        return train_rank(made, job, options, folder)


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (Job(ONE_RANK, "adam", (40,)), RunOptions("two", 0.2, 4, 1)),
        (Job(PAIR, "adam", (60, 60)), RunOptions("two", 0.3, 4, 2)),
        (Job(TWO_BY_TWO, "adagrad", (70, 47, 0, 61)), RunOptions("two", 0.2, 4, 1)),
        (Job(TWO_BY_TWO, "adam", (40, 40, 40, 40)), RunOptions("flat", None, 4, 4)),
        (Job(TWO_NODES, "rowwise/int8", (60, 60)), RunOptions("two", 0.3, 4, 1)),
    ],
    ids=str,
)
def test_same_bits(job: Job, options: RunOptions, tmp_path: Path) -> None:
    results = run_ranks(job.nodes, train_overlapped, job, options, str(tmp_path))
    assert_matches_reference(job, results)
    for result in results:
        for early, late, discarded in result["early"].values():
            assert discarded == 0
            # Batches share keys, so some rows wait for the step. A batch that was not ready in time has no early rows.
            assert (early > 0 and late > 0) or job.world > 1
    assert any(early > 0 for result in results for early, _, _ in result["early"].values())


def test_several_batches_per_step_exchange_all_rows_again(tmp_path: Path) -> None:
    job = Job(PAIR, "adam", (48, 31), accumulate=3)
    results = run_ranks(job.nodes, train_overlapped, job, RunOptions("two", 0.3, 4, 1), str(tmp_path))
    assert_matches_reference(job, results)
    assert any(discarded > 0 for result in results for _, _, discarded in result["early"].values())


def test_rows_that_catch_up_are_not_exchanged_early(tmp_path: Path) -> None:
    """A row is brought to the step of its batch before it is sent."""
    job = Job(PAIR, "adam+catch_up", (20, 20))
    results = run_ranks(job.nodes, train_overlapped, job, RunOptions("two", 0.3, 4, 1), str(tmp_path))
    assert_matches_reference(job, results)
    assert all(early is None for result in results for early in result["early"].values())


class Plan:
    """Stands for a plan."""


def test_a_pipeline_may_add_plans_while_one_is_taken() -> None:
    nothing: Any = None
    early = EarlyRows(nothing, nothing, nothing)
    plan, later = Plan(), Plan()
    adding = threading.Thread(target=early.add, args=([later],))

    def gone() -> None:
        """A plan that nothing refers to any more: lets the thread run while `take` iterates."""
        if adding.ident is None:
            adding.start()
            adding.join(0.2)

    early._coming.append(gone)  # type: ignore[arg-type]
    early.add([plan])
    assert early.take(plan, step=1) is None
    adding.join()
    assert [coming() for coming in early._coming] == [later]


# ---- rows that anything but a step changes


def train_and_load_rows(groups: Groups, overlap: bool) -> tuple[bytes, int]:
    """Train on batches with keys of their own, and write the next batch's rows after each step."""
    count, per_batch = 12, 16
    rank = groups.topology.rank
    keys = (np.arange(count * per_batch, dtype=np.uint64) + np.uint64(1000)).reshape(count, per_batch)
    made = overlapping(groups) if overlap else groups
    table = ShardedTable(4, tc.SGD(lr=0.5), groups=made, mem="1MB", seed=3)
    bag = tc.EmbeddingBag(table, 1)
    batches = [tc.Batch(np.roll(part, rank), np.arange(per_batch + 1), 1) for part in keys]
    for n, batch in enumerate(tc.prefetch(batches, table, depth=4)):
        (bag(batch) ** 2).sum().backward()
        table.step()
        if n + 1 < count:
            table.backend.write_rows(keys[n + 1], np.full((per_batch, 4), n + 1, np.float32))
    rows = table.read(keys.reshape(-1)).tobytes()
    discarded = 0 if table.backend.early is None else table.backend.early.discarded
    table.close()
    if overlap:
        made.close()
    return rows, discarded


def test_rows_written_between_steps_are_seen() -> None:
    plain = run_ranks(PAIR, train_and_load_rows, False)
    overlapped = run_ranks(PAIR, train_and_load_rows, True)
    assert [rows for rows, _ in plain] == [rows for rows, _ in overlapped]
    assert any(discarded > 0 for _, discarded in overlapped)


# ---- parts of a route


def fetch_in_parts(groups: Groups, hops: Any, wire: Any) -> None:
    """Fetch the chosen rows of random batches, then the others: all rows are those of one fetch."""
    exchange = RowExchange(groups.topology, hops=hops, wire=wire, salt=7)
    rng = np.random.default_rng(groups.topology.rank)
    counter = TrafficCounter()
    for size, share in ((0, 0.5), (1, 1.0), (40, 0.0), (200, 0.3), (200, 1.0), (513, 0.7)):
        keys = rng.choice(400, min(size, 400), replace=False).astype(np.uint64)
        (route,) = exchange.plan(groups.train, [keys], counter)
        values = torch.from_numpy(np.stack([route.owned, route.owned * np.uint64(3)], 1).astype(np.float32)).sqrt()
        chosen = torch.from_numpy(rng.random(len(route.owned)) < share)
        read: list[int] = []

        def give(index: torch.Tensor, out: torch.Tensor, values: Any = values, read: Any = read) -> None:
            read += index.tolist()
            take_rows(values, index, out)

        whole, parts = torch.zeros(len(keys), 2), torch.full((len(keys), 2), -1.0)
        exchange.fetch_rows(groups.train, route, give, whole, counter, step=5)
        early, rest = exchange.split_route(groups.train, route, chosen, counter)
        read.clear()
        exchange.fetch_rows(groups.train, early, give, parts, counter, step=5)
        assert all(bool(chosen[index]) for index in read)
        exchange.fetch_rows(groups.train, rest, give, parts, counter, step=5)
        assert sum(early.hops[0].send) + sum(rest.hops[0].send) == len(keys)
        assert torch.equal(whole, parts)


@pytest.mark.parametrize(("hops", "wire"), [("two", "fp32"), ("flat", "fp32"), ("two", "int8"), ("flat", "bf16")])
def test_parts_of_a_route(hops: str, wire: str) -> None:
    run_ranks(TWO_BY_TWO, fetch_in_parts, hops, wire)


@pytest.mark.parametrize("seed", range(5))
def test_slots_among_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = functools.partial(rng.integers, 0, 60, dtype=np.uint32)
    slots, others = np.unique(draw(rng.integers(0, 40))), draw(rng.integers(0, 80))
    assert _among(slots, others).tolist() == np.isin(slots, others).tolist()
