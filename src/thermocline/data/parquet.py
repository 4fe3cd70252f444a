"""Parquet row groups as input splits. A row group is read whole: memory is bounded by row group size and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from thermocline.arrays import Doubles, Keys, Mask, Offsets
from thermocline.config.data import Data
from thermocline.core import core
from thermocline.data.arrow_keys import (
    as_doubles,
    as_seconds,
    hash_column,
    interleave,
    is_list,
    is_text,
    is_time,
    one_array,
    parse_times,
    raw_keys,
    rows_with_invalid_key,
    split_values,
)
from thermocline.data.column_checks import SAMPLE_ROWS, times_as_keys
from thermocline.data.features import KEY_ROLES, Column, transform
from thermocline.data.files import Source, file_errors
from thermocline.data.text_blocks import SKIP_ADVICE, Block, InputSplit, Malformed, Piece, threshold_labels
from thermocline.errors import DataError

Cause = tuple[Mask, Callable[[int], str]]
"""Malformed rows, and a function from row to error message."""
# Just below the limits of the core: a float32 value, and a 64-bit bucket number.
_MAX_DENSE, _MAX_BUCKET = 3.4028e38, 9.22e18
MAX_GROUP_BYTES = 1 << 34
"""Largest row group, uncompressed and with 8 bytes per value: a few bytes of a file can state any number of values."""


class ParquetFileInfo:
    """The footer of a Parquet file."""

    def __init__(self, source: Source) -> None:
        import pyarrow.parquet as pq

        with source.open() as file, file_errors(source.name):
            opened = pq.ParquetFile(file)
            self.metadata = opened.metadata
            self.stored = opened.schema_arrow
        self.schema = with_partition_fields(self.stored, source)
        self.rows = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
        self.first_rows = np.concatenate([[0], np.cumsum(self.rows)]).tolist()


def with_partition_fields(schema: Any, source: Source) -> Any:
    """Add the columns of a file's path to its schema."""
    import pyarrow as pa

    for name in source.partitions:
        if name in schema.names:
            raise DataError(f"{source.name}: column {name!r} is in the file and in its path; rename one")
        schema = schema.append(pa.field(name, pa.string()))
    return schema


