"""find: keys to slots. Copies nothing, inserts nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.index import Index, search
from thermocline.kernels.launch import blocks

LANES = 32
"""Keys of one program: one per thread of one warp, so that nobody waits for the longest search of others."""


@triton.jit(do_not_specialize=["count"])
def _find_kernel(keys, count, words, halves, blocks, strides, slots, LANES: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    slot = search(words, halves, tl.load(keys + i, mask=active, other=0), active, blocks, strides)
    tl.store(slots + i, tl.maximum(slot, -1), mask=active)


def find(index: Index, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int32 per key: the slot of its row, -1 where it has none."""
    keys = keys.contiguous()
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device) if out is None else out
    grid = (blocks(len(keys), LANES),)
    _find_kernel[grid](keys, len(keys), *index.arguments, slots, LANES=LANES, num_warps=1)
    return slots


def find_reference(resident: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same, where resident[slot] is the key whose row is in that slot."""
    if len(resident) == 0:
        return torch.full((len(keys),), -1, dtype=torch.int32, device=keys.device)
    ordered, slots = torch.sort(resident)
    place = torch.searchsorted(ordered, keys.contiguous()).clamp(max=len(resident) - 1)
    return torch.where(ordered[place] == keys, slots[place], -1).to(torch.int32)
