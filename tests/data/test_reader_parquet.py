"""Parquet: all column types, lists, nulls, malformed rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.reader import Example, examples_of, key
from hypothesis import given, strategies as st

import thermocline as tc
from thermocline.config.data import Numeric
from thermocline.data.arrow_keys import hash_column
from thermocline.errors import DataError


def text_of(value: Any) -> bytes:
    """The text of a value in a text file."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return b""
    if isinstance(value, bool):
        return b"1" if value else b"0"
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        assert value == int(value) or 1e-4 < abs(value) < 1e15
        return (str(int(value)) if value == int(value) else repr(value)).encode()
    return str(value).encode()


def keys_of(name: str, value: Any, is_list: bool) -> tuple[tuple[int, float], ...]:
    values = (value or []) if is_list else [value]
    return tuple((key(name, text_of(each)), 1.0) for each in values)


KINDS: dict[str, tuple[Any, Any]] = {
    "string": (pa.string(), st.text(max_size=40)),
    "large": (pa.large_string(), st.text(max_size=9)),
    "bytes": (pa.binary(), st.binary(max_size=40)),
    "fixed": (pa.binary(4), st.binary(min_size=4, max_size=4)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.sampled_from([0.5, 3.0, -17.25, 0.1, 1e9, float("nan")])),
    "words": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "", "c"])),
}


@given(st.data(), st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
def test_scalars_and_lists(tmp_path: Path, data: st.DataObject, kinds: list[str]) -> None:
    rows = data.draw(st.integers(1, 12))
    columns: dict[str, Any] = {"label": pa.array([float(i % 3 == 0) for i in range(rows)])}
    plain: dict[str, tuple[list[Any], bool]] = {}
    for i, kind in enumerate(kinds):
        arrow, values = KINDS[kind]
        one = st.one_of(st.none(), values)
        is_list = kind not in ("words",) and data.draw(st.booleans())
        drawn = st.one_of(st.none(), st.lists(one, max_size=4)) if is_list else one
        column = data.draw(st.lists(drawn, min_size=rows, max_size=rows))
        listed = data.draw(st.sampled_from([pa.list_, pa.large_list])) if is_list else None
        columns[f"c{i}"] = pa.array(column, listed(arrow) if listed else arrow)
        plain[f"c{i}"] = column, is_list
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=data.draw(st.integers(1, 5)))
    expected: list[Example] = [
        (float(i % 3 == 0), tuple(keys_of(name, column[i], listed) for name, (column, listed) in plain.items()), ())
        for i in range(rows)
    ]
    reader = tc.Reader(path, batch_size=data.draw(st.integers(1, 7)))
    assert examples_of(reader) == expected
    assert len(reader) == len(list(reader))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sliced_columns(kind: str) -> None:
    """An Arrow array may start at any offset of its buffers."""
    values = {"string": ["ab", "", None, "xyz"], "bytes": [b"ab", b"", None, b"xyz"], "fixed": [b"abcd", b"1234"] * 2}
    values |= {"large": values["string"], "words": ["a", "b", None, "c"], "bool": [True, False, None, True]}
    column = pa.array(values.get(kind, [1, 2, None, 4]), KINDS[kind][0])
    whole = hash_column(column, "n")
    assert whole.tolist() == [key("n", text_of(value)) for value in column.to_pylist()]
    for start, end in ((1, 4), (2, 3), (3, 3)):
        assert hash_column(column[start:end], "n").tolist() == whole[start:end].tolist()


