"""Scores -> a file, one per example, streamed: CSV, Parquet or NumPy by the file's ending."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thermocline.arrays import Floats
from thermocline.errors import ConfigError
from thermocline.utils import atomic_file

_NPY_HEADER = 128
"""Bytes kept free for the header, which says how many there are: known at the end only."""


def write_scores(path: str | os.PathLike[str], scores: Iterable[Floats]) -> int:
    """Writes them under the name `path` once all are there; returns how many."""
    target = Path(path)
    write = writer_of(target)
    atomic_file.make_writable(target.parent, "the folder of --out")
    with atomic_file.atomic_path(target) as temporary:
        return write(temporary, scores)


def writer_of(path: str | os.PathLike[str]) -> Callable[[Path, Iterable[Floats]], int]:
    """What writes files of this ending. Raises `ConfigError` if nothing does."""
    writers = {".csv": _write_csv, ".parquet": _write_parquet, ".npy": _write_npy}
    write = writers.get(Path(path).suffix)
    if write is None:
        raise ConfigError(f"--out is {os.fspath(path)!r}: its ending must be one of {', '.join(writers)}")
    return write


def _write_csv(path: Path, scores: Iterable[Floats]) -> int:
    """A header, then the shortest text that reads back to the same float32."""
    import pyarrow.csv as csv

    options = csv.WriteOptions(quoting_style="none", quoting_header="none")
    return _write_tables(lambda schema: csv.CSVWriter(str(path), schema, write_options=options), scores)


def _write_parquet(path: Path, scores: Iterable[Floats]) -> int:
    import pyarrow.parquet as pq

    return _write_tables(lambda schema: pq.ParquetWriter(path, schema), scores)


def _write_tables(open_writer: Callable[[Any], Any], scores: Iterable[Floats]) -> int:
    import pyarrow as pa

    schema = pa.schema([("score", pa.float32())])
    count = 0
    with open_writer(schema) as writer:
        for part in _joined(scores):
            writer.write_table(pa.table([pa.array(part)], schema=schema))
            count += len(part)
    return count


def _joined(parts: Iterable[Floats], rows: int = 1 << 20) -> Iterator[Floats]:
    """The same scores in fewer, larger arrays."""
    held: list[Floats] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= rows:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)


def _write_npy(path: Path, scores: Iterable[Floats]) -> int:
    count = 0
    with open(path, "wb") as file:
        file.seek(_NPY_HEADER)
        for part in scores:
            file.write(np.ascontiguousarray(part, "<f4").tobytes())
            count += len(part)
        file.seek(0)
        _write_npy_header(file, count)
    return count


def _write_npy_header(file: BinaryIO, count: int) -> None:
    """NumPy's own, which it fills up to a multiple of 64 bytes: two of them whatever the number."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    assert len(header.getvalue()) == _NPY_HEADER
    file.write(header.getvalue())
