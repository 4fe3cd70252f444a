"""Operations of HierarchicalKV's benchmark that training does not use: rows copied by key, and initialized in HBM.

Training pins slots and pools from the arena, and the DRAM tier initializes new rows. benchmarks/hbm.py composes these
operations from the device functions of the package, to compare with a table that offers them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from thermocline.kernels.evict import NEW
from thermocline.kernels.find import find
from thermocline.kernels.index import Index, search
from thermocline.kernels.insert import InsertPlan
from thermocline.kernels.launch import EXACT, blocks, row_block
from thermocline.kernels.random import counter_bits, row_mix
from thermocline.kernels.rows import copy_in, copy_out, move

_LANES = 32  # keys per program
_PIECE = 128  # elements of a row copied at a time
_TILE = 512  # elements initialized at a time
_WIDE = 64  # rows from here on are copied by a separate kernel: one that also searches needs too many registers


@triton.jit(do_not_specialize=["count"])
def _copy_by_key_kernel(
    keys, count, words, halves, blocks, strides, arena, rows, found, floats,
    OUT: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    slot = search(words, halves, tl.load(keys + i, mask=active, other=0), active, blocks, strides)
    hit = active & (slot >= 0)
    tl.store(found + i, hit, mask=active)
    move(arena, slot, rows, i, hit, floats, OUT, PIECE)


def _copy_by_key(index: Index, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, out: bool) -> torch.Tensor:
    keys, floats = keys.contiguous(), arena.shape[1]
    if floats >= _WIDE:
        slots = find(index, keys)
        copy = copy_out if out else copy_in
        copy(arena, slots, rows, torch.full((1,), len(keys), device=keys.device))
        return slots >= 0
    found = torch.empty(len(keys), dtype=torch.bool, device=keys.device)
    _copy_by_key_kernel[(blocks(len(keys), _LANES),)](
        keys, len(keys), *index.arguments, arena, rows, found, floats,
        OUT=out, LANES=_LANES, PIECE=min(row_block(floats), _PIECE), num_warps=1,
    )  # fmt: skip
    return found


def find_rows(index: Index, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy the row of keys[i] to rows[i] if it is resident; bool[keys]: whether it is."""
    return _copy_by_key(index, arena, keys, rows, True)


def assign_rows(index: Index, arena: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Replace the row of keys[i] by rows[i] if it is resident; bool[keys]: whether it is. No key may repeat."""
    return _copy_by_key(index, arena, keys, rows, False)


@triton.jit(do_not_specialize=["count", "table_mix"])
def _read_or_initialize_kernel(
    arena, resident_slots, count, rows, new_keys, new_slots, counts, table_mix, factor,
    FLOATS: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Even programs copy, which waits for memory; odd ones initialize, which uses the arithmetic units.
    program = tl.program_id(0).to(tl.int64) // 2
    if tl.program_id(0) % 2 == 0:
        i = program * LANES + tl.arange(0, LANES)
        active = i < count
        slot = tl.load(resident_slots + i, mask=active, other=-1)
        move(arena, slot, rows, i, active & (slot >= 0), FLOATS, True, PIECE)
    else:
        new = tl.load(counts + NEW)
        cols = tl.arange(0, BLOCK)
        for first in range(program * LANES, tl.minimum(program * LANES + LANES, new), KEYS):
            item = first + tl.arange(0, KEYS)
            live = item < new
            slot = tl.load(new_slots + item, mask=live, other=-1).to(tl.int64)
            live = live & (slot >= 0)
            mix = row_mix(table_mix, tl.load(new_keys + item, mask=live, other=0))[:, None]
            number = (counter_bits(mix, cols[None, :]) >> 40).to(tl.int32) * 2 - 16777215
            pointer = arena + slot[:, None] * FLOATS + cols[None, :]
            tl.store(pointer, number.to(tl.float32) * factor, mask=live[:, None] & (cols[None, :] < FLOATS))


def read_or_initialize(plan: InsertPlan, arena: torch.Tensor, rows: torch.Tensor, table_mix: int, scale: float) -> None:
    """Copy the rows of resident ids to `rows`, and write initial rows of new keys to the arena, uniform in +-scale."""
    floats, count = arena.shape[1], len(plan.resident_slots)
    factor = float(np.float32(scale) * np.float32(2.0**-24))
    _read_or_initialize_kernel[(2 * blocks(count, _LANES),)](
        arena, plan.resident_slots, count, rows, plan.new_keys, plan.new_slots, plan.counts, table_mix, factor,
        FLOATS=floats, LANES=_LANES, PIECE=min(row_block(floats), _PIECE),
        KEYS=min(_LANES, max(1, _TILE // row_block(floats))), BLOCK=row_block(floats), num_warps=1, **EXACT,
    )  # fmt: skip