def test_raw_keys(tmp_path: Path) -> None:
    columns = {
        "label": pa.array([1, 0, 1]),
        "a": pa.array([1, -1, 2**62]),
        "b": pa.array(["18446744073709551615", "5", "0"]),
        "c": pa.array([[2**64 - 1], [], [3, 4]], pa.list_(pa.uint64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (batch,) = tc.Reader(tmp_path / "a.parquet", raw_keys=True, batch_size=9)
    assert batch.ids.tolist() == [1, 2**64 - 1, 2**64 - 1, 2**64 - 1, 5, 2**62, 0, 3, 4]
    assert np.diff(batch.offsets).tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 2]


def test_malformed_rows(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    columns = {
        "label": pa.array([1.0, None, 0.0, nan, 1.0, 0.0, 1.0]),
        "x": pa.array([1.0, 2.0, inf, 3.0, 1e300, nan, None]),
        "k": pa.array(["1", "2", "3", "4", "5", "6", "x"]),
        "ks": pa.array([["1"], ["2"], ["3"], ["4"], ["5"], ["18446744073709551616"], ["7"]]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=3)
    numbers = Numeric(standardize=False)
    options: dict[str, Any] = {"numeric": ("x",), "numeric_features": numbers, "batch_size": 9}
    reader = tc.Reader(tmp_path / "a.parquet", on_error="skip", raw_keys=True, **options)
    (batch,) = reader
    assert batch.ids.tolist() == [1, 1]
    assert reader.skipped.count == 6
    assert [text.split(": ")[1] for text in reader.skipped.first] == [
        "column 'label' is None",
        "column 'x' is inf",
        "column 'label' is nan",
        "column 'x' is 1e+300",
        "column 'ks' is ['18446744073709551616']",
        "column 'k' is 'x'",
    ]
    assert [text.split(": ")[0].split(", ")[1] for text in reader.skipped.first] == [f"row {i}" for i in range(2, 8)]
    with pytest.raises(DataError, match=r"a\.parquet, row 2: column 'label' is None: a label must be a number"):
        list(tc.Reader(tmp_path / "a.parquet", **options))


def test_large_numbers_have_the_same_buckets_as_in_csv(tmp_path: Path) -> None:
    numbers = Numeric(to="keys", bucket="log_square", standardize=False)
    options: dict[str, Any] = {"numeric": ("n",), "numeric_features": numbers, "batch_size": 9}
    values = [1e19, 3.0, 1e300, -5.0, 1.5]
    pq.write_table(pa.table({"label": [0.0] * 5, "n": values}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("label,n\n" + "".join(f"0,{x!r}\n" for x in values))
    keys = [next(iter(tc.Reader(tmp_path / name, **options))).ids.tolist() for name in ("a.parquet", "a.csv")]
    assert keys[0] == keys[1]
    for wrong in (-1e19, float("inf"), float("-inf")):
        pq.write_table(pa.table({"label": [0.0], "n": [wrong]}), tmp_path / "b.parquet")
        with pytest.raises(DataError, match=r"row 1: column 'n' is .*: its bucket number does not fit"):
            list(tc.Reader(tmp_path / "b.parquet", **options))


def test_duplicate_column_names_are_rejected(tmp_path: Path) -> None:
    columns = [pa.array([1.0]), pa.array([1]), pa.array([2])]
    pq.write_table(pa.table(columns, names=["label", "a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'a' occurs twice"):
        tc.Reader(tmp_path / "a.parquet", batch_size=9)


def test_columns_are_read_by_name_in_any_order(tmp_path: Path) -> None:
    columns = {"label": pa.array([1, 0]), "a": pa.array(["x", "y"]), "b": pa.array([1, 2]), "n": pa.array([0.5, 1.5])}
    order = ["n", "b", "label", "a"]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pq.write_table(pa.table({name: columns[name] for name in order}), tmp_path / "b.parquet")
    options: dict[str, Any] = {"numeric": ("n",), "batch_size": 9}
    first = tc.Reader(tmp_path / "a.parquet", **options)
    other = tc.Reader(tmp_path / "b.parquet", features=first.features, **options)
    assert examples_of(first) == examples_of(other)
    both = tc.Reader([tmp_path / "a.parquet", tmp_path / "b.parquet"], **options)
    assert examples_of(both) == examples_of(first) * 2


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (pa.array([1, 2], pa.time32("s")), {}, "column 'c' has type time32.*keys can be made of strings, bytes"),
        (pa.array([{"a": 1}, {"a": 2}]), {}, "column 'c' has type struct"),
        (pa.array([1.5, 2.5]), {"raw_keys": True}, "column 'c' has type double; keys can be made of integers"),
        (pa.array(["1", "2"]), {"numeric": ("c",)}, "column 'c' has type string; a numeric column must have numbers"),
    ],
)
def test_unsupported_column_types_are_rejected(
    tmp_path: Path, column: Any, options: dict[str, Any], message: str
) -> None:
    pq.write_table(pa.table({"label": pa.array([1, 0]), "k": pa.array([1, 2]), "c": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        tc.Reader(tmp_path / "a.parquet", batch_size=2, **options)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 this is no Parquet file")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: ") as error:
        tc.Reader(path, batch_size=2)
    assert "\n" not in str(error.value)


def test_row_group_that_needs_too_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated value takes a few bytes of the file, but 8 bytes per value in memory: columns read are counted."""
    lists = pa.array([[7] * 5000, [7] * 5000])
    columns = {"label": pa.array([1, 0]), "a.b": pa.array([1, 2]), "large": lists, "other": lists}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    reader = tc.Reader(tmp_path / "a.parquet", batch_size=2, ignore=("other",))
    monkeypatch.setattr("thermocline.data.parquet.MAX_GROUP_BYTES", 100_000)
    assert len(examples_of(reader)) == 2
    monkeypatch.setattr("thermocline.data.parquet.MAX_GROUP_BYTES", 79_999)
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 needs 80\d\d\d bytes of memory: it must need"):
        examples_of(reader)
