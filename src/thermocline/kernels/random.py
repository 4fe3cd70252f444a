"""Counter-based random bits: the hash of csrc/util/hash.h, and the streams of csrc/dram/initial.h built from it.

    t = mix64((mix64(seed + G) ^ table) + G)      once per table, on the host: `table_mix`
    s = mix64((t ^ key) + G)                      once per row: `row_mix`
    bits(c) = mix64(s + (c + 1) * G)              for counter c: `counter_bits`

Keys are int64 bit patterns; arithmetic is modulo 2^64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xFF51AFD7ED558CCD)
MIX_2 = tl.constexpr(0xC4CEB9FE1A85EC53)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@triton.jit
def mix64(x):
    """Murmur3's finalizer on uint64."""
    x = x ^ (x >> 33)
    x = x * MIX_1
    x = x ^ (x >> 33)
    x = x * MIX_2
    return x ^ (x >> 33)


@triton.jit
def row_mix(table_mix, key):
    """uint64 state of the rows of int64 keys; `table_mix` is the result of the host function `table_mix`."""
    mixed = table_mix ^ key
    return mix64(mixed.to(tl.uint64, bitcast=True) + GOLDEN)


@triton.jit
def counter_bits(mix, counter):
    """64 random bits for `counter`, a non-negative integer of any type."""
    return mix64(mix + (counter.to(tl.uint64) + 1) * GOLDEN)


def table_mix(seed: int, table: int) -> int:
    """State from which all rows of a table are derived, as an int64 bit pattern."""
    mixed = _mix64_int((_mix64_int(seed + _GOLDEN & _MASK) ^ table) + _GOLDEN & _MASK)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def mix64_reference(x: torch.Tensor) -> torch.Tensor:
    """`mix64` on int64 bit patterns in plain torch, which has no uint64 arithmetic."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ _shift_right(x, 33)) * (factor - 2**64)
    return x ^ _shift_right(x, 33)


def row_mix_reference(table_mix: int, keys: torch.Tensor) -> torch.Tensor:
    """`row_mix` in plain torch: int64 bit patterns."""
    return mix64_reference((keys ^ table_mix) + (_GOLDEN - 2**64))


def counter_bits_reference(mix: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """`counter_bits` in plain torch: int64 bit patterns."""
    return mix64_reference(mix + (counter + 1) * (_GOLDEN - 2**64))


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix64_int(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33
