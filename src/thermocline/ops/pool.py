"""Gather + pool: each bag's rows, read where they lie, added left to right; mean divides; an empty bag is zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.ops.launch import EXACT, blocks, row_block, tile_rows
from thermocline.ops.sums import sum_rows

GATHER_ELEMENTS, POOL_ELEMENTS = 512, 256
"""Of one program, a warp: measured on an H200, docs/benchmarks.md."""


@triton.jit(do_not_specialize=["ids"])
def _gather_kernel(
    weights, slots, factors, out, ids,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    slot = tl.load(slots + place, mask=place < ids, other=0).to(tl.int64)
    inside = (place[:, None] < ids) & (cols[None, :] < DIM)
    x = tl.load(weights + slot[:, None] * STRIDE + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        x = x * tl.load(factors + place, mask=place < ids, other=0.0)[:, None]
    # Written once, read by others: it should not push rows out of the cache.
    tl.store(out + place[:, None] * DIM + cols[None, :], x, mask=inside, cache_modifier=".cs")


@triton.jit(do_not_specialize=["bags"])
def _pool_kernel(
    weights, slots, factors, offsets, out, bags,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    begin = tl.load(offsets + bag, mask=bag < bags, other=0)
    end = tl.load(offsets + bag + 1, mask=bag < bags, other=0)
    total = sum_rows(begin, end, slots, factors, weights, cols, DIM, STRIDE, WEIGHTED, True)
    size = (end - begin)[:, None]
    if MEAN:
        by = tl.maximum(size, 1).to(tl.float32)
        total = tl.div_rn(total, tl.broadcast_to(by, total.shape))
    total = tl.where(size > 0, total, 0.0)
    tl.store(out + bag[:, None] * DIM + cols[None, :], total, mask=(bag[:, None] < bags) & (cols[None, :] < DIM))


def pool_rows(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    *,
    mean: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32[bags, dim].

    weights   [slots, dim], each row contiguous, rows any stride apart; float32, float16 or bfloat16
    slots     int32[ids]: the row of each id
    offsets   int64[bags + 1], from 0 to ids; none: one vector per id
    factors   float32[ids]: what each row is multiplied by, or none
    """
    if weights.dim() != 2 or weights.stride(1) != 1:
        raise ValueError(f"weights have shape {list(weights.shape)} and strides {weights.stride()}: rows in one piece")
    if offsets is None and mean:
        raise ValueError("a mean needs offsets: without them every id is a bag of its own")
    dim = weights.shape[1]
    bags = len(slots) if offsets is None else len(offsets) - 1
    if out is None:
        out = torch.empty(bags, dim, dtype=torch.float32, device=weights.device)
    elif out.shape != (bags, dim) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype}{list(out.shape)}: needed is contiguous float32[{bags}, {dim}]")
    if bags == 0:
        return out
    common = {"DIM": dim, "STRIDE": weights.stride(0), "WEIGHTED": factors is not None, "COLS": row_block(dim)}
    factors = weights if factors is None else factors
    if offsets is None:
        items = tile_rows(dim, GATHER_ELEMENTS)
        _gather_kernel[(blocks(bags, items),)](
            weights, slots, factors, out, bags, **common, ITEMS=items, num_warps=1, **EXACT,
        )  # fmt: skip
    else:
        items = tile_rows(dim, POOL_ELEMENTS)
        _pool_kernel[(blocks(bags, items),)](
            weights, slots, factors, offsets, out, bags,
            **common, MEAN=mean, ITEMS=items, num_warps=1, **EXACT,
        )  # fmt: skip
    return out


def pool_rows_reference(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    *,
    mean: bool = False,
) -> torch.Tensor:
    """The same in plain torch: the n-th row of every bag at a time."""

    def rows(places: torch.Tensor) -> torch.Tensor:
        x = weights[slots[places].long()].to(torch.float32)
        return x if factors is None else x * factors[places][:, None]

    if offsets is None:
        return rows(torch.arange(len(slots), device=slots.device))
    sizes = offsets.diff()
    out = torch.zeros(len(sizes), weights.shape[1], dtype=torch.float32, device=weights.device)
    for nth in range(int(sizes.max()) if len(sizes) else 0):
        here = (sizes > nth).nonzero()[:, 0]
        x = rows(offsets[here] + nth)
        out[here] = x if nth == 0 else out[here] + x
    return out / sizes.clamp(min=1).to(torch.float32)[:, None] if mean else out
