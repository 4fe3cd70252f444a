"""Operations that only the benchmark against HierarchicalKV uses: rows copied by key, and initialized in the arena."""

from __future__ import annotations

import pytest
import torch
from helpers.index import IndexPair, random_keys
from helpers.kernels import same_bits

import thermocline as tc
from benchmarks.hbm_rows import assign_rows, find_rows, read_or_initialize
from thermocline.kernels.evict import NEW
from thermocline.kernels.find import find_reference
from thermocline.kernels.random import table_mix
from thermocline.kernels.rows import copy_in_reference, copy_out_reference

# Elements per row around the width of a piece (128), and the first that a separate kernel copies (64).
FLOATS = [1, 8, 63, 64, 129, 300]


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 33, 70, pytest.param(200_003, marks=pytest.mark.gpu)])
def test_copy_by_key(count: int, floats: int, device: str) -> None:
    """Half of the keys are resident; rows of the others are left unchanged."""
    draw = torch.Generator().manual_seed(count)
    keys = random_keys(count, device, seed=1)
    table = IndexPair(max(1, count), 2 * count, device)
    table.insert(keys[: count // 2], now=1)
    slots = find_reference(table.residents.keys[: table.used], keys)
    arena = torch.rand(max(1, count), floats, generator=draw).to(device)
    rows, expected = (torch.full((count, floats), float("nan"), device=device) for _ in range(2))
    assert torch.equal(find_rows(table.index, arena, keys, rows), slots >= 0)
    copy_out_reference(arena, slots, expected, count)
    same_bits(rows, expected)
    rows = torch.rand(count, floats, generator=draw).to(device)
    expected = arena.clone()
    assert torch.equal(assign_rows(table.index, arena, keys, rows), slots >= 0)
    copy_in_reference(expected, slots, rows, count)
    same_bits(arena, expected)


@pytest.mark.parametrize("floats", [1, 5, 16, 65, 300])
@pytest.mark.parametrize("count", [0, 1, 33, 90, pytest.param(300_001, marks=pytest.mark.gpu)])
def test_read_or_initialize(count: int, floats: int, device: str) -> None:
    """Two thirds of the keys are resident, some twice in the batch. Initial rows equal those of the DRAM tier."""
    keys = random_keys(count, device, seed=count)
    table = IndexPair(2 * count + 5, 4 * count + 5, device)
    table.insert(keys[: count * 2 // 3], now=1)
    plan, _ = table.insert(torch.cat([keys, keys[: count // 4]]), now=2)
    arena = torch.full((2 * count + 5, floats), float("nan"), device=device)
    arena[: table.used : 3] = -0.0
    expected_arena = arena.clone()
    rows, expected = (torch.full((len(plan.slots), floats), -77.0, device=device) for _ in range(2))
    read_or_initialize(plan, arena, rows, table_mix(7, 8), 0.01)
    copy_out_reference(expected_arena, plan.resident_slots, expected, len(plan.slots))
    new = int(plan.counts[NEW.value])
    tier = tc.DramTier(floats, tc.SGD(), budget="4MB", seed=7, table=8, initial=tc.Uniform(scale=0.01))
    initial = torch.from_numpy(tier.initial_rows(plan.new_keys[:new].cpu().numpy())).to(device)
    expected_arena[plan.new_slots[:new].long()] = initial
    same_bits(rows, expected)
    same_bits(arena, expected_arena)
