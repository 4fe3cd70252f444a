"""Rounding of fp32 to fp16 or bf16, to nearest or stochastically: up with a probability that keeps the mean.

Stochastic rounding is a function of (seed, table, key, step, element), so the tier of the row does not change it:
    s as in kernels/random.py;  h = mix64((s ^ step) + G);  24 random bits of element i: bits(h, i) >> 40
For bf16 and normal fp16 numbers, the highest random bits are added to the discarded bits; a carry rounds up.
For subnormal fp16 numbers, the value is rounded up if the random bits, as a fraction, are below the discarded fraction.
Infinities and NaN are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.random import counter_bits, counter_bits_reference, row_mix, row_mix_reference


@triton.jit
def random_bits(table_mix, keys, step, cols):
    """int32[keys, cols]: 24 random bits per element of a row."""
    mix = row_mix(step, row_mix(table_mix, keys).to(tl.int64, bitcast=True))
    return (counter_bits(mix[:, None], cols[None, :]) >> 40).to(tl.int32)


@triton.jit
def round_to_bf16(x, bits24):
    """float32 to bfloat16, stochastically."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + (bits24 >> 8)) & -65536
    # A NaN with payload only in the discarded bits would become infinite: set its highest payload bit.
    special = (bits & -65536) | tl.where((bits & 0x7FFFFF) != 0, 0x400000, 0)
    return (tl.where(finite, rounded, special) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_fp16(x, bits24):
    """float32 to float16, stochastically."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((bits + (bits24 >> 11)) & -8192).to(tl.float32, bitcast=True)
    # Units of 2^-24, the smallest fp16 number. All operations below are exact.
    units = tl.minimum(size.to(tl.float32, bitcast=True), 1.0) * 16777216.0
    whole = tl.floor(units)
    up = bits24.to(tl.float32) < (units - whole) * 16777216.0
    tiny = (whole + up.to(tl.float32)) * 5.9604644775390625e-08
    tiny = (tiny.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    rounded = tl.where(size < 0x38800000, tiny, normal)
    return tl.where(size < 0x7F800000, rounded, x).to(tl.float16)


@triton.jit
def round_stochastic(x, bits24, BF16: tl.constexpr):
    """float32[rows, cols] to bfloat16 or float16, stochastically; `bits24` from `random_bits`."""
    return round_to_bf16(x, bits24) if BF16 else round_to_fp16(x, bits24)


@triton.jit
def _round_nearest_bf16(x):
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    special = bits | tl.where((bits & 0x7FFFFF) != 0, 0x400000, 0)
    finite = (bits & 0x7F800000) != 0x7F800000
    return (tl.where(finite, rounded, special) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_nearest(x, BF16: tl.constexpr):
    """float32 to bfloat16 or float16, to nearest, ties to even."""
    return _round_nearest_bf16(x) if BF16 else x.to(tl.float16)


def random_bits_reference(table_mix: int, keys: torch.Tensor, step: int, dim: int) -> torch.Tensor:
    """`random_bits` in plain torch."""
    mix = row_mix_reference(step, row_mix_reference(table_mix, keys))
    cols = torch.arange(dim, device=keys.device)
    return ((counter_bits_reference(mix[:, None], cols[None, :]) >> 40) & 0xFFFFFF).to(torch.int32)


def round_rows_reference(
    values: torch.Tensor, keys: torch.Tensor, table_mix: int, step: int, dtype: torch.dtype
) -> torch.Tensor:
    """dtype[rows, dim]: float32 rows of int64 `keys`, rounded stochastically for step `step`, in plain torch."""
    bits24 = random_bits_reference(table_mix, keys, step, values.shape[1])
    bits = values.contiguous().view(torch.int32)
    size = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        rounded = ((bits + (bits24 >> 8)) & -65536).view(torch.float32)
        return torch.where(size < 0x7F800000, rounded, values).to(dtype)
    normal = ((bits + (bits24 >> 11)) & -8192).view(torch.float32)
    units = values.abs().clamp(max=1.0) * 2.0**24
    whole = units.floor()
    up = bits24.to(torch.float32) < (units - whole) * 2.0**24
    tiny = torch.copysign((whole + up) * 2.0**-24, values)
    rounded = torch.where(size < 0x38800000, tiny, normal)
    return torch.where(size < 0x7F800000, rounded, values).to(dtype)
