"""Sharded tables: final rows and dense weights have the bits of `ReferenceRanks`, one process with all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from helpers.rank_training import (
    BATCHES,
    ONE_RANK,
    PAIR,
    TWO_BY_TWO,
    TWO_NODES,
    Job,
    RunOptions,
    assert_matches_reference,
    keys_of,
    reference,
    train_rank,
)
from helpers.ranks import run_ranks

UNEVEN = (90, 47, 0, 71)

# Every value of every option, and the pairs of options that interact.
QUICK = [
    (Job(ONE_RANK, "adam"), RunOptions("two", 0.05, 4, 4)),
    (Job(PAIR, "sgd"), RunOptions("flat", 0.05, 1, 4, 2)),
    (Job(TWO_NODES, "rowwise", (60, 60)), RunOptions("two", None, 4, 1)),
    (Job(TWO_BY_TWO, "adam"), RunOptions("two", 0.05, 4, 4)),
    (Job(TWO_BY_TWO, "adam"), RunOptions("flat", None, 1, 1)),
    (Job(TWO_BY_TWO, "adagrad", UNEVEN), RunOptions("two", 0.2, 4, 1)),
    (Job(TWO_NODES, "rowwise/int8", (60, 60)), RunOptions("two", 0.3, 4, 1)),
    (Job(PAIR, "adam", (80, 51), accumulate=3), RunOptions("two", 0.3, 4, 1)),
    (Job(PAIR, "adam+catch_up", (40, 25)), RunOptions("two", 0.3, 4, 1)),
]
ALL_OPTIONS = [RunOptions(*values) for values in itertools.product(("two", "flat"), (None, 0.2), (1, 4), (1, 4))]
JOBS = [
    *(Job(nodes, "adam") for nodes in (ONE_RANK, PAIR, TWO_NODES, TWO_BY_TWO)),
    Job(TWO_BY_TWO, "rowwise", UNEVEN),
    Job(((0, 1, 2, 3),), "sgd"),
    Job(((0,), (1,), (2,)), "adagrad"),
]


def assert_same_bits(job: Job, options: RunOptions, folder: Path) -> None:
    results = run_ranks(job.nodes, train_rank, job, options, str(folder))
    assert_matches_reference(job, results)
    longest = max(job.batches, default=BATCHES)
    for rank, result in enumerate(results):
        assert result["count"] == longest
        assert result["empty"] == longest - len(job.data(rank))
        for name, stats in result["stats"].items():
            assert stats.pinned == 0
            if options.memory is not None:
                assert stats.capacity <= 1.1 * options.memory * len(keys_of(job, name)) / job.world + 2
                assert stats.evictions > 0


@pytest.mark.parametrize(("job", "options"), QUICK, ids=str)
def test_same_bits(job: Job, options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(job, options, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_same_bits_all_options(job: Job, options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(job, options, tmp_path)


def test_the_reference_depends_on_the_order_of_sums() -> None:
    """Otherwise equal bits would not prove that ranks add in this order."""
    jobs = (Job(nodes, "adam", (10, 10, 10, 10)) for nodes in (TWO_BY_TWO, ((0, 1, 2, 3),)))
    two_nodes, one_node = (reference(job)["wide"] for job in jobs)
    assert two_nodes != one_node
