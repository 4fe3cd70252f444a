"""Weights in reduced precision in the arena: the bits of csrc/dram/codec.h. Decoded by loads, encoded by stores.

Kernels take CODEC, the number of a `Codec`, and a pointer to the weights: fp32, fp16 and bf16 as numbers of that type,
integers as 32-bit words. The words of a row hold its scale, if it has one, then the packed codes, lowest bit first. The
columns of a tile that is stored start at a multiple of 32, or are the whole row, so that programs never share a word.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from thermocline.kernels.rounding import (
    random_bits,
    random_bits_reference,
    round_nearest,
    round_rows_reference,
    round_stochastic,
)

FP32, FP16, BF16, INT = 0, 1, 2, 3
_BF16, _INT = tl.constexpr(BF16), tl.constexpr(INT)
_TYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16, INT: torch.int32}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """Storage format of weights, and the inputs of their rounding apart from step and element."""

    kind: int
    """The `code` of a precision in thermocline.embedding.precision."""
    bits: int
    row_scaled: bool
    stochastic: bool
    dim: int
    scale: torch.Tensor
    """float32[1]: scale of all codes of the table, unless `row_scaled`."""
    keys: torch.Tensor
    """int64[slots]: the key of the row in each slot."""
    table_mix: int
    """`random.table_mix(seed, table)`."""
    gradient: torch.Tensor | None = None
    """int64[1]: sum of the gradient of a learned scale, in fixed point; None if the scale is not learned."""
    tail: int = 0
    """Words of a row after the optimizer's state."""

    @classmethod
    def of(cls, precision: Any, dim: int, keys: torch.Tensor, table_mix: int, tail: int = 0) -> Codec:
        """Codec of a precision in thermocline.embedding.precision."""
        scale = torch.full((1,), precision.scale, dtype=torch.float32, device=keys.device)
        kind, bits, stochastic = precision.code, precision.bits, precision.stochastic
        gradient = torch.zeros(1, dtype=torch.int64, device=keys.device) if precision.scale_lr else None
        return cls(kind, bits, precision.row_scaled, stochastic, dim, scale, keys, table_mix, gradient, tail)

    @property
    def number(self) -> int:
        """CODEC, for which kernels are compiled; 0 for fp32."""
        if self.kind == FP32:
            return 0
        learned = self.gradient is not None
        return self.kind + 4 * self.row_scaled + 8 * self.stochastic + 16 * self.bits + 1024 * learned

    @property
    def words(self) -> int:
        """32-bit words of the weights of a row."""
        return self.row_scaled + -(-self.bits * self.dim // 32)

    def weights(self, arena: torch.Tensor) -> torch.Tensor:
        """View of the weights in an arena, float32[slots, words of a row], as kernels take it."""
        columns = self.words if self.kind == INT else self.dim
        return arena.view(_TYPES[self.kind])[:, :columns]

    def state(self, arena: torch.Tensor) -> torch.Tensor | None:
        """View of the optimizer state in an arena; None if the optimizer has no state."""
        end = arena.shape[1] - self.tail
        return arena[:, self.words : end] if end > self.words else None


def codec_number(weights: torch.Tensor, codec: Codec | None) -> int:
    """CODEC for `weights`; raises ValueError unless their type and strides fit `codec`."""
    if weights.dim() != 2 or weights.stride(1) != 1:
        raise ValueError(f"weights have strides {weights.stride()}: they must be 2-dimensional with contiguous rows")
    if codec is None:
        if not weights.dtype.is_floating_point:
            raise ValueError(f"weights are {weights.dtype}: pass the codec that decodes them")
        return 0
    if weights.dtype != _TYPES[codec.kind]:
        raise ValueError(f"weights are {weights.dtype}: this codec needs {_TYPES[codec.kind]}")
    return codec.number


@triton.jit
def _load_codes(words, slot, cols, inside, table_scale, STRIDE: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr):
    """float32[slots, cols]: codes times scale; undefined where not `inside`."""
    bit = cols * BITS
    first = words + slot[:, None] * STRIDE + (ROW + bit // 32)[None, :]
    shift = (bit % 32)[None, :]
    code = tl.load(first, mask=inside, other=0).to(tl.uint32, bitcast=True) >> shift
    if 32 % BITS != 0:
        crosses = shift + BITS > 32
        high = tl.load(first + 1, mask=inside & crosses, other=0).to(tl.uint32, bitcast=True)
        code = code | tl.where(crosses, high << ((32 - shift) % 32), 0)
    number = (code << (32 - BITS)).to(tl.int32, bitcast=True) >> (32 - BITS)
    if ROW:
        scale = tl.load(words + slot[:, None] * STRIDE + 0 * cols[None, :], mask=inside, other=0)
        scale = scale.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(table_scale)
    return number.to(tl.float32) * scale


@triton.jit
def load_weights(weights, slot, cols, inside, table_scale, other, STRIDE: tl.constexpr, CODEC: tl.constexpr):
    """float32[slots, cols]; `other` where not `inside`."""
    if CODEC % 4 == _INT:
        x = _load_codes(weights, slot, cols, inside, table_scale, STRIDE, (CODEC // 16) % 64, (CODEC // 4) % 2)
        x = tl.where(inside, x, other)
    else:
        x = tl.load(weights + slot[:, None] * STRIDE + cols[None, :], mask=inside, other=other).to(tl.float32)
    return x


@triton.jit
def _row_scale(x, cols, DIM: tl.constexpr, BITS: tl.constexpr):
    """float32[rows]: largest absolute weight over largest code; NaN if a weight is NaN."""
    magnitude = tl.where(cols[None, :] < DIM, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(magnitude, axis=1)
    largest = tl.where(largest > 0x7F800000, 0x7FC00000, largest).to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.zeros_like(largest) + ((1 << (BITS - 1)) - 1))


@triton.jit
def _quantize(x, scale, bits24, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """int32[rows, cols]: x / scale, clamped and rounded to codes."""
    q = tl.div_rn(x, scale)
    q = tl.where(q == q, q, 0.0)
    q = tl.minimum(tl.maximum(q, -(1 << (BITS - 1)) * 1.0), ((1 << (BITS - 1)) - 1) * 1.0)
    floor = tl.floor(q)
    fraction = q - floor
    up = bits24.to(tl.float32) < fraction * 16777216.0 if STOCHASTIC else fraction >= 0.5
    return floor.to(tl.int32) + up.to(tl.int32)


@triton.jit
def _store_codes(
    weights, slot, cols, live, codes, DIM: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """Pack codes into words. A group is the fewest codes that fill whole words; a word is the sum of their bits."""
    COLS: tl.constexpr = codes.shape[1]
    FULL: tl.constexpr = 32 // BITS if 32 % BITS == 0 else 32
    GROUP: tl.constexpr = FULL if FULL < COLS else COLS
    GROUPS: tl.constexpr = COLS // GROUP
    WORDS: tl.constexpr = (GROUP * BITS + 31) // 32
    LAST: tl.constexpr = (DIM * BITS + 31) // 32
    codes = tl.where(cols[None, :] < DIM, codes & ((1 << BITS) - 1), 0)
    codes = tl.reshape(codes, [codes.shape[0], GROUPS, GROUP])
    first = tl.min(tl.reshape(cols, [GROUPS, GROUP]), axis=1) * BITS // 32
    bit = (tl.arange(0, GROUP) * BITS)[None, None, :]
    for nth in tl.static_range(WORDS):
        shift = bit - 32 * nth
        left = tl.where((shift >= 0) & (shift < 32), codes << (shift & 31), 0)
        right = tl.where((shift < 0) & (shift > -BITS), codes >> ((-shift) & 31), 0)
        value = tl.sum(left | right, axis=2)
        word = first + nth
        mask = live[:, None] & (word < LAST)[None, :]
        tl.store(weights + slot[:, None] * STRIDE + (ROW + word)[None, :], value.to(tl.int32), mask=mask)


@triton.jit
def _add_scale_gradient(x, scale, codes, gradient, inside, scale_gradient, BITS: tl.constexpr):
    """Add the gradient of the scale in fixed point: integer atomics give the same sum in any order."""
    least = -(1 << (BITS - 1)) * 1.0
    most = ((1 << (BITS - 1)) - 1) * 1.0
    q = tl.div_rn(x, scale)
    code = tl.where(q < least, least, tl.where(q > most, most, codes.to(tl.float32)))
    error = code - q
    term = (gradient * gradient) * (error * tl.where((q < least) | (q > most), code, error))
    term = tl.where(inside & (term == term), term, 0.0)
    term = tl.minimum(tl.maximum(term, -0.00390625), 0.00390625) * 17592186044416.0
    tl.atomic_add(scale_gradient, tl.sum(tl.sum(term.to(tl.int64), axis=1), axis=0))


@triton.jit
def store_weights(
    weights, slot, cols, live, x, gradient, table_scale, scale_gradient, keys, table_mix, number,
    DIM: tl.constexpr, STRIDE: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Encode and store float32 rows `x`, rounded for step `number` and the keys in keys[slot].

    gradient         float32[rows, cols]: gradient of the weights, read if the scale is learned
    scale_gradient   int64[1]: receives the gradient of a learned scale
    """
    KIND: tl.constexpr = CODEC % 4
    STOCHASTIC: tl.constexpr = (CODEC // 8) % 2
    inside = live[:, None] & (cols[None, :] < DIM)
    bits24 = cols[None, :]
    if STOCHASTIC:
        bits24 = random_bits(table_mix, tl.load(keys + slot, mask=live, other=0), number, cols)
    if KIND == _INT:
        BITS: tl.constexpr = (CODEC // 16) % 64
        ROW: tl.constexpr = (CODEC // 4) % 2
        scale = tl.load(table_scale)
        if ROW:
            scale = _row_scale(x, cols, DIM, BITS)
            tl.store(weights + slot * STRIDE, scale.to(tl.int32, bitcast=True), mask=live)
            scale = scale[:, None]
        scale = tl.broadcast_to(scale, x.shape)
        codes = _quantize(x, scale, bits24, BITS, STOCHASTIC)
        if CODEC >= 1024:
            _add_scale_gradient(x, scale, codes, gradient, inside, scale_gradient, BITS)
        _store_codes(weights, slot, cols, live, codes, DIM, STRIDE, BITS, ROW)
    else:
        if KIND > 0:
            x = round_stochastic(x, bits24, KIND == _BF16) if STOCHASTIC else round_nearest(x, KIND == _BF16)
        tl.store(weights + slot[:, None] * STRIDE + cols[None, :], x, mask=inside)


def decode_reference(weights: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """float32[rows, dim]: stored weights decoded in plain torch."""
    if codec is None or codec.kind != INT:
        return weights.to(torch.float32)
    words = weights.contiguous()
    scale = words[:, :1].view(torch.float32) if codec.row_scaled else codec.scale
    bits = words[:, int(codec.row_scaled) :].long() & 0xFFFFFFFF
    bits = torch.cat([bits, torch.zeros_like(bits[:, :1])], 1)
    bit = torch.arange(codec.dim, device=words.device) * codec.bits
    code = ((bits[:, bit // 32] | bits[:, bit // 32 + 1] << 32) >> (bit % 32)) & (2**codec.bits - 1)
    code = torch.where(code >= 2 ** (codec.bits - 1), code - 2**codec.bits, code)
    return code.to(torch.float32) * scale


def scale_gradient_reference(x: torch.Tensor, words: torch.Tensor, gradient: torch.Tensor, codec: Codec) -> int:
    """Gradient of the table's scale from updated rows `x`, their stored `words` and the gradient of the weights."""
    unscaled = dataclasses.replace(codec, scale=torch.ones_like(codec.scale))
    most = 2 ** (codec.bits - 1) - 1
    q = x / codec.scale
    code = decode_reference(words, unscaled)
    code = torch.where(q > most, float(most), torch.where(q < -most - 1, float(-most - 1), code))
    error = code - q
    term = (gradient * gradient) * (error * torch.where((q > most) | (q < -most - 1), code, error))
    return int((term.nan_to_num(nan=0.0).clamp(-(2.0**-8), 2.0**-8) * 2.0**44).long().sum())


def encode_reference(x: torch.Tensor, keys: torch.Tensor, number: int, codec: Codec | None) -> torch.Tensor:
    """float32 rows of int64 `keys` as stored by step `number`, in plain torch."""
    if codec is None or codec.kind == FP32:
        return x
    if codec.kind != INT:
        dtype = _TYPES[codec.kind]
        return round_rows_reference(x, keys, codec.table_mix, number, dtype) if codec.stochastic else x.to(dtype)
    most = 2 ** (codec.bits - 1) - 1
    scale = codec.scale
    if codec.row_scaled:
        scale = x.abs().amax(1, keepdim=True) / torch.full((), most, dtype=torch.float32, device=x.device)
    q = (x / scale).nan_to_num(nan=0.0, posinf=most, neginf=-most - 1).clamp(-most - 1, most)
    floor = q.floor()
    fraction = q - floor
    if codec.stochastic:
        up = random_bits_reference(codec.table_mix, keys, number, x.shape[1]).to(torch.float32) < fraction * 2.0**24
    else:
        up = fraction >= 0.5
    codes = (floor + up).long() & (2**codec.bits - 1)
    bits = torch.zeros(len(x), codec.words - codec.row_scaled + 1, dtype=torch.int64, device=x.device)
    for i in range(codec.dim):
        word, shift = i * codec.bits // 32, i * codec.bits % 32
        shifted = codes[:, i] << shift
        bits[:, word] |= shifted & 0xFFFFFFFF
        bits[:, word + 1] |= shifted >> 32
    words = torch.where(bits >= 2**31, bits - 2**32, bits)[:, :-1].to(torch.int32)
    return torch.cat([scale.view(torch.int32), words], 1) if codec.row_scaled else words