class ParquetBlocks:
    """Input splits of Parquet files: one per non-empty row group."""

    def __init__(
        self,
        sources: Sequence[Source],
        infos: Sequence[ParquetFileInfo],
        columns: Sequence[Column],
        data: Data,
        fitted: dict[str, tuple[float, float]],
        *,
        binary_labels: bool = False,
        carry: Sequence[str] = (),
    ) -> None:
        self._infos = {id(source): info for source, info in zip(sources, infos, strict=True)}
        self._data = data
        self._numbers = data.numbers_of("parquet")
        self._fitted = fitted
        self._read = [column for column in columns if column.role != "ignore"]
        self._label = next((column.name for column in columns if column.role == "label"), None)
        self._time = next((column.name for column in columns if column.role == "time"), None)
        self._dense = [column.name for column in columns if column.role == "dense"]
        self._keys = [column for column in columns if column.role in KEY_ROLES]
        self._binary_labels = binary_labels
        self.carry = tuple(carry)
        names = [column.name for column in self._read]
        self.names = [*names, *(name for name in self.carry if name not in names)]
        """Columns that are read."""
        for source, info in zip(sources, infos, strict=True):
            self._check_types(source, info)
        groups = [
            (file, group, rows) for file, info in enumerate(infos) for group, rows in enumerate(info.rows) if rows
        ]
        self._sources = sources
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self.sequential = np.zeros(len(groups), np.bool_)
        self.total_examples = float(self._groups[:, 2].sum())
        self.examples_per_split = max(1.0, self.total_examples / max(1, len(groups)))

    def __len__(self) -> int:
        return len(self._groups)

    def split(self, number: int) -> InputSplit:
        file, group, _ = self._groups[number].tolist()
        return InputSplit(self._sources[file], group)

    def rows(self, numbers: Offsets) -> int | None:
        """Return the total rows of these input splits; None: not known before they are read."""
        return int(self._groups[numbers, 2].sum())

    def _check_types(self, source: Source, info: ParquetFileInfo) -> None:
        import pyarrow.types as pt

        for column in self._read:
            name = column.name
            if name not in info.schema.names:
                names = ", ".join(repr(other) for other in info.schema.names)
                raise DataError(f"{source.name} has no column {name!r}: it has {names}")
            kind = info.schema.field(name).type
            number = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_decimal(kind)
            if column.role in ("label", "dense") or self._bucketed(column):
                if not number:
                    role = "the label" if column.role == "label" else "a numeric column"
                    raise DataError(f"{source.name}: column {name!r} has type {kind}; {role} must have numbers")
                continue
            if column.role == "time":
                if not is_time(kind):
                    raise DataError(
                        f"{source.name}: column {name!r} has type {kind}; data.time must name timestamps, dates or "
                        "numbers of seconds"
                    )
                continue
            if column.role == "time_key":
                if not (is_time(kind) or is_text(kind.value_type if pt.is_dictionary(kind) else kind)):
                    raise DataError(
                        f"{source.name}: column {name!r} has type {kind}; data.time_buckets must name timestamps, "
                        "dates, text or numbers of seconds"
                    )
                continue
            if pt.is_timestamp(kind) or pt.is_date(kind):
                raise DataError(times_as_keys(source.name, name, f"has type {kind}, times"))
            if name in self._data.separators and not is_text(kind.value_type if pt.is_dictionary(kind) else kind):
                raise DataError(f"{source.name}: column {name!r} has type {kind}; data.separators must name text")
            value = kind.value_type if is_list(kind) else kind
            value = value.value_type if pt.is_dictionary(value) else value
            valid, allowed = pt.is_integer(value) or is_text(value), "integers, decimal text, and lists of these"
            if not (self._data.raw_keys and column.role == "key"):
                valid = valid or pt.is_floating(value) or pt.is_boolean(value)
                allowed = "strings, bytes, integers, floats, booleans, and lists of these"
            if not valid:
                raise DataError(f"{source.name}: column {name!r} has type {kind}; keys can be made of {allowed}")

    def _bucketed(self, column: Column) -> bool:
        """Whether the column's numbers become bucket numbers; with bucket "none" they are hashed like other values."""
        return column.role == "number_key" and self._numbers.bucket != "none"

    def pieces(self, split: InputSplit, first: int) -> Iterator[Piece]:
        raise AssertionError("row groups are not sequential")

    def parse(self, split: InputSplit, piece: Piece) -> Block:
        raise AssertionError("row groups are not sequential")

    def load(self, split: InputSplit) -> Block:
        return self._block(split, self.table(split, self.names), self._infos[id(split.source)].first_rows[split.start])

    def _block(self, split: InputSplit, table: Any, first_row: int) -> Block:
        first_malformed: tuple[Malformed, ...] = ()
        malformed = 0
        causes = self._causes(table)
        if causes:
            bad = np.logical_or.reduce([mask for mask, _ in causes])
            first_malformed, malformed = self._malformed(split, first_row, causes, bad), int(bad.sum())
            if self._data.on_error == "raise":
                raise DataError(f"{first_malformed[0]}{SKIP_ADVICE}")
            import pyarrow as pa

            table = table.filter(pa.array(~bad))
        with file_errors(split.source.name):
            time = None if self._time is None else as_seconds(one_array(table[self._time]))[0]
            carried = tuple(one_array(table[name]) for name in self.carry)
            return Block(self._examples(table), first_malformed, malformed, time, carried)

    def sampled_values(self) -> dict[str, list[str]]:
        """Return the values of the categorical columns in the first rows, as text, without missing ones."""
        import pyarrow.types as pt

        split = self.split(0)
        schema = self._infos[id(split.source)].schema
        names = [column.name for column in self._keys if column.role == "key"]
        partitions = {name: [value] for name, value in split.source.partitions.items() if name in names and value}
        names = [name for name in names if name not in split.source.partitions]
        names = [name for name in names if not is_list(schema.field(name).type)]
        first = next(self._batches(split, names), None)
        values = {name: [] if first is None else first[name].drop_null() for name in names}
        texts = {name: array for name, array in values.items() if len(array) and not pt.is_dictionary(array.type)}
        return partitions | {name: [_text(value) for value in array.to_pylist()] for name, array in texts.items()}

    def _batches(self, split: InputSplit, names: Sequence[str]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        self._check_size(split, names)
        with split.source.open() as file, file_errors(split.source.name):
            opened = pq.ParquetFile(file, metadata=self._infos[id(split.source)].metadata)
            stored = [name for name in names if name in self._infos[id(split.source)].stored.names]
            options = {"row_groups": [split.start], "columns": stored, "use_threads": False}
            yield from opened.iter_batches(SAMPLE_ROWS, **options)

    def table(self, split: InputSplit, names: Sequence[str]) -> Any:
        """Read columns of a row group, each as one chunk."""
        import pyarrow.parquet as pq

        self._check_size(split, names)
        with split.source.open() as file, file_errors(split.source.name):
            info = self._infos[id(split.source)]
            opened = pq.ParquetFile(file, metadata=info.metadata)
            stored = [name for name in names if name in info.stored.names]
            table = opened.read_row_group(split.start, columns=stored, use_threads=False).combine_chunks()
        return with_partitions(table, split, names, info.rows[split.start])

    def tables(self, split: InputSplit, names: Sequence[str]) -> Iterator[Any]:
        """Read columns of an input split, part by part."""
        yield self.table(split, names)

    def _check_size(self, split: InputSplit, names: Sequence[str]) -> None:
        group = self._infos[id(split.source)].metadata.row_group(split.start)
        columns = [group.column(i) for i in range(group.num_columns)]
        prefixes = tuple(f"{name}." for name in names)
        read = [column for column in columns if f"{column.path_in_schema}.".startswith(prefixes)]
        size = sum(max(column.total_uncompressed_size, 8 * column.num_values) for column in read)
        if size > MAX_GROUP_BYTES:
            raise DataError(
                f"{split.source.name}: row group {split.start} needs {size} bytes of memory: it must need at most "
                f"{MAX_GROUP_BYTES}. Write the file with smaller row groups"
            )

    # ---- malformed rows

    def _causes(self, table: Any) -> list[Cause]:
        """Find the malformed rows of each column."""
        causes: list[Cause] = []

        def add(mask: Mask, name: str, rule: str) -> None:
            if mask.any():
                causes.append((mask, lambda row: f"column {name!r} is {table[name][row].as_py()!r}: {rule}"))

        if self._label is not None:
            label = as_doubles(one_array(table[self._label]))
            add(~(np.abs(label) <= _MAX_DENSE), self._label, "a label must be a number")
            if self._binary_labels:
                wrong = (np.abs(label) <= _MAX_DENSE) & (label != 0) & (label != 1)
                add(wrong, self._label, "a label must be 0 or 1; data.label_threshold converts ratings")
        if self._time is not None:
            rule = "an event time must be a timestamp, or seconds from -2**53 to 2**53"
            add(as_seconds(one_array(table[self._time]))[1], self._time, rule)
        for name in self._dense:
            values = self._scaled(name, as_doubles(one_array(table[name])))
            add(np.abs(values) > _MAX_DENSE, name, "does not fit a float32")
        for column in self._keys:
            if self._bucketed(column):
                values = self._scaled(column.name, as_doubles(one_array(table[column.name])))
                width = 1.0 if isinstance(self._numbers.bucket, str) else self._numbers.bucket
                wide = np.abs(values) / width > _MAX_BUCKET
                if self._numbers.bucket == "log_square":  # above 2 the bucket number is a logarithm, which fits
                    wide &= (values < 0) | np.isinf(values)
                add(wide, column.name, "its bucket number does not fit 64 bits")
            elif column.role == "time_key":
                array = one_array(table[column.name])
                rule = "a time must be a timestamp, seconds since 1970, or text such as 2026-01-31T23:59:59Z"
                add(parse_times(array)[2], column.name, rule)
            elif self._data.raw_keys and column.role == "key":
                array = one_array(table[column.name])
                separator = self._data.separators.get(column.name)
                bad = rows_with_invalid_key(array if separator is None else split_values(array, separator))
                add(bad, column.name, "a raw key must be a 64-bit integer")
        return causes

    def _scaled(self, name: str, values: Doubles) -> Doubles:
        log, mean, inverse, _ = transform(name, self._numbers, self._fitted)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(((np.sign(values) * np.log1p(np.abs(values)) if log else values) - mean) * inverse)

    def _malformed(self, split: InputSplit, first: int, causes: list[Cause], bad: Mask) -> tuple[Malformed, ...]:
        """Describe the first malformed rows."""
        rows = np.flatnonzero(bad)[:16].tolist()
        messages = [next(message(row) for mask, message in causes if mask[row]) for row in rows]
        return tuple(Malformed(split.source, first + row, text) for row, text in zip(rows, messages, strict=True))

    # ---- valid rows

    def _examples(self, table: Any) -> tuple[Any, ...]:
        rows = table.num_rows
        label = np.zeros(rows, np.float32)
        if self._label is not None:
            label[:] = as_doubles(one_array(table[self._label]))
        threshold_labels(label, self._data)
        dense = np.empty((rows, len(self._dense)), np.float32)
        for i, name in enumerate(self._dense):
            log, mean, inverse, _ = transform(name, self._numbers, self._fitted)
            dense[:, i] = core.number_dense(as_doubles(one_array(table[name])), None, log, mean, inverse)
        ids, offsets = interleave(rows, [self._field(one_array(table[column.name]), column) for column in self._keys])
        return ids, offsets, None, dense.reshape(-1), label

    def _field(self, array: Any, column: Column) -> tuple[Keys, Offsets | None]:
        """Return the keys of a column, and the keys per row; None means one key per row."""
        if column.role == "time_key":
            seconds, missing, _ = parse_times(array)
            return core.time_keys(column.name, seconds, ~missing, self._data.time_buckets[column.name]), None
        if column.name in self._data.separators:
            array = split_values(array, self._data.separators[column.name])
        if is_list(array.type):
            sizes = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            return self._values(array.flatten(), column), sizes
        return self._values(array, column), None

    def _values(self, array: Any, column: Column) -> Keys:
        if self._bucketed(column):
            rule = transform(column.name, self._numbers, self._fitted)
            return core.number_keys(column.name, as_doubles(array), None, *rule)
        raw = self._data.raw_keys and column.role == "key"
        return raw_keys(array) if raw else hash_column(array, column.name)


def with_partitions(table: Any, split: InputSplit, names: Sequence[str], rows: int) -> Any:
    """Add the columns of the file's path to its rows, as text."""
    import pyarrow as pa

    for name in (name for name in names if name in split.source.partitions):
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [split.source.partitions[name]])
        table = table.append_column(name, column)
    return table


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
