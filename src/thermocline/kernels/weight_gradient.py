"""weight_gradient: the gradient of the weight of each id, the dot product of its row and the gradient of its bag."""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.codec import Codec, codec_number, decode_reference, load_weights
from thermocline.kernels.launch import EXACT, blocks, kernel, row_block, tile_rows
from thermocline.kernels.optimizer_rules import sum_of_products, sum_of_products_reference

ELEMENTS = 512
"""Elements per program of one warp, as in kernels/pool.py."""


@kernel(do_not_specialize=["ids"])
def _weight_gradient_kernel(
    weights, slots, offsets, bags, grads, out, ids, scale,
    DIM: tl.constexpr, STRIDE: tl.constexpr, CODEC: tl.constexpr, BAGS: tl.constexpr, MEAN: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    live = i < ids
    slot = tl.load(slots + i, mask=live, other=0).to(tl.int64)
    bag = i
    if BAGS:
        bag = tl.load(bags + i, mask=live, other=0).to(tl.int64)
    inside = live[:, None] & (cols[None, :] < DIM)
    x = load_weights(weights, slot, cols, inside, scale, 0.0, STRIDE, CODEC)
    g = tl.load(grads + bag[:, None] * DIM + cols[None, :], mask=inside, other=0.0)
    dot = sum_of_products(x, g, cols, DIM)
    if MEAN:
        size = tl.load(offsets + bag + 1, mask=live, other=1) - tl.load(offsets + bag, mask=live, other=0)
        dot = tl.div_rn(dot, size.to(tl.float32))
    tl.store(out + i, dot, mask=live)


def weight_gradient(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor | None,
    bags: torch.Tensor | None,
    grads: torch.Tensor,
    *,
    mean: bool = False,
    codec: Codec | None = None,
) -> torch.Tensor:
    """float32[ids]: weights[slots[i]] . grads[bag of i], divided by the size of the bag for mean pooling.

    weights   float32[slots, dim], or `codec.weights(arena)`; each row contiguous, any stride between rows
    slots     int32[ids]: the row of each id
    offsets   int64[bags + 1], from 0 to ids; None if every id is one bag
    bags      int32[ids]: the bag of each id (`index_gradients`); None if every id is one bag
    grads     float32[bags, dim], contiguous

    The products are added in a fixed order: `sum_of_products`.
    """
    number = codec_number(weights, codec)
    if (offsets is None) != (bags is None) or (offsets is None and mean):
        raise ValueError("offsets and bags are given together, and mean=True needs them")
    dim = weights.shape[1] if codec is None else codec.dim
    out = torch.empty(len(slots), dtype=torch.float32, device=weights.device)
    if len(slots) == 0:
        return out
    items = tile_rows(dim, ELEMENTS)
    _weight_gradient_kernel[(blocks(len(slots), items),)](
        weights, slots, slots if offsets is None else offsets, slots if bags is None else bags, grads, out, len(slots),
        weights if codec is None else codec.scale,
        DIM=dim, STRIDE=weights.stride(0), CODEC=number, BAGS=bags is not None, MEAN=mean,
        ITEMS=items, COLS=row_block(dim), num_warps=1, **EXACT,
    )  # fmt: skip
    return out


def weight_gradient_reference(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor | None,
    bags: torch.Tensor | None,
    grads: torch.Tensor,
    *,
    mean: bool = False,
    codec: Codec | None = None,
) -> torch.Tensor:
    """`weight_gradient` in plain torch."""
    x = decode_reference(weights[slots.long()], codec)
    dot = sum_of_products_reference(x, grads if bags is None else grads[bags.long()])
    if not mean:
        return dot
    assert offsets is not None
    assert bags is not None
    return dot / offsets.diff()[bags.long()].to(torch.float32)
