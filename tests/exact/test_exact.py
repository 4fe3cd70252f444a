"""Final rows and dense weights are bit-identical whatever the memory, depth, window, threads and policy: to each other
and to the reference table."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from exact.run import DIMS, Ways, assert_same_bits, keys_of, reference, train, trained_something
from helpers.train import OPTIMIZERS

MEMORY = [None, 0.05]
DEPTHS = [1, 2, 4, 8]
WINDOWS = [1, 8]
THREADS = [1, 2]
POLICIES = ["lru_lfu", "lru", "lfu"]
ALL = [Ways(*values) for values in itertools.product(MEMORY, DEPTHS, WINDOWS, THREADS, POLICIES)]  # type: ignore[arg-type]

# Every value of every choice, and the pairs that meet in the code: depth with window, policy with memory.
QUICK = {
    "sgd": [
        Ways(None, 1, 1, 1),
        Ways(0.05, 1, 1, 1, "lru"),
        Ways(0.05, 4, 8, 2, "lfu"),
        Ways(0.05, 8, 1, 2),
    ],
    "adagrad": [
        Ways(None, 4, 8, 2),
        Ways(0.05, 1, 8, 2),
        Ways(0.05, 2, 1, 1),
        Ways(0.05, 4, 1, 2, "lru"),
        Ways(0.05, 8, 8, 1, "lfu"),
    ],
    "rowwise": [
        Ways(None, 8, 1, 1),
        Ways(0.05, 1, 1, 2, "lfu"),
        Ways(0.05, 2, 8, 1, "lru"),
    ],
    "adam": [
        Ways(None, 2, 1, 2),
        Ways(0.05, 1, 8, 1, "lru"),
        Ways(0.05, 4, 1, 1, "lfu"),
        Ways(0.05, 8, 8, 2),
        Ways(0.05, 2, 8, 2),
    ],
}

# Rows below fp32: rounding must not know where a row is, nor when it came.
CODED = [
    ("rowwise/int8", Ways(None, 1, 1, 1)),
    ("rowwise/int8", Ways(0.05, 4, 8, 2)),
    ("adagrad/learned", Ways(0.05, 4, 8, 2)),
    ("sgd/int4", Ways(0.05, 2, 8, 1, "lfu")),
    ("adam/bf16", Ways(0.05, 8, 1, 2, "lru")),
]


def check(optimizer: str, ways: Ways, folder: Path) -> None:
    result = train(optimizer, ways, folder)
    assert_same_bits(result, optimizer)
    for name, stats in result.stats.items():
        if ways.memory is None:
            assert stats.evictions == 0
            assert stats.resident == len(keys_of(name))
        else:  # the proof is worth something only if rows went to the store and came back
            assert stats.capacity <= 0.055 * len(keys_of(name))
            assert stats.evictions > 0.9 * len(keys_of(name))
            assert stats.from_store > 100
    assert ways.memory is None or result.merges > 0


@pytest.mark.parametrize(
    ("optimizer", "ways"), [(name, ways) for name, chosen in QUICK.items() for ways in chosen], ids=str
)
def test_same_bits(optimizer: str, ways: Ways, tmp_path: Path) -> None:
    check(optimizer, ways, tmp_path)


@pytest.mark.parametrize(("recipe", "ways"), CODED, ids=str)
def test_same_bits_below_fp32(recipe: str, ways: Ways, tmp_path: Path) -> None:
    check(recipe, ways, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ways", ALL, ids=str)
def test_same_bits_every_way(optimizer: str, ways: Ways, tmp_path: Path) -> None:
    check(optimizer, ways, tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_reference_is_a_training(optimizer: str) -> None:
    """Every optimizer trains, and each ends somewhere else."""
    assert trained_something(optimizer)
    assert len({reference(name).dense for name in OPTIMIZERS}) == len(OPTIMIZERS)


def test_the_references_below_fp32_are_trainings() -> None:
    recipes = list(dict(CODED))
    assert all(trained_something(recipe) for recipe in recipes)
    assert len({reference(recipe).dense for recipe in recipes}) == len(recipes)


def test_the_choices_are_covered() -> None:
    ways = [w for chosen in QUICK.values() for w in chosen]
    for field, values in {
        "memory": MEMORY,
        "depth": DEPTHS,
        "pull_window": WINDOWS,
        "threads": THREADS,
        "policy": POLICIES,
    }.items():
        assert {getattr(w, field) for w in ways} == set(values)  # type: ignore[arg-type]
    assert set(QUICK) == set(OPTIMIZERS)
    assert {(w.depth, w.pull_window) for w in ways if w.memory} == set(itertools.product(DEPTHS, WINDOWS))
    assert all(len(keys_of(name)) > 4000 for name in DIMS)
