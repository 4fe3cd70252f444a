"""Which keys on a device belong to a part of all keys: elementwise torch operations, one pass per expiry step."""

from __future__ import annotations

import torch

_SIGN = 1 << 63


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= _SIGN else x


def is_in_part(keys: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return bool per key, int64 bit patterns: whether `hash_key` of csrc/util/hash.h is from `lo` to `hi`."""
    x = keys ^ _signed(0x9E3779B97F4A7C15)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ _shifted(x)) * _signed(factor)
    x = (x ^ _shifted(x)) ^ -_SIGN  # in unsigned order
    return (x >= lo - _SIGN) & (x <= hi - _SIGN)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Return x >> 33 without the sign."""
    return (x >> 33) & 0x7FFFFFFF
