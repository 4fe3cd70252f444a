"""update_rows: the sparse update. Sums the gradients of each key in a fixed order and applies the optimizer.

Order of every sum: the occurrences of a segment, left to right in blocks of 64, then the block sums left to right.
There are two launches. The first sums the blocks of hot segments into a buffer; it sums all other segments and updates
their rows. The second adds the block sums of hot segments and updates their rows. `sum_gradients` and `apply_gradients`
are the two halves. There are no atomics on floats: each row is written by one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from thermocline.kernels.codec import (
    Codec,
    codec_number,
    decode_reference,
    encode_reference,
    load_weights,
    scale_gradient_reference,
    store_weights,
)
from thermocline.kernels.launch import EXACT, OPEN, RepeatedLaunch, blocks, kernel, row_block, tile_rows
from thermocline.kernels.optimizer_rules import (
    NONE,
    WHOLE_ROW,
    OptimizerStep,
    StoredStep,
    load_state,
    new_row,
    new_rows_reference,
    state_floats,
    step_constants,
    store_state,
)
from thermocline.kernels.ordered_sum import sum_rows
from thermocline.kernels.segments import BLOCK, Segments

_LAUNCH = {"num_warps": 1, **EXACT}

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _finish(
    weights, state, slot, live, w, first, second, total, cols, out, item,
    constants, scale, scale_gradient, keys, dirty, table_mix, number,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, STORED: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """Apply the sums `total` to the rows, or store them in `out` if OPTIMIZER is negative."""
    inside = live[:, None] & (cols[None, :] < DIM)
    if OPTIMIZER < 0:
        tl.store(out + item.to(tl.int64)[:, None] * DIM + cols[None, :], total, mask=inside)
    else:
        constants, number = step_constants(constants, number, STORED)
        w, first, second = new_row(w, first, second, total, cols, constants, OPTIMIZER, DECAY, DIM)
        store_state(state, slot, live, cols, first, second, OPTIMIZER, DIM, S_STRIDE)
        gradient = total * constants[3]
        store_weights(
            weights, slot, cols, live, w, gradient, scale, scale_gradient, keys, table_mix, number, DIM, W_STRIDE, CODEC
        )  # fmt: skip
        if MARK:
            tl.store(dirty + slot, tl.full(slot.shape, 1, tl.uint8), mask=live)


@triton.jit
def _load(
    weights, state, slot, live, cols, scale,
    OPTIMIZER: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr, W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr,
):  # fmt: skip
    """Weights and state of rows, loaded before the gradients are summed to hide latency."""
    w = tl.zeros([slot.shape[0], cols.shape[0]], tl.float32)
    first = slot
    second = slot
    if OPTIMIZER >= 0:
        inside = live[:, None] & (cols[None, :] < DIM)
        w = load_weights(weights, slot, cols, inside, scale, 0.0, W_STRIDE, CODEC)
        first, second = load_state(state, slot, live, cols, OPTIMIZER, DIM, S_STRIDE)
    return w, first, second


@kernel(do_not_specialize=["segments", "hot_blocks", "block_programs", "table_mix", "number"])
def _update_kernel(
    weights, state, out, partial, starts, slots, block_starts, block_ends, counts, rows, coefs, grads,
    segments, hot_blocks, block_programs,
    constants, scale, scale_gradient, keys, dirty, table_mix, number,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, STORED: tl.constexpr, MARK: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, COLS)
    if program < block_programs:
        item = program * ITEMS + tl.arange(0, ITEMS)
        begin = tl.load(block_starts + item, mask=item < hot_blocks, other=0)
        end = tl.load(block_ends + item, mask=item < hot_blocks, other=0)
        live = item < tl.minimum(hot_blocks, tl.load(counts + 2))
        begin = tl.where(live, begin, 0)  # elements past the end of the lists are undefined
        end = tl.where(live, end, 0)
        total = sum_rows(begin, end, rows, coefs, grads, cols, scale, DIM, DIM, WEIGHTED, True, 0)
        pointer = partial + item.to(tl.int64)[:, None] * DIM + cols[None, :]
        tl.store(pointer, total, mask=live[:, None] & (cols[None, :] < DIM))
    else:
        item = (program - block_programs) * ITEMS + tl.arange(0, ITEMS)
        begin = tl.load(starts + item, mask=item < segments, other=0)
        end = tl.load(starts + item + 1, mask=item < segments, other=0)
        slot = tl.load(slots + item, mask=item < segments, other=0).to(tl.int64)
        live = (item < tl.minimum(segments, tl.load(counts))) & (end - begin <= _BLOCK)
        begin = tl.where(live, begin, 0)
        end = tl.where(live, end, 0)
        w, first, second = _load(weights, state, slot, live, cols, scale, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
        total = sum_rows(begin, end, rows, coefs, grads, cols, scale, DIM, DIM, WEIGHTED, True, 0)
        _finish(
            weights, state, slot, live, w, first, second, total, cols, out, item,
            constants, scale, scale_gradient, keys, dirty, table_mix, number,
            OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE, STORED, MARK,
        )  # fmt: skip


@kernel(do_not_specialize=["hot_segments", "table_mix", "number"])
def _hot_kernel(
    weights, state, out, partial, hot, hot_blocks, slots, counts, hot_segments,
    constants, scale, scale_gradient, keys, dirty, table_mix, number,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, STORED: tl.constexpr, MARK: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    nth = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = nth < tl.minimum(hot_segments, tl.load(counts + 1))
    item = tl.load(hot + nth, mask=live, other=0)
    begin = tl.load(hot_blocks + nth, mask=live, other=0)
    end = tl.load(hot_blocks + nth + 1, mask=live, other=0)
    slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    w, first, second = _load(weights, state, slot, live, cols, scale, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
    total = sum_rows(begin, end, partial, partial, partial, cols, scale, DIM, DIM, False, False, 0)
    _finish(
        weights, state, slot, live, w, first, second, total, cols, out, item,
        constants, scale, scale_gradient, keys, dirty, table_mix, number,
        OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE, STORED, MARK,
    )  # fmt: skip


@kernel(do_not_specialize=["count", "table_mix", "number"])
def _apply_kernel(
    weights, state, sums, slots, count,
    constants, scale, scale_gradient, keys, dirty, table_mix, number,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, CODEC: tl.constexpr, DIM: tl.constexpr,
    W_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, STORED: tl.constexpr, MARK: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    live = item < count
    slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    w, first, second = _load(weights, state, slot, live, cols, scale, OPTIMIZER, CODEC, DIM, W_STRIDE, S_STRIDE)
    pointer = sums + item.to(tl.int64)[:, None] * DIM + cols[None, :]
    total = tl.load(pointer, mask=live[:, None] & (cols[None, :] < DIM), other=0.0)
    _finish(
        weights, state, slot, live, w, first, second, total, cols, sums, item,
        constants, scale, scale_gradient, keys, dirty, table_mix, number,
        OPTIMIZER, DECAY, CODEC, DIM, W_STRIDE, S_STRIDE, STORED, MARK,
    )  # fmt: skip


_NO_STEP = OptimizerStep(NONE, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1)


def update_rows(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    segments: Segments,
    grads: torch.Tensor,
    grad_rows: torch.Tensor | None,
    coefs: torch.Tensor | None,
    step: OptimizerStep | StoredStep,
    codec: Codec | None = None,
    dirty: torch.Tensor | None = None,
) -> None:
    """Apply one optimizer step to the rows of `segments`, in place.

    weights    float32[slots, dim], or `codec.weights(arena)`; each row contiguous, any stride between rows
    state      float32[slots, state floats], strided likewise; None for SGD
    grads      float32[.., dim], contiguous
    grad_rows  int32[ids], in the order of `segments.order`: the row of `grads` of each occurrence; None for
               `segments.order` itself
    coefs      float32[ids], in the same order: factor of each gradient; None if all are 1
    dirty      uint8[slots]: set to 1 for each row of `segments`
    """
    update = RowUpdate(weights, state, segments, grad_rows, coefs, step, codec, dirty)
    update(grads, step.constants, step.number, segments.sizes)


def sum_gradients(
    segments: Segments, grads: torch.Tensor, grad_rows: torch.Tensor | None, coefs: torch.Tensor | None
) -> torch.Tensor:
    """float32[segments.sizes[0], dim]: the sum of the gradients of each segment; arguments as in `update_rows`.

    The first half of `update_rows`, for clipping and for exchange between ranks. Rows past segments.counts[0] are
    undefined.
    """
    out = torch.empty(segments.sizes[0], grads.shape[1], dtype=torch.float32, device=grads.device)
    update = RowUpdate(out, None, segments, grad_rows, coefs, _NO_STEP, out=out)
    update(grads, _NO_STEP.constants, _NO_STEP.number, segments.sizes)
    return out


def apply_gradients(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    sums: torch.Tensor,
    step: OptimizerStep,
    codec: Codec | None = None,
    dirty: torch.Tensor | None = None,
) -> None:
    """Second half of `update_rows`: apply gradient sums[i] to row slots[i]. No slot may repeat."""
    _check_rows(weights, state, step, codec)
    count, dim = sums.shape
    if count == 0:
        return
    items = _items(dim, step)
    _apply_kernel[(blocks(count, items),)](
        weights, weights if state is None else state, sums, slots, count,
        *_common(weights, codec, dirty, step.constants, step.number),
        **_layout(weights, state, step, codec, dirty), ITEMS=items, COLS=row_block(dim), **_LAUNCH,
    )  # fmt: skip


class RowUpdate:
    """`update_rows` of rows, segments, grad_rows and coefs at fixed addresses, which it keeps alive: cheap to repeat.

    `segments` may be of another batch at each call: sizes are given with the call.
    """

    __slots__ = ("_dim", "_hot", "_hot_columns", "_hot_items", "_items", "_partial", "_rows", "_weighted")

    def __init__(
        self,
        weights: torch.Tensor,
        state: torch.Tensor | None,
        segments: Segments,
        grad_rows: torch.Tensor | None,
        coefs: torch.Tensor | None,
        step: OptimizerStep | StoredStep,
        codec: Codec | None = None,
        dirty: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> None:
        """
        step   of the same optimizer as the steps of all calls, and stored if they are
        out    where to store the sums instead of applying them
        """
        _check_rows(weights, state, step, codec)
        dim = self._dim = weights.shape[1] if codec is None else codec.dim
        sums = weights if out is None else out  # `weights` is a placeholder
        device = weights.device
        self._partial = torch.empty(segments.sizes[2], dim, dtype=torch.float32, device=device)
        common = _common(weights, codec, dirty)
        layout = _layout(weights, state, step, codec, dirty)
        states = weights if state is None else state
        self._items, self._weighted = _items(dim, step), coefs is not None
        self._rows = RepeatedLaunch(
            _update_kernel,
            (
                weights, states, sums, self._partial, segments.starts, segments.slots, segments.block_starts,
                segments.block_ends, segments.counts, segments.order if grad_rows is None else grad_rows,
                OPEN if coefs is None else coefs, OPEN, OPEN, OPEN, OPEN, *common,
            ),
            {**layout, "WEIGHTED": coefs is not None, "ITEMS": self._items, "COLS": row_block(dim), **_LAUNCH},
        )  # fmt: skip
        # Hot rows are few and their sums long: with one column per thread, more of them run in parallel.
        # A mean over the row or a row scale needs the whole row in one program.
        whole = step.optimizer in WHOLE_ROW or (codec is not None and codec.row_scaled)
        cols = row_block(dim) if whole else min(32, row_block(dim))
        self._hot_items, self._hot_columns = tile_rows(cols, 32), blocks(dim, cols)
        self._hot = RepeatedLaunch(
            _hot_kernel,
            (
                weights, states, sums, self._partial, segments.hot, segments.hot_blocks, segments.slots,
                segments.counts, OPEN, *common,
            ),
            {**layout, "ITEMS": self._hot_items, "COLS": cols, **_LAUNCH},
        )  # fmt: skip

    def __call__(
        self, grads: torch.Tensor, constants: tuple[float, ...] | torch.Tensor, number: Any, sizes: Sequence[int]
    ) -> None:
        """Apply a step on the current stream.

        constants, number   those of an `OptimizerStep` or `StoredStep`
        sizes               `Segments.sizes`: not more than those of the segments given before
        """
        if grads.dtype != torch.float32 or not grads.is_contiguous() or grads.dim() != 2 or grads.shape[1] != self._dim:
            raise ValueError(f"grads are {grads.dtype}{list(grads.shape)}: must be contiguous float32[.., {self._dim}]")
        count, hot, hot_blocks = sizes
        if count == 0:
            return
        items = self._items
        block_programs = -(-hot_blocks // items)
        placeholder = () if self._weighted else (grads,)  # in place of coefs
        self._rows(
            block_programs + -(-count // items), 1, *placeholder, grads, count, hot_blocks, block_programs, constants,
            number,
        )  # fmt: skip
        if hot:
            self._hot(-(-hot // self._hot_items), self._hot_columns, hot, constants, number)


def _items(dim: int, step: OptimizerStep | StoredStep) -> int:
    """Rows per program of one warp, tuned on an H200: docs/benchmarks/hbm.md. Fewer if state tiles need registers."""
    return tile_rows(dim, 256 if dim >= 64 and state_floats(step.optimizer, dim) <= 1 else 128)


def _common(
    weights: torch.Tensor,
    codec: Codec | None,
    dirty: torch.Tensor | None,
    constants: object = OPEN,
    number: object = OPEN,
) -> tuple[object, ...]:
    flags = weights if dirty is None else dirty  # `weights` and `keys` are placeholders
    if codec is None:
        return constants, weights, weights, weights, flags, 0, number
    scale_gradient = codec.keys if codec.gradient is None else codec.gradient
    return constants, codec.scale, scale_gradient, codec.keys, flags, codec.table_mix, number


def _layout(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    step: OptimizerStep | StoredStep,
    codec: Codec | None,
    dirty: torch.Tensor | None,
) -> dict[str, object]:
    return {
        "OPTIMIZER": step.optimizer,
        "DECAY": step.weight_decay != 0,
        "CODEC": 0 if codec is None else codec.number,
        "DIM": weights.shape[1] if codec is None else codec.dim,
        "W_STRIDE": weights.stride(0),
        "S_STRIDE": 0 if state is None else state.stride(0),
        "STORED": isinstance(step, StoredStep),
        "MARK": dirty is not None,
    }


def _check_rows(
    weights: torch.Tensor, state: torch.Tensor | None, step: OptimizerStep | StoredStep, codec: Codec | None
) -> None:
    if codec_number(weights, codec) == 0 and weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}: pass the codec that rounds them")
    need = state_floats(step.optimizer, weights.shape[1] if codec is None else codec.dim)
    have = 0 if state is None else state.shape[1]
    if have != need or (state is not None and (state.dtype != torch.float32 or state.stride(1) != 1)):
        raise ValueError(f"state has {have} floats per row: this optimizer needs {need}, contiguous float32")


def sum_gradients_reference(
    segments: Segments, grads: torch.Tensor, grad_rows: torch.Tensor | None, coefs: torch.Tensor | None
) -> torch.Tensor:
    """`sum_gradients` in plain torch: adds the n-th occurrence of every block, then the n-th block of every segment."""
    count = int(segments.counts[0])
    starts = segments.starts[: count + 1].long()
    sizes = starts.diff()
    rows = (segments.order if grad_rows is None else grad_rows).long()
    block_counts = (sizes + BLOCK - 1) // BLOCK
    first_block = torch.cat([block_counts.new_zeros(1), block_counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(count, device=grads.device), block_counts)
    begin = starts[owner] + (torch.arange(len(owner), device=grads.device) - first_block[owner]) * BLOCK
    end = torch.minimum(begin + BLOCK, starts[owner + 1])

    def gradient(positions: torch.Tensor) -> torch.Tensor:
        g = grads[rows[positions]]
        return g if coefs is None else g * coefs[positions][:, None]

    sums = gradient(begin)
    for nth in range(1, BLOCK):
        longer = (begin + nth < end).nonzero()[:, 0]
        if len(longer) == 0:
            break
        sums[longer] = sums[longer] + gradient(begin[longer] + nth)
    total = sums[first_block[:-1]]
    for nth in range(1, int(block_counts.max()) if count else 0):
        longer = (block_counts > nth).nonzero()[:, 0]
        total[longer] = total[longer] + sums[first_block[longer] + nth]
    return total


def apply_gradients_reference(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    sums: torch.Tensor,
    step: OptimizerStep,
    codec: Codec | None = None,
) -> None:
    """`apply_gradients` in plain torch."""
    rows = slots.long()
    before = decode_reference(weights[rows], codec)
    w, s = new_rows_reference(before, None if state is None else state[rows], sums, step)
    stored = w if codec is None else encode_reference(w, codec.keys[rows], step.number, codec)
    weights[rows] = stored
    if codec is not None and codec.gradient is not None:
        codec.gradient.add_(scale_gradient_reference(w, stored, sums * step.scale, codec))
    if state is not None and s is not None:
        state[rows] = s


def update_rows_reference(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    segments: Segments,
    grads: torch.Tensor,
    grad_rows: torch.Tensor | None,
    coefs: torch.Tensor | None,
    step: OptimizerStep,
    codec: Codec | None = None,
) -> None:
    """`update_rows` in plain torch."""
    sums = sum_gradients_reference(segments, grads, grad_rows, coefs)
    apply_gradients_reference(weights, state, segments.slots[: len(sums)], sums, step, codec)
