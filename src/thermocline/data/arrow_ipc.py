"""Arrow IPC files (Feather) as input splits: the columns, keys and errors of Parquet, from record batches.

A file has a footer with the places of its record batches: each is a split, like a row group. A stream has none, so it
can only be read from its beginning: it is one sequential split, whose pieces are record batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from thermocline.arrays import Offsets
from thermocline.data.arrow_keys import is_list
from thermocline.data.column_checks import SAMPLE_ROWS
from thermocline.data.files import Source, file_errors
from thermocline.data.parquet import ParquetBlocks, with_partition_fields, with_partitions
from thermocline.data.text_blocks import Block, InputSplit, Piece
from thermocline.errors import DataError

_FILE, _FEATHER_1 = b"ARROW1", b"FEA1"


class ArrowFileInfo:
    """Schema and record batches of an Arrow IPC file or stream."""

    def __init__(self, source: Source) -> None:
        with source.open() as file, _arrow_errors(source.name):
            begin = file.read(len(_FILE))
            if begin.startswith(_FEATHER_1):
                raise DataError(f"{source.name} has version 1 of Feather: write it with version 2, Arrow's IPC format")
            self.stream = begin != _FILE
            """Whether it is a stream: without the places of its record batches."""
            file.seek(0)
            reader = _open(file, self.stream)
            self.stored = reader.schema
            _ = self.stored.names  # raises if they are not UTF-8
            self.schema = with_partition_fields(self.stored, source)
            self.rows = self._estimated_rows(reader, file) if self.stream else self._rows(file, reader)
        self.first_rows = np.concatenate([[0], np.cumsum(self.rows)]).tolist()

    def _rows(self, file: Any, reader: Any) -> list[int]:
        """Return the rows of each record batch; reads one column of them."""
        if not self.stored.names:
            return []
        one_column = _open(file, False, [0])
        return [one_column.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def _estimated_rows(self, reader: Any, file: Any) -> list[int]:
        """Estimate the rows of a stream from its first record batch that has any."""
        start = file.tell()
        self.batch_rows = next((batch.num_rows for batch in reader if batch.num_rows), 0)
        """Rows of that record batch."""
        share = (file.tell() - start) / max(1, file.size() - start)
        return [round(self.batch_rows / max(share, 1e-9))]


class ArrowBlocks(ParquetBlocks):
    """Input splits of Arrow IPC files: one per record batch of a file, one per stream."""

    _infos: dict[int, Any]

    def __init__(self, sources: Sequence[Source], infos: Sequence[ArrowFileInfo], *arguments: Any, **more: Any) -> None:
        super().__init__(sources, infos, *arguments, **more)  # type: ignore[arg-type]
        streams = np.array([info.stream for info in infos], np.bool_)
        self.sequential = streams[self._groups[:, 0]]
        parts = [infos[file].batch_rows if infos[file].stream else rows for file, _, rows in self._groups.tolist()]
        self.examples_per_split = max(1.0, sum(parts) / max(1, len(parts)))

    def rows(self, numbers: Offsets) -> int | None:
        return None if self.sequential[numbers].any() else super().rows(numbers)

    def table(self, split: InputSplit, names: Sequence[str]) -> Any:
        """Read columns of a record batch of a file."""
        with self._reader(split, names) as reader:
            return self._as_table(split, reader.get_batch(split.start), names)

    def tables(self, split: InputSplit, names: Sequence[str]) -> Iterator[Any]:
        if not self._infos[id(split.source)].stream:
            yield self.table(split, names)
            return
        for _, batch in self._stream(split, names, 0):
            yield self._as_table(split, batch, names)

    def pieces(self, split: InputSplit, first: int) -> Iterator[Piece]:
        """Yield (rows before it, record batch), from the record batch with index `first` on."""
        return self._stream(split, self.names, first)

    def parse(self, split: InputSplit, piece: Piece) -> Block:
        return self._block(split, self._as_table(split, piece[1], self.names), piece[0])

    def _batches(self, split: InputSplit, names: Sequence[str]) -> Iterator[Any]:
        for table in self.tables(split, names):
            if table.num_rows:
                yield table.slice(0, SAMPLE_ROWS).combine_chunks().to_batches()[0]

    def _stream(self, split: InputSplit, names: Sequence[str], first: int) -> Iterator[Piece]:
        rows = 0
        with self._reader(split, names) as reader:
            for number, batch in enumerate(reader):
                if number >= first:
                    yield rows, batch
                rows += batch.num_rows

    @contextlib.contextmanager
    def _reader(self, split: InputSplit, names: Sequence[str]) -> Iterator[Any]:
        info = self._infos[id(split.source)]
        columns = [i for i, name in enumerate(info.stored.names) if name in names]
        with split.source.open() as file, _arrow_errors(split.source.name):
            # Without columns of the file, its first one tells the number of rows.
            yield _open(file, info.stream, columns or [0])

    def _as_table(self, split: InputSplit, batch: Any, names: Sequence[str]) -> Any:
        import pyarrow as pa

        with _arrow_errors(split.source.name):
            batch.validate(full=True)  # Arrow does not compare lengths and offsets with the buffers
            table = pa.Table.from_batches([batch])
            stored = [name for name in table.column_names if name in names]
            table = _without_views(table.select(stored))
        return with_partitions(table, split, names, batch.num_rows)


def _without_views(table: Any) -> Any:
    """Convert views of text and bytes, as polars writes them: Arrow's functions do not accept them."""
    import pyarrow as pa

    plain = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    for i, field in enumerate(table.schema):
        if str(field.type) in plain:
            table = table.set_column(i, field.name, table[i].cast(plain[str(field.type)]))
        elif is_list(field.type) and str(field.type.value_type) in plain:
            table = table.set_column(i, field.name, table[i].cast(pa.large_list(plain[str(field.type.value_type)])))
    return table


def _open(file: Any, stream: bool, columns: list[int] | None = None) -> Any:
    from pyarrow import ipc

    options = ipc.IpcReadOptions(use_threads=False, included_fields=columns)
    return ipc.open_stream(file, options=options) if stream else ipc.open_file(file, options=options)


@contextlib.contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    """Re-raise errors of Arrow as a DataError. Bytes of a file can state any size and type."""
    import pyarrow as pa

    with file_errors(name):
        try:
            yield
        except (MemoryError, pa.ArrowException) as error:
            raise DataError(f"{name} cannot be read: {' '.join(str(error).split())}") from None
