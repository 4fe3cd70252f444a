"""Rows copied by slot: whole rows, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import same_bits

from thermocline.kernels.rows import copy_in, copy_in_reference, copy_out, copy_out_reference

FLOATS = [1, 3, 8, 64, 127, 128, 129, 300]  # around the width of a piece
BIG = pytest.param(200_003, marks=pytest.mark.gpu)


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 31, 33, 140, BIG])
def test_copy_out_and_in(count: int, floats: int, device: str) -> None:
    draw = torch.Generator().manual_seed(count)
    arena = torch.rand(count + 20, floats, generator=draw).to(device)
    slots = torch.randperm(count + 20, generator=draw).to(torch.int32)[: count + 7].to(device)
    slots[::5] = -1
    limit = torch.tensor([count], device=device)
    rows, expected = (torch.full((count + 7, floats), float("nan"), device=device) for _ in range(2))
    copy_out(arena, slots, rows, limit)
    copy_out_reference(arena, slots, expected, count)
    same_bits(rows, expected)
    rows = torch.rand(count + 7, floats, generator=draw).to(device)
    expected = arena.clone()
    copy_in(arena, slots, rows, limit)
    copy_in_reference(expected, slots, rows, count)
    same_bits(arena, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    slots_of_arena = 2**31 // 64 + 1000
    arena = torch.empty(slots_of_arena, 64, device=device)
    slots = torch.arange(slots_of_arena - 500, slots_of_arena, dtype=torch.int32, device=device)
    rows = torch.rand(500, 64, device=device)
    limit = torch.tensor([500], device=device)
    copy_in(arena, slots, rows, limit)
    copied = torch.empty_like(rows)
    copy_out(arena, slots, copied, limit)
    assert torch.equal(arena[-500:], rows)
    assert torch.equal(copied, rows)
