"""Rows by slot or by key: copied out of the arena and into it, whole, weights and optimizer state.

Arenas are [slots, row_floats] of any 4-byte type; a row is moved in pieces of at most 128 elements. By key, short rows
are copied by the kernel that searches: those found first are on their way while others are still searched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.find import find, find_reference
from thermocline.kernels.index import Index, search
from thermocline.kernels.launch import blocks, row_block

_PIECE = 128


@triton.jit
def move(arena, slot, other, i, active, floats, OUT: tl.constexpr, PIECE: tl.constexpr):
    """Rows `slot` of the arena and rows `i` of `other`: copied out of the arena, or into it."""
    inside = arena + slot.to(tl.int64)[:, None] * floats
    outside = other + i[:, None] * floats
    for first in range(0, floats, PIECE):
        column = first + tl.arange(0, PIECE)[None, :]
        mask = active[:, None] & (column < floats)
        if OUT:
            tl.store(outside + column, tl.load(inside + column, mask=mask, other=0), mask=mask)
        else:
            tl.store(inside + column, tl.load(outside + column, mask=mask, other=0), mask=mask)


@triton.jit
def _by_slot_kernel(arena, slots, limit, other, floats, OUT: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr):
    count = tl.load(limit)
    for first in range(tl.program_id(0).to(tl.int64) * LANES, count, tl.num_programs(0) * LANES):
        i = first + tl.arange(0, LANES)
        active = i < count
        slot = tl.load(slots + i, mask=active, other=-1)
        move(arena, slot, other, i, active & (slot >= 0), floats, OUT, PIECE)


@triton.jit(do_not_specialize=["count"])
def _by_key_kernel(
    keys,
    count,
    words,
    halves,
    blocks,
    strides,
    arena,
    other,
    found,
    floats,
    OUT: tl.constexpr,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    slot = search(words, halves, tl.load(keys + i, mask=active, other=0), active, blocks, strides)
    hit = active & (slot >= 0)
    tl.store(found + i, hit, mask=active)
    move(arena, slot, other, i, hit, floats, OUT, PIECE)


_LANES = 32  # keys of a program
_LINK_PROGRAMS = 64  # that copy over the link: enough to fill it, few enough to leave room for others' kernels
_WIDE = 64  # rows from here on are copied by a kernel of their own: one that also searches holds too many registers


def _shape(floats: int) -> dict[str, int]:
    return {"LANES": _LANES, "PIECE": min(row_block(floats), _PIECE), "num_warps": 1}


def _by_slot(arena: torch.Tensor, slots: torch.Tensor, other: torch.Tensor, count: torch.Tensor, out: bool) -> None:
    programs = blocks(len(slots), _LANES)
    grid = (min(programs, _LINK_PROGRAMS) if other.is_cpu else programs,)
    _by_slot_kernel[grid](arena, slots, count, other, arena.shape[1], OUT=out, **_shape(arena.shape[1]))


def copy_out(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: torch.Tensor) -> None:
    """rows[i] = arena[slots[i]] for i < count, a number in device memory; negative slots are passed over."""
    _by_slot(arena, slots, rows, count, True)


def copy_in(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: torch.Tensor) -> None:
    """arena[slots[i]] = rows[i] for i < count, a number in device memory. No slot may repeat; negative: passed over."""
    _by_slot(arena, slots, rows, count, False)


def _by_key(index: Index, arena: torch.Tensor, keys: torch.Tensor, other: torch.Tensor, out: bool) -> torch.Tensor:
    keys = keys.contiguous()
    if arena.shape[1] >= _WIDE:
        slots = find(index, keys)
        _by_slot(arena, slots, other, torch.full((1,), len(keys), device=keys.device), out)
        return slots >= 0
    found = torch.empty(len(keys), dtype=torch.bool, device=keys.device)
    grid = (blocks(len(keys), _LANES),)
    _by_key_kernel[grid](
        keys,
        len(keys),
        *index.arguments,
        arena,
        other,
        found,
        arena.shape[1],
        OUT=out,
        **_shape(arena.shape[1]),
    )
    return found


def find_rows(index: Index, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copies the rows of `keys` to `rows`; bool per key: whether it was there. Other rows are left as they are."""
    return _by_key(index, arena, keys, rows, True)


def assign(index: Index, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Replaces the rows of those `keys` that are there; bool per key: whether it was. No key may repeat."""
    return _by_key(index, arena, keys, rows, False)


def copy_out_reference(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """As `copy_out`."""
    i = torch.nonzero(slots[:count] >= 0).flatten()
    rows[i] = arena[slots[i].long()]


def copy_in_reference(arena: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """As `copy_in`."""
    i = torch.nonzero(slots[:count] >= 0).flatten()
    arena[slots[i].long()] = rows[i]


def find_rows_reference(
    resident: torch.Tensor, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """As `find_rows`, where resident[slot] is the key whose row is in that slot."""
    slots = find_reference(resident, keys)
    copy_out_reference(arena, slots, rows, len(keys))
    return slots >= 0


def assign_reference(
    resident: torch.Tensor, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """As `assign`."""
    slots = find_reference(resident, keys)
    copy_in_reference(arena, slots, rows, len(keys))
    return slots >= 0
