"""serve: after find_or_insert, new keys get their initial rows, and the rows that were there are copied out.

One kernel: every other program copies, which waits for memory, or initialises, which keeps the arithmetic units busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.evict import NEW
from thermocline.kernels.initial import InitialRows, initial_rows_reference, initial_weights
from thermocline.kernels.insert import Plan
from thermocline.kernels.launch import EXACT, blocks, row_block
from thermocline.kernels.rows import copy_out_reference, move

_LANES = 32  # ids of a program that copies
_PIECE = 128
_ELEMENTS = 512  # of a tile that is initialised


@triton.jit(do_not_specialize=["count", "table_mix"])
def _serve_kernel(
    arena, found, count, out, new_keys, new_slots, counts, table_mix, factor, state,
    FLOATS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
    LANES: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64) // 2
    if tl.program_id(0) % 2 == 0:
        i = program * LANES + tl.arange(0, LANES)
        active = i < count
        slot = tl.load(found + i, mask=active, other=-1)
        move(arena, slot, out, i, active & (slot >= 0), FLOATS, True, PIECE)
    else:
        new = tl.load(counts + NEW)
        for first in range(program * LANES, tl.minimum(program * LANES + LANES, new), KEYS):
            item = first + tl.arange(0, KEYS)
            live = item < new
            slot = tl.load(new_slots + item, mask=live, other=-1).to(tl.int64)
            live = live & (slot >= 0)
            cols = tl.arange(0, BLOCK)
            value = initial_weights(tl.load(new_keys + item, mask=live, other=0), cols, table_mix, factor, KIND)
            value = tl.where(cols[None, :] < DIM, value, state)
            place = arena + slot[:, None] * FLOATS + cols[None, :]
            tl.store(place, value, mask=live[:, None] & (cols[None, :] < FLOATS))


def serve(plan: Plan, arena: torch.Tensor, rows: torch.Tensor, dim: int, init: InitialRows) -> None:
    """rows[i] = the row of id i if its key was there before; rows of new keys are initialised, in the arena."""
    floats, count = arena.shape[1], len(plan.found)
    keys = min(_LANES, max(1, _ELEMENTS // row_block(floats)))
    _serve_kernel[(2 * blocks(count, _LANES),)](
        arena, plan.found, count, rows, plan.new_keys, plan.new_slots, plan.counts,
        init.table_mix, init.factor, init.state,
        FLOATS=floats, DIM=dim, KIND=init.kind, LANES=_LANES, PIECE=min(row_block(floats), _PIECE), KEYS=keys,
        BLOCK=row_block(floats), num_warps=1, **EXACT,
    )  # fmt: skip


def serve_reference(plan: Plan, arena: torch.Tensor, rows: torch.Tensor, dim: int, init: InitialRows) -> None:
    """The same in plain torch."""
    copy_out_reference(arena, plan.found, rows, len(plan.found))
    new = int(plan.counts[NEW.value])
    keys, slots = plan.new_keys[:new], plan.new_slots[:new].long()
    arena[slots] = initial_rows_reference(keys, dim, arena.shape[1], init)
