"""Ranks whose rows are on a GPU: the same bits. Interpreted here, small; on a GPU that 2 and 4 ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rank_training import APART, FOUR, PAIR, Job, Way, assert_reference, train_rank
from helpers.ranks import play

from thermocline.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def check(job: Job, way: Way, folder: Path) -> None:
    results = play(job.nodes, train_rank, job, way, str(folder), seconds=240)
    assert_reference(job, results, DEVICE)
    assert way.hbm is not None
    for result in results:
        for stats in result["hbm"].values():
            assert stats.bytes_total <= stats.budget
            assert way.hbm >= 1 or stats.evictions > 0


@pytest.mark.parametrize(
    ("job", "way"),
    [
        (Job(APART, "adagrad", (6, 5)), Way("two", None, 2, 1, hbm=0.6)),
        (Job(PAIR, "adam", (5, 6), accumulate=2), Way("flat", None, 1, 2, hbm=2)),
    ],
    ids=str,
)
def test_same_bits(job: Job, way: Way, tmp_path: Path) -> None:
    check(job, way, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [PAIR, APART, FOUR], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "way"),
    [
        ("adam", Way("two", 0.2, 4, 4, 2, hbm=0.1)),
        ("sgd", Way("flat", None, 1, 1, 1, hbm=0.05)),
        ("rowwise", Way("two", 0.2, 4, 1, 2, hbm=1.0)),
    ],
    ids=str,
)
def test_same_bits_on_a_gpu(nodes: tuple[tuple[int, ...], ...], optimizer: str, way: Way, tmp_path: Path) -> None:
    check(Job(nodes, optimizer), way, tmp_path)
