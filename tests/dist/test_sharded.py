"""Tables over several ranks: final rows and dense weights have the bits of one process that plays all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist.ranks_run import APART, BATCHES, FOUR, ONE, PAIR, Job, Way, assert_reference, keys_of, reference, train_rank
from ranks_helpers import play

CASES = [
    (Job(ONE, "adam"), Way("two", 0.05, 4, 4)),
    (Job(PAIR, "adagrad"), Way("two", None, 1, 1)),
    (Job(PAIR, "sgd"), Way("flat", 0.05, 4, 4, 2)),
    (Job(APART, "rowwise"), Way("two", 0.05, 4, 1)),
    (Job(FOUR, "adam"), Way("two", 0.05, 4, 4)),
    (Job(FOUR, "adam"), Way("flat", 0.05, 1, 4)),
    (Job(FOUR, "adam"), Way("two", None, 1, 1)),
    (Job(FOUR, "adagrad", (150, 47, 0, 113)), Way("two", 0.05, 4, 4)),
    (Job(FOUR, "adagrad", (150, 47, 0, 113)), Way("flat", None, 4, 1)),
    (Job(PAIR, "adam", (150, 71), accumulate=3), Way("two", 0.2, 4, 1)),
    (Job(FOUR, "sgd", accumulate=2), Way("two", None, 1, 1)),
]


@pytest.mark.parametrize(("job", "way"), CASES, ids=str)
def test_same_bits(job: Job, way: Way, tmp_path: Path) -> None:
    results = play(job.nodes, train_rank, job, way, str(tmp_path))
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


def test_the_reference_depends_on_the_tree() -> None:
    """Or the bits above would prove nothing about the order of sums."""
    four: Job = Job(FOUR, "adam")
    assert reference(four)["wide"] != reference(Job(((0, 1, 2, 3),), "adam"))["wide"]
