"""`SplitHorizon`: rows of coming batches, loaded from several DRAM tiers. Implements `KeyHorizon`.

Each part loads the keys of one tier. A batch keeps its ids, because its keys are in several parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from thermocline.arrays import Keys
from thermocline.embedding.backend import BatchAhead, KeyHorizon, ReadCounts
from thermocline.embedding.batch_plan import BagInputs

_NO_KEYS: Keys = np.empty(0, np.uint64)


class SplitBatchAhead:
    """See `BatchAhead`."""

    def __init__(self, horizon: SplitHorizon, ids: Keys, parts: Sequence[BatchAhead]) -> None:
        self._horizon = horizon
        self._ids = ids
        self._parts = parts

    def restore(self) -> Keys:
        return self._ids

    @property
    def to_visit(self) -> float:
        return max(part.to_visit for part in self._parts)

    def release(self) -> None:
        ids, self._ids = self._ids, _NO_KEYS
        self._horizon.forget(ids)
        for part in self._parts:
            part.release()

    @property
    def bytes(self) -> int:
        return self._ids.nbytes + sum(part.bytes for part in self._parts)


class SplitHorizon:
    """See `RowHorizon`. `split` returns the keys of each part."""

    def __init__(self, parts: Sequence[KeyHorizon], split: Callable[[Keys], Sequence[Keys]]) -> None:
        self._parts = parts
        self._split = split
        self._lock = threading.Lock()
        self._id_bytes = 0  # of batches that are not released

    def add(self, inputs: BagInputs, *, frozen: bool = False) -> SplitBatchAhead:
        ids = [source.ids for source in inputs.values()]
        joined = ids[0] if len(ids) == 1 else np.concatenate([_NO_KEYS, *ids])
        with self._lock:
            self._id_bytes += joined.nbytes
        return SplitBatchAhead(self, joined, self._add(joined))

    def add_keys(self, keys: Keys) -> SplitBatchAhead:
        return SplitBatchAhead(self, _NO_KEYS, self._add(keys))

    def _add(self, keys: Keys) -> list[BatchAhead]:
        return [part.add_keys(own) for part, own in zip(self._parts, self._split(keys), strict=True)]

    def forget(self, ids: Keys) -> None:
        """Count the ids of a batch no longer."""
        with self._lock:
            self._id_bytes -= ids.nbytes

    @property
    def full(self) -> bool:
        return any(part.full for part in self._parts)

    def load(self, share: float = 1.0) -> bool:
        visited = [part.load(share) for part in self._parts]
        return any(visited)

    def drop(self) -> bool:
        dropped = [part.drop() for part in self._parts]
        return any(dropped)

    @property
    def dropped(self) -> bool:
        return any(part.dropped for part in self._parts)

    @property
    def position(self) -> float:
        return min(part.position for part in self._parts)

    @property
    def late_rows(self) -> int:
        return sum(part.late_rows for part in self._parts)

    @property
    def rows_loaded(self) -> int:
        return sum(part.rows_loaded for part in self._parts)

    @property
    def read_counts(self) -> ReadCounts:
        counts = [part.read_counts for part in self._parts]
        return ReadCounts(
            sum(count.reads for count in counts),
            sum(count.bytes for count in counts),
            max(count.read_cost for count in counts),
            max(count.page_cost for count in counts),
        )

    @property
    def bytes(self) -> int:
        return self._id_bytes + sum(part.bytes for part in self._parts)
