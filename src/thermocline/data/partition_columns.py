"""`PartitionColumns`: columns of Hive's partitions, folders name=value, for CSV files.

The values of a file's path are the same in all of its rows. They are parsed once, as a line of CSV, by the parser of
the files' own columns, and added to each example after its fields.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from thermocline.data.features import KEY_ROLES, Column
from thermocline.data.files import Source
from thermocline.errors import DataError, ThermoclineError

_ROLES = ("key", "time_key", "ignore")


def partition_names(source: Source, names: Sequence[str]) -> list[str]:
    """Return the names of a file's columns, `names`, and of the columns of its path."""
    for name in source.partitions:
        if name in names:
            raise DataError(f"{source.name}: column {name!r} is in the file and in its path; rename one")
    return [*names, *source.partitions]


class PartitionColumns:
    """Adds the columns of paths to examples. Thread-safe."""

    def __init__(self, columns: Sequence[Column], own_columns: Sequence[Column], parser: Any, delimiter: str) -> None:
        """
        columns      the columns of the paths, in the order of their folders
        own_columns  the columns of the files
        parser       of `columns`
        delimiter    of `parser`
        """
        for column in columns:
            if column.role not in _ROLES:
                raise DataError(
                    f"column {column.name!r} of the folders {column.name}=... is a {column.role}: CSV files can only "
                    "have categories and times with a bucket there. Write it into the files, or use Parquet or Arrow"
                )
        self._fields = sum(column.role in KEY_ROLES for column in own_columns)
        self._parser, self._delimiter = parser, delimiter

    def add_to(self, examples: Sequence[Any], source: Source) -> tuple[Any, ...]:
        """Return parsed examples of `source` with the fields of its path after their own."""
        ids, offsets, weights, dense, labels = examples
        more, more_offsets = self._parse(source)
        rows, fields = len(labels), self._fields
        of_path = np.broadcast_to(np.diff(more_offsets), (rows, len(more_offsets) - 1))
        lengths = np.concatenate([np.diff(offsets).reshape(rows, fields), of_path], axis=1)
        all_offsets = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths.reshape(-1), out=all_offsets[1:])
        row = np.arange(rows)
        own = np.arange(len(ids)) + len(more) * np.repeat(row, lengths[:, :fields].sum(1))
        added = (all_offsets[lengths.shape[1] :: lengths.shape[1], None] - len(more)) + np.arange(len(more))
        all_ids = np.empty(all_offsets[-1], np.uint64)
        all_ids[own], all_ids[added] = ids, more
        if weights is not None:
            all_weights = np.ones(len(all_ids), np.float32)
            all_weights[own] = weights
            weights = all_weights
        return all_ids, all_offsets, weights, dense, labels

    def _parse(self, source: Source) -> tuple[Any, Any]:
        """Return ids and offsets of the columns of a path."""
        line = io.StringIO()
        values = source.partitions.values()
        csv.writer(line, delimiter=self._delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
        try:
            ids, offsets, *_, errors, _ = self._parser.parse(line.getvalue().encode(), True)
        except ThermoclineError as error:
            raise DataError(f"{source.name}: {error}") from None
        if errors:
            raise DataError(f"{source.name}: folders {', '.join(source.partitions)}: {errors[0][1]}")
        return ids, offsets
