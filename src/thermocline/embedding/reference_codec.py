"""Reference implementation of csrc/dram/codec.h and kernels/codec.py: storage of rows below fp32.

A stored row consists of units and a scale: each weight is its unit times the scale. fp16 and bf16 numbers are their own
units.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats
from thermocline.embedding.precision import Precision

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """See csrc/util/hash.h."""
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


def table_mix(seed: int, table: int) -> int:
    """See csrc/dram/random.h, also for the next two functions."""
    return mix64((mix64(seed + _GOLDEN & _MASK) ^ table) + _GOLDEN & _MASK)


def row_mix(mix: int, key: int) -> int:
    return mix64((mix ^ key) + _GOLDEN & _MASK)


def counter_bits(mix: int, counter: int) -> int:
    return mix64(mix + (counter + 1) * _GOLDEN & _MASK)


def rounding_bits(seed: int, table: int, key: int, step: int, dim: int) -> list[int]:
    """Return 24 random bits per element for the rounding in training step `step`; 0 is the initial row."""
    stream = row_mix(row_mix(table_mix(seed, table), key), step)
    return [counter_bits(stream, i) >> 40 for i in range(dim)]


def encode(precision: Precision, x: Floats, scale: np.float32, random: list[int] | None) -> tuple[Floats, np.float32]:
    """Return units and scale of float32 weights.

    `scale`: the table's, unused if rows have their own. `random`: from `rounding_bits`; None rounds to nearest.
    """
    if precision.kind == "fp32":
        return x.copy(), np.float32(1)
    round_value = {"fp16": _fp16, "bf16": _bf16}.get(precision.kind)
    if round_value is not None:
        units = [round_value(v, None if random is None else random[i]) for i, v in enumerate(x)]
        return np.array(units, np.float32), np.float32(1)
    most = 2 ** (precision.bits - 1) - 1
    if precision.row_scaled:
        scale = np.float32(np.abs(x).max() / np.float32(most))
    with np.errstate(all="ignore"):
        q = x / scale
    q = np.where(np.isnan(q), np.float32(0), q).clip(-most - 1, most).astype(np.float32)
    floor = np.floor(q)
    fraction = q - floor
    up = fraction >= 0.5 if random is None else np.array(random, np.float32) < fraction * np.float32(2.0**24)
    return (floor + up).astype(np.float32), scale


def scale_gradient(precision: Precision, x: Floats, units: Floats, scale: np.float32, gradient: Floats) -> int:
    """Return the term of one row in the gradient of the table's scale; `x` are the updated weights."""
    most = 2 ** (precision.bits - 1) - 1
    total = 0
    for value, unit, g in zip(x, units, gradient, strict=True):
        q = value / scale
        inside = -most - 1 <= q <= most
        code = unit if inside else np.float32(most if q > 0 else -most - 1)
        term = (g * g) * ((code - q) * (code - q if inside else code))
        if not np.isnan(term):
            total += int(np.float32(min(max(term, -(2.0**-8)), 2.0**-8)) * np.float32(2.0**44))
    return total


def pack(precision: Precision, units: Floats, scale: np.float32) -> bytes:
    """Return the stored bytes of the weights."""
    codes = [int(code) for code in _codes(precision, units)]
    bits, mask = precision.bits, 2**precision.bits - 1
    packed = sum((code & mask) << (bits * i) for i, code in enumerate(codes))
    words = 4 * (precision.weight_words(len(units)) - precision.row_scaled)
    stored: bytes = packed.to_bytes(words, "little")
    return scale.tobytes() + stored if precision.row_scaled else stored


def _codes(precision: Precision, units: Floats) -> npt.NDArray[np.int64]:
    match precision.kind:
        case "fp32":
            return units.view(np.uint32).astype(np.int64)
        case "fp16":
            return units.astype(np.float16).view(np.uint16).astype(np.int64)
        case "bf16":
            return (units.view(np.uint32) >> 16).astype(np.int64)
    return units.astype(np.int64)


def _fp16(x: np.float32, random: int | None) -> np.float32:
    with np.errstate(over="ignore"):
        if random is None or not np.isfinite(x):
            return np.float32(np.float16(x))
        if abs(x) >= np.float32(2.0**-14):  # normal: drop 13 bits
            return np.float32(np.float16(_truncate(x, 13, random >> 11)))
        units = abs(x) * np.float32(2.0**24)
        whole = np.floor(units)
        up = np.float32(random) < (units - whole) * np.float32(2.0**24)
        return np.float32(np.copysign((whole + np.float32(up)) * np.float32(2.0**-24), x))


def _bf16(x: np.float32, random: int | None) -> np.float32:
    bits = int(x.view(np.uint32))
    if not np.isfinite(x):
        return x
    nearest = 0x7FFF + (bits >> 16 & 1)
    return _truncate(x, 16, nearest if random is None else random >> 8)


def _truncate(x: np.float32, bits: int, addend: int) -> np.float32:
    """Drop the lowest `bits` bits after adding `addend`, which may carry."""
    whole = int(x.view(np.uint32)) + addend >> bits << bits
    return np.uint32(whole).view(np.float32)
