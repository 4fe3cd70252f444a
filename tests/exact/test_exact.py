"""Final rows and dense weights equal those of the reference table, bit for bit, for all options: DRAM size, depth,
window, threads and eviction policy."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from exact.run import DIMS, RunOptions, assert_same_bits, keys_of, reference, train, training_changes_weights
from helpers.train import OPTIMIZERS

DRAM = [None, 0.05]
DEPTHS = [1, 2, 4, 8]
WINDOWS = [1, 8]
THREADS = [1, 2]
POLICIES = ["lru_lfu", "lru", "lfu"]
ALL = [RunOptions(*values) for values in itertools.product(DRAM, DEPTHS, WINDOWS, THREADS, POLICIES)]  # type: ignore[arg-type]

# Every value of every option, and the pairs that interact: depth with window, policy with DRAM size.
QUICK = {
    "sgd": [
        RunOptions(None, 1, 1, 1),
        RunOptions(0.05, 1, 1, 1, "lru"),
        RunOptions(0.05, 4, 8, 2, "lfu"),
        RunOptions(0.05, 8, 1, 2),
    ],
    "adagrad": [
        RunOptions(None, 4, 8, 2),
        RunOptions(0.05, 1, 8, 2),
        RunOptions(0.05, 2, 1, 1),
        RunOptions(0.05, 4, 1, 2, "lru"),
        RunOptions(0.05, 8, 8, 1, "lfu"),
    ],
    "rowwise": [
        RunOptions(None, 8, 1, 1),
        RunOptions(0.05, 1, 1, 2, "lfu"),
        RunOptions(0.05, 2, 8, 1, "lru"),
    ],
    "adam": [
        RunOptions(None, 2, 1, 2),
        RunOptions(0.05, 1, 8, 1, "lru"),
        RunOptions(0.05, 4, 1, 1, "lfu"),
        RunOptions(0.05, 8, 8, 2),
        RunOptions(0.05, 2, 8, 2),
    ],
    "partial": [
        RunOptions(None, 4, 1, 2),
        RunOptions(0.05, 2, 1, 2, "lru"),
        RunOptions(0.05, 8, 8, 1),
    ],
}

LOOKAHEADS = [
    ("sgd", RunOptions(0.05, 1, 1, 1, lookahead=8)),
    ("adagrad", RunOptions(0.05, 4, 1, 2, lookahead=1)),
    ("rowwise", RunOptions(0.05, 2, 8, 1, "lfu", lookahead=64)),
    ("adam", RunOptions(0.05, 8, 8, 2, "lru", lookahead=8)),
    ("adam", RunOptions(0.05, 4, 1, 2, lookahead=64)),
    ("adagrad/learned", RunOptions(0.05, 4, 1, 2, lookahead=64)),
]

# Rounding of rows below fp32 must not depend on the tier of a row or on the time of its load.
QUANTIZED = [
    ("rowwise/int8", RunOptions(None, 1, 1, 1)),
    ("rowwise/int8", RunOptions(0.05, 4, 8, 2)),
    ("adagrad/learned", RunOptions(0.05, 4, 8, 2)),
    ("sgd/int4", RunOptions(0.05, 2, 8, 1, "lfu")),
    ("adam/bf16", RunOptions(0.05, 8, 1, 2, "lru")),
]


def check(optimizer: str, options: RunOptions, folder: Path) -> None:
    result = train(optimizer, options, folder)
    assert_same_bits(result, optimizer)
    for name, stats in result.stats.items():
        if options.dram is None:
            assert stats.evictions == 0
            assert stats.resident == len(keys_of(name))
        else:  # the test is meaningful only if rows were evicted to the store and read back
            assert stats.capacity <= 0.055 * len(keys_of(name))
            assert stats.evictions > 0.9 * len(keys_of(name))
            assert stats.from_store > 100
            assert stats.loaded_ahead > 100 or not options.lookahead
    assert options.dram is None or result.merges > 0


@pytest.mark.parametrize(
    ("optimizer", "options"), [(name, options) for name, chosen in QUICK.items() for options in chosen], ids=str
)
def test_same_bits(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    check(optimizer, options, tmp_path)


@pytest.mark.parametrize(("recipe", "options"), LOOKAHEADS, ids=str)
def test_same_bits_with_look_ahead(recipe: str, options: RunOptions, tmp_path: Path) -> None:
    check(recipe, options, tmp_path)


@pytest.mark.parametrize(("recipe", "options"), QUANTIZED, ids=str)
def test_same_bits_below_fp32(recipe: str, options: RunOptions, tmp_path: Path) -> None:
    check(recipe, options, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_same_bits_for_all_options(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    check(optimizer, options, tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reference_changes_weights(optimizer: str) -> None:
    """Every optimizer trains, and each has a different result."""
    assert training_changes_weights(optimizer)
    assert len({reference(name).dense for name in OPTIMIZERS}) == len(OPTIMIZERS)


def test_references_below_fp32_change_weights() -> None:
    recipes = list(dict(QUANTIZED))
    assert all(training_changes_weights(recipe) for recipe in recipes)
    assert len({reference(recipe).dense for recipe in recipes}) == len(recipes)


def test_quick_covers_all_options() -> None:
    options = [w for chosen in QUICK.values() for w in chosen]
    for field, values in {
        "dram": DRAM,
        "depth": DEPTHS,
        "pull_window": WINDOWS,
        "threads": THREADS,
        "policy": POLICIES,
    }.items():
        assert {getattr(w, field) for w in options} == set(values)  # type: ignore[arg-type]
    assert set(QUICK) == set(OPTIMIZERS)
    assert {(w.depth, w.pull_window) for w in options if w.dram} == set(itertools.product(DEPTHS, WINDOWS))
    assert all(len(keys_of(name)) > 4000 for name in DIMS)
