"""Writes batches to Parquet, LibSVM and LibFFM files, with one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from thermocline.arrays import as_numpy
from thermocline.batch import Batch
from thermocline.core import core
from thermocline.utils import atomic_file

OutputFormat = Literal["parquet", "libsvm", "libffm"]
OUTPUT_FORMATS: tuple[str, ...] = get_args(OutputFormat)


def write_text(path: Path, batches: Iterable[Batch], with_fields: bool) -> None:
    """Write one line per example: `label id:1 ...`, or `label field:id:1 ...` if `with_fields`."""
    with atomic_file.atomic_path(path) as temporary, open(temporary, "wb") as file:
        for batch in batches:
            if batch.dense is not None:
                raise ValueError(
                    "LibSVM and LibFFM cannot hold dense features: write Parquet, or generate data with dense=0"
                )
            label = np.ascontiguousarray(as_numpy(batch.label, "label"), np.float32)
            file.write(core.to_text(batch.ids, batch.offsets, batch.fields, label, with_fields))


def write_parquet(path: Path, batches: Iterable[Batch], one_hot: bool, compression: str) -> None:
    """Write the columns label (float), dense_0 .. (float) and field_0 .. (uint64; lists of uint64 unless `one_hot`)."""
    import pyarrow.parquet as pq

    writer: Any = None
    with atomic_file.atomic_path(path) as temporary:
        try:
            for batch in batches:
                table = _arrow_table(batch, one_hot)
                if writer is None:
                    # Hashed keys rarely repeat within a page: a dictionary would not reduce the size.
                    writer = pq.ParquetWriter(temporary, table.schema, compression=compression, use_dictionary=False)
                writer.write_table(table, row_group_size=len(batch))
        finally:
            if writer is not None:
                writer.close()


def _arrow_table(batch: Batch, one_hot: bool) -> Any:
    import pyarrow as pa

    columns: dict[str, Any] = {"label": pa.array(np.asarray(as_numpy(batch.label, "label")))}
    if batch.dense is not None:
        dense = as_numpy(batch.dense, "dense")
        columns |= {f"dense_{i}": pa.array(np.ascontiguousarray(dense[:, i])) for i in range(dense.shape[1])}
    for field in range(batch.fields):
        ids, offsets, _ = batch.select([field])
        values = pa.array(ids)
        columns[f"field_{field}"] = values if one_hot else pa.ListArray.from_arrays(offsets.astype(np.int32), values)
    return pa.table(columns)
