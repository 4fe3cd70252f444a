"""Launch options that keep results bit-exact, and tile shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import CUDAOptions

_KNOWN_OPTIONS = {field.name for field in dataclasses.fields(CUDAOptions)}

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""No fused multiply-add, and no flush of subnormal numbers to zero: every operation is rounded separately."""
if "enable_reflect_ftz" in _KNOWN_OPTIONS:
    EXACT["enable_reflect_ftz"] = False


def row_block(dim: int) -> int:
    """Columns of a tile that holds rows of `dim` elements: the next power of two."""
    return int(triton.next_power_of_2(dim))


def tile_rows(dim: int, elements: int) -> int:
    """Rows of a tile of about `elements` elements; at most 128, which a warp can hold in registers."""
    return max(1, min(128, elements // row_block(dim)))


def blocks(count: int, size: int) -> int:
    """Number of tiles of `size` items for `count` items; at least 1, because a grid must not be empty."""
    return max(1, -(-count // size))


def stream_ahead(device: torch.device) -> torch.cuda.Stream | None:
    """High-priority stream for small kernels that training waits for; None on a CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
