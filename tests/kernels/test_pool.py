"""Pooling against plain torch: equal bits for every dim, pooling, weights and row stride."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import Arena, floats, random_offsets, random_slots, same_bits
from hypothesis import given, strategies as st

from thermocline.kernels import INTERPRETED
from thermocline.kernels.pool import pool_rows, pool_rows_reference

DEVICE = "cpu" if INTERPRETED else "cuda"
DIMS = [1, 3, 4, 8, 19, 64, 100, 128, 130]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize("dim", DIMS)
def test_every_dim(dim: int, pooling: str, weighted: bool, device: str) -> None:
    random = np.random.default_rng(dim)
    arena = Arena(40, dim, 2, random, device)
    slots = random_slots(90, 40, random, device)
    offsets = None if pooling == "none" else random_offsets(90, random, device)
    factors = floats((90,), random, device) if weighted else None
    mean = pooling == "mean"
    out = pool_rows(arena.weights, slots, offsets, factors, mean=mean)
    same_bits(out, pool_rows_reference(arena.weights, slots, offsets, factors, mean=mean))


@pytest.mark.parametrize("size", [0, 1, 2, 4, 5, 6, 8, 9, 70])
def test_bags_of_every_size(size: int, device: str) -> None:
    random = np.random.default_rng(size)
    arena = Arena(30, 16, 0, random, device)
    slots = random_slots(3 * size, 30, random, device)
    offsets = torch.arange(4, device=device) * size
    for mean in (False, True):
        same_bits(
            pool_rows(arena.weights, slots, offsets, mean=mean),
            pool_rows_reference(arena.weights, slots, offsets, mean=mean),
        )


@pytest.mark.parametrize("bags", [1, 15, 16, 17, 32, 33])
def test_bags_around_a_tile(bags: int, device: str) -> None:
    random = np.random.default_rng(bags)
    arena = Arena(9, 16, 0, random, device)
    slots = random_slots(2 * bags, 9, random, device)
    offsets = torch.arange(bags + 1, device=device) * 2
    same_bits(pool_rows(arena.weights, slots, offsets), pool_rows_reference(arena.weights, slots, offsets))
    same_bits(pool_rows(arena.weights, slots), pool_rows_reference(arena.weights, slots))


def test_empty_batches(device: str) -> None:
    weights = torch.ones(3, 4, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    assert pool_rows(weights, empty).shape == (0, 4)
    assert pool_rows(weights, empty, torch.zeros(1, dtype=torch.int64, device=device)).shape == (0, 4)
    same_bits(
        pool_rows(weights, empty, torch.zeros(3, dtype=torch.int64, device=device)), torch.zeros(2, 4, device=device)
    )


def test_minus_zero_is_kept(device: str) -> None:
    weights = torch.full((2, 4), -0.0, device=device)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 2], device=device)
    same_bits(pool_rows(weights, slots, offsets), torch.full((1, 4), -0.0, device=device))


def test_nan_stays_in_its_bag(device: str) -> None:
    weights = torch.ones(3, 4, device=device)
    weights[2] = float("nan")
    slots = torch.tensor([0, 2, 2, 1], dtype=torch.int32, device=device)
    out = pool_rows(weights, slots, torch.tensor([0, 1, 3, 4], device=device))
    assert out.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows(dtype: torch.dtype, device: str) -> None:
    random = np.random.default_rng(4)
    weights = floats((20, 24), random, device).to(dtype)[:, :20]
    slots = random_slots(50, 20, random, device)
    offsets = random_offsets(50, random, device)
    same_bits(pool_rows(weights, slots, offsets), pool_rows_reference(weights, slots, offsets))
    same_bits(pool_rows(weights, slots), pool_rows_reference(weights, slots))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 12), st.booleans(), st.booleans())
def test_random(ids: list[int], dim: int, mean: bool, weighted: bool) -> None:
    random = np.random.default_rng(len(ids))
    arena = Arena(10, dim, 1, random, DEVICE)
    slots = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    offsets = random_offsets(len(ids), random, DEVICE)
    factors = floats((len(ids),), random, DEVICE) if weighted else None
    same_bits(
        pool_rows(arena.weights, slots, offsets, factors, mean=mean),
        pool_rows_reference(arena.weights, slots, offsets, factors, mean=mean),
    )


def test_wrong_arguments_raise(device: str) -> None:
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="strides"):
        pool_rows(torch.ones(4, 4, device=device).t()[:2], slots)
    with pytest.raises(ValueError, match="offsets"):
        pool_rows(torch.ones(4, 4, device=device), slots, mean=True)
    with pytest.raises(ValueError, match=r"out is .* must be contiguous float32\[2, 4\]"):
        pool_rows(torch.ones(4, 4, device=device), slots, out=torch.ones(3, 4, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "state"), [(128, 0), (128, 256), (64, 1), (16, 16), (10, 1)])
def test_large(dim: int, state: int, device: str) -> None:
    random = np.random.default_rng(dim)
    arena = Arena(200_000, dim, state, random, device, gap=0)
    slots = random_slots(500_000, 200_000, random, device)
    offsets = random_offsets(500_000, random, device)
    factors = floats((500_000,), random, device)
    same_bits(pool_rows(arena.weights, slots), pool_rows_reference(arena.weights, slots))
    for mean in (False, True):
        same_bits(
            pool_rows(arena.weights, slots, offsets, factors, mean=mean),
            pool_rows_reference(arena.weights, slots, offsets, factors, mean=mean),
        )


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    arena = torch.empty(2**31 // 128 + 5, 128, device=device)
    last = len(arena) - 1
    arena[last] = torch.arange(128.0, device=device)
    slots = torch.tensor([last], dtype=torch.int32, device=device)
    same_bits(pool_rows(arena, slots), arena[last:])
    same_bits(pool_rows(arena, slots, torch.tensor([0, 1], device=device)), arena[last:])
