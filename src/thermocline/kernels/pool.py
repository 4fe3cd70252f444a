"""pool_rows: sum or mean of the rows of each bag, read from the arena and added left to right; 0 for an empty bag."""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.codec import Codec, codec_number, decode_reference, load_weights
from thermocline.kernels.launch import EXACT, OPEN, RepeatedLaunch, blocks, kernel, row_block, tile_rows
from thermocline.kernels.ordered_sum import sum_rows

GATHER_ELEMENTS, POOL_ELEMENTS = 512, 256
"""Elements per program of one warp, tuned on an H200: docs/benchmarks/hbm.md."""


@kernel(do_not_specialize=["ids"])
def _gather_kernel(
    weights, slots, factors, out, ids, scale,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    slot = tl.load(slots + i, mask=i < ids, other=0).to(tl.int64)
    inside = (i[:, None] < ids) & (cols[None, :] < DIM)
    x = load_weights(weights, slot, cols, inside, scale, 0.0, STRIDE, CODEC)
    if WEIGHTED:
        x = x * tl.load(factors + i, mask=i < ids, other=0.0)[:, None]
    # Streaming store: the result must not evict rows from the cache.
    tl.store(out + i[:, None] * DIM + cols[None, :], x, mask=inside, cache_modifier=".cs")


@kernel(do_not_specialize=["bags"])
def _pool_kernel(
    weights, slots, factors, offsets, out, bags, scale,
    DIM: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODEC: tl.constexpr, MEAN: tl.constexpr,
    ITEMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    cols = tl.arange(0, COLS)
    begin = tl.load(offsets + bag, mask=bag < bags, other=0)
    end = tl.load(offsets + bag + 1, mask=bag < bags, other=0)
    total = sum_rows(begin, end, slots, factors, weights, cols, scale, DIM, STRIDE, WEIGHTED, True, CODEC)
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
    """float32[bags, dim]: the pooled rows; one vector per id if `offsets` is None.

    weights   float32[slots, dim], or `codec.weights(arena)`; each row contiguous, any stride between rows
    slots     int32[ids]: the row of each id
    offsets   int64[bags + 1], from 0 to ids
    factors   float32[ids], multiplied with the rows; None if all are 1
    out       float32[bags, dim], contiguous: where to write the result
    """
    return Pooling(weights, slots, offsets, factors, mean=mean, codec=codec)(out)


class Pooling:
    """`pool_rows` of rows, slots, offsets and factors at fixed addresses, which it keeps alive: cheap to repeat."""

    __slots__ = ("_device", "_launch", "_programs", "_shape")

    def __init__(
        self,
        weights: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor | None,
        factors: torch.Tensor | None,
        *,
        mean: bool,
        codec: Codec | None,
    ) -> None:
        number = codec_number(weights, codec)
        if offsets is None and mean:
            raise ValueError("mean=True needs offsets: without them every id is one bag")
        dim = weights.shape[1] if codec is None else codec.dim
        bags = len(slots) if offsets is None else len(offsets) - 1
        self._device, self._shape = weights.device, (bags, dim)
        items = tile_rows(dim, GATHER_ELEMENTS if offsets is None else POOL_ELEMENTS)
        self._programs = blocks(bags, items)
        constants = {
            "DIM": dim, "STRIDE": weights.stride(0), "WEIGHTED": factors is not None, "CODEC": number,
            "COLS": row_block(dim), "ITEMS": items, "num_warps": 1, **EXACT,
        }  # fmt: skip
        scale = weights if codec is None else codec.scale
        factors = weights if factors is None else factors
        if offsets is None:
            self._launch = RepeatedLaunch(_gather_kernel, (weights, slots, factors, OPEN, bags, scale), constants)
        else:
            arguments = (weights, slots, factors, offsets, OPEN, bags, scale)
            self._launch = RepeatedLaunch(_pool_kernel, arguments, {**constants, "MEAN": mean})

    def __call__(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pool on the current stream into `out`, or into a new tensor."""
        shape = self._shape
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=self._device)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"out is {out.dtype}{list(out.shape)}: must be contiguous float32{list(shape)}")
        if shape[0]:
            self._launch(self._programs, 1, out)
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
    """`pool_rows` in plain torch: adds the n-th row of every bag at a time."""

    def rows(positions: torch.Tensor) -> torch.Tensor:
        x = decode_reference(weights[slots[positions].long()], codec)
        return x if factors is None else x * factors[positions][:, None]

    if offsets is None:
        return rows(torch.arange(len(slots), device=slots.device))
    sizes = offsets.diff()
    dim = weights.shape[1] if codec is None else codec.dim
    out = torch.zeros(len(sizes), dim, dtype=torch.float32, device=weights.device)
    for nth in range(int(sizes.max()) if len(sizes) else 0):
        bags = (sizes > nth).nonzero()[:, 0]
        x = rows(offsets[bags] + nth)
        out[bags] = x if nth == 0 else out[bags] + x
    return out / sizes.clamp(min=1).to(torch.float32)[:, None] if mean else out
