"""Errors in files, columns and options: one line that names the cause and the allowed values."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from helpers.reader import examples_of, pack

import thermocline as tc
from thermocline.config.data import Data, Numeric, Synth
from thermocline.data import text_blocks
from thermocline.errors import DataError


def assert_data_error(message: str, *paths: Any, **options: Any) -> None:
    """Check that opening or reading raises a DataError of one line that matches `message`."""
    with pytest.raises(DataError) as error:
        list(tc.Reader(list(paths), **{"batch_size": 2, **options}))
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("label,a\n1,x\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "folder").mkdir()
    assert_data_error(r"trian\.csv: no such file \(.* has empty\.csv, folder, train\.csv\)", tmp_path / "trian.csv")
    assert_data_error(r"\*\.tsv matches no file", tmp_path / "*.tsv")
    assert_data_error(r"empty\.csv is empty", tmp_path / "train.csv", tmp_path / "empty.csv")
    assert_data_error("folder is a folder without files", tmp_path / "folder")
    assert_data_error("no input files")
    assert_data_error(r"nosuch://x/y\.csv: no file system for this protocol", "nosuch://x/y.csv")
    assert_data_error(r"memory://none/.*\.csv matches no file", "memory://none/*.csv")
    assert_data_error(r"memory://none/a\.csv: no such file", "memory://none/a.csv")
    (tmp_path / "header.csv").write_text("label,a\n")
    assert_data_error(r"header\.csv has no examples", tmp_path / "header.csv")
    assert len(examples_of(tc.Reader([tmp_path / "header.csv", tmp_path / "train.csv"], batch_size=2))) == 1


def test_globs_folders_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["a/1.csv", "a/2.csv", "a/b/3.csv", "a/_SUCCESS", "a/[x].csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"label,file\n1,{name}\n")

    def rows(*paths: Any) -> int:
        return len(examples_of(tc.Reader(list(paths), batch_size=2)))

    assert rows(tmp_path / "a") == 3
    assert rows(tmp_path / "a" / "?.csv") == 2
    assert rows(tmp_path / "**" / "[0-9].csv") == 3
    assert rows(tmp_path / "a" / "[x].csv") == 1  # an exact name has priority over a glob
    assert rows("~/a/1.csv", f"file://{tmp_path}/a/2.csv") == 2


def test_format_errors(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_text("label,a\n1,x\n")
    (tmp_path / "a.csv").write_text("label,a\n1,x\n")
    (tmp_path / "a.svm").write_text("1 2\n")
    assert_data_error(
        r"data\.format is not given, and the ending of '.*a\.data' does not tell it: set it to one of libsvm, "
        "libffm, criteo, csv, parquet, arrow, synth",
        tmp_path / "a.data",
    )
    assert_data_error("the files' endings differ", tmp_path / "a.csv", tmp_path / "a.svm")
    assert len(examples_of(tc.Reader(tmp_path / "a.data", format="csv", batch_size=2))) == 1
    numeric = {"numeric": ("a",)}
    assert_data_error(
        "data.numeric is .*, but format libsvm does not use it: remove it; it is for criteo, csv",
        tmp_path / "a.svm",
        **numeric,
    )
    assert_data_error(
        "data.fields is 'one', but format csv does not use it: remove it; it is for libsvm",
        tmp_path / "a.csv",
        fields="one",
    )
    assert_data_error("is generated data and has no files", tmp_path / "a.csv", format="synth")


def test_column_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,age,site\n1,2,x\n")
    path = tmp_path / "a.csv"
    assert_data_error(r"a\.csv has no label column 'label': set data\.label to one of 'click', 'age', 'site'", path)
    label = {"label": "click"}
    assert_data_error(
        "data.numeric names 'ages', but .*a.csv has no such column: it has 'click', 'age', 'site'",
        path,
        numeric=("ages",),
        **label,
    )
    assert_data_error(r"data\.ignore names 'x_\*', but", path, ignore=("x_*",), **label)
    assert_data_error(
        "column 'age' is in data.numeric and in data.categorical: remove it from one",
        path,
        numeric=("age",),
        categorical=("age",),
        **label,
    )
    assert_data_error("has no categorical column", path, numeric=("*",), **label)
    (tmp_path / "twice.csv").write_text("label,a,a\n1,2,x\n")
    assert_data_error(r"twice\.csv, line 1: column 'a' occurs twice", tmp_path / "twice.csv")
    (tmp_path / "none.csv").write_text("\n1,2\n")
    assert_data_error(r"none\.csv, line 1: the header is empty", tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"label,gr\xfc\xdfe\n1,2\n")
    assert_data_error(r"latin\.csv, line 1: the header is not UTF-8", tmp_path / "latin.csv")
    (tmp_path / "quote.csv").write_bytes(b'label,"a"b\n1,2\n')
    assert_data_error(r"quote\.csv, line 1: the header is not valid CSV", tmp_path / "quote.csv")
    (tmp_path / "index.csv").write_bytes(b",label,a\n0,1,x\n1,0,y\n")
    assert_data_error(r"index\.csv: column 1 has no name", tmp_path / "index.csv")
    assert tc.Reader(tmp_path / "index.csv", ignore=("",), batch_size=2).field_names == ("a",)
    (tmp_path / "long.csv").write_bytes(b"x" * 300_000)
    assert_data_error(r"long\.csv: the first line is longer than", tmp_path / "long.csv")


def test_headers_and_features_must_match(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n1,2,x\n")
    (tmp_path / "b.csv").write_text("label,b,a\n1,2,x\n")
    (tmp_path / "c.csv").write_text("label,a\n1,2\n")
    assert_data_error(
        r"b\.csv has a different header than .*a\.csv: column 2 is 'b' instead of 'a'",
        tmp_path / "a.csv",
        tmp_path / "b.csv",
    )
    assert_data_error(
        r"c\.csv has a different header than .*a\.csv: column 3 is missing instead of 'b'",
        tmp_path / "a.csv",
        tmp_path / "c.csv",
    )
    features = tc.Reader(tmp_path / "a.csv", batch_size=2).features
    assert_data_error(
        r"c\.csv has different columns than the training data: it lacks 'b' \(add them; values may be empty\)$",
        tmp_path / "c.csv",
        features=features,
    )
    assert_data_error(
        r"b\.csv has the columns of the training data in a different order: column 1 is 'b' instead of 'a'",
        tmp_path / "b.csv",
        train=(str(tmp_path / "a.csv"),),
    )


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_column_differences_and_their_fixes(tmp_path: Path, ending: str) -> None:
    """Columns are compared with the training data, and the fix in the message works."""

    def write(name: str, **columns: object) -> Path:
        path, table = tmp_path / f"{name}.{ending}", pa.table({column: [value] for column, value in columns.items()})
        write_table = csv.write_csv if ending == "csv" else pq.write_table
        write_table(table, path)
        return path

    plain: dict[str, Any] = {"numeric": ("price",), "ignore": ("id",)}
    train = write("train", label=1, id=7, site="x", user="y", price=2.5)
    features = tc.Reader(train, batch_size=1, **plain).features
    given = {"features": features, **plain}
    without_id = tc.Reader(write("new", label=1, site="x", user="y", price=2.5), batch_size=1, **given)
    assert examples_of(without_id) == examples_of(tc.Reader(train, batch_size=1, **plain))
    other = write("other", label=1, site="x", shop="z", day=3)
    assert_data_error(
        r"other\.\w+ has different columns than the training data: it lacks 'user', 'price' \(add them; values "
        r"may be empty\); it also has 'shop', 'day' \(set data\.ignore to \[\"id\", \"shop\", \"day\"\]\)",
        other,
        **given,
    )
    more = write("more", label=1, id=7, site="x", user="y", price=2.5, shop="z")
    assert_data_error(r"training data: it also has 'shop' \(set data\.ignore to \[\"id\", \"shop\"\]\)$", more, **given)
    fixed = tc.Reader(more, batch_size=1, **{**given, "ignore": ("id", "shop")})
    assert examples_of(fixed) == examples_of(without_id)
    assert_data_error(
        r"column 'price' is a field of keys, but a dense feature in the training data",
        train,
        features=features,
        ignore=("id",),
    )
    assert_data_error(
        r"has no column of the training data: it has 'a', not 'site', 'user', 'price'",
        write("a", label=1, a=1),
        **given,
    )
    unlabelled = write("unlabelled", site="x", user="y", price=2.5)
    assert_data_error(
        "has no label column 'label': set data.label to one of .*; prediction needs no label", unlabelled, **given
    )
    assert examples_of(tc.Reader(unlabelled, batch_size=1, labelled=False, **given))


def test_libsvm_and_libffm_lines_must_match_the_fields(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:1 2:1\n0 1:1 2:1\n1 5:1\n")
    assert_data_error(r'a\.svm, line 3: .*"position".*"one"', tmp_path / "a.svm")
    (tmp_path / "b.svm").write_text("1\n0 1:1\n")
    assert_data_error(
        r'b\.svm: the first line has no ids.*data\.num_fields, or data\.fields = "one"', tmp_path / "b.svm"
    )
    assert len(examples_of(tc.Reader(tmp_path / "b.svm", fields="one", batch_size=2))) == 2
    (tmp_path / "c.ffm").write_text("1 0:1:1\n" + "0 1:2:1\n" * 40_000 + "1 7:3:1\n")
    assert_data_error(r"c\.ffm, line 40002: .*7", tmp_path / "c.ffm")
    assert len(examples_of(tc.Reader(tmp_path / "c.ffm", num_fields=8, batch_size=500))) == 40_002
    (tmp_path / "d.ffm").write_text("1 5 6\n")
    assert_data_error("the first lines have no field:id", tmp_path / "d.ffm")


@pytest.mark.parametrize("compression", [None, ".gz", ".zst"])
def test_line_numbers_count_from_the_start_of_the_file(tmp_path: Path, compression: str | None) -> None:
    lines = [b"label,a"] + [b"1,x" for _ in range(5000)]
    lines[4321] = b"one,x"
    path = tmp_path / f"a.csv{compression or ''}"
    path.write_bytes(pack(b"\r\n".join(lines), compression))
    assert_data_error(r"a\.csv\S*, line 4322: .*one", path, block_bytes=1000)
    reader = tc.Reader(path, block_bytes=1000, on_error="skip", batch_size=4999)
    assert [len(batch) for batch in reader] == [4999]
    assert reader.skipped.count == 1
    assert "line 4322" in reader.skipped.first[0]


def test_skipped_lines_are_counted_and_the_first_described(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a\n" + "1,x\n" + "bad\n" * 1000)
    reader = tc.Reader(tmp_path / "a.csv", on_error="skip", batch_size=2, block_bytes=64)
    for _ in range(2):  # the count restarts with each iteration
        assert len(list(reader)) == 1
        assert reader.skipped.count == 1000
        assert [text.split(":")[0][-7:].strip() for text in reader.skipped.first] == [f"line {i}" for i in range(3, 13)]
    assert_data_error(
        "all 1002 lines are malformed; the first: .*a.csv, line 1",
        tmp_path / "a.csv",
        on_error="skip",
        format="libsvm",
        fields="one",
    )


def test_files_with_only_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a\n\n\r\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"label,a\n"))
    assert_data_error(r"a\.csv has no examples: all lines are empty", tmp_path / "a.csv")
    assert_data_error(r"b\.csv\.gz has no examples: all lines are empty", tmp_path / "b.csv.gz")
    assert_data_error(r"a\.csv and 1 other file have no examples", tmp_path / "a.csv", tmp_path / "b.csv.gz")


def test_damaged_compression(tmp_path: Path) -> None:
    complete = gzip.compress(b"".join(b"1 %d\n" % i for i in range(100_000)))
    (tmp_path / "cut.svm.gz").write_bytes(complete[:-1000])
    assert_data_error(r"cut\.svm\.gz cannot be read: ", tmp_path / "cut.svm.gz")
    (tmp_path / "flip.svm.gz").write_bytes(complete[:5000] + bytes([complete[5000] ^ 255]) + complete[5001:])
    assert_data_error(r"flip\.svm\.gz", tmp_path / "flip.svm.gz")
    (tmp_path / "not.svm.gz").write_bytes(b"1 2 3\n")
    assert_data_error(r"not\.svm\.gz cannot be read: ", tmp_path / "not.svm.gz")
    (tmp_path / "not.svm.zst").write_bytes(b"1 2 3\n")
    assert_data_error(r"not\.svm\.zst cannot be read: ", tmp_path / "not.svm.zst")


def test_file_changed_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_bytes(b"1 2 3\n" * 1000)
    reader = tc.Reader(path, batch_size=10, block_bytes=60, threads=1)
    batches = iter(reader)
    next(batches)
    with path.open("ab") as file:
        file.write(b"1 2 3\n")
    with pytest.raises(DataError, match=r"a\.svm changed while it was read: it had 6000 bytes, now it has 6006"):
        list(batches)
    with pytest.raises(DataError, match=r"a\.svm changed while it was read"):
        list(reader)  # the next epoch
    path.unlink()
    with pytest.raises(DataError, match=r"a\.svm: no such file"):
        list(reader)


def test_too_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "MAX_LINE", 10_000)
    text = b"1 2\n" + b"1 " + b"3" * 50_000 + b"\n"
    (tmp_path / "a.svm").write_bytes(text)
    (tmp_path / "a.svm.gz").write_bytes(gzip.compress(text))
    for name in ("a.svm", "a.svm.gz"):
        assert_data_error("line 2: longer than 10000 bytes", tmp_path / name, block_bytes=100)


def test_option_errors() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: Data(format="xml"), "data.format is 'xml': it must be one of libsvm, libffm"),  # type: ignore[arg-type]
        (lambda: Data(on_error="ignore"), "data.on_error is 'ignore': it must be one of raise, skip"),  # type: ignore[arg-type]
        (lambda: Data(fields="two"), "data.fields is 'two': it must be one of position, one"),  # type: ignore[arg-type]
        (lambda: Data(delimiter="||"), "data.delimiter is '||': it must be one ASCII character"),
        (lambda: Data(categorical=(1,)), "data.categorical[0] is 1: it must be a column name"),  # type: ignore[arg-type]
        (lambda: Data(shuffle_buffer=0), "data.shuffle_buffer is 0: it must be at least 1"),
        (lambda: Data(threads=0), "data.threads is 0: it must be at least 1"),
        (lambda: Data(num_fields=0), "data.num_fields is 0: it must be 1 to 65536"),
        (lambda: Data(label_threshold=float("nan")), "data.label_threshold is nan: it must be a finite number"),
        (lambda: Data(format="synth", valid=("a.csv",)), "data.valid is ['a.csv']: it must be left out with format"),
        (lambda: Numeric(to="both"), "data.numeric_features.to is 'both'"),  # type: ignore[arg-type]
        (
            lambda: Numeric(bucket=0.0, to="keys"),
            "data.numeric_features.bucket is 0.0: it must be a finite number, above 0",
        ),
        (
            lambda: Numeric(bucket="log_square"),
            "data.numeric_features.bucket is 'log_square': it must be \"none\" when",
        ),
        (
            lambda: Numeric(to="keys", bucket="log_square", log=True),
            "data.numeric_features.log is True: it must be false",
        ),
        (lambda: Numeric(fit_rows=0), "data.numeric_features.fit_rows is 0"),
        (lambda: Synth(zipf=float("inf")), "data.synth.zipf is inf: it must be a finite number, at least 0"),
        (lambda: Synth(examples=0), "data.synth.examples is 0: it must be at least 1"),
        (lambda: tc.Reader("x", batch_size=0), "batch_size is 0: it must be at least 1"),
        (lambda: tc.Reader("x", batch_size=1, shard=(2, 2)), "shard is (2, 2): it must be (number, count)"),
        (lambda: tc.Reader("x", batch_size=1, seed=-1), "seed is -1: it must be from 0"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    assert Data(categorical="ab").categorical == ("ab",)  # type: ignore[arg-type]
