"""Which keys on a device belong to a part of all keys: elementwise torch operations, one pass per expiry step."""

from __future__ import annotations

import torch

from thermocline.kernels.random import GOLDEN, mix64_reference

_SIGN = 1 << 63


def is_in_part(keys: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return bool per key, int64 bit patterns: whether `hash_key` of csrc/util/hash.h is from `lo` to `hi`."""
    x = mix64_reference(keys ^ (GOLDEN.value - 2**64)) ^ -_SIGN  # in unsigned order
    return (x >= lo - _SIGN) & (x <= hi - _SIGN)
