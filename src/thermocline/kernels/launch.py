"""How kernels are launched: options that keep bits, and the shape of tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import CUDAOptions

_KNOWN = {field.name for field in dataclasses.fields(CUDAOptions)}

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Every operation rounded by itself: no fused multiply-add, subnormal numbers kept in square roots and divisions."""
if "enable_reflect_ftz" in _KNOWN:
    EXACT["enable_reflect_ftz"] = False


def row_block(dim: int) -> int:
    """Columns of a tile that holds rows of `dim` elements."""
    return int(triton.next_power_of_2(dim))


def tile_rows(dim: int, elements: int) -> int:
    """Rows of a tile of about so many elements; no more than a warp can keep in registers."""
    return max(1, min(128, elements // row_block(dim)))


def blocks(count: int, size: int) -> int:
    """How many tiles of `size` hold `count`; never none, an empty grid cannot be launched."""
    return max(1, -(-count // size))


def stream_ahead(device: torch.device) -> torch.cuda.Stream | None:
    """Of work that training will wait for: its kernels are small, and go before those of training. None on a CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
