"""Rows of a version as Parquet or safetensors files, beside the native format, for readers of other systems.

table-0-rows-00000.parquet     key (uint64), weights (list of float32); at most a million rows per file
table-0-deleted.parquet        key (uint64): keys deleted since the version before; only if there are any

safetensors files have the tensors `keys` (int64 bit patterns) and `weights`. Weights are those that a lookup returns.
Names, sizes and digests of the files are in the manifest of the version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from thermocline.arrays import Floats, Keys
from thermocline.core import _core
from thermocline.serving.row_format import Precision, decode
from thermocline.serving.version import RowFileFormat

_FILE_ROWS = 1_000_000
_PIECE_ROWS = 65536
_NAME = re.compile(rf"table-\d+-(?:rows-\d{{5,}}|deleted)\.(?:{'|'.join(get_args(RowFileFormat))})")


def check_formats(formats: Iterable[str]) -> tuple[RowFileFormat, ...]:
    """Return the formats, each once, sorted. Raises ValueError for an unknown one."""
    for name in formats:
        if name not in get_args(RowFileFormat):
            raise ValueError(f"format is {name!r}: it must be one of {', '.join(get_args(RowFileFormat))}")
    return tuple(sorted(set(formats)))  # type: ignore[arg-type]


def is_row_file(name: str) -> bool:
    """Whether a file of a version has rows, by its name."""
    return _NAME.fullmatch(name) is not None


def write_row_files(
    folder: Path, index: int, rows: Path, precision: Precision, dim: int, format: RowFileFormat
) -> list[Path]:
    """Write the rows and deleted keys of the native file `rows`, of table `index`; return the files."""
    source = _core.SnapshotFile(os.fsencode(rows))
    written = []
    for number, first in enumerate(range(0, source.rows, _FILE_ROWS)):
        path = folder / f"table-{index}-rows-{number:05}.{format}"
        _WRITERS[format](path, _pieces(source, first, precision, dim), dim)
        written.append(path)
    if len(source.deleted):
        path = folder / f"table-{index}-deleted.{format}"
        _WRITERS[format](path, iter([(np.array(source.deleted), np.empty((len(source.deleted), 0), np.float32))]), 0)
        written.append(path)
    return written


def _pieces(source: _core.SnapshotFile, first: int, precision: Precision, dim: int) -> Iterator[tuple[Keys, Floats]]:
    end = min(source.rows, first + _FILE_ROWS)
    for start in range(first, end, _PIECE_ROWS):
        count = min(_PIECE_ROWS, end - start)
        keys, stored = np.empty(count, np.uint64), np.empty((count, source.row_bytes), np.uint8)
        source.copy_rows(start, keys, stored)
        yield keys, decode(stored, precision, dim)


def _write_parquet(path: Path, pieces: Iterator[tuple[Keys, Floats]], dim: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: list[Any] = [("key", pa.uint64())] + ([("weights", pa.list_(pa.float32(), dim))] if dim else [])
    with pq.ParquetWriter(path, pa.schema(fields)) as writer:
        for keys, weights in pieces:
            columns = [pa.array(keys)]
            if dim:
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(weights.reshape(-1)), dim))
            writer.write_table(pa.table(columns, schema=writer.schema))


def _write_safetensors(path: Path, pieces: Iterator[tuple[Keys, Floats]], dim: int) -> None:
    from safetensors.numpy import save_file

    whole = list(pieces)
    tensors = {"keys": np.concatenate([keys for keys, _ in whole]).view(np.int64)}
    if dim:
        tensors["weights"] = np.concatenate([weights for _, weights in whole])
    save_file(tensors, path)


_WRITERS = {"parquet": _write_parquet, "safetensors": _write_safetensors}
