"""set_flags: one byte per slot, written for a list of slots whose length is in device memory."""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.launch import blocks, kernel

_TILE = 256


@kernel(do_not_specialize=["value"])
def _set_flags_kernel(flags, slots, count, value, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = i < tl.load(count)
    slot = tl.load(slots + i, mask=live, other=0)
    tl.store(flags + slot, tl.full([TILE], 0, tl.uint8) + value.to(tl.uint8), mask=live)


def set_flags(flags: torch.Tensor, slots: torch.Tensor, count: torch.Tensor, value: int) -> None:
    """flags[slots[i]] = value for i < count.

    flags    uint8[slots of the table]
    slots    int32[at least count]
    count    int64[1], in device memory
    """
    _set_flags_kernel[(blocks(len(slots), _TILE),)](flags, slots, count, value, TILE=_TILE)


def set_flags_reference(flags: torch.Tensor, slots: torch.Tensor, count: int, value: int) -> None:
    """`set_flags` in plain torch."""
    flags[slots[:count].long()] = value
