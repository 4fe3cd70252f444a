"""Arrow IPC files and streams: the keys and errors of Parquet. Order, resuming and shards: test_reader_order.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from helpers.reader import examples_of, write_arrow

import thermocline as tc
from thermocline.errors import DataError

FORMS = pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])


def all_types(rows: int = 40) -> pa.Table:
    """Columns of every type that keys and numbers can be made of, with nulls."""
    random = np.random.default_rng(0)
    words = [None if i % 11 == 5 else f"w{random.integers(9)}" for i in range(rows)]
    numbers = [None if i % 7 == 3 else int(random.integers(-50, 50)) for i in range(rows)]
    return pa.table(
        {
            "label": [float(i % 2) for i in range(rows)],
            "string": words,
            "large": pa.array(words, pa.large_string()),
            "view": pa.array(words, pa.string_view()),
            "bytes": [None if word is None else word.encode() for word in words],
            "coded": pa.array(words).dictionary_encode(),
            "int8": pa.array(numbers, pa.int8()),
            "uint64": pa.array([2**64 - 1 - i % 9 for i in range(rows)], pa.uint64()),
            "bool": [word is None for word in words],
            "double": [0.5 * i for i in range(rows)],
            "views": pa.array([[words[i]] * (i % 3) for i in range(rows)], pa.list_(pa.string_view())),
            "bag": [[words[i], words[-i]] if i % 3 else None for i in range(rows)],
            "x": [None if number is None else number / 3 for number in numbers],
        }
    )


@FORMS
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_keys_of_parquet(tmp_path: Path, stream: bool, compression: str | None) -> None:
    table = all_types()
    plain = table.set_column(3, "view", table["view"].cast(pa.string()))  # Parquet has no views
    at = plain.column_names.index("views")
    plain = plain.set_column(at, "views", pa.array(plain["views"].to_pylist(), pa.list_(pa.string())))
    pq.write_table(plain, tmp_path / "a.parquet", row_group_size=7)
    write_arrow(table, tmp_path / "a.arrow", stream=stream, compression=compression)
    options: dict[str, Any] = {"batch_size": 9, "numeric": ("x",), "carry": ["string"]}
    expected = tc.Reader(tmp_path / "a.parquet", **options)
    got = tc.Reader(tmp_path / "a.arrow", **options)
    assert got.format == "arrow"
    assert got.features == expected.features
    assert examples_of(got) == examples_of(expected)
    carried = [(a.carried["string"].to_pylist(), b.carried["string"].to_pylist()) for a, b in [(got, expected)]]
    assert carried[0][0] == carried[0][1]


def test_feather_and_its_endings(tmp_path: Path) -> None:
    table = all_types().drop(["bag", "views", "view"])
    for name in ("a.feather", "b.ipc", "c.ARROWS"):
        feather.write_feather(table, str(tmp_path / name), chunksize=7)
        assert tc.Reader(tmp_path / name, batch_size=9).format == "arrow"
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    with pytest.raises(DataError, match=r"old\.feather has version 1 of Feather: write it with version 2"):
        tc.Reader(tmp_path / "old.feather", batch_size=9)


def test_streams_may_change_their_dictionaries(tmp_path: Path) -> None:
    parts = [pa.array(words).dictionary_encode() for words in (["a", "b"], ["c", "a"], ["b"])]
    batches = [pa.record_batch({"label": [0.0] * len(part), "word": part}) for part in parts]
    for deltas in (False, True):
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        got = [bags[0][0][0] for _, bags, _ in examples_of(tc.Reader(tmp_path / "a.arrow", batch_size=2))]
        assert got == [tc.key_of("word", word) for word in ("a", "b", "c", "a", "b")]


@FORMS
def test_malformed_rows_have_their_number_in_the_file(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"label": [0.0, 1.0] * 10, "a": list(range(20))})
    table = table.set_column(0, "label", [[*([0.0, 1.0] * 8), 3.0, 0.0, None, 0.0]])
    write_arrow(table, tmp_path / "a.arrow", stream=stream)
    with pytest.raises(DataError, match=r"a\.arrow, row 17: column 'label' is 3\.0: a label must be 0 or 1"):
        list(tc.Reader(tmp_path / "a.arrow", batch_size=4))
    reader = tc.Reader(tmp_path / "a.arrow", batch_size=4, on_error="skip")
    assert len(examples_of(reader)) == 18
    assert [text.split(",")[1] for text in reader.skipped.first] == [
        " row 17: column 'label' is 3.0: a label must be 0 or 1; data.label_threshold converts ratings",
        " row 19: column 'label' is None: a label must be a number",
    ]


@FORMS
def test_wrong_columns_have_the_errors_of_parquet(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"label": ["a"], "x": ["b"], "when": pa.array([0], pa.timestamp("s"))})
    write_arrow(table, tmp_path / "a.arrow", stream=stream)
    pq.write_table(table, tmp_path / "a.parquet")
    for options in ({}, {"label": "x"}, {"label": "none"}, {"numeric": ("x",), "label": "when"}, {"carry": ["y"]}):
        errors = []
        for ending in ("arrow", "parquet"):
            with pytest.raises(DataError) as caught:
                tc.Reader(tmp_path / f"a.{ending}", batch_size=1, **options)
            errors.append(str(caught.value).replace(ending, ""))
        assert errors[0] == errors[1]
    (tmp_path / "a.arrow").rename(tmp_path / "a.arrow.gz")
    with pytest.raises(DataError, match=r"a\.arrow\.gz: Arrow files have their own compression; decompress this file"):
        tc.Reader(tmp_path / "a.arrow.gz", batch_size=1)


@FORMS
def test_files_without_rows(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"label": [0.0], "a": ["x"]})
    write_arrow(table.slice(0, 0), tmp_path / "a.arrow", stream=stream)
    with pytest.raises(DataError, match="has no examples"):
        tc.Reader(tmp_path / "a.arrow", batch_size=1)
    schema = table.schema
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(tmp_path / "b.arrow"), schema) as writer:  # empty record batches among others
        for rows in (0, 1, 0, 1):
            writer.write_batch(table.slice(0, rows).combine_chunks().to_batches()[0] if rows else _empty(schema))
    assert len(examples_of(tc.Reader(tmp_path / "b.arrow", batch_size=1))) == 2


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@FORMS
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damaged_files_raise_or_are_read(tmp_path: Path, stream: bool, compression: str | None) -> None:
    """Never a crash, an endless loop or an error of another class; wrong bytes of values cannot be found."""
    path = write_arrow(all_types(16), tmp_path / "a.arrow", stream=stream, compression=compression)
    data = path.read_bytes()
    random = np.random.default_rng(1)
    outcomes = []
    for n in range(60):
        damaged = bytearray(data)
        if n % 5 == 0:
            damaged = damaged[: int(random.integers(1, len(data)))]
        else:
            for _ in range(int(random.integers(1, 4))):
                damaged[int(random.integers(len(data)))] = int(random.choice([0, 1, 127, 128, 255]))
        path.write_bytes(damaged)
        try:
            outcomes.append(len(examples_of(tc.Reader(path, batch_size=5, numeric=("x",), on_error="skip"))))
        except DataError:
            outcomes.append(-1)
    assert min(outcomes) == -1
    assert max(outcomes) == 16


def test_partitions_datasets_and_remote_files(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1] * 6, "shop": [f"s{i}" for i in range(12)], "day": [i % 3 for i in range(12)]})
    for format in ("feather", "parquet"):
        ds.write_dataset(table, tmp_path / format, format=format, partitioning=["day"], partitioning_flavor="hive")
    expected = sorted(examples_of(tc.Reader(tmp_path / "parquet", batch_size=5)))
    assert sorted(examples_of(tc.Reader(tmp_path / "feather", batch_size=5))) == expected
    dataset = ds.dataset(tmp_path / "feather", format="feather", partitioning="hive")
    assert sorted(examples_of(tc.Reader(dataset, batch_size=5))) == expected
    only_day = tc.Reader(tmp_path / "feather", batch_size=5, ignore=("shop",))
    assert only_day.features.fields == ("day",)
    assert len(examples_of(only_day)) == 12
    with pytest.raises(DataError, match=r"the dataset cannot be read: .*filtered"):
        tc.Reader(dataset.filter(ds.field("day") == 1), batch_size=5)

    memory = fsspec.filesystem("memory")
    for form in (False, True):
        write_arrow(table, tmp_path / "a.arrow", stream=form)
        memory.pipe("/arrow/a.arrow", (tmp_path / "a.arrow").read_bytes())
        remote = tc.Reader("memory://arrow/a.arrow", batch_size=5)
        assert examples_of(remote) == examples_of(tc.Reader(tmp_path / "a.arrow", batch_size=5))
