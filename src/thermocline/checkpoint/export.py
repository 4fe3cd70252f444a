"""Exports the rows of a table to Parquet or safetensors shards, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from thermocline.arrays import Floats, Keys
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.table import Table
from thermocline.utils import atomic_file

ExportFormat = Literal["parquet", "safetensors"]
_BATCH_ROWS = 65536


def export_rows(
    table: Table | MemberTable,
    path: str | os.PathLike[str],
    *,
    format: ExportFormat = "parquet",
    shard_rows: int = 1_000_000,
) -> list[Path]:
    """Write every trained row to `path/part-00000.<format>` and following shards; return their paths.

    Call it between steps. Parquet has columns `key` (uint64), `weights` and `state` (lists of float). safetensors has
    tensors `keys` (int64 bit patterns), `weights` and `state`. A shard has at most `shard_rows` rows, and memory holds
    at most one shard. `path/index.json` is written last: without it the export is incomplete.
    """
    if format not in ("parquet", "safetensors"):
        raise ValueError(f"format is {format!r}: it must be parquet or safetensors")
    if shard_rows < 1:
        raise ValueError(f"shard_rows is {shard_rows}: it must be at least 1")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: export into a new folder")
    write = _write_parquet if format == "parquet" else _write_safetensors
    source = _RowStream(table)
    shards: list[dict[str, Any]] = []
    while source.has_more():
        file = folder / f"part-{len(shards):05}.{format}"
        shards.append({"file": file.name, "rows": write(file, table, source, shard_rows)})
    index = {"table": table.name, **table.layout, "format": format, "rows": sum(s["rows"] for s in shards)}
    with atomic_file.atomic_path(folder / "index.json") as temporary:
        temporary.write_text(json.dumps({**index, "shards": shards}, indent=1))
    return [folder / shard["file"] for shard in shards]


class _RowStream:
    """Iterates over the rows of a table in batches that end at shard boundaries."""

    def __init__(self, table: Table | MemberTable) -> None:
        self._batches = table.rows(_BATCH_ROWS)
        self._keys: Keys = np.empty(0, np.uint64)
        self._rows: Floats = np.empty((0, 0), np.float32)

    def has_more(self) -> bool:
        while not len(self._keys):
            try:
                self._keys, self._rows = next(self._batches)
            except StopIteration:
                return False
        return True

    def take(self, limit: int) -> Iterator[tuple[Keys, Floats]]:
        """Yield at most `limit` rows, in batches."""
        while limit and self.has_more():
            keys, rows = self._keys[:limit], self._rows[:limit]
            self._keys, self._rows = self._keys[limit:], self._rows[limit:]
            limit -= len(keys)
            yield keys, rows


def _write_parquet(path: Path, table: Table | MemberTable, source: _RowStream, shard_rows: int) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    state = table.optimizer.state_floats(table.dim)
    fields = [("key", pa.uint64()), ("weights", pa.list_(pa.float32(), table.dim))]
    if state:
        fields.append(("state", pa.list_(pa.float32(), state)))
    count = 0
    with pq.ParquetWriter(path, pa.schema(fields)) as writer:
        for keys, rows in source.take(shard_rows):
            columns = [pa.array(keys), _lists(rows[:, : table.dim])]
            if state:
                columns.append(_lists(rows[:, table.dim :]))
            writer.write_table(pa.table(columns, schema=writer.schema))
            count += len(keys)
    return count


def _lists(values: Floats) -> Any:
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _write_safetensors(path: Path, table: Table | MemberTable, source: _RowStream, shard_rows: int) -> int:
    from safetensors.numpy import save_file

    pieces = [(keys.copy(), rows.copy()) for keys, rows in source.take(shard_rows)]
    rows = np.concatenate([rows for _, rows in pieces])
    tensors = {
        "keys": np.concatenate([keys for keys, _ in pieces]).view(np.int64),
        "weights": np.ascontiguousarray(rows[:, : table.dim]),
    }
    if rows.shape[1] > table.dim:
        tensors["state"] = np.ascontiguousarray(rows[:, table.dim :])
    save_file(tensors, path, metadata={"table": table.name, "dim": str(table.dim)})
    return len(rows)
