"""Hashes of keys as csrc/util/hash.h has them, of whole arrays."""

from __future__ import annotations

import numpy as np

from thermocline.embedding.arrays import Keys


def mix64(x: Keys) -> Keys:
    """`mix64` of csrc/util/hash.h, of every element."""
    shift = np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> shift)) * np.uint64(factor)
    return x ^ (x >> shift)


def hash_keys(keys: Keys) -> Keys:
    """`hash_key` of csrc/util/hash.h."""
    return mix64(keys ^ np.uint64(0x9E3779B97F4A7C15))
