"""Rows moved by slot and by key: exactly those, whole, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.index import Table, random_keys

from thermocline.kernels.rows import (
    assign,
    assign_reference,
    copy_in,
    copy_in_reference,
    copy_out,
    copy_out_reference,
    find_rows,
    find_rows_reference,
)

FLOATS = [1, 3, 8, 64, 127, 128, 129, 300]  # around the width of a tile
BIG = pytest.param(200_003, marks=pytest.mark.gpu)


def poisoned(rows: int, floats: int, device: str) -> torch.Tensor:
    return torch.full((rows, floats), float("nan"), device=device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bits, so that poison counts."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 31, 33, 140, BIG])
def test_by_slot(count: int, floats: int, device: str) -> None:
    draw = torch.Generator().manual_seed(count)
    arena = torch.rand(count + 20, floats, generator=draw).to(device)
    slots = torch.randperm(count + 20, generator=draw).to(torch.int32)[: count + 7].to(device)
    slots[::5] = -1
    limit = torch.tensor([count], device=device)
    mine, its = poisoned(count + 7, floats, device), poisoned(count + 7, floats, device)
    copy_out(arena, slots, mine, limit)
    copy_out_reference(arena, slots, its, count)
    assert same(mine, its)
    rows = torch.rand(count + 7, floats, generator=draw).to(device)
    expected = arena.clone()
    copy_in(arena, slots, rows, limit)
    copy_in_reference(expected, slots, rows, count)
    assert same(arena, expected)


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 33, 140, BIG])
def test_by_key(count: int, floats: int, device: str) -> None:
    """Half of the keys are there."""
    draw = torch.Generator().manual_seed(count)
    keys = random_keys(count, device, seed=1)
    table = Table(max(1, count), 2 * count, device)
    table.insert(keys[: count // 2], now=1)
    arena = torch.rand(max(1, count), floats, generator=draw).to(device)
    resident = table.residents.keys[: table.used]
    mine, its = poisoned(count, floats, device), poisoned(count, floats, device)
    assert torch.equal(find_rows(table.index, arena, keys, mine), find_rows_reference(resident, arena, keys, its))
    assert same(mine, its)
    rows = torch.rand(count, floats, generator=draw).to(device)
    expected = arena.clone()
    assert torch.equal(assign(table.index, arena, keys, rows), assign_reference(resident, expected, keys, rows))
    assert same(arena, expected)


@pytest.mark.gpu
def test_arenas_beyond_two_to_the_31_elements(device: str) -> None:
    rows = 2**31 // 64 + 1000
    arena = torch.empty(rows, 64, device=device)
    slots = torch.arange(rows - 500, rows, dtype=torch.int32, device=device)
    given = torch.rand(500, 64, device=device)
    limit = torch.tensor([500], device=device)
    copy_in(arena, slots, given, limit)
    back = torch.empty_like(given)
    copy_out(arena, slots, back, limit)
    assert torch.equal(arena[-500:], given)
    assert torch.equal(back, given)
