"""Rows of new keys and rounding by chance: the same bits as the reference table, the C++ core and plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import floats, same_bits
from hypothesis import given, strategies as st

from thermocline.embedding.initializers import Constant, Initial, Normal, Uniform
from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, initial_state
from thermocline.embedding.reference import ReferenceTable
from thermocline.kernels import INTERPRETED
from thermocline.kernels.initial import InitialRows, initial_rows_reference, write_initial_rows
from thermocline.kernels.random import table_mix
from thermocline.kernels.rounding import round_rows, round_rows_reference

DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS: list[Initial] = [Uniform(scale=0.05), Normal(scale=0.3), Constant(value=-1.5)]
KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 0x6A09E667F3BCC909, *range(10**12, 10**12 + 60)]


def initial(kind: Initial, optimizer: Optimizer, seed: int, table: int) -> InitialRows:
    return InitialRows.of(kind.code, kind.scale, initial_state(optimizer), seed, table)


@pytest.mark.parametrize("dim", [1, 3, 16, 100, 128])
@pytest.mark.parametrize("optimizer", [SGD(), Adagrad(initial_accumulator=0.1), RowWiseAdagrad(), Adam()])
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference_table(kind: Initial, optimizer: Optimizer, dim: int, device: str) -> None:
    seed, number = 2**64 - 3, 2**63 + 5
    keys = KEYS[:20] if dim > 16 else KEYS
    given_keys = torch.tensor(keys, dtype=torch.int64, device=device)
    size = dim + optimizer.state_floats(dim)
    arena = torch.full((100, size + 2), -77.0, device=device)
    slots = torch.randperm(100, device=device)[: len(keys)].to(torch.int32)
    slots[3] = -1
    init = initial(kind, optimizer, seed, number)
    write_initial_rows(arena[:, :size], given_keys, slots, dim, init)
    rows = ReferenceTable(dim, optimizer, seed=seed, table=number, initial=kind).read([key % 2**64 for key in keys])
    wanted = torch.full((100, size + 2), -77.0, device=device)
    here = slots >= 0
    wanted[slots[here].long(), :size] = torch.from_numpy(rows).to(device)[here]
    same_bits(arena, wanted)
    same_bits(initial_rows_reference(given_keys, dim, size, init), torch.from_numpy(rows).to(device))


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_core(kind: Initial, device: str) -> None:
    pytest.importorskip("thermocline.core", reason="the C++ module is not built here", exc_type=ImportError)
    from thermocline.tiers.dram import DramTier

    optimizer = Adam()
    keys = torch.from_numpy(np.random.default_rng(1).integers(-(2**63), 2**63, 300))
    tier = DramTier(24, optimizer, budget="4MB", seed=11, table=12, initial=kind)
    rows = torch.empty(300, 72, device=device)
    slots = torch.arange(300, dtype=torch.int32, device=device)
    write_initial_rows(rows, keys.to(device), slots, 24, initial(kind, optimizer, 11, 12))
    same_bits(rows.cpu(), torch.from_numpy(tier.initial_rows(keys.numpy())))


def test_nothing(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    write_initial_rows(torch.zeros(3, 4, device=device), none, none.int(), 4, initial(KINDS[0], SGD(), 0, 0))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_random(seed: int, number: int, key: int) -> None:
    for kind in KINDS:
        rows = torch.empty(1, 5, device=DEVICE)
        keys = torch.tensor([key], device=DEVICE)
        slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        write_initial_rows(rows, keys, slots, 5, initial(kind, SGD(), seed, number))
        wanted = ReferenceTable(5, SGD(), seed=seed, table=number, initial=kind).read([key % 2**64])
        same_bits(rows.cpu(), torch.from_numpy(wanted))


# ---- rounding by chance

HALVES = [torch.float16, torch.bfloat16]
EDGES = [0.0, -0.0, 1.0, -1.0, 65504.0, 65535.9, 6.1e-5, 6.0e-5, 5.9e-8, 1e-9, -3e-8, 1e-40, 3e38, float("inf")]


def some_values(device: str, rows: int = 50, dim: int = 30) -> torch.Tensor:
    random = np.random.default_rng(rows)
    values = floats((rows, dim), random, device) * 10.0 ** floats((rows, dim), random, device).mul(3).round()
    values[0, : len(EDGES)] = torch.tensor(EDGES, device=device)
    return values


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_as_plain_torch(dtype: torch.dtype, device: str) -> None:
    values = some_values(device)
    keys = torch.arange(len(values), device=device) * 7919
    same_bits(
        round_rows(values, keys, table_mix(1, 2), 9, dtype),
        round_rows_reference(values, keys, table_mix(1, 2), 9, dtype),
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_goes_to_a_neighbour(dtype: torch.dtype, device: str) -> None:
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
def test_rounding_is_right_on_average(value: float, dtype: torch.dtype, device: str) -> None:
    rows = 400
    values = torch.full((rows, 64), value, device=device)
    rounded = round_rows(values, torch.arange(rows, device=device), table_mix(0, 0), 1, dtype).double()
    exact = float(np.float32(value))
    gap = float(rounded.max() - rounded.min())
    assert gap > 0
    # The mean of 25,600 choices between two neighbours: five deviations.
    assert abs(float(rounded.mean()) - exact) < 5 * 0.5 * gap / np.sqrt(rows * 64)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_depends_on_all_it_should(dtype: torch.dtype, device: str) -> None:
    values = torch.full((2, 256), 0.30011, device=device)
    keys = torch.tensor([5, 6], device=device)

    def bits(seed: int, table: int, step: int) -> torch.Tensor:
        return round_rows(values, keys, table_mix(seed, table), step, dtype)

    base = bits(1, 2, 3)
    same_bits(base, bits(1, 2, 3))
    for other in (bits(2, 2, 3), bits(1, 3, 3), bits(1, 2, 4), base.flip(0), base.roll(1, 1)):
        assert 0.2 < float((other != base).float().mean()) < 0.8


@pytest.mark.parametrize("dtype", HALVES)
def test_not_a_number_stays(dtype: torch.dtype, device: str) -> None:
    # The second has its only payload bit among those that are dropped.
    values = torch.tensor([[0x7FC00000, 0x7F800001, -1]], dtype=torch.int32, device=device).view(torch.float32)
    assert round_rows(values, torch.zeros(1, dtype=torch.int64, device=device), 0, 1, dtype).isnan().all()


def test_refuses_other_types(device: str) -> None:
    values, keys = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"float16 or torch\.bfloat16"):
        round_rows(values, keys, 0, 1, torch.float64)
