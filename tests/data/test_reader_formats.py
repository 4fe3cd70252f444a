"""Every format against the reference reader: random and hostile files, any block size, compressed or not."""

from __future__ import annotations

import functools
import gzip
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.reader import (
    CRITEO,
    Example,
    Malformed,
    criteo_row,
    examples_of,
    key,
    lines_of,
    pack,
    split_row,
    svm_example,
    table_example,
)
from hypothesis import assume, given, settings, strategies as st

import thermocline as tc
from thermocline.config.data import Numeric
from thermocline.errors import DataError

ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
COMPRESSIONS = st.sampled_from([None, None, ".gz", ".zst"])
counter = itertools.count()


def reference_examples(
    texts: Sequence[bytes], parse: Callable[[bytes], Example], blank: bytes
) -> tuple[list[Example], list[tuple[int, int]]]:
    """Parse all files; return the examples, and (file, line) of each malformed line."""
    examples, malformed = [], []
    for file, text in enumerate(texts):
        for line, content in lines_of(text, blank):
            try:
                examples.append(parse(content))
            except Malformed:
                malformed.append((file, line))
    return examples, malformed


def check(
    folder: Path,
    texts: Sequence[bytes],
    ending: str,
    parse: Callable[[bytes], Example],
    *,
    header: bytes = b"",
    compression: str | None = None,
    close: bool = False,
    blank: bytes = b"",
    **options: Any,
) -> None:
    """Check that `tc.Reader` and the reference reader return the same examples and errors for these files."""
    options = {"label_values": "any", **options}
    folder = folder / str(next(counter))
    folder.mkdir()
    paths = [folder / f"{i}{ending}{compression or ''}" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(pack(header + text, compression))
    expected, malformed = reference_examples(texts, parse, blank)
    lines = 1 if header else 0
    where = [f"{paths[file]}, line {line + lines}: " for file, line in malformed]
    reader = tc.Reader(paths, on_error="skip", **options)
    if malformed and not expected:
        with pytest.raises(DataError, match=f"all {len(malformed)} lines are malformed; the first: {where[0]}"):
            list(reader)
        return
    if not expected:
        with pytest.raises(DataError, match="all lines are empty"):
            list(reader)
        return
    actual = examples_of(reader)
    if close:
        assert [row[:2] for row in actual] == [row[:2] for row in expected]
        assert np.allclose([row[2] for row in actual], [row[2] for row in expected], rtol=1e-6, atol=1e-6)
    else:
        assert actual == expected
    assert reader.skipped.count == len(malformed)
    assert [re.match(".*, line [0-9]+: ", text)[0] for text in reader.skipped.first] == where[:10]  # type: ignore[index]
    if malformed:
        with pytest.raises(DataError) as error:
            list(tc.Reader(paths, **options))
        assert str(error.value).startswith(where[0])
        assert "\n" not in str(error.value)
    else:
        assert examples_of(tc.Reader(paths, **options)) == actual


def joined(lines: Sequence[bytes], end: bytes, last: bool) -> bytes:
    return end.join(lines) + (end if last else b"")


# ---- LibSVM and LibFFM

LABELS = st.sampled_from([b"0", b"1", b"-1", b"+1", b"0.5", b"1e-3", b"7"])
IDS = st.one_of(st.integers(0, 30), st.integers(0, 2**70)).map(lambda n: str(n).encode())
WEIGHTS = st.sampled_from([b"", b"", b":1", b":1.0", b":0.25", b":-3e2", b":0"])
HOSTILE = st.lists(st.sampled_from([*b'0123456789:::.  \t-+eEx,"#\r\0\xff']), min_size=1, max_size=12).map(bytes)
SPACES = st.sampled_from([b" ", b"\t", b"  "])


@st.composite
def svm_line(draw: Any, fields: int, ffm: bool) -> bytes:
    if draw(st.integers(0, 5)) == 0:
        return draw(HOSTILE)  # type: ignore[no-any-return]
    count = fields if not ffm else draw(st.integers(0, 6))
    tokens = [draw(LABELS)]
    for _ in range(count):
        field = str(draw(st.integers(0, fields - 1))).encode() + b":" if ffm else b""
        tokens.append(field + draw(IDS) + draw(WEIGHTS))
    return draw(SPACES).join(tokens)  # type: ignore[no-any-return]


@given(st.data(), st.integers(1, 4), st.sampled_from(["position", "one", "ffm"]), st.booleans())
def test_libsvm_and_libffm(tmp_path: Path, data: st.DataObject, fields: int, kind: str, raw: bool) -> None:
    ffm, one = kind == "ffm", kind == "one"
    line = svm_line(fields, ffm)
    files = data.draw(st.lists(st.lists(line, min_size=1, max_size=12), min_size=1, max_size=3))
    texts = [joined(lines, data.draw(ENDS), data.draw(st.booleans())) for lines in files]
    assume(all(texts))
    parse = functools.partial(svm_example, ffm=ffm, fields=1 if one else fields, one_bag=one, raw=raw)
    options = {"fields": "one"} if one else {"num_fields": fields}
    check(
        tmp_path,
        texts,
        ".ffm" if ffm else ".svm",
        parse,
        blank=b" \t",
        compression=data.draw(COMPRESSIONS),
        batch_size=data.draw(st.integers(1, 9)),
        block_bytes=data.draw(st.integers(1, 60)),
        raw_keys=raw,
        **options,
    )


def test_number_of_fields_is_inferred(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_bytes(b"\n1 5:1 6:2 7\n0 1 2 3\n")
    (tmp_path / "a.ffm").write_bytes(b"1 0:5:1 38:6:2\n0 3:1:1\n")
    assert tc.Reader(tmp_path / "a.svm", batch_size=2).field_names == ("0", "1", "2")
    assert tc.Reader(tmp_path / "a.ffm", batch_size=2).fields == 39
    batch = next(iter(tc.Reader(tmp_path / "a.svm", batch_size=2)))
    assert batch.weights is not None
    assert batch.weights.tolist() == [1, 2, 1, 1, 1, 1]
    assert batch.ids[:3].tolist() == [key("0", b"5"), key("1", b"6"), key("2", b"7")]


# ---- Criteo and CSV

VALUES = st.sampled_from([b"", b"a", b"0", b"17", b"-3", b"2.5", b"1e3", b"7a3f09bc", "é€".encode(), b"x" * 50])
NUMBERS = st.sampled_from(
    [b"", b" ", b"0", b"1", b"2", b"3", b"-2", b"44", b"-0.5", b"1e9", b"123456789", b".5", b"4."]
)
NUMERICS = [
    Numeric(to="keys", bucket="log_square"),
    Numeric(to="keys", bucket="none"),
    Numeric(to="keys", bucket=2.5, standardize=False),
    Numeric(standardize=False),
    Numeric(standardize=False, log=True),
]


@given(st.data(), st.sampled_from(NUMERICS))
def test_criteo(tmp_path: Path, data: st.DataObject, numbers: Numeric) -> None:
    number = "dense" if numbers.to == "dense" else "number_key"
    roles = [("label", "label"), *((number, name) for name in CRITEO[1:14]), *(("key", name) for name in CRITEO[14:])]
    row = st.tuples(LABELS, *[NUMBERS] * 13, *[VALUES] * 26).map(b"\t".join)
    line = st.one_of(row, row, row, HOSTILE, row.map(lambda text: text[:-3].replace(b"17", b"nan", 1)))
    files = data.draw(st.lists(st.lists(line, min_size=1, max_size=6), min_size=1, max_size=2))
    texts = [joined(lines, data.draw(ENDS), data.draw(st.booleans())) for lines in files]

    def parse(line: bytes) -> Example:
        if b"\0" in line:
            raise Malformed(line)
        return table_example(line.split(b"\t"), roles, numbers)

    options = {"batch_size": data.draw(st.integers(1, 5)), "block_bytes": data.draw(st.integers(1, 400))}
    compression = data.draw(COMPRESSIONS)
    close = numbers.log
    check(
        tmp_path, texts, ".txt", parse, compression=compression, format="criteo", numeric_features=numbers, close=close,
        **options,
    )  # fmt: skip


@given(st.data(), st.sampled_from([",", "\t", ";"]), st.sampled_from(NUMERICS), st.booleans())
@settings(max_examples=150)
def test_csv(tmp_path: Path, data: st.DataObject, delimiter: str, numbers: Numeric, raw: bool) -> None:
    number = "dense" if numbers.to == "dense" else "number_key"
    names = data.draw(st.permutations(["click", "age", "site", "ad", "junk"]))
    of_name = {"click": "label", "age": number, "site": "key", "ad": "key", "junk": "ignore"}
    roles = [(of_name[name], name) for name in names]
    text = st.lists(st.sampled_from([*b"ab,;\t \"'"]), max_size=5).map(bytes)
    word = st.one_of(VALUES, text.map(lambda value: b'"' + value.replace(b'"', b'""') + b'"'), text)
    if raw:
        word = st.one_of(st.integers(0, 2**64 + 1).map(lambda n: str(n).encode()), st.just(b'"12"'), st.just(b""))
    values = {"label": LABELS, number: NUMBERS, "key": word, "ignore": word}
    row = st.tuples(*[values[role] for role, _ in roles]).map(delimiter.encode().join)
    files = data.draw(st.lists(st.lists(row, min_size=1, max_size=8), min_size=1, max_size=2))
    texts = [joined(lines, data.draw(ENDS), data.draw(st.booleans())) for lines in files]
    header = delimiter.encode().join(f'"{name}"'.encode() if name == "ad" else name.encode() for name in names)

    def parse(line: bytes) -> Example:
        return table_example(split_row(line, delimiter), roles, numbers, raw)

    check(
        tmp_path,
        texts,
        ".tsv" if delimiter == "\t" else ".csv",
        parse,
        header=data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
        + header
        + data.draw(st.sampled_from([b"\n", b"\r\n"])),
        compression=data.draw(COMPRESSIONS),
        close=numbers.log,
        label="click",
        numeric=("age",),
        ignore=("ju*",),
        numeric_features=numbers,
        raw_keys=raw,
        line_breaks=False,
        delimiter=None if delimiter == "\t" else delimiter,
        batch_size=data.draw(st.integers(1, 5)),
        block_bytes=data.draw(st.integers(1, 60)),
    )


# ---- formats against each other


@pytest.mark.parametrize(
    "numbers",
    [None, Numeric(log=True), Numeric(standardize=False), Numeric(to="keys", bucket=0.5, log=True)],
    ids=["log_square", "standardized", "plain", "width"],
)
def test_criteo_csv_and_parquet_give_the_same_batches(tmp_path: Path, numbers: Numeric | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(5)
    rows = [criteo_row(rng) for _ in range(300)]
    (tmp_path / "a.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("".join(",".join(row) + "\n" for row in [CRITEO, *rows]))
    columns = list(zip(*rows, strict=True))
    table: dict[str, Any] = {"label": pa.array([int(value) for value in columns[0]], pa.int8())}
    for name, column in zip(CRITEO[1:14], columns[1:14], strict=True):
        kind = pa.float64() if name == "I3" else pa.int32()
        table[name] = pa.array([None if value == "" else int(value) for value in column], kind)
    for i, (name, column) in enumerate(zip(CRITEO[14:], columns[14:], strict=True)):
        values = pa.array([None if value == "" and i % 2 else value for value in column], pa.string())
        table[name] = values.cast([pa.large_string(), pa.binary(), pa.string()][i % 3])
        if i % 5 == 0:
            table[name] = pa.array(column).dictionary_encode()
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=70)
    rule = numbers or Numeric(to="keys", bucket="log_square")
    options: dict[str, Any] = {"batch_size": 64, "numeric_features": rule}
    readers = [
        tc.Reader(tmp_path / "a.txt", format="criteo", block_bytes=5000, **options),
        tc.Reader(tmp_path / "a.csv", numeric=CRITEO[1:14], **options),
        tc.Reader(tmp_path / "a.parquet", numeric=("I*",), **options),
    ]
    batches = [list(reader) for reader in readers]
    assert [len(part) for part in batches] == [5, 5, 5]
    assert readers[0].features == readers[1].features == readers[2].features
    assert readers[0].fields == (39 if rule.to == "keys" else 26)
    for of_each in zip(*batches, strict=True):
        bits = [(b.ids.tobytes(), b.offsets.tobytes(), np.asarray(b.label).tobytes()) for b in of_each]
        assert bits[0] == bits[1] == bits[2]
        if rule.to == "dense":
            assert of_each[0].dense.shape[1] == 13
            dense = [np.asarray(b.dense).tobytes() for b in of_each]
            assert dense[0] == dense[1] == dense[2]


def test_numbers_are_standardized_over_the_training_data(tmp_path: Path) -> None:
    ages = [3.0, 5.0, None, 10.0, -8.0, None, 2.0]
    lines = "".join(f"{i % 2},{'' if age is None else age},u{i}\n" for i, age in enumerate(ages))
    (tmp_path / "train.csv").write_text("label,age,user\n" + lines)
    (tmp_path / "test.csv").write_text("label,age,user\n1,2,a\n0,,b\n")
    numbers = Numeric(fit_rows=5)
    options: dict[str, Any] = {"numeric": ("age",), "numeric_features": numbers, "batch_size": 10, "block_bytes": 7}
    train = tc.Reader(tmp_path / "train.csv", **options)
    seen = np.array([3.0, 5.0, 10.0, -8.0])
    expected = [0.0 if age is None else (age - seen.mean()) / seen.std() for age in ages]
    assert np.allclose(np.concatenate([b.dense for b in train])[:, 0], expected, atol=1e-6)
    mean, deviation = train.features.statistics["age"]
    for test in (
        tc.Reader(tmp_path / "test.csv", features=train.features, **options),
        tc.Reader(tmp_path / "test.csv", train=(str(tmp_path / "train.csv"),), **options),
    ):
        assert np.allclose(next(iter(test)).dense[:, 0], [(2 - mean) / deviation, 0.0])


def test_constant_numeric_column(tmp_path: Path) -> None:
    """The standard deviation is 0: values are not divided."""
    (tmp_path / "a.csv").write_text("label,user,x\n1,a,3\n0,b,3\n1,c,\n")
    reader = tc.Reader(tmp_path / "a.csv", numeric=("x",), batch_size=9)
    assert reader.features.statistics == {"x": (3.0, 1.0)}
    assert np.asarray(next(iter(reader)).dense).tolist() == [[0.0], [0.0], [0.0]]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("block_bytes", [1, 2, 7, 1000])
def test_byte_order_mark_is_skipped(tmp_path: Path, ending: str, block_bytes: int) -> None:
    texts = {
        "svm": b"1 3:1 4:1\n0 5:1 6:1\n",
        "ffm": b"1 0:3:1 1:4:1\n0 0:5:1 1:6:1",
        "csv": b"label,a\n1,x\n0,y\n",
        "criteo": b"".join(b"%d%s\n" % (label, b"\t7" * 39) for label in (1, 0)),
    }
    for name, text in texts.items():
        options: dict[str, Any] = {"batch_size": 9, "block_bytes": block_bytes}
        options |= {"format": "criteo"} if name == "criteo" else {}
        results = []
        for mark in (b"", b"\xef\xbb\xbf"):
            path = tmp_path / f"{len(mark)}.{name}{ending}"
            path.write_bytes(gzip.compress(mark + text) if ending else mark + text)
            results.append(examples_of(tc.Reader(path, **options)))
        assert results[0] == results[1]
        assert len(results[0]) == 2


def test_optional_labels(tmp_path: Path) -> None:
    """labelled=False ignores empty and malformed labels; labelled=None reads labels if the file has them."""
    numbers = b"\t7" * 39
    texts = {"a.csv": b"label,a\n1,x\n,y\n", "b.csv": b"a\nx\ny\n"}
    texts |= {"a.tsv": b"1" + numbers + b"\n?" + numbers + b"\n", "b.tsv": (numbers[1:] + b"\n") * 2}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        options: dict[str, Any] = {"batch_size": 9, "format": "criteo" if name.endswith("tsv") else "csv"}
        (batch,) = tc.Reader(tmp_path / name, labelled=False, **options)
        assert np.asarray(batch.label).tolist() == [0, 0]
        reader = tc.Reader(tmp_path / name, labelled=None, on_error="skip", **options)
        assert np.asarray(next(iter(reader)).label).tolist() == ([1] if name[0] == "a" else [0, 0])
        assert reader.fields == batch.fields


def test_label_threshold_and_missing_labels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("rating,user\n5,a\n3,b\n4,c\n")
    (tmp_path / "b.csv").write_text("user\na\n\nb\n")
    reader = tc.Reader(tmp_path / "a.csv", label="rating", label_threshold=4, batch_size=9)
    assert np.asarray(next(iter(reader)).label).tolist() == [1, 0, 1]
    unlabelled = tc.Reader(tmp_path / "b.csv", labelled=False, features=reader.features, batch_size=9)
    batch = next(iter(unlabelled))
    assert np.asarray(batch.label).tolist() == [0, 0]
    assert batch.ids.tolist() == [key("user", b"a"), key("user", b"b")]
    with pytest.raises(DataError, match="no label column 'label'"):
        tc.Reader(tmp_path / "b.csv", batch_size=9)
