"""Publishes the rows of a trained run for serving (`thermocline export`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from thermocline.arrays import Floats, Keys
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.table import Table
from thermocline.serving import Publication, TableRows, Version
from thermocline.serving.changes import Changes, sort_by_hash
from thermocline.serving.row_format import Precision
from thermocline.serving.snapshot import open_state

_BATCH_ROWS = 65536


def publish_table(
    table: Table,
    path: str | os.PathLike[str],
    *,
    step: int,
    delta: bool = False,
    precision: Precision = "fp32",
    event_time: float | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> Version:
    """Publish the weights of every trained row; call it between steps.

    delta    publish only rows that differ from the current version, and the keys that are gone. All rows are read.
    advance  called with the number of rows read since the last call
    """
    with Publication(path, precision=precision) as publication:
        options: dict[str, Any] = {
            "name": table.name,
            "dim": table.dim,
            "seed": table.spec.seed,
            "table_id": table.spec.table_id,
            "initial": _initial(table),
        }
        rows = _weights(table, advance)
        rows = rows if _in_hash_order(table) else sort_by_hash(rows)
        if not delta:
            return publication.publish_base([TableRows(rows=rows, **options)], step=step, event_time=event_time)
        current = publication.current
        if current is None:
            raise FileNotFoundError(f"{publication.path} has no version yet: publish a base first, without --delta")
        view = open_state(publication.path, current.number).views.get(table.name)
        if view is None:
            raise ValueError(f"{publication.path} has no table {table.name!r}: publish into another folder")
        changes = Changes(rows, view, precision)
        tables = [TableRows(rows=changes, deleted=changes.deleted, **options)]
        return publication.publish_delta(tables, step=step, event_time=event_time)


def _in_hash_order(table: Table) -> bool:
    """Whether `table.rows()` is in hash order: rows of a store are, rows that are only in DRAM are not."""
    return isinstance(table, ShardReaderTable) or table.store is not None or table.checkpoint_store is not None


def _initial(table: Table) -> tuple[int, float] | None:
    """Return what `TableRows.initial` takes. None: rows below fp32 are rounded at the start too."""
    initial = table.spec.initial
    return (initial.code, initial.scale) if table.spec.precision.kind == "fp32" else None


def _weights(table: Table, advance: Callable[[int], object]) -> Iterator[tuple[Keys, Floats]]:
    for keys, rows in table.rows(_BATCH_ROWS):
        yield keys, rows[:, : table.dim]
        advance(len(keys))
