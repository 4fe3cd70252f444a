"""Sums of rows picked from a matrix, left to right: what pooling and the sums of gradients share."""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.codec import load_weights


@triton.jit
def minus_zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    """What can be added to any number without changing it; Triton takes the literal -0.0 for 0.0."""
    return tl.full([ROWS, COLS], -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _row_at(rows, place, end):
    """Which row stands at a place of the list."""
    return tl.load(rows + place, mask=place < end, other=0).to(tl.int64)


@triton.jit
def _term(
    matrix, factors, row, place, end, cols, step,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """That row times its factor; minus zeros past the end of the item."""
    inside = place[:, None] < end[:, None]
    if cols.shape[0] != DIM:
        inside = inside & (cols[None, :] < DIM)
    nothing = minus_zeros(row.shape[0], cols.shape[0])
    x = load_weights(matrix, row, cols, inside, step, nothing, STRIDE, CODEC)
    if WEIGHTED:
        x = x * tl.load(factors + place, mask=place < end, other=1.0)[:, None]
    return x


@triton.jit
def sum_rows(
    begin, end, rows, factors, matrix, cols, step,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, LISTED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """float32[items, cols]: of each item, the rows at places begin to end of a list, added left to right.

    rows      the list: numbers of rows; if not LISTED, places are rows themselves
    factors   per place, if WEIGHTED
    step      of a matrix of codes: CODEC as in ops/codec.py, 0 if it holds numbers
    An empty item gives minus zeros. Several rows of each item are asked for before the first is added: four, or, if
    they are not LISTED, thirty-two: such lists are long, and their length is all the time it takes.
    """
    total = minus_zeros(begin.shape[0], cols.shape[0])
    longest = tl.max(end - begin, axis=0)
    if LISTED:
        for done in range(0, longest, 4):
            p0 = begin + done
            p1, p2, p3 = p0 + 1, p0 + 2, p0 + 3
            r0 = _row_at(rows, p0, end)
            r1 = _row_at(rows, p1, end)
            r2 = _row_at(rows, p2, end)
            r3 = _row_at(rows, p3, end)
            x0 = _term(matrix, factors, r0, p0, end, cols, step, DIM, STRIDE, WEIGHTED, CODEC)
            x1 = _term(matrix, factors, r1, p1, end, cols, step, DIM, STRIDE, WEIGHTED, CODEC)
            x2 = _term(matrix, factors, r2, p2, end, cols, step, DIM, STRIDE, WEIGHTED, CODEC)
            x3 = _term(matrix, factors, r3, p3, end, cols, step, DIM, STRIDE, WEIGHTED, CODEC)
            total = total + x0
            total = total + x1
            total = total + x2
            total = total + x3
    else:
        for done in range(0, longest, 32):
            for nth in tl.static_range(32):
                place = begin + (done + nth)
                row = place.to(tl.int64)
                total = total + _term(matrix, factors, row, place, end, cols, step, DIM, STRIDE, WEIGHTED, CODEC)
    return total
