"""Vectorized versions of the key hashes in csrc/util/hash.h."""

from __future__ import annotations

import numpy as np

from thermocline.arrays import Keys


def mix64(x: Keys) -> Keys:
    """Apply the finalizer of MurmurHash3 to each element: `mix64` of csrc/util/hash.h."""
    shift = np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> shift)) * np.uint64(factor)
    return x ^ (x >> shift)


def hash_keys(keys: Keys) -> Keys:
    """Hash each key: `hash_key` of csrc/util/hash.h."""
    return mix64(keys ^ np.uint64(0x9E3779B97F4A7C15))
