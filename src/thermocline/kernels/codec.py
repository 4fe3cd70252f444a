"""Weights as codes in an arena of words: the bits of csrc/dram/codec.h. Decoded at look-up, encoded after a step.

A kernel is given CODEC, the number of a `Codec`, and where weights lie: fp32, fp16 and bf16 as numbers of that type,
integers as words, which hold codes of any width, lowest bit first, after the row's own step if it has one. Columns of a
tile that stores begin at a multiple of 32, or are the whole row: then no two programs share a word.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from thermocline.kernels.rounding import chance, chance_reference, nearest_half, round_row, round_rows_reference

FP32, FP16, BF16, INT = 0, 1, 2, 3
_BF16, _INT = tl.constexpr(BF16), tl.constexpr(INT)
_TYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16, INT: torch.int32}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """How the weights of an arena's rows are stored, and what rounding them depends on beside step and element."""

    kind: int
    """The `code` of a precision in thermocline.embedding.precision."""
    bits: int
    row_scaled: bool
    stochastic: bool
    dim: int
    scale: torch.Tensor
    """float32[1]: what the codes of a table are multiplied by."""
    keys: torch.Tensor
    """int64 per slot: the key whose row is there."""
    table_mix: int
    """`random.table_mix(seed, table)`."""
    gradient: torch.Tensor | None = None
    """int64[1]: where the gradient of a step that is learned is summed; none: it is not."""

    @classmethod
    def of(cls, precision: Any, dim: int, keys: torch.Tensor, table_mix: int) -> Codec:
        """Of a precision in thermocline.embedding.precision."""
        scale = torch.full((1,), precision.scale, dtype=torch.float32, device=keys.device)
        kind, bits, stochastic = precision.code, precision.bits, precision.stochastic
        gradient = torch.zeros(1, dtype=torch.int64, device=keys.device) if precision.scale_lr else None
        return cls(kind, bits, precision.row_scaled, stochastic, dim, scale, keys, table_mix, gradient)

    @property
    def number(self) -> int:
        """What kernels are compiled for; 0: fp32."""
        if self.kind == FP32:
            return 0
        learned = self.gradient is not None
        return self.kind + 4 * self.row_scaled + 8 * self.stochastic + 16 * self.bits + 1024 * learned

    @property
    def words(self) -> int:
        """Of a row's weights."""
        return self.row_scaled + -(-self.bits * self.dim // 32)

    def weights(self, arena: torch.Tensor) -> torch.Tensor:
        """The weights of float32[slots, words of a row], as kernels take them."""
        columns = self.words if self.kind == INT else self.dim
        return arena.view(_TYPES[self.kind])[:, :columns]

    def state(self, arena: torch.Tensor) -> torch.Tensor | None:
        """The optimizer's state there; none if it has none."""
        return arena[:, self.words :] if arena.shape[1] > self.words else None


def number_of(weights: torch.Tensor, codec: Codec | None) -> int:
    """CODEC of these weights; raises unless they are as the codec, or none, has them."""
    if weights.dim() != 2 or weights.stride(1) != 1:
        raise ValueError(f"weights have shape {list(weights.shape)} and strides {weights.stride()}: rows in one piece")
    if codec is None:
        if not weights.dtype.is_floating_point:
            raise ValueError(f"weights are {weights.dtype}: give the codec that reads them")
        return 0
    if weights.dtype != _TYPES[codec.kind]:
        raise ValueError(f"weights are {weights.dtype}: those of this codec are {_TYPES[codec.kind]}")
    return codec.number


@triton.jit
def _load_codes(words, slot, cols, inside, step, STRIDE: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr):
    """float32[slots, cols]: codes times their step; not numbers to use where not `inside`."""
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
        scale = tl.load(step)
    return number.to(tl.float32) * scale


@triton.jit
def load_weights(weights, slot, cols, inside, step, other, STRIDE: tl.constexpr, CODEC: tl.constexpr):
    """float32[slots, cols]; `other` where not `inside`."""
    if CODEC % 4 == _INT:
        x = _load_codes(weights, slot, cols, inside, step, STRIDE, (CODEC // 16) % 64, (CODEC // 4) % 2)
        x = tl.where(inside, x, other)
    else:
        x = tl.load(weights + slot[:, None] * STRIDE + cols[None, :], mask=inside, other=other).to(tl.float32)
    return x


@triton.jit
def _row_step(x, cols, DIM: tl.constexpr, BITS: tl.constexpr):
    """The row's own step: NaN if a weight is."""
    size = tl.where(cols[None, :] < DIM, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(size, axis=1)
    largest = tl.where(largest > 0x7F800000, 0x7FC00000, largest).to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.zeros_like(largest) + ((1 << (BITS - 1)) - 1))


@triton.jit
def _quantize(x, scale, bits24, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """int32: codes."""
    q = tl.div_rn(x, scale)
    q = tl.where(q == q, q, 0.0)
    q = tl.minimum(tl.maximum(q, -(1 << (BITS - 1)) * 1.0), ((1 << (BITS - 1)) - 1) * 1.0)
    floor = tl.floor(q)
    rest = q - floor
    up = bits24.to(tl.float32) < rest * 16777216.0 if STOCHASTIC else rest >= 0.5
    return floor.to(tl.int32) + up.to(tl.int32)


@triton.jit
def _store_codes(
    weights, slot, cols, live, codes, DIM: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """Packs codes: as few as fill whole words are a group, and each word of a group is the sum of what they add."""
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
        at = bit - 32 * nth
        left = tl.where((at >= 0) & (at < 32), codes << (at & 31), 0)
        right = tl.where((at < 0) & (at > -BITS), codes >> ((-at) & 31), 0)
        word = tl.sum(left | right, axis=2)
        place = first + nth
        mask = live[:, None] & (place < LAST)[None, :]
        tl.store(weights + slot[:, None] * STRIDE + (ROW + place)[None, :], word.to(tl.int32), mask=mask)


@triton.jit
def _add_scale_gradient(x, scale, codes, gradient, inside, into, BITS: tl.constexpr):
    """Integers: a sum in any order."""
    least = -(1 << (BITS - 1)) * 1.0
    most = ((1 << (BITS - 1)) - 1) * 1.0
    q = tl.div_rn(x, scale)
    code = tl.where(q < least, least, tl.where(q > most, most, codes.to(tl.float32)))
    error = code - q
    term = (gradient * gradient) * (error * tl.where((q < least) | (q > most), code, error))
    term = tl.where(inside & (term == term), term, 0.0)
    term = tl.minimum(tl.maximum(term, -0.00390625), 0.00390625) * 17592186044416.0
    tl.atomic_add(into, tl.sum(tl.sum(term.to(tl.int64), axis=1), axis=0))


@triton.jit
def store_weights(
    weights, slot, cols, live, x, gradient, step, into, keys, table_mix, number,
    DIM: tl.constexpr, STRIDE: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Rows of float32, rounded as step `number` does; keys[slot] is whose row it is.

    gradient, into   of the weights, and where the one of a step that is learned is summed
    """
    KIND: tl.constexpr = CODEC % 4
    STOCHASTIC: tl.constexpr = (CODEC // 8) % 2
    inside = live[:, None] & (cols[None, :] < DIM)
    bits24 = cols[None, :]
    if STOCHASTIC:
        bits24 = chance(table_mix, tl.load(keys + slot, mask=live, other=0), number, cols)
    if KIND == _INT:
        BITS: tl.constexpr = (CODEC // 16) % 64
        ROW: tl.constexpr = (CODEC // 4) % 2
        scale = tl.load(step)
        if ROW:
            scale = _row_step(x, cols, DIM, BITS)
            tl.store(weights + slot * STRIDE, scale.to(tl.int32, bitcast=True), mask=live)
            scale = scale[:, None]
        scale = tl.broadcast_to(scale, x.shape)
        codes = _quantize(x, scale, bits24, BITS, STOCHASTIC)
        if CODEC >= 1024:
            _add_scale_gradient(x, scale, codes, gradient, inside, into, BITS)
        _store_codes(weights, slot, cols, live, codes, DIM, STRIDE, BITS, ROW)
    else:
        if KIND > 0:
            x = round_row(x, bits24, KIND == _BF16) if STOCHASTIC else nearest_half(x, KIND == _BF16)
        tl.store(weights + slot[:, None] * STRIDE + cols[None, :], x, mask=inside)


def decode_reference(weights: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """float32[rows, dim] of weights as stored, in plain torch."""
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
    """What these rows add to the gradient of the table's step: x as updated, its codes, the weights' gradients."""
    one = dataclasses.replace(codec, scale=torch.ones_like(codec.scale))
    most = 2 ** (codec.bits - 1) - 1
    q = x / codec.scale
    code = decode_reference(words, one)
    code = torch.where(q > most, float(most), torch.where(q < -most - 1, float(-most - 1), code))
    error = code - q
    term = (gradient * gradient) * (error * torch.where((q > most) | (q < -most - 1), code, error))
    return int((term.nan_to_num(nan=0.0).clamp(-(2.0**-8), 2.0**-8) * 2.0**44).long().sum())


def encode_reference(x: torch.Tensor, keys: torch.Tensor, number: int, codec: Codec | None) -> torch.Tensor:
    """Rows of `keys` as step `number` stores them, in plain torch."""
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
    rest = q - floor
    if codec.stochastic:
        up = chance_reference(codec.table_mix, keys, number, x.shape[1]).to(torch.float32) < rest * 2.0**24
    else:
        up = rest >= 0.5
    codes = (floor + up).long() & (2**codec.bits - 1)
    bits = torch.zeros(len(x), codec.words - codec.row_scaled + 1, dtype=torch.int64, device=x.device)
    for i in range(codec.dim):
        word, shift = i * codec.bits // 32, i * codec.bits % 32
        both = codes[:, i] << shift
        bits[:, word] |= both & 0xFFFFFFFF
        bits[:, word + 1] |= both >> 32
    words = torch.where(bits >= 2**31, bits - 2**32, bits)[:, :-1].to(torch.int32)
    return torch.cat([scale.view(torch.int32), words], 1) if codec.row_scaled else words
