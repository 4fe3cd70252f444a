"""index_gradients: the row of the gradient of every occurrence of an id, and its coefficient.

The row is the number of the occurrence's bag. The coefficient is the weight of the occurrence, divided by the size of
the bag for mean pooling. Both are computed ahead of training: in the order of the segments, or in example order if
several inputs of a batch are concatenated afterwards.
"""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.launch import EXACT, blocks, kernel

_TILE = 1024


@kernel(do_not_specialize=["ids", "bags", "rounds"])
def _index_gradients_kernel(
    order, offsets, weights, rows, coefs, ids, bags, rounds,
    ORDERED: tl.constexpr, BAGS: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < ids
    position = tl.load(order + i, mask=live, other=0) if ORDERED else i
    coef = tl.full([TILE], 1.0, tl.float32)
    if WEIGHTED:
        coef = tl.load(weights + position, mask=live, other=1.0)
    if BAGS:
        # Search for the last bag that starts at or before the position, which skips empty bags.
        low = tl.zeros([TILE], tl.int32)
        high = tl.zeros([TILE], tl.int32) + bags
        for _ in range(rounds):
            middle = (low + high) // 2
            right = tl.load(offsets + middle, mask=live & (low + 1 < high), other=0) <= position
            search = low + 1 < high
            low = tl.where(search & right, middle, low)
            high = tl.where(search & ~right, middle, high)
        tl.store(rows + i, low, mask=live)
        if MEAN:
            size = tl.load(offsets + low + 1, mask=live, other=1) - tl.load(offsets + low, mask=live, other=0)
            coef = tl.div_rn(coef, size.to(tl.float32))
    else:
        tl.store(rows + i, position, mask=live)
    if WEIGHTED or MEAN:
        tl.store(coefs + i, coef, mask=live)


def index_gradients(
    ids: int, order: torch.Tensor | None, offsets: torch.Tensor | None, weights: torch.Tensor | None, mean: bool,
    device: torch.device | str, out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """int32[ids] rows of the gradient, and float32[ids] coefficients, None if all are 1. Written to `out` if given.

    order     int32[ids], `Segments.order`; None for example order
    offsets   int64[bags + 1], from 0 to ids; None if every id is one bag
    weights   float32[ids] in example order; None if all are 1
    """
    if offsets is None and mean:
        raise ValueError("mean=True needs offsets: without them every id is one bag")
    if out is not None:
        rows, coefs = out
    else:
        rows = torch.empty(ids, dtype=torch.int32, device=device)
        coefs = torch.empty(ids, dtype=torch.float32, device=device) if mean or weights is not None else None
    if ids == 0:
        return rows, coefs
    bags = 0 if offsets is None else len(offsets) - 1
    _index_gradients_kernel[(blocks(ids, _TILE),)](
        rows if order is None else order, rows if offsets is None else offsets, rows if weights is None else weights,
        rows, rows if coefs is None else coefs, ids, bags, max(bags, 1).bit_length(),
        ORDERED=order is not None, BAGS=offsets is not None, WEIGHTED=weights is not None, MEAN=mean, TILE=_TILE,
        **EXACT,
    )  # fmt: skip
    return rows, coefs


def index_gradients_reference(
    ids: int, order: torch.Tensor | None, offsets: torch.Tensor | None, weights: torch.Tensor | None, mean: bool,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`index_gradients` in plain torch."""
    bag = torch.arange(ids, device=device)
    coefs = torch.ones(ids, device=device) if weights is None else weights
    if offsets is not None:
        sizes = offsets.diff()
        bag = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
        if mean:
            coefs = coefs / sizes[bag].to(torch.float32)
    positions = torch.arange(ids, device=device) if order is None else order.long()
    return bag[positions].to(torch.int32), coefs[positions] if mean or weights is not None else None
