"""Stored forms of a served row: fp32, fp16, or int8 with a scale and an offset per row."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats
from thermocline.errors import FormatError

Precision = Literal["fp32", "fp16", "int8"]


def row_bytes(precision: str, dim: int) -> int:
    """Return the bytes of a stored row."""
    if precision not in get_args(Precision):
        raise FormatError(f"precision is {precision!r}: it must be one of {', '.join(get_args(Precision))}")
    return {"fp32": 4 * dim, "fp16": 2 * dim, "int8": 8 + dim}[precision]


def encode(weights: Floats, precision: Precision) -> npt.NDArray[np.uint8]:
    """Return the stored form of each row.

    int8: byte = round((weight - least) / scale), scale = (greatest - least) / 255; the error of a weight is at most
    half a scale, plus rounding of fp32. fp16 raises OverflowError for weights beyond 65504.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    if precision == "fp32":
        return weights.view(np.uint8)
    if precision == "fp16":
        with np.errstate(over="ignore"):
            half = weights.astype(np.float16)
        if not np.isfinite(half).all():
            raise OverflowError("weights beyond 65504, or not finite: publish with precision fp32")
        return half.view(np.uint8)
    least = weights.min(axis=1, keepdims=True)
    scale = (weights.max(axis=1, keepdims=True) - least) / np.float32(255)
    if not np.isfinite(scale).all():
        raise OverflowError("weights are not finite: int8 rows cannot hold them")
    codes = np.rint((weights - least) / np.where(scale > 0, scale, np.float32(1)))
    stored = np.empty((len(weights), 8 + weights.shape[1]), np.uint8)
    stored[:, :4] = scale.astype(np.float32).view(np.uint8)
    stored[:, 4:8] = least.view(np.uint8)
    stored[:, 8:] = np.clip(codes, 0, 255)
    return stored


def decode(stored: npt.NDArray[np.uint8], precision: Precision, dim: int) -> Floats:
    """Return the weights of stored rows, as `SnapshotView.lookup` does."""
    stored = np.ascontiguousarray(stored)
    if precision == "fp32":
        return stored.view(np.float32).reshape(len(stored), dim)
    if precision == "fp16":
        return stored.view(np.float16).reshape(len(stored), dim).astype(np.float32)
    scale = np.ascontiguousarray(stored[:, :4]).view(np.float32)
    offset = np.ascontiguousarray(stored[:, 4:8]).view(np.float32)
    return offset + scale * stored[:, 8:].astype(np.float32)
