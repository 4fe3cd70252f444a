"""fp32 to half precision by chance, for rows kept in fp16 or bf16: up or down, so that the mean is the value.

The chance is a function of (seed, table, key, step, element), so it is the same wherever and whenever the row is:
    s as in ops/random.py;  h = mix64((s ^ step) + G);  24 bits per element i: bits(h, i) >> 40
bf16 and normal fp16 numbers: the bits that go are added to as many of these 24, the highest; the carry rounds up.
Below fp16's smallest normal number: up if these 24, as a fraction, are below the fraction that goes.
Infinities and NaN stay what they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import blocks, row_block, tile_rows
from thermocline.kernels.random import counter_bits, counter_bits_reference, mix64_reference, row_mix, row_mix_reference

_GOLDEN = 0x9E3779B97F4A7C15


@triton.jit
def chance(table_mix, keys, step, cols):
    """int32[keys, cols]: 24 random bits per element of a row."""
    mix = row_mix(step, row_mix(table_mix, keys).to(tl.int64, bitcast=True))
    return (counter_bits(mix[:, None], cols[None, :]) >> 40).to(tl.int32)


@triton.jit
def round_to_bf16(x, bits24):
    """float32 -> bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + (bits24 >> 8)) & -65536
    # A NaN whose payload is only in the bits that go would become infinite: it keeps its highest payload bit instead.
    special = (bits & -65536) | tl.where((bits & 0x7FFFFF) != 0, 0x400000, 0)
    return (tl.where(finite, rounded, special) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_fp16(x, bits24):
    """float32 -> float16."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((bits + (bits24 >> 11)) & -8192).to(tl.float32, bitcast=True)
    # Units of 2^-24, fp16's smallest number: exact, as is every step below.
    units = tl.minimum(size.to(tl.float32, bitcast=True), 1.0) * 16777216.0
    whole = tl.floor(units)
    up = bits24.to(tl.float32) < (units - whole) * 16777216.0
    tiny = (whole + up.to(tl.float32)) * 5.9604644775390625e-08
    tiny = (tiny.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    rounded = tl.where(size < 0x38800000, tiny, normal)
    return tl.where(size < 0x7F800000, rounded, x).to(tl.float16)


@triton.jit
def round_row(x, bits24, BF16: tl.constexpr):
    """Rows of float32 as half-precision numbers; `bits24` as from `chance`."""
    return round_to_bf16(x, bits24) if BF16 else round_to_fp16(x, bits24)


@triton.jit
def _nearest_bf16(x):
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    special = bits | tl.where((bits & 0x7FFFFF) != 0, 0x400000, 0)
    finite = (bits & 0x7F800000) != 0x7F800000
    return (tl.where(finite, rounded, special) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest_half(x, BF16: tl.constexpr):
    """The same to the nearest, ties to even."""
    return _nearest_bf16(x) if BF16 else x.to(tl.float16)


@triton.jit(do_not_specialize=["count", "table_mix", "step"])
def _round_kernel(
    values, keys, out, count, table_mix, step,
    DIM: tl.constexpr, BF16: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    cols = tl.arange(0, BLOCK)
    key = tl.load(keys + item, mask=item < count, other=0)
    inside = (item[:, None] < count) & (cols[None, :] < DIM)
    place = item[:, None] * DIM + cols[None, :]
    x = tl.load(values + place, mask=inside, other=0.0)
    tl.store(out + place, round_row(x, chance(table_mix, key, step, cols), BF16), mask=inside)


def round_rows(values: torch.Tensor, keys: torch.Tensor, table_mix: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """dtype[rows, dim]: float32 rows of `keys` (int64) as they are stored after step number `step`."""
    check_half(dtype)
    count, dim = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if count:
        rows = tile_rows(dim, 1024)
        _round_kernel[(blocks(count, rows),)](
            values.contiguous(), keys, out, count, table_mix, step,
            DIM=dim, BF16=dtype == torch.bfloat16, KEYS=rows, BLOCK=row_block(dim),
        )  # fmt: skip
    return out


def check_half(dtype: torch.dtype) -> None:
    """Raises unless rows can be kept in `dtype` by chance."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}: rows are rounded by chance to torch.float16 or torch.bfloat16")


def chance_reference(table_mix: int, keys: torch.Tensor, step: int, dim: int) -> torch.Tensor:
    """As `chance`."""
    mix = mix64_reference((row_mix_reference(table_mix, keys) ^ step) + (_GOLDEN - 2**64))
    cols = torch.arange(dim, device=keys.device)
    return ((counter_bits_reference(mix[:, None], cols[None, :]) >> 40) & 0xFFFFFF).to(torch.int32)


def round_rows_reference(
    values: torch.Tensor, keys: torch.Tensor, table_mix: int, step: int, dtype: torch.dtype
) -> torch.Tensor:
    """The same in plain torch."""
    bits24 = chance_reference(table_mix, keys, step, values.shape[1])
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
