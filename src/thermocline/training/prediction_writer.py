"""Write scores to a file, one per example, as a stream: CSV, Parquet or NumPy by file name."""

from __future__ import annotations

import glob
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thermocline.arrays import Floats
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.errors import ConfigError
from thermocline.utils import atomic_file

_NPY_HEADER = 128
"""Bytes reserved for the header, which has the number of scores and is written last."""


def write_scores(path: str | os.PathLike[str], scores: Iterable[Floats], runner: CollectiveRunner | None = None) -> int:
    """Write all scores, then rename the file to `path`; return their number.

    runner   over ranks: the file has the scores of rank 0, then those of rank 1, and so on. Each rank writes its own to
             a hidden folder next to the file, and rank 0 joins them. Collective
    """
    target = Path(path)
    if runner is None or runner.world == 1:
        atomic_file.make_writable(target.parent, "the folder of --out")
        return _write(target, scores)
    folder = Path(runner.broadcast("creating the folder of --out", lambda: _make_parts_folder(target)))
    try:
        runner.run_all("opening the folder of --out", lambda: _require_visible(folder, runner.rank))
        # Not inside a call of `runner`: computing scores is collective, so no rank may wait for another rank's error.
        with atomic_file.disk_errors(target):
            _write_npy(folder / _part_name(runner.rank), scores)
        runner.barrier("writing scores")
        parts = (part for rank in range(runner.world) for part in _read_npy(folder / _part_name(rank)))
        return runner.broadcast("joining the scores of all ranks", lambda: _write(target, parts))
    finally:
        if runner.is_rank0:
            shutil.rmtree(folder, ignore_errors=True)


def _write(target: Path, scores: Iterable[Floats]) -> int:
    with atomic_file.atomic_path(target) as temporary:
        return writer_of(target)(temporary, scores)


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
    return f"{rank:05}.npy"


def writer_of(path: str | os.PathLike[str]) -> Callable[[Path, Iterable[Floats]], int]:
    """Return the writer for the suffix of a file name. Raises `ConfigError` for another suffix."""
    writers = {".csv": _write_csv, ".parquet": _write_parquet, ".npy": _write_npy}
    write = writers.get(Path(path).suffix)
    if write is None:
        raise ConfigError(f"--out is {os.fspath(path)!r}: its suffix must be one of {', '.join(writers)}")
    return write


def _write_csv(path: Path, scores: Iterable[Floats]) -> int:
    """Write a header, then each score as the shortest text that reads back to the same float32."""
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
        for part in _merge_arrays(scores):
            writer.write_table(pa.table([pa.array(part)], schema=schema))
            count += len(part)
    return count


def _merge_arrays(parts: Iterable[Floats], rows: int = 1 << 20) -> Iterator[Floats]:
    """Concatenate small arrays into arrays of at least `rows` scores."""
    pending: list[Floats] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += len(part)
        if size >= rows:
            yield np.concatenate(pending)
            pending, size = [], 0
    if pending:
        yield np.concatenate(pending)


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


def _read_npy(path: Path, rows: int = 1 << 20) -> Iterator[Floats]:
    """Yield the scores that `_write_npy` wrote, in arrays of at most `rows`."""
    with open(path, "rb") as file:
        file.seek(_NPY_HEADER)
        while len(part := np.fromfile(file, "<f4", rows)):
            yield part


def _write_npy_header(file: BinaryIO, count: int) -> None:
    """Write NumPy's header, which is padded to a multiple of 64 bytes: 128 bytes for any number of scores."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    assert len(header.getvalue()) == _NPY_HEADER
    file.write(header.getvalue())
