"""Write scores to a file, one per example, beside columns of the data, as a stream: CSV, Parquet or NumPy by name."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.errors import ConfigError
from thermocline.utils import atomic_file

Columns = Mapping[str, Any]
"""Arrays of equal length by name: Arrow arrays, and "score", float32."""
_NPY_HEADER = 128
"""Bytes reserved for the header, which has the number of scores and is written last."""


def write_scores(path: str | os.PathLike[str], parts: Iterable[Columns], runner: CollectiveRunner | None = None) -> int:
    """Write all scores, then rename the file to `path`; return their number.

    parts    columns of consecutive examples: "score", and others before it, which must be the same in all parts
    runner   over ranks: the file has the scores of rank 0, then those of rank 1, and so on. Each rank writes its own to
             a hidden folder next to the file, and rank 0 joins them. Collective
    """
    target = Path(path)
    if runner is None or runner.world == 1:
        atomic_file.make_writable(target.parent, "the folder of --out")
        return _write(target, parts)
    folder = Path(runner.broadcast("creating the folder of --out", lambda: _make_parts_folder(target)))
    try:
        runner.run_all("opening the folder of --out", lambda: _require_visible(folder, runner.rank))
        # Not inside a call of `runner`: computing scores is collective, so no rank may wait for another rank's error.
        with atomic_file.disk_errors(target):
            _write_ipc(folder / _part_name(runner.rank), parts)
        runner.barrier("writing scores")
        joined = (part for rank in range(runner.world) for part in _read_ipc(folder / _part_name(rank)))
        return runner.broadcast("joining the scores of all ranks", lambda: _write(target, joined))
    finally:
        if runner.is_rank0:
            shutil.rmtree(folder, ignore_errors=True)


def _write(target: Path, parts: Iterable[Columns]) -> int:
    with atomic_file.atomic_path(target) as temporary:
        return writer_of(target)(temporary, parts)


def _make_parts_folder(target: Path) -> str:
    """Make a folder for the scores of each rank; remove those of earlier predictions that were killed."""
    atomic_file.make_writable(target.parent, "the folder of --out")
    prefix = f".{target.name}.parts-"
    for stale in target.parent.glob(glob.escape(prefix) + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    return tempfile.mkdtemp(prefix=prefix, dir=target.parent)


def _require_visible(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"--out is in {str(folder.parent)!r}, but rank {rank} on host {socket.gethostname()} does not see what "
            "rank 0 wrote there: choose a folder on a file system that all ranks share"
        )


def _part_name(rank: int) -> str:
    return f"{rank:05}.arrow"


def writer_of(path: str | os.PathLike[str]) -> Callable[[Path, Iterable[Columns]], int]:
    """Return the writer for the suffix of a file name. Raises `ConfigError` for another suffix."""
    writers = {".csv": _write_csv, ".parquet": _write_parquet, ".npy": _write_npy}
    write = writers.get(Path(path).suffix)
    if write is None:
        raise ConfigError(f"--out is {os.fspath(path)!r}: its suffix must be one of {', '.join(writers)}")
    return write


def _write_csv(path: Path, parts: Iterable[Columns]) -> int:
    """Write a header, then each score as the shortest text that reads back to the same float32."""
    import pyarrow.csv as csv

    def open_writer(schema: Any) -> Any:
        quoting = "none" if schema.names == ["score"] else "needed"
        options = csv.WriteOptions(quoting_style=quoting, quoting_header=quoting)
        return csv.CSVWriter(str(path), schema, write_options=options)

    return _write_tables(open_writer, parts)


def _write_parquet(path: Path, parts: Iterable[Columns]) -> int:
    import pyarrow.parquet as pq

    return _write_tables(lambda schema: pq.ParquetWriter(path, schema), parts)


def _write_ipc(path: Path, parts: Iterable[Columns]) -> int:
    import pyarrow as pa

    return _write_tables(lambda schema: pa.ipc.new_stream(str(path), schema), parts)


def _read_ipc(path: Path) -> Iterator[Columns]:
    """Yield what `_write_ipc` wrote."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield dict(zip(batch.schema.names, batch.columns, strict=True))


def _write_tables(open_writer: Callable[[Any], Any], parts: Iterable[Columns]) -> int:
    """Write tables of at least a million rows, all but the last; an empty one if there are no parts."""
    import pyarrow as pa

    count = 0
    with contextlib.ExitStack() as stack:
        writer: Any = None
        for columns in _merged(parts):
            table = pa.table({name: _arrow(values) for name, values in columns.items()})
            if writer is None:
                writer = stack.enter_context(open_writer(table.schema))
            writer.write_table(table)
            count += len(table)
        if writer is None:
            stack.enter_context(open_writer(pa.schema([("score", pa.float32())])))
    return count


def _arrow(values: Any) -> Any:
    import pyarrow as pa

    return pa.chunked_array([pa.array(part) if isinstance(part, np.ndarray) else part for part in values])


def _merged(parts: Iterable[Columns], rows: int = 1 << 20) -> Iterator[dict[str, list[Any]]]:
    """Gather the arrays of small parts until they have at least `rows` scores."""
    pending: dict[str, list[Any]] = {}
    size = 0
    for part in parts:
        for name, values in part.items():
            pending.setdefault(name, []).append(values)
        size += len(part["score"])
        if size >= rows:
            yield pending
            pending, size = {}, 0
    if pending:
        yield pending


def _write_npy(path: Path, parts: Iterable[Columns]) -> int:
    count = 0
    with open(path, "wb") as file:
        file.seek(_NPY_HEADER)
        for part in parts:
            scores = np.ascontiguousarray(part["score"], "<f4")
            file.write(scores.tobytes())
            count += len(scores)
        file.seek(0)
        _write_npy_header(file, count)
    return count


def _write_npy_header(file: BinaryIO, count: int) -> None:
    """Write NumPy's header, which is padded to a multiple of 64 bytes: 128 bytes for any number of scores."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    assert len(header.getvalue()) == _NPY_HEADER
    file.write(header.getvalue())
