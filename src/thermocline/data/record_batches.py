"""`RecordBatchConverter`: Arrow tables with the columns of the training data as batches, as `Reader` reads Parquet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from thermocline.batch import Batch
from thermocline.config.data import CRITEO_NUMERIC, Data
from thermocline.core import core
from thermocline.data.feature_hashing import make_hasher
from thermocline.data.features import KEY_ROLES, Features, resolve
from thermocline.data.files import Source
from thermocline.data.formats import sort_columns
from thermocline.data.parquet import ParquetBlocks
from thermocline.data.text_blocks import InputSplit
from thermocline.errors import DataError

ColumnFormat = Literal["csv", "criteo", "parquet", "arrow"]
"""Formats whose examples have named columns."""


class RecordBatchConverter:
    """Converts tables to batches of NumPy arrays, without labels; label columns are ignored. Thread-safe.

    data      settings of the training data; `data.format` is a `ColumnFormat`
    features  features of the training data
    """

    def __init__(self, data: Data, features: Features) -> None:
        if data.format is None or data.format not in get_args(ColumnFormat):
            raise DataError(f"data.format is {data.format!r}: only {', '.join(get_args(ColumnFormat))} have columns")
        numeric = data.numeric or (CRITEO_NUMERIC if data.format == "criteo" else ())
        numbers = data.numbers_of(data.format)
        # The event time is used in training only.
        ignore = data.ignore if data.time is None else (*data.ignore, data.time)
        self._data = dataclasses.replace(
            data,
            format="parquet",
            numeric=numeric,
            numeric_features=numbers,
            on_error="raise",
            time=None,
            ignore=ignore,
        )
        self._features = features
        self._hasher = make_hasher(data.hashing, data.threads)
        self._source = Source("request", "request", 0)

    def batch(self, table: Any) -> Batch:
        """Convert an Arrow table. Raises `DataError` that names the column, and the row of a malformed value."""
        names = list(table.schema.names)
        repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if repeated is not None:
            raise DataError(f"request: column {repeated!r} occurs twice; column names must be unique")
        features = self._features
        columns = resolve(names, self._data, "parquet", "request", labelled=False, known=True)
        columns = sort_columns(columns, features)
        fields = [column.name for column in columns if column.role in KEY_ROLES]
        features.require(fields, [column.name for column in columns if column.role == "dense"], "request")
        blocks = _TableBlocks(self._source, table, columns, self._data, features.statistics)
        examples = blocks.load(InputSplit(self._source, 0)).examples
        order = np.arange(table.num_rows, dtype=np.int64)
        size = len(features.dense)
        ids, offsets, weights, dense, _ = core.gather_examples([examples], len(features.fields), size, order)
        values = dense.reshape(len(order), size) if size else None
        batch = Batch(ids, offsets, len(features.fields), weights, values, names=features.fields)
        return batch if self._hasher is None else self._hasher(batch)


class _TableBlocks(ParquetBlocks):
    """One table in memory as the only row group."""

    def __init__(self, source: Source, table: Any, columns: Sequence[Any], data: Data, fitted: Any) -> None:
        self._table = table.combine_chunks()
        super().__init__([source], [_TableInfo(table)], columns, data, fitted)  # type: ignore[list-item]

    def table(self, split: InputSplit, names: Sequence[str]) -> Any:
        return self._table.select(list(names))


class _TableInfo:
    """The part of a `ParquetFileInfo` that `ParquetBlocks` reads."""

    def __init__(self, table: Any) -> None:
        self.schema = table.schema
        self.rows = [table.num_rows]
        self.first_rows = [0, table.num_rows]
