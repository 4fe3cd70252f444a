"""The sparse update: each key's gradients summed in the fixed order, then the optimizer, in one pass over the rows.

The order of every sum: a segment's occurrences as listed, added left to right in blocks of 64, then the block sums
left to right. Two launches. The first has a program per tile of items: blocks of hot segments, whose sums go to a
buffer, and whole segments of the others, whose rows it updates. The second adds up the hot segments' block sums and
updates their rows. No atomics: a row is written by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.codec import (
    Codec,
    decode_reference,
    encode_reference,
    load_weights,
    number_of,
    scale_gradient_reference,
    store_weights,
)
from thermocline.kernels.launch import EXACT, blocks, row_block, tile_rows
from thermocline.kernels.optimizer_rules import (
    NONE,
    ROW_WISE_ADAGRAD,
    Step,
    load_state,
    new_row,
    new_rows_reference,
    state_floats,
    store_state,
)
from thermocline.kernels.ordered_sum import sum_rows
from thermocline.kernels.segments import BLOCK, Segments

_LAUNCH = {"num_warps": 1, **EXACT}

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _finish(
    weights, state, slot, live, w, first, second, total, cols, out, item,
    constants, unit, into, keys, table_mix, step,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr,
):  # fmt: skip
    """Applies the sums to the rows, or only stores them (OPTIMIZER below 0)."""
    inside = live[:, None] & (cols[None, :] < DIM)
    if OPTIMIZER < 0:
        tl.store(out + item.to(tl.int64)[:, None] * DIM + cols[None, :], total, mask=inside)
    else:
        w, first, second = new_row(w, first, second, total, cols, constants, OPTIMIZER, DECAY, DIM)
        store_state(state, slot, live, cols, first, second, OPTIMIZER, DIM, S_STRIDE)
        gradient = total * constants[3]
        store_weights(weights, slot, cols, live, w, gradient, unit, into, keys, table_mix, step, DIM, W_STRIDE, CODEC)


@triton.jit
def _load(
    weights, state, slot, live, cols, unit,
    OPTIMIZER: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr, W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr,
):  # fmt: skip
    """Weights and state of rows, asked for before the gradients are summed."""
    w = tl.zeros([slot.shape[0], cols.shape[0]], tl.float32)
    first = slot
    second = slot
    if OPTIMIZER >= 0:
        inside = live[:, None] & (cols[None, :] < DIM)
        w = load_weights(weights, slot, cols, inside, unit, 0.0, W_STRIDE, CODEC)
        first, second = load_state(state, slot, live, cols, OPTIMIZER, DIM, S_STRIDE)
    return w, first, second


@triton.jit(do_not_specialize=["segments", "hot_blocks", "block_programs", "table_mix", "step"])
def _update_kernel(
    weights, state, out, partial, starts, slots, block_starts, block_ends, counts, rows, coefs, grads,
    segments, hot_blocks, block_programs,
    constants, unit, into, keys, table_mix, step,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, COLS)
    if program < block_programs:
        item = program * ITEMS + tl.arange(0, ITEMS)
        begin = tl.load(block_starts + item, mask=item < hot_blocks, other=0)
        end = tl.load(block_ends + item, mask=item < hot_blocks, other=0)
        live = item < tl.minimum(hot_blocks, tl.load(counts + 2))
        begin = tl.where(live, begin, 0)  # what was read past the lists' ends is no place
        end = tl.where(live, end, 0)
        total = sum_rows(begin, end, rows, coefs, grads, cols, unit, DIM, DIM, WEIGHTED, True, 0)
        place = partial + item.to(tl.int64)[:, None] * DIM + cols[None, :]
        tl.store(place, total, mask=live[:, None] & (cols[None, :] < DIM))
    else:
        item = (program - block_programs) * ITEMS + tl.arange(0, ITEMS)
        begin = tl.load(starts + item, mask=item < segments, other=0)
        end = tl.load(starts + item + 1, mask=item < segments, other=0)
        slot = tl.load(slots + item, mask=item < segments, other=0).to(tl.int64)
        live = (item < tl.minimum(segments, tl.load(counts))) & (end - begin <= _BLOCK)
        begin = tl.where(live, begin, 0)
        end = tl.where(live, end, 0)
        w, first, second = _load(weights, state, slot, live, cols, unit, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
        total = sum_rows(begin, end, rows, coefs, grads, cols, unit, DIM, DIM, WEIGHTED, True, 0)
        _finish(
            weights, state, slot, live, w, first, second, total, cols, out, item,
            constants, unit, into, keys, table_mix, step, OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["hot_segments", "table_mix", "step"])
def _hot_kernel(
    weights, state, out, partial, hot, hot_blocks, slots, counts, hot_segments,
    constants, unit, into, keys, table_mix, step,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    nth = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = nth < tl.minimum(hot_segments, tl.load(counts + 1))
    item = tl.load(hot + nth, mask=live, other=0)
    begin = tl.load(hot_blocks + nth, mask=live, other=0)
    end = tl.load(hot_blocks + nth + 1, mask=live, other=0)
    slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    w, first, second = _load(weights, state, slot, live, cols, unit, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
    total = sum_rows(begin, end, partial, partial, partial, cols, unit, DIM, DIM, False, False, 0)
    _finish(
        weights, state, slot, live, w, first, second, total, cols, out, item,
        constants, unit, into, keys, table_mix, step, OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "table_mix", "step"])
def _apply_kernel(
    weights, state, sums, slots, count,
    constants, unit, into, keys, table_mix, step,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    live = item < count
    slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    w, first, second = _load(weights, state, slot, live, cols, unit, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
    place = sums + item.to(tl.int64)[:, None] * DIM + cols[None, :]
    total = tl.load(place, mask=live[:, None] & (cols[None, :] < DIM), other=0.0)
    _finish(
        weights, state, slot, live, w, first, second, total, cols, sums, item,
        constants, unit, into, keys, table_mix, step, OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE,
    )  # fmt: skip


_NO_STEP = Step(NONE, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1)


def update_rows(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    segments: Segments,
    grads: torch.Tensor,
    grad_rows: torch.Tensor | None,
    coefs: torch.Tensor | None,
    step: Step,
    codec: Codec | None = None,
) -> None:
    """Applies one step to the rows of `segments`, in place.

    weights    float32[slots, dim], or as `codec.weights` gives them; each row contiguous, rows any stride apart
    state      float32[slots, state of the optimizer], likewise; none for SGD
    grads      float32[.., dim], contiguous
    grad_rows  int32, in the order of `segments.order`: the row of `grads` that belongs to an occurrence; none: the
               occurrence's own position
    coefs      float32, in the same order: what it is multiplied by; none: 1
    """
    _check_rows(weights, state, step, codec)
    _launch(weights, state, None, segments, grads, grad_rows, coefs, step, codec)


def sum_gradients(
    segments: Segments, grads: torch.Tensor, grad_rows: torch.Tensor | None, coefs: torch.Tensor | None
) -> torch.Tensor:
    """float32[segments.sizes[0], dim]: the first half of `update_rows`, for what must see all sums first.

    Rows past the segments' count, when that is not known on the host, are left as they were: not numbers to use.
    """
    out = torch.empty(segments.sizes[0], grads.shape[1], dtype=torch.float32, device=grads.device)
    _launch(out, None, out, segments, grads, grad_rows, coefs, _NO_STEP, None)
    return out


def apply_gradients(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    sums: torch.Tensor,
    step: Step,
    codec: Codec | None = None,
) -> None:
    """The second half: row slots[i] takes the gradient sums[i]. No slot may repeat."""
    _check_rows(weights, state, step, codec)
    count, dim = sums.shape
    if count == 0:
        return
    items = _items(dim, step)
    _apply_kernel[(blocks(count, items),)](
        weights, weights if state is None else state, sums, slots, count, *_common(weights, step, codec),
        **_layout(weights, state, step, codec), ITEMS=items, COLS=row_block(dim), **_LAUNCH,
    )  # fmt: skip


def _launch(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    out: torch.Tensor | None,
    segments: Segments,
    grads: torch.Tensor,
    grad_rows: torch.Tensor | None,
    coefs: torch.Tensor | None,
    step: Step,
    codec: Codec | None,
) -> None:
    dim = weights.shape[1] if codec is None else codec.dim
    if grads.dtype != torch.float32 or not grads.is_contiguous() or grads.dim() != 2 or grads.shape[1] != dim:
        raise ValueError(f"grads are {grads.dtype}{list(grads.shape)}: needed is contiguous float32[.., {dim}]")
    count, hot, hot_blocks = segments.sizes
    if count == 0:
        return
    items = _items(dim, step)
    sums = weights if out is None else out  # not used if none
    partial = torch.empty(hot_blocks, dim, dtype=torch.float32, device=grads.device)
    common = _common(weights, step, codec)
    layout = _layout(weights, state, step, codec)
    states = weights if state is None else state
    block_programs = -(-hot_blocks // items)
    _update_kernel[(block_programs + blocks(count, items),)](
        weights, states, sums, partial, segments.starts, segments.slots, segments.block_starts, segments.block_ends,
        segments.counts, segments.order if grad_rows is None else grad_rows, grads if coefs is None else coefs, grads,
        count, hot_blocks, block_programs, *common,
        **layout, WEIGHTED=coefs is not None, ITEMS=items, COLS=row_block(dim), **_LAUNCH,
    )  # fmt: skip
    if hot:
        # Few rows, long sums, and nothing but their length counts: one column per thread, so that many are in flight.
        # What is taken over a row, a mean or its own step, needs all of it in one program.
        whole = step.optimizer == ROW_WISE_ADAGRAD or (codec is not None and codec.row_scaled)
        cols = row_block(dim) if whole else min(32, row_block(dim))
        items = tile_rows(cols, 32)
        _hot_kernel[(blocks(hot, items), blocks(dim, cols))](
            weights, states, sums, partial, segments.hot, segments.hot_blocks, segments.slots, segments.counts, hot,
            *common, **layout, ITEMS=items, COLS=cols, **_LAUNCH,
        )  # fmt: skip


def _items(dim: int, step: Step) -> int:
    """Of one program, a warp: measured on an H200, docs/benchmarks.md. Tiles of state leave room for fewer rows."""
    return tile_rows(dim, 256 if dim >= 64 and state_floats(step.optimizer, dim) <= 1 else 128)


def _common(weights: torch.Tensor, step: Step, codec: Codec | None) -> tuple[object, ...]:
    if codec is None:
        return step.constants, weights, weights, weights, 0, step.number
    into = codec.keys if codec.gradient is None else codec.gradient  # not used if none
    return step.constants, codec.scale, into, codec.keys, codec.table_mix, step.number


def _layout(weights: torch.Tensor, state: torch.Tensor | None, step: Step, codec: Codec | None) -> dict[str, object]:
    return {
        "OPTIMIZER": step.optimizer,
        "DECAY": step.weight_decay != 0,
        "CODEC": 0 if codec is None else codec.number,
        "DIM": weights.shape[1] if codec is None else codec.dim,
        "W_STRIDE": weights.stride(0),
        "S_STRIDE": 0 if state is None else state.stride(0),
    }


def _check_rows(weights: torch.Tensor, state: torch.Tensor | None, step: Step, codec: Codec | None) -> None:
    if number_of(weights, codec) == 0 and weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}: give the codec that rounding them depends on")
    need = state_floats(step.optimizer, weights.shape[1] if codec is None else codec.dim)
    have = 0 if state is None else state.shape[1]
    if have != need or (state is not None and (state.dtype != torch.float32 or state.stride(1) != 1)):
        raise ValueError(f"state has {have} floats per row: this optimizer has {need}, float32, in one piece")


def sum_gradients_reference(
    segments: Segments, grads: torch.Tensor, grad_rows: torch.Tensor | None, coefs: torch.Tensor | None
) -> torch.Tensor:
    """The sums in plain torch: the n-th occurrence of every block of 64 at a time, then the n-th block of every key."""
    count = int(segments.counts[0])
    starts = segments.starts[: count + 1].long()
    sizes = starts.diff()
    rows = (segments.order if grad_rows is None else grad_rows).long()
    block_counts = (sizes + BLOCK - 1) // BLOCK
    first_block = torch.cat([block_counts.new_zeros(1), block_counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(count, device=grads.device), block_counts)
    begin = starts[owner] + (torch.arange(len(owner), device=grads.device) - first_block[owner]) * BLOCK
    end = torch.minimum(begin + BLOCK, starts[owner + 1])

    def gradient(places: torch.Tensor) -> torch.Tensor:
        g = grads[rows[places]]
        return g if coefs is None else g * coefs[places][:, None]

    sums = gradient(begin)
    for nth in range(1, BLOCK):
        here = (begin + nth < end).nonzero()[:, 0]
        if len(here) == 0:
            break
        sums[here] = sums[here] + gradient(begin[here] + nth)
    total = sums[first_block[:-1]]
    for nth in range(1, int(block_counts.max()) if count else 0):
        here = (block_counts > nth).nonzero()[:, 0]
        total[here] = total[here] + sums[first_block[here] + nth]
    return total


def apply_gradients_reference(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    sums: torch.Tensor,
    step: Step,
    codec: Codec | None = None,
) -> None:
    """`apply_gradients` in plain torch."""
    here = slots.long()
    before = decode_reference(weights[here], codec)
    w, s = new_rows_reference(before, None if state is None else state[here], sums, step)
    stored = w if codec is None else encode_reference(w, codec.keys[here], step.number, codec)
    weights[here] = stored
    if codec is not None and codec.gradient is not None:
        codec.gradient.add_(scale_gradient_reference(w, stored, sums * step.scale, codec))
    if state is not None and s is not None:
        state[here] = s


def update_rows_reference(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    segments: Segments,
    grads: torch.Tensor,
    grad_rows: torch.Tensor | None,
    coefs: torch.Tensor | None,
    step: Step,
    codec: Codec | None = None,
) -> None:
    """`update_rows` in plain torch."""
    sums = sum_gradients_reference(segments, grads, grad_rows, coefs)
    apply_gradients_reference(weights, state, segments.slots[: len(sums)], sums, step, codec)
