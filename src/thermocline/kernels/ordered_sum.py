"""Sums of rows of a matrix in a fixed order, left to right; used by pooling and by the sums of gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.codec import load_weights


@triton.jit
def minus_zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Tile of -0.0, the identity of addition. Triton parses the literal -0.0 as 0.0."""
    return tl.full([ROWS, COLS], -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _row_at(rows, i, end):
    """int64: element `i` of the list of rows."""
    return tl.load(rows + i, mask=i < end, other=0).to(tl.int64)


@triton.jit
def _term(
    matrix, factors, row, i, end, cols, scale,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """float32[items, cols]: the rows times their factors, -0.0 past the end of an item."""
    inside = i[:, None] < end[:, None]
    if cols.shape[0] != DIM:
        inside = inside & (cols[None, :] < DIM)
    identity = minus_zeros(row.shape[0], cols.shape[0])
    x = load_weights(matrix, row, cols, inside, scale, identity, STRIDE, CODEC)
    if WEIGHTED:
        x = x * tl.load(factors + i, mask=i < end, other=1.0)[:, None]
    return x


@triton.jit
def sum_rows(
    begin, end, rows, factors, matrix, cols, scale,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, LISTED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """float32[items, cols]: per item, the sum over i in [begin, end) of matrix[rows[i]] * factors[i], left to right.

    rows      row numbers, read if LISTED; otherwise row i itself is added
    factors   float32, read if WEIGHTED
    scale     float32[1], read if `matrix` holds codes; CODEC as in kernels/codec.py, 0 for floating-point numbers
    An empty item gives -0.0. Several rows of an item are loaded before the first is added, to hide latency: four, or 32
    unless LISTED, because such sums are few and long.
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
            x0 = _term(matrix, factors, r0, p0, end, cols, scale, DIM, STRIDE, WEIGHTED, CODEC)
            x1 = _term(matrix, factors, r1, p1, end, cols, scale, DIM, STRIDE, WEIGHTED, CODEC)
            x2 = _term(matrix, factors, r2, p2, end, cols, scale, DIM, STRIDE, WEIGHTED, CODEC)
            x3 = _term(matrix, factors, r3, p3, end, cols, scale, DIM, STRIDE, WEIGHTED, CODEC)
            total = total + x0
            total = total + x1
            total = total + x2
            total = total + x3
    else:
        for done in range(0, longest, 32):
            for nth in tl.static_range(32):
                i = begin + (done + nth)
                row = i.to(tl.int64)
                total = total + _term(matrix, factors, row, i, end, cols, scale, DIM, STRIDE, WEIGHTED, CODEC)
    return total
