"""`RowSource`: the weights of a table in hash order, all of them or those that changed since a position of its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from thermocline.arrays import Floats, Keys, Mask, Rows
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.serving.changes import merge_by_hash, sort_by_hash
from thermocline.serving.served_rows import ServedRows
from thermocline.tiers.ssd import SsdStore

_BATCH_ROWS = 65536
Piece = tuple[Keys, Floats]
Change = tuple[Keys, Floats, Mask]
"""Keys, weights, and whether each key is deleted; the weights of deleted keys are undefined."""


class RowSource:
    """Reads a table between steps. `advance` is called with the number of rows read since the last call."""

    def __init__(self, table: Table, advance: Callable[[int], object] = lambda rows: None) -> None:
        self._table = table
        self._advance = advance
        self._stores = _stores(table)
        if table.groups is not None and not isinstance(table, ShardReaderTable):
            raise ThermoclineError(
                f"table {table.name!r}: its rows are on several ranks: save a checkpoint, and publish it in one process"
            )
        if not isinstance(table, ShardReaderTable) and self._stores:
            table.backend.flush(self._stores[0])  # changed rows of HBM and DRAM
        self.positions = tuple(store.position() for store in self._stores)
        """Position of each store; empty: the table has none."""

    def rows(self) -> Iterator[Piece]:
        """Yield keys and weights of every trained row."""
        rows = self._all_rows()
        return rows if self._stores else sort_by_hash(rows)

    def _all_rows(self) -> Iterator[Piece]:
        for keys, rows in self._table.rows(_BATCH_ROWS):
            yield keys, rows[:, : self._table.dim]
            self._advance(len(keys))

    def changes(self, since: Sequence[str], served: ServedRows) -> LoggedChanges | str:
        """Return the changes since the positions of a version; a text, the cause, if they are not known."""
        if not self._stores:
            return "the table has neither a store nor a checkpoint, so that its changes are not recorded"
        if not since:
            return "the version before does not record the position of its rows"
        if self._table.spec.precision.scale_lr > 0:
            return "the scale of all weights is trained"
        if not served.by_row:
            return "a cap on rows compares each row with all others"
        if len(since) != len(self._stores):
            return f"the rows are in {len(self._stores)} stores, those of the version before in {len(since)}"
        streams = [store.changes(position) for store, position in zip(self._stores, since, strict=True)]
        if causes := [stream for stream in streams if isinstance(stream, str)]:
            return causes[0]
        decoded = [self._decoded(stream) for stream in streams if not isinstance(stream, str)]
        return LoggedChanges(decoded[0] if len(decoded) == 1 else _merged(decoded), served)

    def _decoded(self, stream: Iterator[tuple[Keys, Rows, Mask]]) -> Iterator[Change]:
        dram, dim = self._table.backend.tiers.dram, self._table.dim
        assert dram is not None
        for keys, stored, deleted in stream:
            yield keys, dram.decode(stored.view(np.float32))[:, :dim], deleted
            self._advance(len(keys))


def _merged(streams: Sequence[Iterator[Change]]) -> Iterator[Change]:
    """Merge changes of several stores by hash; the flags travel as a further column."""
    packed = (
        ((keys, np.column_stack([weights, deleted.astype(np.float32)])) for keys, weights, deleted in stream)
        for stream in streams
    )
    for keys, rows in merge_by_hash(list(packed)):
        yield keys, rows[:, :-1], rows[:, -1] != 0


class LoggedChanges:
    """Changed rows that are served. Iterate once; then `deleted` has the keys that are deleted or not served."""

    def __init__(self, stream: Iterator[Change], served: ServedRows) -> None:
        self._stream = stream
        self._served = served
        self._deleted: list[Keys] = []

    def __iter__(self) -> Iterator[Piece]:
        for keys, weights, deleted in self._stream:
            kept = ~deleted & self._served.keeps(weights)
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
