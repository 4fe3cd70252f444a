"""copy_out, copy_in: whole rows, weights and optimizer state, between the arena and a list of rows.

An arena is [slots, floats] of any 4-byte type, contiguous. A row is copied in pieces of at most 128 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import blocks, kernel, row_block

_PIECE = 128
_LANES = 32  # rows per program
_LINK_PROGRAMS = 64  # programs that copy to or from host memory: enough to saturate the link, and no more


@triton.jit
def move(arena, slot, rows, i, active, floats, OUT: tl.constexpr, PIECE: tl.constexpr):
    """Copy arena[slot] to rows[i] if OUT, else rows[i] to arena[slot], where `active`."""
    in_arena = arena + slot.to(tl.int64)[:, None] * floats
    in_rows = rows + i[:, None] * floats
    for first in range(0, floats, PIECE):
        column = first + tl.arange(0, PIECE)[None, :]
        mask = active[:, None] & (column < floats)
        if OUT:
            tl.store(in_rows + column, tl.load(in_arena + column, mask=mask, other=0), mask=mask)
        else:
            tl.store(in_arena + column, tl.load(in_rows + column, mask=mask, other=0), mask=mask)


@kernel
def _copy_kernel(arena, slots, limit, rows, floats, OUT: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr):
    count = tl.load(limit)
    for first in range(tl.program_id(0).to(tl.int64) * LANES, count, tl.num_programs(0) * LANES):
        i = first + tl.arange(0, LANES)
        active = i < count
        slot = tl.load(slots + i, mask=active, other=-1)
        move(arena, slot, rows, i, active & (slot >= 0), floats, OUT, PIECE)


def _copy(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: torch.Tensor, out: bool) -> None:
    floats, programs = arena.shape[1], blocks(len(slots), _LANES)
    grid = (min(programs, _LINK_PROGRAMS) if rows.is_cpu else programs,)
    _copy_kernel[grid](
        arena, slots, count, rows, floats, OUT=out, LANES=_LANES, PIECE=min(row_block(floats), _PIECE), num_warps=1
    )


def copy_out(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: torch.Tensor) -> None:
    """rows[i] = arena[slots[i]] for i < count where slots[i] >= 0.

    slots    int32[at least count]
    rows     [at least count, floats], in device memory or in page-locked host memory
    count    int64[1], in device memory
    """
    _copy(arena, slots, rows, count, True)


def copy_in(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: torch.Tensor) -> None:
    """arena[slots[i]] = rows[i] for i < count where slots[i] >= 0; arguments as in `copy_out`. No slot may repeat."""
    _copy(arena, slots, rows, count, False)


def copy_out_reference(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """`copy_out` in plain torch."""
    i = torch.nonzero(slots[:count] >= 0).flatten()
    rows[i] = arena[slots[i].long()]


def copy_in_reference(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """`copy_in` in plain torch."""
    i = torch.nonzero(slots[:count] >= 0).flatten()
    arena[slots[i].long()] = rows[i]
