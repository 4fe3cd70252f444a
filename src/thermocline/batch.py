"""Shared words: the working set of a batch."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from thermocline.core import core
from thermocline.tables.arrays import Keys, as_keys

Slots = npt.NDArray[np.uint32]


@functools.cache
def _dedup(threads: int) -> core.Dedup:
    """One per number of threads: it keeps its scratch memory between batches."""
    return core.Dedup(threads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """The unique keys of a batch's ids, and where each of them occurs. Computed once per batch, used by every stage."""

    keys: Keys
    """The unique keys, in order of first occurrence."""
    inverse: Slots
    """Per id: its place in `keys`."""
    starts: Slots
    """Key u occurs at order[starts[u] : starts[u + 1]]."""
    order: Slots
    """Positions of ids, grouped by key, ascending within a key."""

    @classmethod
    def of(cls, ids: Any, *, threads: int | None = None) -> Self:
        """The working set of `ids` (uint64, or int64 bit patterns). The result does not depend on `threads`."""
        return cls(*_dedup(threads or os.cpu_count() or 1).run(as_keys(ids)))

    def __len__(self) -> int:
        return len(self.keys)
