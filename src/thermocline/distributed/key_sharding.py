"""Which rank owns a key: the low 16 bits of the key's hash, which nothing else uses (csrc/util/hash.h)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys
from thermocline.embedding.key_hash import hash_keys

MOST_RANKS = 1 << 16


def owner_of(keys: Keys, world: int) -> npt.NDArray[np.int64]:
    """Per key: the rank of `world` that has its row."""
    bits = (hash_keys(keys) & np.uint64(0xFFFF)).astype(np.int64)
    return bits * world >> 16


def rank_folder(rank: int, world: int, again: int = 0) -> str:
    """The folder of one rank's rows, inside that of the table; `again`: where the name is taken."""
    return f"rank-{rank:05}-of-{world:05}" + f".{again}" * (again > 0)
