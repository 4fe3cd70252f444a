"""Rows of keys that were never trained, written on the device: the bits of csrc/dram/initial.h."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import EXACT, blocks, row_block, tile_rows
from thermocline.kernels.random import counter_bits, counter_bits_reference, row_mix, row_mix_reference, table_mix

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
_UNIFORM, _NORMAL = tl.constexpr(UNIFORM), tl.constexpr(NORMAL)


@dataclasses.dataclass(frozen=True, slots=True)
class InitialRows:
    """What rows begin with: weights by `kind`, every element of the optimizer's state `state`."""

    kind: int
    """The `code` of an initialiser in thermocline.embedding.initializers."""
    scale: float
    state: float
    table_mix: int
    """`random.table_mix(seed, table)`."""

    @classmethod
    def of(cls, kind: int, scale: float, state: float, seed: int, table: int) -> InitialRows:
        return cls(kind, scale, state, table_mix(seed, table))

    @property
    def factor(self) -> float:
        """What the integer of an element is multiplied by: rounded to fp32 once, exact as a Python float."""
        power = {CONSTANT: 0, UNIFORM: -24, NORMAL: -16}[self.kind]
        return float(np.float32(self.scale) * np.float32(2.0**power))


@triton.jit
def words(bits):
    """The sum of the four 16-bit words."""
    total = (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + (bits >> 48)
    return total.to(tl.int32)


@triton.jit
def initial_weights(keys, cols, table_mix, factor, KIND: tl.constexpr):
    """float32[keys, cols]: elements `cols` of the rows of `keys`."""
    col = cols[None, :]
    if KIND == _UNIFORM:
        mix = row_mix(table_mix, keys)[:, None]
        number = (counter_bits(mix, col) >> 40).to(tl.int32) * 2 - 16777215
        weights = number.to(tl.float32) * factor
    elif KIND == _NORMAL:
        mix = row_mix(table_mix, keys)[:, None]
        number = words(counter_bits(mix, col * 3))
        number += words(counter_bits(mix, col * 3 + 1))
        number += words(counter_bits(mix, col * 3 + 2))
        weights = (number - 393210).to(tl.float32) * factor
    else:
        weights = tl.zeros([keys.shape[0], cols.shape[0]], tl.float32) + factor
    return weights


@triton.jit(do_not_specialize=["count", "table_mix"])
def _initial_kernel(
    rows, keys, slots, count, table_mix, factor, state,
    FLOATS: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = item < count
    slot = tl.load(slots + item, mask=live, other=-1).to(tl.int64)
    live = live & (slot >= 0)
    if tl.max(live.to(tl.int32), 0) > 0:  # lists of new keys have room for many more
        key = tl.load(keys + item, mask=live, other=0)
        cols = tl.arange(0, BLOCK)
        value = initial_weights(key, cols, table_mix, factor, KIND)
        value = tl.where(cols[None, :] < DIM, value, state)
        place = rows + slot[:, None] * STRIDE + cols[None, :]
        tl.store(place, value, mask=live[:, None] & (cols[None, :] < FLOATS))


def write_initial_rows(
    rows: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, dim: int, init: InitialRows
) -> None:
    """rows[slots[i]] = the whole initial row of keys[i]; slots below 0 are skipped.

    rows    float32[slots, floats], rows of `dim` weights and then state; its row stride may be larger
    keys    int64 bit patterns
    slots   int32 or int64, one per key, none twice
    """
    if rows.dtype != torch.float32 or rows.stride(1) != 1:
        raise ValueError(f"rows are {rows.dtype} with strides {rows.stride()}: needed is float32, contiguous in a row")
    count = len(keys)
    if count == 0:
        return
    floats = rows.shape[1]
    per_program = tile_rows(floats, 1024)
    _initial_kernel[(blocks(count, per_program),)](
        rows, keys, slots, count, init.table_mix, init.factor, init.state,
        FLOATS=floats, STRIDE=rows.stride(0), DIM=dim, KIND=init.kind, KEYS=per_program, BLOCK=row_block(floats),
        **EXACT,
    )  # fmt: skip


def initial_rows_reference(keys: torch.Tensor, dim: int, floats: int, init: InitialRows) -> torch.Tensor:
    """float32[keys, floats] in plain torch."""
    rows = torch.full((len(keys), floats), init.state, dtype=torch.float32, device=keys.device)
    mix = row_mix_reference(init.table_mix, keys)[:, None]
    cols = torch.arange(dim, device=keys.device)[None, :]
    if init.kind == UNIFORM:
        number = ((counter_bits_reference(mix, cols) >> 40) & 0xFFFFFF) * 2 - 16777215
        rows[:, :dim] = number.to(torch.float32) * init.factor
    elif init.kind == NORMAL:
        number = torch.full((len(keys), dim), -393210, device=keys.device)
        for part in range(3):
            bits = counter_bits_reference(mix, cols * 3 + part)
            for shift in (0, 16, 32, 48):
                number = number + ((bits >> shift) & 0xFFFF)
        rows[:, :dim] = number.to(torch.float32) * init.factor
    else:
        rows[:, :dim] = init.factor
    return rows
