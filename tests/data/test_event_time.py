"""`data.time`: event times of CSV and Parquet files in `Batch.time`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import thermocline as tc
from thermocline.errors import DataError

UTC = datetime.UTC


def times(reader: tc.Reader) -> list[int]:
    result: list[int] = []
    for batch in reader:
        assert batch.time is not None
        assert batch.time.dtype == np.int64
        result += batch.time.tolist()
    return result


def csv(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in ("label,at,ad", *rows)))
    return path


def parquet(path: Path, at: Any, kind: Any) -> Path:
    columns = {"label": pa.array([1.0] * len(at)), "at": pa.array(at, kind), "ad": pa.array(["x"] * len(at))}
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_csv(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "1,1700000000,x", "0,1700000001.9,y", "0,2023-11-14T22:13:22Z,z", "1, -1 ,x")
    reader = tc.Reader(path, time="at", batch_size=3)
    assert reader.features.fields == ("ad",)
    assert times(reader) == [1700000000, 1700000001, 1700000002, -1]
    assert next(iter(tc.Reader(path, categorical=["ad"], batch_size=3))).time is None


def test_shuffled_times_stay_with_their_examples(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", *(f"{i % 2},{i},{i}" for i in range(500)))
    reader = tc.Reader(path, time="at", batch_size=64, shuffle=True, block_bytes=300)
    known = {int(batch.ids[0]): i for i, batch in enumerate(tc.Reader(path, time="at", batch_size=1))}
    assert times(reader) != list(range(500))
    for batch in reader:
        assert [known[int(i)] for i in batch.ids] == batch.time.tolist()  # type: ignore[union-attr]


def test_a_malformed_time_is_an_error_or_skipped_with_its_line(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "1,5,x", "0,soon,y", "0,,y", "1,7,x")
    with pytest.raises(
        DataError, match=r"a\.csv, line 3: column \"at\" \(2 of 3\): \"soon\" is not an event time: use"
    ):
        times(tc.Reader(path, time="at", batch_size=3))
    reader = tc.Reader(path, time="at", batch_size=3, on_error="skip")
    assert times(reader) == [5, 7]
    assert "the event time is empty" in reader.skipped.first[1]


def test_columns_of_data_time(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "1,5,x")
    with pytest.raises(DataError, match=r"has no time column 'when': set data\.time to one of 'label', 'at', 'ad'"):
        tc.Reader(path, time="when", batch_size=3)
    with pytest.raises(DataError, match=r"column 'at' is in data\.time and in data\.numeric: remove it from one"):
        tc.Reader(path, time="at", numeric=["at"], batch_size=3)
    svm = tmp_path / "a.svm"
    svm.write_text("1 2:1\n")
    with pytest.raises(DataError, match=r"data\.time is 'at', but format libsvm does not use it"):
        tc.Reader(svm, time="at", batch_size=3)
    with pytest.raises(tc.ConfigError, match=r"data\.time .*synth"):
        tc.Data(format="synth", time="at")


@pytest.mark.parametrize(
    ("kind", "at", "expected"),
    [
        (pa.int32(), [5, -6, 7], [5, -6, 7]),
        (pa.uint64(), [5, 2**53, 7], [5, 2**53, 7]),
        (pa.float64(), [5.9, -5.1, 2.0**40], [5, -6, 2**40]),
        (pa.timestamp("ms", "Europe/Paris"), [datetime.datetime(2000, 1, 1, tzinfo=UTC)] * 3, [946684800] * 3),
        (pa.timestamp("ns"), [datetime.datetime(1969, 12, 31, 23, 59, 59, 500000)] * 3, [-1] * 3),
        (pa.date32(), [datetime.date(1970, 1, 2)] * 3, [86400] * 3),
    ],
)
def test_parquet(tmp_path: Path, kind: Any, at: list[Any], expected: list[int]) -> None:
    assert times(tc.Reader(parquet(tmp_path / "a.parquet", at, kind), time="at", batch_size=2)) == expected


@pytest.mark.parametrize(
    ("kind", "bad"), [(pa.int64(), 2**60), (pa.float32(), float("nan")), (pa.timestamp("s"), None)]
)
def test_parquet_malformed(tmp_path: Path, kind: Any, bad: Any) -> None:
    path = parquet(tmp_path / "a.parquet", [5, bad, 7], kind)
    with pytest.raises(DataError, match=r"a\.parquet, row 2: column 'at' is .*: an event time must be a timestamp, or"):
        times(tc.Reader(path, time="at", batch_size=2))
    assert times(tc.Reader(path, time="at", batch_size=2, on_error="skip")) == [5, 7]


def test_parquet_type(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["x"], pa.string())
    with pytest.raises(DataError, match=r"column 'at' has type string; data\.time must name timestamps"):
        tc.Reader(path, time="at", batch_size=2)
