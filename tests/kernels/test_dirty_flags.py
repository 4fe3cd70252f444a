"""Flags of slots against plain torch."""

from __future__ import annotations

import pytest
import torch

from thermocline.kernels.dirty_flags import set_flags, set_flags_reference


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])  # around the size of a tile
@pytest.mark.parametrize("value", [0, 1])
def test_set_flags(count: int, value: int, device: str) -> None:
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(count)).to(torch.int32)[:300].to(device)
    flags, expected = (torch.full((400,), 7, dtype=torch.uint8, device=device) for _ in range(2))
    set_flags(flags, slots, torch.tensor([count], device=device), value)
    set_flags_reference(expected, slots, count, value)
    assert torch.equal(flags, expected)
