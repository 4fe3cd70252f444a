"""Wire formats of rows and gradients between nodes. Every row has the same number of bytes.

fp32         4 bytes per element, exact
fp16, bf16   2 bytes per element, rounded to nearest
int8         1 byte per element and a float32 scale per row: x = q * scale, with stochastic rounding, which is unbiased.
             The random bits are a function of (salt, key, step, element), so a repeated run has the same bits

Pure functions: any thread may call them; they do not block.
"""

from __future__ import annotations

import numpy as np
import torch

from thermocline.arrays import Keys
from thermocline.config.distributed import Wire
from thermocline.embedding.key_hash import mix64

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_GOLDEN = 0x9E3779B97F4A7C15


def wire_bytes(wire: Wire, dim: int) -> int:
    """Return the encoded size of a row of `dim` elements."""
    return dim + 4 if wire == "int8" else dim * _DTYPES[wire].itemsize


def encode(values: torch.Tensor, wire: Wire, keys: Keys, step: int, salt: int) -> torch.Tensor:
    """Encode float32[n, dim] as uint8[n * wire_bytes]. `keys`, `step` and `salt` seed int8's rounding."""
    if wire != "int8":
        return values.to(_DTYPES[wire]).contiguous().view(-1).view(torch.uint8)
    if not values.numel():
        return values.new_empty(0, dtype=torch.uint8)
    scale = values.abs().amax(1, keepdim=True) / 127
    ratio = (values / scale).nan_to_num(0.0)  # a row of zeros; a row with inf or nan decodes to nan by its scale
    noise = _uniform(keys, values.shape[1], step, salt).to(values.device)
    quanta = torch.floor(ratio + noise).clamp_(-127, 127)
    rows = torch.cat([scale.view(torch.uint8), quanta.to(torch.int8).view(torch.uint8)], 1)
    return rows.view(-1)


def decode(data: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Decode the result of `encode` to float32[n, dim]."""
    if wire != "int8":
        dtype = _DTYPES[wire]
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(-1, dim).to(torch.float32)
    rows = data.view(-1, dim + 4)
    # A slice of a single row counts as contiguous, so `contiguous()` would leave it unaligned: clone.
    scale = rows[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows[:, 4:].contiguous().view(torch.int8).to(torch.float32) * scale


def _uniform(keys: Keys, dim: int, step: int, salt: int) -> torch.Tensor:
    """Return float32[n, dim] in [0, 1), 24 random bits each."""
    row = mix64(mix64(keys ^ np.uint64(salt)) + np.uint64(step * _GOLDEN & (1 << 64) - 1))
    counters = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = mix64(row[:, None] + counters) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0**-24))


def pack_flags(flags: torch.Tensor | None, count: int) -> torch.Tensor:
    """Pack `count` flags into uint8[flag_bytes(count)], eight per byte; None means that all are set."""
    if flags is None:
        return torch.full((flag_bytes(count),), 255, dtype=torch.uint8)
    if flags.is_cpu:
        packed = np.zeros(flag_bytes(count), np.uint8)
        packed[: -(-count // 8)] = np.packbits(flags.numpy(), bitorder="little")
        return torch.from_numpy(packed)
    padded = flags.new_zeros(8 * flag_bytes(count), dtype=torch.uint8)
    padded[:count] = flags
    return (padded.view(-1, 8) << _bit_positions(flags.device)).sum(1, dtype=torch.uint8)


def unpack_flags(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool[count], the argument of `pack_flags`."""
    if data.is_cpu:
        return torch.from_numpy(np.unpackbits(data.numpy(), count=count, bitorder="little").view(np.bool_))
    return ((data[:, None] >> _bit_positions(data.device)) & 1).view(-1)[:count].bool()


def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def flag_bytes(count: int) -> int:
    """Return the size of `count` packed flags: a multiple of 4, so that the rows after them are aligned."""
    return -(-count // 32) * 4
