"""Ranks with an HBM tier have the reference's bits: small under Triton's interpreter, or 2 and 4 ranks on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rank_training import (
    PAIR,
    TWO_BY_TWO,
    TWO_NODES,
    Job,
    RunOptions,
    assert_matches_reference,
    train_rank,
)
from helpers.ranks import Nodes, run_ranks

from thermocline.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def assert_same_bits(job: Job, options: RunOptions, folder: Path) -> None:
    results = run_ranks(job.nodes, train_rank, job, options, str(folder), seconds=240)
    assert_matches_reference(job, results, DEVICE)
    assert options.hbm is not None
    for result in results:
        for stats in result["hbm"].values():
            assert stats.bytes_total <= stats.budget
            assert options.hbm >= 1 or stats.evictions > 0


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (Job(TWO_NODES, "adagrad", (6, 5)), RunOptions("two", 0.8, 2, 1, hbm=0.6, lookahead=2)),
        (Job(PAIR, "adam", (5, 6), accumulate=2), RunOptions("flat", None, 1, 2, hbm=2)),
        (Job(PAIR, "adam+catch_up", (5, 4)), RunOptions("two", None, 2, 1, hbm=2)),
    ],
    ids=str,
)
def test_same_bits(job: Job, options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(job, options, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [PAIR, TWO_NODES, TWO_BY_TWO], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adam", RunOptions("two", 0.2, 4, 4, 2, hbm=0.1, lookahead=8)),
        ("sgd", RunOptions("flat", None, 1, 1, 1, hbm=0.05)),
        ("rowwise", RunOptions("two", 0.2, 4, 1, 2, hbm=1.0)),
    ],
    ids=str,
)
def test_same_bits_on_a_gpu(nodes: Nodes, optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(Job(nodes, optimizer), options, tmp_path)
