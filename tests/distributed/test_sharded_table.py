"""Tables over several ranks: final rows and dense weights have the bits of one process that plays all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from helpers.rank_training import (
    APART,
    BATCHES,
    FOUR,
    ONE,
    PAIR,
    Job,
    Way,
    assert_reference,
    keys_of,
    reference,
    train_rank,
)
from helpers.ranks import play

UNEVEN = (90, 47, 0, 71)

# Every value of every choice, and the pairs that meet in the code.
QUICK = [
    (Job(ONE, "adam"), Way("two", 0.05, 4, 4)),
    (Job(PAIR, "sgd"), Way("flat", 0.05, 1, 4, 2)),
    (Job(APART, "rowwise", (60, 60)), Way("two", None, 4, 1)),
    (Job(FOUR, "adam"), Way("two", 0.05, 4, 4)),
    (Job(FOUR, "adam"), Way("flat", None, 1, 1)),
    (Job(FOUR, "adagrad", UNEVEN), Way("two", 0.2, 4, 1)),
    (Job(APART, "rowwise/int8", (60, 60)), Way("two", 0.3, 4, 1)),
    (Job(PAIR, "adam", (80, 51), accumulate=3), Way("two", 0.3, 4, 1)),
]
WAYS = [Way(*way) for way in itertools.product(("two", "flat"), (None, 0.2), (1, 4), (1, 4))]
JOBS = [
    *(Job(nodes, "adam") for nodes in (ONE, PAIR, APART, FOUR)),
    Job(FOUR, "rowwise", UNEVEN),
    Job(((0, 1, 2, 3),), "sgd"),
    Job(((0,), (1,), (2,)), "adagrad"),
]


def check(job: Job, way: Way, folder: Path) -> None:
    results = play(job.nodes, train_rank, job, way, str(folder))
    assert_reference(job, results)
    longest = max(job.batches, default=BATCHES)
    for rank, result in enumerate(results):
        assert result["count"] == longest
        assert result["empty"] == longest - len(job.data(rank))
        for name, stats in result["stats"].items():
            assert stats.pinned == 0
            if way.memory is not None:
                assert stats.capacity <= 1.1 * way.memory * len(keys_of(job, name)) / job.world + 2
                assert stats.evictions > 0


@pytest.mark.parametrize(("job", "way"), QUICK, ids=str)
def test_same_bits(job: Job, way: Way, tmp_path: Path) -> None:
    check(job, way, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_same_bits_every_way(job: Job, way: Way, tmp_path: Path) -> None:
    check(job, way, tmp_path)


def test_the_reference_depends_on_the_tree() -> None:
    """Or the bits above would prove nothing about the order of sums."""
    assert reference(Job(FOUR, "adam"))["wide"] != reference(Job(((0, 1, 2, 3),), "adam"))["wide"]
