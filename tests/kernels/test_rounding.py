"""Stochastic rounding to half precision: bits, neighbors, mean, and dependence on seed, table, key, step, element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import floats, same_bits

from thermocline.embedding.optimizers import SGD
from thermocline.embedding.precision import Precision
from thermocline.kernels import INTERPRETED
from thermocline.kernels.codec import Codec
from thermocline.kernels.optimizer_rules import OptimizerStep
from thermocline.kernels.random import table_mix
from thermocline.kernels.rounding import round_rows_reference
from thermocline.kernels.update import apply_gradients

HALVES = [torch.float16, torch.bfloat16]
EDGES = [0.0, -0.0, 1.0, -1.0, 65504.0, 65535.9, 6.1e-5, 6.0e-5, 5.9e-8, 1e-9, -3e-8, 1e-40, 3e38, float("inf")]


def round_rows(values: torch.Tensor, keys: torch.Tensor, mix: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Round by a step of SGD whose exact result is `values`: from -0.0, with learning rate 1 and gradient -values."""
    rows, dim = values.shape
    codec = Codec.of(
        Precision(kind="fp16" if dtype == torch.float16 else "bf16", rounding="stochastic"), dim, keys, mix
    )
    weights = torch.full(values.shape, -0.0, dtype=dtype, device=values.device)
    slots = torch.arange(rows, dtype=torch.int32, device=values.device)
    apply_gradients(weights, None, slots, -values, OptimizerStep.of(SGD(lr=1.0), step), codec)
    return weights


def some_values(device: str, rows: int = 50, dim: int = 30) -> torch.Tensor:
    random = np.random.default_rng(rows)
    values = floats((rows, dim), random, device) * 10.0 ** floats((rows, dim), random, device).mul(3).round()
    values[0, : len(EDGES)] = torch.tensor(EDGES, device=device)
    return values


@pytest.mark.parametrize("dtype", HALVES)
def test_equals_plain_torch(dtype: torch.dtype, device: str) -> None:
    values = some_values(device)
    keys = torch.arange(len(values), device=device) * 7919
    same_bits(
        round_rows(values, keys, table_mix(1, 2), 9, dtype),
        round_rows_reference(values, keys, table_mix(1, 2), 9, dtype),
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_to_a_neighbor(dtype: torch.dtype, device: str) -> None:
    values = some_values(device, 51)
    rounded = round_rows(values, torch.arange(len(values), device=device), table_mix(1, 2), 1, dtype)
    nearest = values.to(dtype)
    steps = (rounded.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
    assert int(steps[rounded.isfinite() & nearest.isfinite()].max()) <= 1
    exact = nearest.float() == values
    same_bits(rounded[exact], nearest[exact])
    assert torch.equal(rounded.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.30011, -1.7003, 1.2345e-5, 3.3e-8])
def test_mean_is_exact(value: float, dtype: torch.dtype, device: str) -> None:
    rows = 100 if INTERPRETED else 400
    values = torch.full((rows, 64), value, device=device)
    rounded = round_rows(values, torch.arange(rows, device=device), table_mix(0, 0), 1, dtype).double()
    exact = float(np.float32(value))
    gap = float(rounded.max() - rounded.min())
    assert gap > 0
    # Mean of rows * 64 choices between two neighbors: five standard deviations.
    assert abs(float(rounded.mean()) - exact) < 5 * 0.5 * gap / np.sqrt(rows * 64)


@pytest.mark.parametrize("dtype", HALVES)
def test_depends_on_seed_table_key_step_and_element(dtype: torch.dtype, device: str) -> None:
    values = torch.full((2, 256), 0.30011, device=device)
    keys = torch.tensor([5, 6], device=device)

    def bits(seed: int, table: int, step: int) -> torch.Tensor:
        return round_rows(values, keys, table_mix(seed, table), step, dtype)

    base = bits(1, 2, 3)
    same_bits(base, bits(1, 2, 3))
    for changed in (bits(2, 2, 3), bits(1, 3, 3), bits(1, 2, 4), base.flip(0), base.roll(1, 1)):
        assert 0.2 < float((changed != base).float().mean()) < 0.8


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_is_kept(dtype: torch.dtype, device: str) -> None:
    # The only payload bit of the second NaN is discarded.
    values = torch.tensor([[0x7FC00000, 0x7F800001, -1]], dtype=torch.int32, device=device).view(torch.float32)
    assert round_rows(values, torch.zeros(1, dtype=torch.int64, device=device), 0, 1, dtype).isnan().all()
