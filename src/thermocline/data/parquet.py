"""Parquet row groups -> examples. A row group is read whole: its size, and the threads', bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thermocline.config.data import Data
from thermocline.core import core
from thermocline.data.arrow_keys import doubles, hashed, interleave, is_list, is_text, raw_keys, rows_without_key, whole
from thermocline.data.features import Column, transform
from thermocline.data.files import Source, explained
from thermocline.data.text_blocks import Block, Malformed, Piece, Unit, threshold_labels
from thermocline.errors import DataError

Mask = npt.NDArray[np.bool_]
# Just below what the core refuses: a float32, and a bucket's number of 64 bits.
_MOST_DENSE, _MOST_BUCKET = 3.4028e38, 9.22e18


class ParquetFileInfo:
    """One file's footer."""

    def __init__(self, source: Source) -> None:
        import pyarrow.parquet as pq

        with source.open() as file, explained(source.name):
            opened = pq.ParquetFile(file)
            self.metadata = opened.metadata
            self.schema = opened.schema_arrow
        self.rows = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
        self.first_rows = np.concatenate([[0], np.cumsum(self.rows)]).tolist()


class ParquetBlocks:
    """Row groups of Parquet files."""

    def __init__(
        self,
        sources: Sequence[Source],
        infos: Sequence[ParquetFileInfo],
        columns: Sequence[Column],
        data: Data,
        fitted: dict[str, tuple[float, float]],
    ) -> None:
        self._infos = {id(source): info for source, info in zip(sources, infos, strict=True)}
        self._data = data
        self._numbers = data.numbers_of("parquet")
        self._fitted = fitted
        self._read = [column for column in columns if column.role != "ignore"]
        self._label = next((column.name for column in columns if column.role == "label"), None)
        self._dense = [column.name for column in columns if column.role == "dense"]
        self._keys = [column for column in columns if column.role in ("key", "number_key")]
        for source, info in zip(sources, infos, strict=True):
            self._check_types(source, info)
        units = [(file, group, rows) for file, info in enumerate(infos) for group, rows in enumerate(info.rows) if rows]
        self._sources = sources
        self._units = np.array(units, np.int64).reshape(-1, 3)
        self.sequential = np.zeros(len(units), np.bool_)
        self.total_examples = float(self._units[:, 2].sum())
        self.examples_per_unit = max(1.0, self.total_examples / max(1, len(units)))

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, number: int) -> Unit:
        file, group, _ = self._units[number].tolist()
        return Unit(self._sources[file], group)

    def rows(self, numbers: npt.NDArray[np.int64]) -> int:
        """Of these units together."""
        return int(self._units[numbers, 2].sum())

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
                    what = "the label" if column.role == "label" else "a numeric column"
                    raise DataError(f"{source.name}: column {name!r} has type {kind}; {what} holds numbers")
                continue
            value = kind.value_type if is_list(kind) else kind
            value = value.value_type if pt.is_dictionary(value) else value
            fine, allowed = pt.is_integer(value) or is_text(value), "integers or their decimal text, and lists of these"
            if not (self._data.raw_keys and column.role == "key"):
                fine = fine or pt.is_floating(value) or pt.is_boolean(value)
                allowed = "strings, bytes, integers, floats, booleans, and lists of these"
            if not fine:
                raise DataError(f"{source.name}: column {name!r} has type {kind}, but keys are made of {allowed}")

    def _bucketed(self, column: Column) -> bool:
        """With bucket "none", a numeric column is like any other column of keys."""
        return column.role == "number_key" and self._numbers.bucket != "none"

    def pieces(self, unit: Unit, first: int) -> Iterator[Piece]:
        raise AssertionError("row groups are read whole")

    def parse(self, unit: Unit, piece: Piece) -> Block:
        raise AssertionError("row groups are read whole")

    def load(self, unit: Unit) -> Block:
        table = self.table(unit, [column.name for column in self._read])
        found: tuple[Malformed, ...] = ()
        malformed = 0
        causes = self._causes(table)
        if causes:
            bad = np.logical_or.reduce([mask for mask, _ in causes])
            found, malformed = self._malformed(unit, causes, bad), int(bad.sum())
            if self._data.on_error == "raise":
                raise DataError(str(found[0]))
            import pyarrow as pa

            table = table.filter(pa.array(~bad))
        with explained(unit.source.name):
            return Block(self._examples(table), found, malformed)

    def table(self, unit: Unit, names: Sequence[str]) -> Any:
        """Some columns of a row group, each in one piece."""
        import pyarrow.parquet as pq

        with unit.source.open() as file, explained(unit.source.name):
            opened = pq.ParquetFile(file, metadata=self._infos[id(unit.source)].metadata)
            return opened.read_row_group(unit.start, columns=list(names), use_threads=False).combine_chunks()

    # ---- rows that cannot be used

    def _causes(self, table: Any) -> list[tuple[Mask, Callable[[int], str]]]:
        """Which rows are malformed, and why."""
        causes: list[tuple[Mask, Callable[[int], str]]] = []

        def add(mask: Mask, name: str, rule: str) -> None:
            if mask.any():
                causes.append((mask, lambda row: f"column {name!r} is {table[name][row].as_py()!r}: {rule}"))

        if self._label is not None:
            label = doubles(whole(table[self._label]))
            add(~(np.abs(label) <= _MOST_DENSE), self._label, "a label is a number")
        for name in self._dense:
            values = self._scaled(name, doubles(whole(table[name])))
            add(np.abs(values) > _MOST_DENSE, name, "it does not fit a float32")
        for column in self._keys:
            if self._bucketed(column):
                values = self._scaled(column.name, doubles(whole(table[column.name])))
                width = 1.0 if isinstance(self._numbers.bucket, str) else self._numbers.bucket
                wide = np.abs(values) / width > _MOST_BUCKET
                if self._numbers.bucket == "log_square":  # above 2 it is a logarithm
                    wide &= (values < 0) | np.isinf(values)
                add(wide, column.name, "its bucket's number does not fit 64 bits")
            elif self._data.raw_keys and column.role == "key":
                add(rows_without_key(whole(table[column.name])), column.name, "a raw key is an integer of 64 bits")
        return causes

    def _scaled(self, name: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        log, mean, inverse, _ = transform(name, self._numbers, self._fitted)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(((np.sign(values) * np.log1p(np.abs(values)) if log else values) - mean) * inverse)

    def _malformed(
        self, unit: Unit, causes: list[tuple[Mask, Callable[[int], str]]], bad: Mask
    ) -> tuple[Malformed, ...]:
        first = self._infos[id(unit.source)].first_rows[unit.start]
        rows = np.flatnonzero(bad)[:16].tolist()
        why = [next(cause(row) for mask, cause in causes if mask[row]) for row in rows]
        return tuple(Malformed(unit.source, first + row, cause) for row, cause in zip(rows, why, strict=True))

    # ---- rows that can

    def _examples(self, table: Any) -> tuple[Any, ...]:
        rows = table.num_rows
        label = np.zeros(rows, np.float32)
        if self._label is not None:
            label[:] = doubles(whole(table[self._label]))
        threshold_labels(label, self._data)
        dense = np.empty((rows, len(self._dense)), np.float32)
        for i, name in enumerate(self._dense):
            log, mean, inverse, _ = transform(name, self._numbers, self._fitted)
            dense[:, i] = core.number_dense(doubles(whole(table[name])), None, log, mean, inverse)
        ids, offsets = interleave(rows, [self._field(whole(table[column.name]), column) for column in self._keys])
        return ids, offsets, None, dense.reshape(-1), label

    def _field(self, array: Any, column: Column) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64] | None]:
        """Keys, and how many each row has; None: one."""
        if is_list(array.type):
            sizes = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            return self._values(array.flatten(), column), sizes
        return self._values(array, column), None

    def _values(self, array: Any, column: Column) -> npt.NDArray[np.uint64]:
        if self._bucketed(column):
            rule = transform(column.name, self._numbers, self._fitted)
            return core.number_keys(column.name, doubles(array), None, *rule)
        raw = self._data.raw_keys and column.role == "key"
        return raw_keys(array) if raw else hashed(array, column.name)
