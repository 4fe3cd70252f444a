"""`RowSource`: the served rows of a table in hash order, all of them or those that changed since a position of its log.

Inside, a row is its weights, followed by the words of its statistics if the rule of the served rows reads them. Over
ranks a `RowSource` has the rows of its own rank; `rank_rows.py` has those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from thermocline.arrays import Floats, Keys, Mask, Rows
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.serving.changes import merge_by_hash, sort_by_hash
from thermocline.serving.served_rows import Candidates, ServedRows
from thermocline.tiers.ssd import SsdStore

_BATCH_ROWS = 65536
Piece = tuple[Keys, Floats]
Change = tuple[Keys, Floats, Mask]
"""Keys, rows, and whether each key is deleted; the rows of deleted keys are undefined."""


class RowSource:
    """Reads a table between steps. `advance` is called with the number of rows read since the last call."""

    def __init__(self, table: Table, advance: Callable[[int], object] = lambda rows: None) -> None:
        if table.storage is not table or table.spec.members:
            raise ThermoclineError(
                f"table {table.name!r} is stored with other tables of tc.Tiers, and cannot be published: declare it "
                'with keys="hash", which stores it alone, and publish table.storage'
            )
        self._table = table
        self._advance = advance
        self._stores = _stores(table)
        if not isinstance(table, ShardReaderTable) and self._stores:
            table.backend.flush(self._stores[0])  # changed rows of HBM and DRAM
        self.positions = tuple(store.position() for store in self._stores)
        """Position of each store; empty: the table has none."""
        self._kept = [] if isinstance(table, ShardReaderTable) else list(zip(self._stores, self.positions, strict=True))
        for store, position in self._kept:
            store.keep_log(position, replace=False)

    def keep_log(self) -> None:
        """Keep the log of this process's store from here on: these rows are published, and a delta will follow."""
        for store, position in self._kept:
            store.keep_log(position)

    def rows(self, served: ServedRows, always: int | None = None) -> Iterator[Piece]:
        """Yield keys and weights of the trained rows that are served. `always`: a key that is served in any case."""
        served.check(self._table.spec.statistics.names)
        return served.select(lambda: self._candidates(served), always)

    def _candidates(self, served: ServedRows) -> Iterator[Candidates]:
        for keys, packed in self.packed(served):
            yield self._unpack(keys, packed, served)

    def packed(self, served: ServedRows) -> Iterator[Piece]:
        """Yield all trained rows, as they are inside."""
        rows = self._all_rows(served)
        return rows if self._stores else sort_by_hash(rows)

    def _all_rows(self, served: ServedRows) -> Iterator[Piece]:
        table = self._table
        for keys, rows in table.backend.rows(table.checkpoint_store, _BATCH_ROWS):
            yield keys, self._pack(rows, served)
            self._advance(len(keys))

    def _pack(self, rows: Floats, served: ServedRows) -> Floats:
        """Return the columns of whole rows that are needed."""
        weights = rows[:, : self._table.dim]
        if not served.needs:
            return weights
        words = self._table.spec.statistics.words
        packed: Floats = np.concatenate([weights, rows[:, rows.shape[1] - words :]], axis=1)
        return packed

    def _unpack(self, keys: Keys, packed: Floats, served: ServedRows) -> Candidates:
        table = self._table
        values = table.spec.statistics.unpack(packed, table.backend.statistics) if served.needs else {}
        return keys, packed[:, : table.dim], values

    def changes(
        self, since: Sequence[str], decays: int | None, served: ServedRows, always: int | None = None
    ) -> LoggedChanges | str:
        """Return the changes since a version; a text, the cause, if they are not known.

        since, decays  positions of the rows of the version, and decays before it (`TableFile`)
        always         a key that is served in any case
        """
        served.check(self._table.spec.statistics.names)
        found = self.logged(since, decays, served)
        if isinstance(found, str):
            return found
        unpacked = ((self._unpack(keys, packed, served), deleted) for keys, packed, deleted in found)
        return LoggedChanges(unpacked, served, always)

    def logged(self, since: Sequence[str], decays: int | None, served: ServedRows) -> Iterator[Change] | str:
        """Return all changes since a version; a text, the cause, if they are not known. See `changes`."""
        if not self._stores:
            return "the table has neither a store nor a checkpoint, so that its changes are not recorded"
        if not since:
            return "the version before does not record the position of its rows"
        if self._table.spec.precision.scale_lr > 0:
            return "the scale of all weights is trained"
        if not served.by_row:
            return "a cap on rows compares each row with all others"
        if served.min_score is not None and decays != self.decays:
            return "show and click of all rows were decayed since"
        if len(since) != len(self._stores):
            return f"the rows are in {len(self._stores)} stores, those of the version before in {len(since)}"
        streams = [store.changes(position) for store, position in zip(self._stores, since, strict=True)]
        if causes := [stream for stream in streams if isinstance(stream, str)]:
            return causes[0]
        decoded = [self._decoded(stream, served) for stream in streams if not isinstance(stream, str)]
        return decoded[0] if len(decoded) == 1 else merge_changes(decoded)

    @property
    def decays(self) -> int:
        """Decays of show and click of all rows so far."""
        return self._table.backend.statistics.decays

    def _decoded(self, stream: Iterator[tuple[Keys, Rows, Mask]], served: ServedRows) -> Iterator[Change]:
        dram = self._table.backend.tiers.dram
        assert dram is not None
        for keys, stored, deleted in stream:
            yield keys, self._pack(dram.decode(stored.view(np.float32)), served), deleted
            self._advance(len(keys))


def merge_changes(streams: Sequence[Iterator[Change]]) -> Iterator[Change]:
    """Merge changes of several stores by hash; the flags travel as a further column."""
    packed = (
        ((keys, np.column_stack([rows, deleted.astype(np.float32)])) for keys, rows, deleted in stream)
        for stream in streams
    )
    for keys, rows in merge_by_hash(list(packed)):
        yield keys, rows[:, :-1], rows[:, -1] != 0


class LoggedChanges:
    """Changed rows that are served. Iterate once; then `deleted` has the keys that are deleted or not served."""

    def __init__(self, stream: Iterator[tuple[Candidates, Mask]], served: ServedRows, always: int | None) -> None:
        self._stream = stream
        self._served = served
        self._always = always
        self._deleted: list[Keys] = []

    def __iter__(self) -> Iterator[Piece]:
        for candidates, deleted in self._stream:
            keys, weights, _ = candidates
            kept = ~deleted & self._served.keeps(candidates, self._always)
            if kept.all():
                yield keys, weights
                continue
            self._deleted.append(keys[~kept])
            yield keys[kept], weights[kept]

    def deleted(self) -> Keys:
        """Return the deleted keys. Call it after the iteration."""
        return np.concatenate([np.empty(0, np.uint64), *self._deleted])


def _stores(table: Table) -> list[SsdStore]:
    """Return the stores that have the rows: of all ranks for a reader, else of this process."""
    if isinstance(table, ShardReaderTable):
        return table.stores
    store = table.store or table.checkpoint_store
    return [] if store is None else [store]
