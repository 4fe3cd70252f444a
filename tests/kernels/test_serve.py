"""Rows of a plan: found ones copied out, new ones initialised; nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from helpers.index import Table, random_keys

from thermocline.kernels.dirty_flags import mark, mark_reference
from thermocline.kernels.initial import CONSTANT, NORMAL, UNIFORM, InitialRows
from thermocline.kernels.serve import serve, serve_reference


@pytest.mark.parametrize(("dim", "floats"), [(1, 1), (5, 5), (8, 16), (64, 65), (128, 300)])
@pytest.mark.parametrize("kind", [UNIFORM, NORMAL, CONSTANT])
@pytest.mark.parametrize("count", [0, 1, 33, 90, pytest.param(300_001, marks=pytest.mark.gpu)])
def test_serve(count: int, kind: int, dim: int, floats: int, device: str) -> None:
    """Two thirds of the keys were there, some twice in the batch; -0.0 and NaN in rows stay as they are."""
    keys = random_keys(count, device, seed=count)
    table = Table(2 * count + 5, 4 * count + 5, device)
    table.insert(keys[: count * 2 // 3], now=1)
    plan, _ = table.insert(torch.cat([keys, keys[: count // 4]]), now=2)
    arena = torch.full((2 * count + 5, floats), float("nan"), device=device)
    arena[: table.used : 3] = -0.0
    expected = arena.clone()
    mine, its = (torch.full((len(plan.slots), floats), -77.0, device=device) for _ in range(2))
    init = InitialRows.of(kind, 0.01, 0.5, 7, 8)
    serve(plan, arena, mine, dim, init)
    serve_reference(plan, expected, its, dim, init)
    assert torch.equal(mine.view(torch.int32), its.view(torch.int32))
    assert torch.equal(arena.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("value", [0, 1])
def test_mark(count: int, value: int, device: str) -> None:
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(count)).to(torch.int32)[:300].to(device)
    mine, its = (torch.full((400,), 7, dtype=torch.uint8, device=device) for _ in range(2))
    mark(mine, slots, torch.tensor([count], device=device), value)
    mark_reference(its, slots, count, value)
    assert torch.equal(mine, its)
