"""What is wrong with files, columns and options: one line that names it and what is allowed."""

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


def refused(message: str, *paths: Any, **options: Any) -> None:
    """Opening or reading raises a DataError of one line."""
    with pytest.raises(DataError) as error:
        list(tc.Reader(list(paths), **{"batch_size": 2, **options}))
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("label,a\n1,x\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "folder").mkdir()
    refused(r"trian\.csv: there is no such file \(.* has empty\.csv, folder, train\.csv\)", tmp_path / "trian.csv")
    refused(r"\*\.tsv matches no file", tmp_path / "*.tsv")
    refused(r"empty\.csv is empty", tmp_path / "train.csv", tmp_path / "empty.csv")
    refused("folder is a folder without files", tmp_path / "folder")
    refused("no files are named")
    refused(r"nosuch://x/y\.csv: no file system for this protocol", "nosuch://x/y.csv")
    refused(r"memory://none/.*\.csv matches no file", "memory://none/*.csv")
    refused(r"memory://none/a\.csv: there is no such file", "memory://none/a.csv")
    (tmp_path / "header.csv").write_text("label,a\n")
    refused(r"header\.csv has no examples", tmp_path / "header.csv")
    assert len(examples_of(tc.Reader([tmp_path / "header.csv", tmp_path / "train.csv"], batch_size=2))) == 1


def test_globs_folders_and_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert rows(tmp_path / "a" / "[x].csv") == 1  # a file of that name comes before a glob
    assert rows("~/a/1.csv", f"file://{tmp_path}/a/2.csv") == 2


def test_formats(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_text("label,a\n1,x\n")
    (tmp_path / "a.csv").write_text("label,a\n1,x\n")
    (tmp_path / "a.svm").write_text("1 2\n")
    refused(r"data\.format is not given, and the ending of '.*a\.data' does not tell it: set it to one of libsvm, "
            "libffm, criteo, csv, parquet, synth", tmp_path / "a.data")  # fmt: skip
    refused("the files' endings differ", tmp_path / "a.csv", tmp_path / "a.svm")
    assert len(examples_of(tc.Reader(tmp_path / "a.data", format="csv", batch_size=2))) == 1
    numeric = {"numeric": ("a",)}
    refused("data.numeric is .*, but format libsvm has none: it is for criteo, csv", tmp_path / "a.svm", **numeric)
    refused("data.fields is 'one', but format csv has none: it is for libsvm", tmp_path / "a.csv", fields="one")
    refused("generated and has no files", tmp_path / "a.csv", format="synth")


def test_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,age,site\n1,2,x\n")
    path = tmp_path / "a.csv"
    refused(r"a\.csv has no label column 'label': set data\.label to one of 'click', 'age', 'site'", path)
    label = {"label": "click"}
    refused("data.numeric names 'ages', but .*a.csv has no such column: it has 'click', 'age', 'site'", path,
            numeric=("ages",), **label)  # fmt: skip
    refused(r"data\.ignore names 'x_\*', but", path, ignore=("x_*",), **label)
    refused("column 'age' is in data.numeric and again in data.categorical", path, numeric=("age",),
            categorical=("age",), **label)  # fmt: skip
    refused("has no column that becomes keys", path, numeric=("*",), **label)
    (tmp_path / "twice.csv").write_text("label,a,a\n1,2,x\n")
    refused(r"twice\.csv, line 1: column 'a' is there twice", tmp_path / "twice.csv")
    (tmp_path / "none.csv").write_text("\n1,2\n")
    refused(r"none\.csv, line 1: the header is empty", tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"label,gr\xfc\xdfe\n1,2\n")
    refused(r"latin\.csv, line 1: the header is not UTF-8", tmp_path / "latin.csv")
    (tmp_path / "quote.csv").write_bytes(b'label,"a"b\n1,2\n')
    refused(r"quote\.csv, line 1: the header is not csv", tmp_path / "quote.csv")
    (tmp_path / "index.csv").write_bytes(b",label,a\n0,1,x\n1,0,y\n")
    refused(r"index\.csv: column 1 has no name", tmp_path / "index.csv")
    assert tc.Reader(tmp_path / "index.csv", ignore=("",), batch_size=2).field_names == ("a",)
    (tmp_path / "long.csv").write_bytes(b"x" * 300_000)
    refused(r"long\.csv: its first line is longer than", tmp_path / "long.csv")


def test_headers_and_features_that_differ(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n1,2,x\n")
    (tmp_path / "b.csv").write_text("label,b,a\n1,2,x\n")
    (tmp_path / "c.csv").write_text("label,a\n1,2\n")
    refused(r"b\.csv has another header than .*a\.csv: number 2 is 'b' instead of 'a'", tmp_path / "a.csv",
            tmp_path / "b.csv")  # fmt: skip
    refused(r"c\.csv has another header than .*a\.csv: number 3 is nothing instead of 'b'", tmp_path / "a.csv",
            tmp_path / "c.csv")  # fmt: skip
    features = tc.Reader(tmp_path / "a.csv", batch_size=2).features
    refused(r"c\.csv has other columns than the training data: it lacks 'b' \(add them; empty values will do\)$",
            tmp_path / "c.csv", features=features)  # fmt: skip
    refused(r"b\.csv has the training data's columns in another order: number 1 is 'b' instead of 'a'",
            tmp_path / "b.csv", train=(str(tmp_path / "a.csv"),))  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_other_columns_there_are_and_what_to_do(tmp_path: Path, ending: str) -> None:
    """Whatever the settings say of columns, the comparison with the training data speaks; its advice helps."""

    def written(name: str, **columns: object) -> Path:
        path, table = tmp_path / f"{name}.{ending}", pa.table({column: [value] for column, value in columns.items()})
        write = csv.write_csv if ending == "csv" else pq.write_table
        write(table, path)
        return path

    plain: dict[str, Any] = {"numeric": ("price",), "ignore": ("id",)}
    train = written("train", label=1, id=7, site="x", user="y", price=2.5)
    features = tc.Reader(train, batch_size=1, **plain).features
    given = {"features": features, **plain}
    without_id = tc.Reader(written("new", label=1, site="x", user="y", price=2.5), batch_size=1, **given)
    assert examples_of(without_id) == examples_of(tc.Reader(train, batch_size=1, **plain))
    other = written("other", label=1, site="x", shop="z", day=3)
    refused(r"other\.\w+ has other columns than the training data: it lacks 'user', 'price' \(add them; empty values "
            r"will do\); it also has 'shop', 'day' \(set data\.ignore to \[\"id\", \"shop\", \"day\"\]\)",
            other, **given)  # fmt: skip
    more = written("more", label=1, id=7, site="x", user="y", price=2.5, shop="z")
    refused(r"training data: it also has 'shop' \(set data\.ignore to \[\"id\", \"shop\"\]\)$", more, **given)
    advised = tc.Reader(more, batch_size=1, **{**given, "ignore": ("id", "shop")})
    assert examples_of(advised) == examples_of(without_id)
    refused(r"column 'price' is a field of keys, but a dense feature in the training data", train,
            features=features, ignore=("id",))  # fmt: skip
    refused(r"has no column of the training data: it has 'a', not 'site', 'user', 'price'", written("a", label=1, a=1),
            **given)  # fmt: skip
    unlabelled = written("unlabelled", site="x", user="y", price=2.5)
    refused("has no label column 'label': set data.label to one of .*; predicting needs none", unlabelled, **given)
    assert examples_of(tc.Reader(unlabelled, batch_size=1, labelled=False, **given))


def test_libsvm_lines_that_do_not_fit_the_choice_of_fields(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:1 2:1\n0 1:1 2:1\n1 5:1\n")
    refused(r'a\.svm, line 3: .*"position".*"one"', tmp_path / "a.svm")
    (tmp_path / "b.svm").write_text("1\n0 1:1\n")
    refused(r'b\.svm: its first line has no ids.*data\.num_fields, or data\.fields = "one"', tmp_path / "b.svm")
    assert len(examples_of(tc.Reader(tmp_path / "b.svm", fields="one", batch_size=2))) == 2
    (tmp_path / "c.ffm").write_text("1 0:1:1\n" + "0 1:2:1\n" * 40_000 + "1 7:3:1\n")
    refused(r"c\.ffm, line 40002: .*7", tmp_path / "c.ffm")
    assert len(examples_of(tc.Reader(tmp_path / "c.ffm", num_fields=8, batch_size=500))) == 40_002
    (tmp_path / "d.ffm").write_text("1 5 6\n")
    refused("no field:id in its first lines", tmp_path / "d.ffm")


@pytest.mark.parametrize("compression", [None, ".gz", ".zst"])
def test_line_numbers_are_of_the_file(tmp_path: Path, compression: str | None) -> None:
    lines = [b"label,a"] + [b"1,x" for _ in range(5000)]
    lines[4321] = b"one,x"
    path = tmp_path / f"a.csv{compression or ''}"
    path.write_bytes(pack(b"\r\n".join(lines), compression))
    refused(r"a\.csv\S*, line 4322: .*one", path, block_bytes=1000)
    reader = tc.Reader(path, block_bytes=1000, on_error="skip", batch_size=4999)
    assert [len(batch) for batch in reader] == [4999]
    assert reader.skipped.count == 1
    assert "line 4322" in reader.skipped.first[0]


def test_skipped_lines_are_counted_and_few_described(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a\n" + "1,x\n" + "bad\n" * 1000)
    reader = tc.Reader(tmp_path / "a.csv", on_error="skip", batch_size=2, block_bytes=64)
    for _ in range(2):  # each iteration counts anew
        assert len(list(reader)) == 1
        assert reader.skipped.count == 1000
        assert [text.split(":")[0][-7:].strip() for text in reader.skipped.first] == [f"line {i}" for i in range(3, 13)]
    refused("all 1002 lines are malformed; the first: .*a.csv, line 1", tmp_path / "a.csv", on_error="skip",
            format="libsvm", fields="one")  # fmt: skip


def test_files_with_nothing_but_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a\n\n\r\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"label,a\n"))
    refused(r"a\.csv has no examples: there are only empty lines", tmp_path / "a.csv")
    refused(r"b\.csv\.gz has no examples: there are only empty lines", tmp_path / "b.csv.gz")
    refused(r"a\.csv has no examples, nor have the 1 others", tmp_path / "a.csv", tmp_path / "b.csv.gz")


def test_damaged_compression(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b"1 %d\n" % i for i in range(100_000)))
    (tmp_path / "cut.svm.gz").write_bytes(whole[:-1000])
    refused(r"cut\.svm\.gz cannot be read: ", tmp_path / "cut.svm.gz")
    (tmp_path / "flip.svm.gz").write_bytes(whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:])
    refused(r"flip\.svm\.gz", tmp_path / "flip.svm.gz")
    (tmp_path / "not.svm.gz").write_bytes(b"1 2 3\n")
    refused(r"not\.svm\.gz cannot be read: ", tmp_path / "not.svm.gz")
    (tmp_path / "not.svm.zst").write_bytes(b"1 2 3\n")
    refused(r"not\.svm\.zst cannot be read: ", tmp_path / "not.svm.zst")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match=r"a\.svm: there is no such file"):
        list(reader)


def test_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "MAX_LINE", 10_000)
    text = b"1 2\n" + b"1 " + b"3" * 50_000 + b"\n"
    (tmp_path / "a.svm").write_bytes(text)
    (tmp_path / "a.svm.gz").write_bytes(gzip.compress(text))
    for name in ("a.svm", "a.svm.gz"):
        refused("line 2: it is longer than 10000 bytes", tmp_path / name, block_bytes=100)


def test_options() -> None:
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
        (lambda: tc.Reader("x", batch_size=0), "batch_size is 0"),
        (lambda: tc.Reader("x", batch_size=1, shard=(2, 2)), r"shard is (2, 2): (number, count)"),
        (lambda: tc.Reader("x", batch_size=1, seed=-1), "seed is -1"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    assert Data(categorical="ab").categorical == ("ab",)  # type: ignore[arg-type]
