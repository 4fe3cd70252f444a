"""mark: a flag per slot, set or cleared for a list of slots whose length only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import blocks

_TILE = 256


@triton.jit(do_not_specialize=["value"])
def _mark_kernel(flags, slots, count, value, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = i < tl.load(count)
    slot = tl.load(slots + i, mask=live, other=0)
    tl.store(flags + slot, tl.full([TILE], 0, tl.uint8) + value.to(tl.uint8), mask=live)


def mark(flags: torch.Tensor, slots: torch.Tensor, count: torch.Tensor, value: int) -> None:
    """flags[slots[i]] = value for i < count, a number in device memory, at most len(slots). Flags are uint8."""
    _mark_kernel[(blocks(len(slots), _TILE),)](flags, slots, count, value, TILE=_TILE)


def mark_reference(flags: torch.Tensor, slots: torch.Tensor, count: int, value: int) -> None:
    """As `mark`."""
    flags[slots[:count].long()] = value
