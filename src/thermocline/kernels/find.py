"""find: the slot of every key; copies and inserts nothing."""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.index import Index, search
from thermocline.kernels.launch import blocks, kernel

LANES = 32
"""Keys per program: one per thread of a single warp, so that a long search delays only 31 others."""


@kernel(do_not_specialize=["count"])
def _find_kernel(keys, count, words, halves, blocks, strides, slots, LANES: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    slot = search(words, halves, tl.load(keys + i, mask=active, other=0), active, blocks, strides)
    tl.store(slots + i, tl.maximum(slot, -1), mask=active)


def find(index: Index, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int32[keys]: the slot of each int64 key, -1 if the index does not hold it. Written to `out` if given."""
    keys = keys.contiguous()
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device) if out is None else out
    grid = (blocks(len(keys), LANES),)
    _find_kernel[grid](keys, len(keys), *index.arguments, slots, LANES=LANES, num_warps=1)
    return slots


def find_reference(resident_keys: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`find` in plain torch, where slot i holds the row of resident_keys[i]."""
    if len(resident_keys) == 0:
        return torch.full((len(keys),), -1, dtype=torch.int32, device=keys.device)
    ordered, slots = torch.sort(resident_keys)
    position = torch.searchsorted(ordered, keys.contiguous()).clamp(max=len(resident_keys) - 1)
    return torch.where(ordered[position] == keys, slots[position], -1).to(torch.int32)
