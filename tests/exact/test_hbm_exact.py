"""With an HBM tier of any size the bits are the reference's: interpreted here, small; every way on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from exact.run import Ways, assert_same_bits, keys_of, recipe, train
from helpers.train import OPTIMIZERS

from thermocline.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = 12

# (hbm, memory, depth, window); 2 % of the rows hold one batch, not a window of eight.
QUICK = [(1.0, None, 1, 1), (0.4, None, 2, 1), (0.25, 0.5, 4, 1)]
EVERY = [
    ways
    for ways in itertools.product([1.0, 0.2, 0.05, 0.02], [None, 0.05], [1, 2, 4], [1, 8])
    if not (ways[0] == 0.02 and ways[3] == 8)
]


def check(optimizer: str, ways: Ways, folder: Path, count: int, least: float) -> None:
    result = train(optimizer, ways, folder, count, DEVICE)
    assert_same_bits(result, optimizer, count, DEVICE)
    assert ways.hbm is not None
    seed = recipe(optimizer)[2]
    for name, stats in result.hbm.items():
        assert stats.bytes_total <= stats.budget
        assert stats.capacity == int(ways.hbm * len(keys_of(name, count, seed)))
        if ways.hbm < 1:  # the proof is worth something only if rows left and came back
            assert stats.evictions > least * len(keys_of(name, count, seed))
            assert stats.written_down == stats.evictions


@pytest.mark.parametrize(("optimizer", "ways"), [*zip(["adagrad", "sgd", "adam"], QUICK, strict=True)], ids=str)
def test_same_bits(optimizer: str, ways: tuple[float, float | None, int, int], tmp_path: Path) -> None:
    hbm, memory, depth, window = ways
    check(optimizer, Ways(memory, depth, window, hbm=hbm), tmp_path, SMALL, 0.1)


CODED = [("rowwise/int8", (0.4, None, 2, 1)), ("adagrad/learned", (0.25, 0.5, 4, 1))]


@pytest.mark.parametrize(("recipe", "ways"), CODED, ids=str)
def test_same_bits_below_fp32(recipe: str, ways: tuple[float, float | None, int, int], tmp_path: Path) -> None:
    hbm, memory, depth, window = ways
    check(recipe, Ways(memory, depth, window, hbm=hbm), tmp_path, SMALL, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise/int8", "adagrad/learned", "sgd/int4", "adam/bf16"])
def test_same_bits_below_fp32_every_recipe(recipe: str, tmp_path: Path) -> None:
    check(recipe, Ways(0.05, 4, 8, 2, hbm=0.05), tmp_path, 320, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("optimizer", "ways"), [*zip(itertools.cycle(OPTIMIZERS), EVERY, strict=False)], ids=str)
def test_same_bits_every_way(
    optimizer: str, ways: tuple[float, float | None, int, int], seed: int, tmp_path: Path
) -> None:
    hbm, memory, depth, window = ways
    check(f"{optimizer}@{seed}", Ways(memory, depth, window, 2, hbm=hbm), tmp_path, 320, 0.3)


@pytest.mark.gpu
def test_ten_repetitions(tmp_path: Path) -> None:
    """Races would show here."""
    for n in range(10):
        (tmp_path / str(n)).mkdir()
        check("adam", Ways(0.05, 4, 1, 2, hbm=0.05), tmp_path / str(n), 320, 0.3)
