"""Key ownership: the low 16 bits of a key's hash choose the owner rank (csrc/util/hash.h lists the use of all bits).

Pure functions: any thread may call them; they do not block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys
from thermocline.embedding.key_hash import hash_keys

MAX_RANKS = 1 << 16


def owner_of(keys: Keys, world: int) -> npt.NDArray[np.int64]:
    """Return the owner rank of each key in a job of `world` ranks."""
    bits = (hash_keys(keys) & np.uint64(0xFFFF)).astype(np.int64)
    return bits * world >> 16


def overlapping_ranks(rank: int, world: int, saved_world: int) -> range:
    """Return the ranks of a job of `saved_world` ranks that own keys which `rank` of `world` ranks owns.

    A rank owns one contiguous range of the 16 bits, so ranks of two jobs share keys if their ranges overlap.
    """
    first, last = -(-(rank << 16) // world), -(-(rank + 1 << 16) // world) - 1
    return range(first * saved_world >> 16, (last * saved_world >> 16) + 1)


def rank_folder(rank: int, world: int, suffix: int = 0) -> str:
    """Return the name of a rank's store folder inside its table's folder; `suffix` > 0 makes another unused name."""
    return f"rank-{rank:05}-of-{world:05}" + f".{suffix}" * (suffix > 0)
