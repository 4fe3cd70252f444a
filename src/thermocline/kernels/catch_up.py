"""catch_up_rows: replay the steps that rows missed, in place: the arithmetic of `catch_up` in csrc/dram/kernels.h.

The word after the optimizer's state is the number of the last step that the row includes, as int32. One program replays
the steps of a few rows, as many as the row that missed the most needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import EXACT, blocks, kernel, row_block, tile_rows
from thermocline.kernels.optimizer_rules import (
    ADAM,
    PARTIAL_ROW_WISE_ADAM,
    ROW_WISE_ADAGRAD,
    SGD,
    OptimizerStep,
    load_state,
    new_row,
    new_rows_reference,
    state_floats,
    store_state,
)

_ADAM, _ROW_WISE, _SGD = tl.constexpr(ADAM), tl.constexpr(ROW_WISE_ADAGRAD), tl.constexpr(SGD)
_PARTIAL = tl.constexpr(PARTIAL_ROW_WISE_ADAM)


@triton.jit
def _replay(
    rows, slot, live, begin, rates, constants, limit, target,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Apply the steps begin + 1 .. target, without gradients, to each row."""
    cols = tl.arange(0, COLS)
    inside = live[:, None] & (cols[None, :] < DIM)
    pointer = rows + slot[:, None] * STRIDE + cols[None, :]
    w = tl.load(pointer, mask=inside, other=0.0)
    first, second = load_state(rows + DIM, slot, live, cols, OPTIMIZER, DIM, STRIDE)
    total = tl.zeros([slot.shape[0], COLS], tl.float32)
    for n in range(tl.min(begin, axis=0) + 1, target + 1):
        rate = tl.load(rates + n % limit)
        bias = tl.load(rates + limit + n % limit)
        step = (
            rate, constants[1], constants[2], constants[3], constants[4], constants[5], constants[6], rate, bias,
        )  # fmt: skip
        new_w, new_first, new_second = new_row(w, first, second, total, cols, step, OPTIMIZER, DECAY, DIM)
        missed = n > begin
        w = tl.where(missed[:, None], new_w, w)
        if OPTIMIZER == _ROW_WISE:
            first = tl.where(missed, new_first, first)
        elif OPTIMIZER != _SGD:
            first = tl.where(missed[:, None], new_first, first)
        if OPTIMIZER == _ADAM:
            second = tl.where(missed[:, None], new_second, second)
        elif OPTIMIZER == _PARTIAL:
            second = tl.where(missed, new_second, second)
    tl.store(pointer, w, mask=inside)
    store_state(rows + DIM, slot, live, cols, first, second, OPTIMIZER, DIM, STRIDE)


@kernel(do_not_specialize=["count", "limit", "target", "stamp"])
def _catch_up_kernel(
    rows, words, slots, counts, dirty, rates, constants, count, limit, target, stamp,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr,
    LISTED: tl.constexpr, COUNTED: tl.constexpr, MARK: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item < count
    if COUNTED:
        live = item < tl.minimum(count, tl.load(counts))
    slot = item.to(tl.int64)
    if LISTED:
        slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    last = tl.load(words + slot * STRIDE + LAST, mask=live, other=0)
    live = live & (last < stamp)
    begin = tl.where(live, tl.maximum(last, target - limit), target)
    if tl.min(begin, axis=0) < target:
        _replay(
            rows, slot, live, begin, rates, constants, limit, target, OPTIMIZER, DECAY, DIM, STRIDE, COLS,
        )  # fmt: skip
    tl.store(words + slot * STRIDE + LAST, tl.full([ITEMS], 0, tl.int32) + stamp, mask=live)
    if MARK:
        tl.store(dirty + slot, tl.full([ITEMS], 1, tl.uint8), mask=live)


def catch_up_rows(
    rows: torch.Tensor,
    dim: int,
    step: OptimizerStep,
    rates: torch.Tensor,
    target: int,
    *,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    dirty: torch.Tensor | None = None,
    stamp: int | None = None,
) -> None:
    """Bring rows to step `target`, at most by the last `limit` steps that they missed.

    rows     float32[slots, dim + state + 1 or more], contiguous: an arena, or copies of rows. Statistics may follow
    step     constants that all steps share; its `number` and rates have no effect
    rates    float32[2, limit]: of step n at index n % limit, see `StepRates.ring`
    slots    int32: the rows to catch up; None: all. No slot may repeat
    counts   int32: its first element is the number of slots; None: all of them
    dirty    uint8[slots]: set to 1 for each row that was not as of `stamp`
    stamp    stored as the last step of these rows: `target`, or the step that is applied next
    """
    last = dim + state_floats(step.optimizer, dim)
    if rows.dtype != torch.float32 or not rows.is_contiguous() or rows.shape[1] <= last:
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}: must be contiguous float32[.., {last + 1} or more]")
    count = len(rows) if slots is None else len(slots)
    if count == 0:
        return
    items = tile_rows(dim, 32)
    _catch_up_kernel[(blocks(count, items),)](
        rows, rows.view(torch.int32), rows if slots is None else slots, rows if counts is None else counts,
        rows if dirty is None else dirty, rates, step.constants, count, rates.shape[1], target,
        target if stamp is None else stamp,
        OPTIMIZER=step.optimizer, DECAY=step.weight_decay != 0, DIM=dim, STRIDE=rows.shape[1], LAST=last,
        LISTED=slots is not None, COUNTED=counts is not None, MARK=dirty is not None,
        ITEMS=items, COLS=row_block(dim), num_warps=1, **EXACT,
    )  # fmt: skip


def catch_up_reference(rows: torch.Tensor, dim: int, steps: list[OptimizerStep], limit: int) -> None:
    """`catch_up_rows` of all rows in plain torch, to the last of `steps`: all steps from the first on."""
    last, target = rows.view(torch.int32)[:, -1], steps[-1].number
    for step in steps[-limit:]:
        missed = (last < step.number).nonzero()[:, 0]
        own = rows[missed]
        state = own[:, dim:-1] if own.shape[1] > dim + 1 else None
        w, new = new_rows_reference(own[:, :dim], state, torch.zeros(len(own), dim), step)
        rows[missed] = torch.cat([w, *([] if new is None else [new]), own[:, -1:]], 1)
    last[:] = torch.clamp(last, min=target)
