"""Vectorized versions of the key hashes in csrc/util/hash.h, and parts of all keys by hash."""

from __future__ import annotations

from typing import NamedTuple

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


class KeyPart(NamedTuple):
    """Part `number` of `parts` parts of all keys: hashes from `lo` to `hi`, both inclusive. Parts have equal size."""

    number: int = 0
    parts: int = 1

    @property
    def lo(self) -> int:
        """Smallest hash of the part."""
        return -(-(self.number << 64) // self.parts)

    @property
    def hi(self) -> int:
        """Largest hash of the part."""
        return -(-((self.number + 1) << 64) // self.parts) - 1

    def share(self, total: int) -> int:
        """Return the share of the part; the shares of all parts sum to `total`."""
        return (self.number + 1) * total // self.parts - self.number * total // self.parts


ALL_KEYS = KeyPart()


def table_mix(seed: int, table: int) -> int:
    """Return the state from which all rows of a table are derived: `table_mix` of csrc/dram/random.h."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = mix64(np.array([seed % 2**64], np.uint64) + golden) ^ np.uint64(table)
    return int(mix64(mixed + golden)[0])
