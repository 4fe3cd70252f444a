"""Gradients of weights per id against plain torch: equal bits for every dim, pooling, precision and row stride."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import Arena, floats, random_offsets, random_slots, same_bits

from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.weight_gradient import weight_gradient, weight_gradient_reference


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 16, 19, 130])
def test_every_dim(dim: int, pooling: str, device: str) -> None:
    random = np.random.default_rng(dim)
    arena = Arena(40, dim, 2, random, device)
    slots = random_slots(40, 40, random, device)
    offsets = None if pooling == "none" else random_offsets(40, random, device)
    mean = pooling == "mean"
    bags = None if offsets is None else index_gradients(40, None, offsets, None, mean, device)[0]
    grads = floats((40 if offsets is None else len(offsets) - 1, dim), random, device)
    out = weight_gradient(arena.weights, slots, offsets, bags, grads, mean=mean)
    same_bits(out, weight_gradient_reference(arena.weights, slots, offsets, bags, grads, mean=mean))
    exact = (arena.weights[slots.long()].double() * grads[torch.arange(40) if bags is None else bags.long()]).sum(1)
    if mean:
        assert offsets is not None
        assert bags is not None
        exact = exact / offsets.diff()[bags.long()]
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_half_precision_and_minus_zero(device: str) -> None:
    random = np.random.default_rng(4)
    weights = floats((20, 24), random, device).to(torch.float16)[:, :20]
    slots = random_slots(50, 20, random, device)
    grads = -floats((50, 20), random, device).abs() * 0.0  # products of both signs of zero
    out = weight_gradient(weights, slots, None, None, grads)
    same_bits(out, weight_gradient_reference(weights, slots, None, None, grads))
    same_bits(out, torch.zeros(50, device=device))


def test_empty_and_wrong_arguments(device: str) -> None:
    weights = torch.ones(3, 4, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    assert weight_gradient(weights, empty, None, None, torch.zeros(0, 4, device=device)).shape == (0,)
    with pytest.raises(ValueError, match="mean=True needs them"):
        weight_gradient(weights, empty, None, None, torch.zeros(0, 4, device=device), mean=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [10, 16, 128])
def test_large(dim: int, device: str) -> None:
    random = np.random.default_rng(dim)
    arena = Arena(200_000, dim, 1, random, device)
    slots = random_slots(500_000, 200_000, random, device)
    offsets = random_offsets(500_000, random, device)
    bags = index_gradients(500_000, None, offsets, None, True, device)[0]
    grads = floats((len(offsets) - 1, dim), random, device)
    out = weight_gradient(arena.weights, slots, offsets, bags, grads, mean=True)
    same_bits(out, weight_gradient_reference(arena.weights, slots, offsets, bags, grads, mean=True))
