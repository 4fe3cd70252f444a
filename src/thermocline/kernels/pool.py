"""Gather + pool: each bag's rows, read where they lie, added left to right; mean divides; an empty bag is zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.codec import Codec, decode_reference, load_weights, number_of
from thermocline.kernels.launch import EXACT, blocks, row_block, tile_rows
from thermocline.kernels.ordered_sum import sum_rows

GATHER_ELEMENTS, POOL_ELEMENTS = 512, 256
"""Of one program, a warp: measured on an H200, docs/benchmarks.md."""


@triton.jit(do_not_specialize=["ids"])
def _gather_kernel(
    weights, slots, factors, out, ids, step,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    slot = tl.load(slots + place, mask=place < ids, other=0).to(tl.int64)
    inside = (place[:, None] < ids) & (cols[None, :] < DIM)
    x = load_weights(weights, slot, cols, inside, step, 0.0, STRIDE, CODEC)
    if WEIGHTED:
        x = x * tl.load(factors + place, mask=place < ids, other=0.0)[:, None]
    # Written once, read by others: it should not push rows out of the cache.
    tl.store(out + place[:, None] * DIM + cols[None, :], x, mask=inside, cache_modifier=".cs")


@triton.jit(do_not_specialize=["bags"])
def _pool_kernel(
    weights, slots, factors, offsets, out, bags, step,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr, MEAN: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    begin = tl.load(offsets + bag, mask=bag < bags, other=0)
    end = tl.load(offsets + bag + 1, mask=bag < bags, other=0)
    total = sum_rows(begin, end, slots, factors, weights, cols, step, DIM, STRIDE, WEIGHTED, True, CODEC)
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
    codec: Codec | None = None,
) -> torch.Tensor:
    """float32[bags, dim].

    weights   float32[slots, dim], or as `codec.weights` gives them; each row contiguous, rows any stride apart
    slots     int32[ids]: the row of each id
    offsets   int64[bags + 1], from 0 to ids; none: one vector per id
    factors   float32[ids]: what each row is multiplied by, or none
    """
    number = number_of(weights, codec)
    if offsets is None and mean:
        raise ValueError("a mean needs offsets: without them every id is a bag of its own")
    dim = weights.shape[1] if codec is None else codec.dim
    bags = len(slots) if offsets is None else len(offsets) - 1
    if out is None:
        out = torch.empty(bags, dim, dtype=torch.float32, device=weights.device)
    elif out.shape != (bags, dim) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype}{list(out.shape)}: needed is contiguous float32[{bags}, {dim}]")
    if bags == 0:
        return out
    common = {"DIM": dim, "STRIDE": weights.stride(0), "WEIGHTED": factors is not None, "CODEC": number}
    common["COLS"] = row_block(dim)
    step = weights if codec is None else codec.scale
    factors = weights if factors is None else factors
    if offsets is None:
        items = tile_rows(dim, GATHER_ELEMENTS)
        _gather_kernel[(blocks(bags, items),)](
            weights, slots, factors, out, bags, step, **common, ITEMS=items, num_warps=1, **EXACT,
        )  # fmt: skip
    else:
        items = tile_rows(dim, POOL_ELEMENTS)
        _pool_kernel[(blocks(bags, items),)](
            weights, slots, factors, offsets, out, bags, step,
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
    codec: Codec | None = None,
) -> torch.Tensor:
    """The same in plain torch: the n-th row of every bag at a time."""

    def rows(places: torch.Tensor) -> torch.Tensor:
        x = decode_reference(weights[slots[places].long()], codec)
        return x if factors is None else x * factors[places][:, None]

    if offsets is None:
        return rows(torch.arange(len(slots), device=slots.device))
    sizes = offsets.diff()
    dim = weights.shape[1] if codec is None else codec.dim
    out = torch.zeros(len(sizes), dim, dtype=torch.float32, device=weights.device)
    for nth in range(int(sizes.max()) if len(sizes) else 0):
        here = (sizes > nth).nonzero()[:, 0]
        x = rows(offsets[here] + nth)
        out[here] = x if nth == 0 else out[here] + x
    return out / sizes.clamp(min=1).to(torch.float32)[:, None] if mean else out
