"""How rows and gradients travel: as they are, or in fewer bits between nodes. One fixed number of bytes per row.

fp32   4 bytes per element, exact
fp16, bf16   2 bytes per element, rounded to the nearest
int8   1 byte per element and 4 per row: x = q * scale, rounded up or down by chance, right on average. The chance
       is a function of (salt, key, step, element): the same run gives the same bits again
"""

from __future__ import annotations

import numpy as np
import torch

from thermocline.arrays import Keys
from thermocline.config.distributed import Wire
from thermocline.embedding.key_hash import mix64

_PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_GOLDEN = 0x9E3779B97F4A7C15


def width(wire: Wire, dim: int) -> int:
    """Bytes per row."""
    return dim + 4 if wire == "int8" else dim * _PLAIN[wire].itemsize


def encode(values: torch.Tensor, wire: Wire, keys: Keys, step: int, salt: int) -> torch.Tensor:
    """uint8[bytes]: float32[n, dim] on the wire."""
    if wire != "int8":
        return values.to(_PLAIN[wire]).contiguous().view(-1).view(torch.uint8)
    if not values.numel():
        return values.new_empty(0, dtype=torch.uint8)
    scale = values.abs().amax(1, keepdim=True) / 127
    ratio = (values / scale).nan_to_num(0.0)  # a row of zeros; of one that is not finite the scale tells
    quanta = torch.floor(ratio + _chance(keys, values.shape[1], step, salt).to(values.device)).clamp_(-127, 127)
    rows = torch.cat([scale.view(torch.uint8), quanta.to(torch.int8).view(torch.uint8)], 1)
    return rows.view(-1)


def decode(data: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """float32[n, dim]: what `encode` was given, as far as the wire keeps it."""
    if wire != "int8":
        kind = _PLAIN[wire]
        if data.storage_offset() % kind.itemsize:
            data = data.clone()
        return data.view(kind).view(-1, dim).to(torch.float32)
    rows = data.view(-1, dim + 4)
    scale = rows[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)  # a single row is contiguous
    return rows[:, 4:].contiguous().view(torch.int8).to(torch.float32) * scale


def _chance(keys: Keys, dim: int, step: int, salt: int) -> torch.Tensor:
    """float32[n, dim] in [0, 1), 24 bits each."""
    row = mix64(mix64(keys ^ np.uint64(salt)) + np.uint64(step * _GOLDEN & (1 << 64) - 1))
    counters = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = mix64(row[:, None] + counters) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0**-24))


def pack_flags(flags: torch.Tensor | None, count: int) -> torch.Tensor:
    """uint8[flag_bytes(count)]: eight flags per byte; none: all are set."""
    if flags is None:
        return torch.full((flag_bytes(count),), 255, dtype=torch.uint8)
    if flags.is_cpu:
        packed = np.zeros(flag_bytes(count), np.uint8)
        packed[: -(-count // 8)] = np.packbits(flags.numpy(), bitorder="little")
        return torch.from_numpy(packed)
    room = flags.new_zeros(8 * flag_bytes(count), dtype=torch.uint8)
    room[:count] = flags
    return (room.view(-1, 8) << _bits(flags.device)).sum(1, dtype=torch.uint8)


def unpack_flags(data: torch.Tensor, count: int) -> torch.Tensor:
    """bool[count]."""
    if data.is_cpu:
        return torch.from_numpy(np.unpackbits(data.numpy(), count=count, bitorder="little").view(np.bool_))
    return ((data[:, None] >> _bits(data.device)) & 1).view(-1)[:count].bool()


def _bits(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def flag_bytes(count: int) -> int:
    """Whole words of 4 bytes, so that what follows is aligned."""
    return -(-count // 32) * 4
