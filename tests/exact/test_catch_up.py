"""Rows that replay missed steps (`lazy="catch_up"`) give the bits of the reference in every tier, for all options."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact.run import RunOptions, assert_same_bits, reference, train
from helpers.train import CATCH_UP

from thermocline.kernels import INTERPRETED

COUNT = 32
DEVICE = "cpu" if INTERPRETED else "cuda"

OPTIONS = [
    ("sgd+catch_up", RunOptions(None, 1, 1, 1)),
    ("sgd+catch_up", RunOptions(0.1, 4, 1, 2, "lfu")),
    ("adagrad+catch_up", RunOptions(0.15, 8, 2, 2)),
    ("rowwise+catch_up", RunOptions(0.1, 2, 1, 1, "lru")),
    ("adam+catch_up", RunOptions(None, 8, 8, 2)),
    ("adam+catch_up", RunOptions(0.1, 1, 1, 1)),
    ("adam+catch_up", RunOptions(0.1, 4, 1, 2, lookahead=16)),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIONS, ids=str)
def test_same_bits(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    result = train(optimizer, options, tmp_path, COUNT)
    assert_same_bits(result, optimizer, COUNT)
    if options.dram is not None:  # the test is meaningful only if rows were evicted and read back
        assert all(stats.evictions > 20 and stats.from_store > 0 for stats in result.stats.values())
    assert all(stats.loaded_ahead > 0 for stats in result.stats.values()) == bool(options.lookahead)


def check_hbm(optimizer: str, count: int, options: RunOptions, folder: Path) -> None:
    result = train(optimizer, options, folder, count, DEVICE)
    assert_same_bits(result, optimizer, count, DEVICE)
    assert all(stats.evictions > 0 for stats in result.hbm.values())


@pytest.mark.parametrize("optimizer", ["adam+catch_up"])
def test_same_bits_in_hbm(optimizer: str, tmp_path: Path) -> None:
    check_hbm(optimizer, 8, RunOptions(0.5, 4, 1, 2, hbm=0.3, lookahead=4), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", CATCH_UP)
def test_same_bits_on_a_gpu(optimizer: str, tmp_path: Path) -> None:
    check_hbm(optimizer, COUNT, RunOptions(0.3, 4, 1, 2, hbm=0.2, lookahead=8), tmp_path)


def test_references_differ() -> None:
    """Every optimizer has a result of its own, which replaying changes."""
    dense = {reference(name, COUNT).dense for name in (*CATCH_UP, *(name.split("+")[0] for name in CATCH_UP))}
    assert len(dense) == 2 * len(CATCH_UP)
