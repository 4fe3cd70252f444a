"""How rows of less than fp32 are stored, the obvious way: the oracle of csrc/dram/codec.h and ops/codec.py.

A stored row is units and a step: each weight is its unit times the step. fp16 and bf16 numbers are their own units.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats
from thermocline.embedding.precision import Precision

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The mixer of csrc/util/hash.h."""
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


def table_mix(seed: int, table: int) -> int:
    """Of csrc/dram/random.h, as the two below."""
    return mix64((mix64(seed + _GOLDEN & _MASK) ^ table) + _GOLDEN & _MASK)


def row_mix(mix: int, key: int) -> int:
    return mix64((mix ^ key) + _GOLDEN & _MASK)


def counter_bits(mix: int, counter: int) -> int:
    return mix64(mix + (counter + 1) * _GOLDEN & _MASK)


def chances(seed: int, table: int, key: int, step: int, dim: int) -> list[int]:
    """24 random bits per element, for rounding what step number `step` wrote; 0: the initial row."""
    stream = row_mix(row_mix(table_mix(seed, table), key), step)
    return [counter_bits(stream, i) >> 40 for i in range(dim)]


def encode(precision: Precision, x: Floats, step: np.float32, chance: list[int] | None) -> tuple[Floats, np.float32]:
    """Units and step of float32 weights; `step`: the table's; `chance` as from `chances`, none: to the nearest."""
    if precision.kind == "fp32":
        return x.copy(), np.float32(1)
    round_one = {"fp16": _fp16, "bf16": _bf16}.get(precision.kind)
    if round_one is not None:
        units = [round_one(v, None if chance is None else chance[i]) for i, v in enumerate(x)]
        return np.array(units, np.float32), np.float32(1)
    most = 2 ** (precision.bits - 1) - 1
    if precision.row_scaled:
        step = np.float32(np.abs(x).max() / np.float32(most))
    with np.errstate(all="ignore"):
        q = x / step
    q = np.where(np.isnan(q), np.float32(0), q).clip(-most - 1, most).astype(np.float32)
    floor = np.floor(q)
    rest = q - floor
    up = rest >= 0.5 if chance is None else np.array(chance, np.float32) < rest * np.float32(2.0**24)
    return (floor + up).astype(np.float32), step


def scale_gradient(precision: Precision, x: Floats, units: Floats, step: np.float32, gradient: Floats) -> int:
    """What one row adds to the gradient of the table's step: x as updated, its units, the weights' gradient."""
    most = 2 ** (precision.bits - 1) - 1
    total = 0
    for value, unit, g in zip(x, units, gradient, strict=True):
        q = value / step
        inside = -most - 1 <= q <= most
        code = unit if inside else np.float32(most if q > 0 else -most - 1)
        term = (g * g) * ((code - q) * (code - q if inside else code))
        if not np.isnan(term):
            total += int(np.float32(min(max(term, -(2.0**-8)), 2.0**-8)) * np.float32(2.0**44))
    return total


def pack(precision: Precision, units: Floats, step: np.float32) -> bytes:
    """The weights as they are stored."""
    codes = [int(code) for code in _codes(precision, units)]
    bits, mask = precision.bits, 2**precision.bits - 1
    packed = sum((code & mask) << (bits * i) for i, code in enumerate(codes))
    words = 4 * (precision.weight_words(len(units)) - precision.row_scaled)
    stored: bytes = packed.to_bytes(words, "little")
    return step.tobytes() + stored if precision.row_scaled else stored


def _codes(precision: Precision, units: Floats) -> npt.NDArray[np.int64]:
    match precision.kind:
        case "fp32":
            return units.view(np.uint32).astype(np.int64)
        case "fp16":
            return units.astype(np.float16).view(np.uint16).astype(np.int64)
        case "bf16":
            return (units.view(np.uint32) >> 16).astype(np.int64)
    return units.astype(np.int64)


def _fp16(x: np.float32, chance: int | None) -> np.float32:
    with np.errstate(over="ignore"):
        if chance is None or not np.isfinite(x):
            return np.float32(np.float16(x))
        if abs(x) >= np.float32(2.0**-14):  # normal: 13 bits go
            return np.float32(np.float16(_cut(x, 13, chance >> 11)))
        units = abs(x) * np.float32(2.0**24)
        whole = np.floor(units)
        up = np.float32(chance) < (units - whole) * np.float32(2.0**24)
        return np.float32(np.copysign((whole + np.float32(up)) * np.float32(2.0**-24), x))


def _bf16(x: np.float32, chance: int | None) -> np.float32:
    bits = int(x.view(np.uint32))
    if not np.isfinite(x):
        return x
    nearest = 0x7FFF + (bits >> 16 & 1)
    return _cut(x, 16, nearest if chance is None else chance >> 8)


def _cut(x: np.float32, bits: int, more: int) -> np.float32:
    """The lowest bits go; what is added before may carry over."""
    whole = int(x.view(np.uint32)) + more >> bits << bits
    return np.uint32(whole).view(np.float32)
