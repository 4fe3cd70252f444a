"""Training with an HBM tier gives the bits of the reference: small cases under Triton's interpreter, all on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from exact.run import RunOptions, assert_same_bits, keys_of, recipe, train
from helpers.train import OPTIMIZERS

from thermocline.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = 8  # batches

# (hbm, dram, depth, window); 2 % of the rows hold one batch, but not a window of eight.
QUICK = [("sgd", (1.0, None, 1, 1)), ("adam", (0.25, 0.5, 4, 1))]
EVERY = [
    options
    for options in itertools.product([1.0, 0.2, 0.05, 0.02], [None, 0.05], [1, 2, 4], [1, 8])
    if not (options[0] == 0.02 and options[3] == 8)
]


def check(optimizer: str, options: RunOptions, folder: Path, count: int, min_evicted: float) -> None:
    result = train(optimizer, options, folder, count, DEVICE)
    assert_same_bits(result, optimizer, count, DEVICE)
    assert options.hbm is not None
    seed = recipe(optimizer)[2]
    assert not options.lookahead or all(stats.loaded_ahead > 0 for stats in result.stats.values())
    for name, stats in result.hbm.items():
        assert stats.bytes_total <= stats.budget
        assert stats.capacity == int(options.hbm * len(keys_of(name, count, seed)))
        if options.hbm < 1:  # the test is meaningful only if rows were evicted and loaded again
            assert stats.evictions > min_evicted * len(keys_of(name, count, seed))
            assert stats.written_back == stats.evictions


@pytest.mark.parametrize(("optimizer", "options"), QUICK, ids=str)
def test_same_bits(optimizer: str, options: tuple[float, float | None, int, int], tmp_path: Path) -> None:
    hbm, dram, depth, window = options
    check(optimizer, RunOptions(dram, depth, window, hbm=hbm), tmp_path, SMALL, 0.1)


LOOKAHEADS = [
    ("adam", RunOptions(0.5, 4, 1, 2, hbm=0.25, lookahead=4)),
    ("sgd", RunOptions(0.5, 1, 1, hbm=0.25, lookahead=8)),
    ("sgd", RunOptions(0.5, 4, 1, 2, hbm=0.25, lookahead=1)),
    ("adagrad", RunOptions(0.5, 4, 1, 2, hbm=0.25, lookahead="auto")),
]


@pytest.mark.parametrize(("optimizer", "options"), LOOKAHEADS, ids=str)
def test_same_bits_with_look_ahead(optimizer: str, options: RunOptions, tmp_path: Path) -> None:
    """The look-ahead loads copies into DRAM of rows that are newer in HBM: no such copy is ever read."""
    check(optimizer, options, tmp_path, SMALL, 0.1)


QUANTIZED = [("rowwise/int8", (0.4, None, 2, 1)), ("adagrad/learned", (0.25, 0.5, 4, 1))]


@pytest.mark.parametrize(("recipe", "options"), QUANTIZED, ids=str)
def test_same_bits_below_fp32(recipe: str, options: tuple[float, float | None, int, int], tmp_path: Path) -> None:
    hbm, dram, depth, window = options
    check(recipe, RunOptions(dram, depth, window, hbm=hbm), tmp_path, SMALL, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise/int8", "adagrad/learned", "sgd/int4", "adam/bf16"])
def test_same_bits_below_fp32_every_recipe(recipe: str, tmp_path: Path) -> None:
    check(recipe, RunOptions(0.05, 4, 8, 2, hbm=0.05), tmp_path, 320, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("optimizer", "options"), [*zip(itertools.cycle(OPTIMIZERS), EVERY, strict=False)], ids=str)
def test_same_bits_for_all_options(
    optimizer: str, options: tuple[float, float | None, int, int], seed: int, tmp_path: Path
) -> None:
    hbm, dram, depth, window = options
    check(f"{optimizer}@{seed}", RunOptions(dram, depth, window, 2, hbm=hbm), tmp_path, 320, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "window", "lookahead"), [*itertools.product([1, 4], [1, 8], [1, 8, 64, "auto"])])
def test_same_bits_with_look_ahead_over_many_batches(
    depth: int, window: int, lookahead: int | str, tmp_path: Path
) -> None:
    check("adagrad", RunOptions(0.05, depth, window, 2, hbm=0.05, lookahead=lookahead), tmp_path, 320, 0.3)


@pytest.mark.gpu
def test_ten_repetitions(tmp_path: Path) -> None:
    """A race between streams or threads would show as a difference."""
    for n in range(10):
        (tmp_path / str(n)).mkdir()
        check("adam", RunOptions(0.05, 4, 1, 2, hbm=0.05), tmp_path / str(n), 320, 0.3)
