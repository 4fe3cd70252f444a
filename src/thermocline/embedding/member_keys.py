"""Keys of rows of several tables that are stored together, as one table of more keys.

    key = id ^ salt,   salt = table_mix(seed, name of the table) ^ table_mix(seed, name of the storage)

Initial rows and rounding are functions of table_mix ^ key (csrc/dram/random.h): with this salt they are those of a
table of its own. Ids are below 2^48, so the top 16 bits of a key are those of its table's salt. They are unique among
the tables of a storage: two tables never share a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.arrays import Floats, Keys, Mask
from thermocline.embedding.key_hash import table_mix

if TYPE_CHECKING:
    from thermocline.embedding.backend import Select
    from thermocline.embedding.initializers import Initial

ID_BITS = 48
LARGEST_ID = np.uint64(2**ID_BITS - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One of the tables of a storage."""

    name: str
    salt: int
    initial: Initial

    @property
    def prefix(self) -> int:
        """Top 16 bits of the keys of its rows."""
        return self.salt >> ID_BITS

    def owns(self, keys: Keys) -> Mask:
        """Return which keys of the storage are of this table."""
        own: Mask = keys >> np.uint64(ID_BITS) == self.prefix
        return own

    def select(self, select: Select) -> Select:
        """Return a selection among the rows of this table: `select` is called with ids and their rows."""
        salt = np.uint64(self.salt)

        def chosen(pieces: Iterator[tuple[Keys, Floats]]) -> Keys:
            own = ((keys, rows, self.owns(keys)) for keys, rows in pieces)
            return select((keys[mine] ^ salt, rows[mine]) for keys, rows, mine in own) ^ salt

        return chosen


def salt_of(seed: int, table: int, storage: int) -> int:
    """Return the salt of a table, given the `table_id` of table and storage."""
    return table_mix(seed, table) ^ table_mix(seed, storage)


def member_keys(ids: Keys, salt: Any, subject: str) -> Keys:
    """Return the keys of ids of one table. Raises IndexError that names the first id out of range."""
    if len(ids) and ids.max() > LARGEST_ID:
        worst = ids[ids > LARGEST_ID][0]
        raise IndexError(
            f"{subject} has id {worst.astype(np.int64)}: ids of a table that is stored with others are 0 to "
            f"2^{ID_BITS} - 1. For keys of 64 bits, such as the hashed values of tc.Reader and tc.Collate, declare the "
            'table by tiers.table(..., keys="hash"): it then has a storage of its own'
        )
    return ids ^ np.uint64(salt)
