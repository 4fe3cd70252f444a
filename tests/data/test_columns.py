"""Columns of csv and parquet files: several values, line breaks, times, unique values, labels, ids carried along."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from helpers.cli import done, invoke, write_config
from helpers.reader import Example, examples_of, key, pack

import thermocline as tc
from thermocline.config.data import Data, TimeBucket
from thermocline.data.features import Features
from thermocline.errors import ConfigError, DataError


def read(path: Path, **options: Any) -> list[Example]:
    return examples_of(tc.Reader(path, batch_size=3, **{"labelled": None, **options}))


def write_csv(path: Path, columns: dict[str, list[Any]], end: str = "\n") -> Path:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    path.write_text(text.getvalue(), newline="")
    return path


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


# ---- several values


TAGS = ["a|b", "", "c", "|a||d|", "b|a|b"]
BAGS = [["a", "b"], [], ["c"], ["a", "d"], ["b", "a", "b"]]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_column_with_separator_is_a_bag(tmp_path: Path, ending: str) -> None:
    write: Any = write_csv if ending == "csv" else write_parquet
    path = write(tmp_path / f"a.{ending}", {"label": [0, 1, 0, 1, 1], "tags": TAGS, "shop": list("vwxyz")})
    bags = [bags for _, bags, _ in read(path, separators={"tags": "|"})]
    assert [[k for k, _ in tags] for tags, _ in bags] == [[key("tags", v.encode()) for v in bag] for bag in BAGS]
    assert [[k for k, _ in shop] for _, shop in bags] == [[key("shop", v.encode())] for v in "vwxyz"]
    (whole, _) = read(path)[0][1]
    assert whole == ((key("tags", b"a|b"), 1.0),)


def test_separator_may_be_the_delimiter_and_values_may_be_raw_keys(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"label": [0, 1], "ids": ["7, 8", f"{2**64 - 1}"]}
    files = [write_csv(tmp_path / "a.csv", columns), write_parquet(tmp_path / "a.parquet", columns)]
    for path in files:
        bags = [bags for _, (bags,), _ in read(path, separators={"ids": ", "}, raw_keys=True)]
        assert bags == [((7, 1.0), (8, 1.0)), ((2**64 - 1, 1.0),)]
    columns["ids"] = ["7", "8, x"]
    for path in (write_csv(files[0], columns), write_parquet(files[1], columns)):
        with pytest.raises(DataError, match=r"(?:line 3|row 2): column .ids."):
            read(path, separators={"ids": ", "}, raw_keys=True)
        assert len(read(path, separators={"ids": ", "}, raw_keys=True, on_error="skip")) == 1


def test_separator_errors(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"label": [0], "a": ["x"], "n": [1]})
    with pytest.raises(DataError, match=r"data\.separators names 'b', but .*a\.csv has no such column: it has 'label'"):
        read(path, separators={"b": "|"})
    with pytest.raises(DataError, match=r"data\.separators names 'n', which is not categorical in .*a\.csv"):
        read(path, separators={"n": "|"}, numeric="n")
    with pytest.raises(
        ConfigError, match=r"data\.separators is .*: it must be a table of columns and the text between"
    ):
        Data(separators={"a": ""})
    number = write_parquet(tmp_path / "a.parquet", {"label": [0], "a": [1]})
    with pytest.raises(DataError, match=r"column 'a' has type int64; data\.separators must name text"):
        read(number, separators={"a": "|"})
    (tmp_path / "a.libsvm").write_text("1 2\n")
    with pytest.raises(DataError, match="format libsvm does not use it"):
        read(tmp_path / "a.libsvm", separators={"a": "|"})


# ---- line breaks


def texts_with_line_breaks(rows: int) -> dict[str, list[Any]]:
    rng = random.Random(3)
    words = ["x", "y\nz", 'say "hi"\n', "a,b", "\n\n", '5" disk', "é\r\nü", ""]
    text = ["".join(rng.choices(words, k=rng.randrange(4))) for _ in range(rows)]
    return {"label": [rng.randrange(2) for _ in range(rows)], "text": text, "n": [i % 5 for i in range(rows)]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("compression", [None, ".gz"])
def test_quoted_line_breaks(tmp_path: Path, end: str, compression: str | None) -> None:
    columns = texts_with_line_breaks(300)
    path = write_csv(tmp_path / "a.csv", columns, end)
    if compression:
        packed = tmp_path / f"a.csv{compression}"
        packed.write_bytes(pack(path.read_bytes(), compression))
        path = packed
    expected = [
        (float(y), ((key("text", t.encode()), 1.0),), (key("n", str(n).encode()), 1.0))
        for y, t, n in zip(*columns.values(), strict=True)
    ]
    for block_bytes in (1, 40, 1000, None):
        examples = read(path, block_bytes=block_bytes)
        assert [(y, bags[0], bags[1][0]) for y, bags, _ in examples] == expected
    # Shuffled in two shards, and resumed in the middle of an epoch.
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 5, "block_bytes": 300, "shuffle_buffer": 40}
    shards = [list(tc.Reader(path, shard=(i, 2), **options)) for i in range(2)]
    both = [example for shard in shards for example in examples_of(shard)]
    assert sorted(map(str, both)) == sorted(map(str, read(path)))
    resumed = tc.Reader(path, shard=(1, 2), **options).seek(shards[1][3].position)
    assert examples_of(resumed) == examples_of(shards[1][4:])


def test_line_numbers_of_records_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('label,text,n\n1,"a\nb",1\n0,"c\n\nd",x\n1,e,2\n0,"f\n",y\n')
    with pytest.raises(DataError, match=r'a\.csv, line 4: column "n" \(3 of 3\): "x" is not a finite number'):
        read(path, numeric="n", block_bytes=4)
    reader = tc.Reader(path, batch_size=9, numeric="n", on_error="skip", labelled=None, block_bytes=4)
    assert [label for label, _, _ in examples_of(reader)] == [1.0, 1.0]
    assert [re.sub(".*(line .):.*", r"\1", text) for text in reader.skipped.first] == ["line 4", "line 8"]


def test_line_breaks_may_be_set_or_denied(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('label,text\n1,"a\nb"\n')
    advice = (
        r"line 2: column \"text\" .* does not end in this line; data\.line_breaks = true reads values of several lines"
    )
    with pytest.raises(DataError, match=advice):
        read(path, line_breaks=False)
    # The first line break comes after the sample that decides.
    path.write_text("label,text\n" + "0,abcdefgh\n" * 30_000 + '1,"a\nb"\n')
    with pytest.raises(DataError, match=r"line 30002: .*data\.line_breaks = true"):
        read(path)
    assert len(read(path, line_breaks=True)) == 30_001
    path.write_text('label,text\n1,"a\n' + "0,x\n" * 5_000_000)
    with pytest.raises(DataError, match="line 2: longer than 16777216 bytes; a quote does not end"):
        read(path, line_breaks=True)
    path.write_text('label,text\n1,"a\n0,b\n')  # a missing quote is no line break
    with pytest.raises(DataError, match=r'line 2: column "text" .* does not end in this line'):
        read(path)


def test_positions_know_whether_records_have_line_breaks(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"label": [0, 1, 0, 1], "a": list("wxyz")})
    batch = next(iter(tc.Reader(path, batch_size=2, line_breaks=True)))
    with pytest.raises(DataError, match="belongs to other data or settings"):
        tc.Reader(path, batch_size=2).seek(batch.position)


# ---- times


TIMES = [datetime.datetime(2026, 1, 1) + datetime.timedelta(hours=1001 * i, minutes=7) for i in range(60)]
PARTS: dict[TimeBucket, Any] = {
    "hour_of_day": lambda t: t.hour,
    "weekday": lambda t: t.weekday(),
    "hour_of_week": lambda t: 24 * t.weekday() + t.hour,
    "day_of_month": lambda t: t.day,
    "month": lambda t: t.month,
}


@pytest.mark.parametrize("bucket", PARTS)
def test_times_become_buckets(tmp_path: Path, bucket: TimeBucket) -> None:
    """The same keys from text, seconds, and Arrow's timestamps of any unit; a missing one has the key of ''."""
    expected = [key("at", str(PARTS[bucket](t)).encode()) for t in TIMES] + [key("at", b"")]
    labels = [0] * (len(TIMES) + 1)
    seconds = [int(t.replace(tzinfo=datetime.UTC).timestamp()) for t in TIMES]
    files = [
        write_csv(tmp_path / "text.csv", {"label": labels, "at": [*map(str, TIMES), ""]}),
        write_csv(tmp_path / "seconds.csv", {"label": labels, "at": [*seconds, ""]}),
        write_parquet(tmp_path / "seconds.parquet", {"label": labels, "at": [*seconds, None]}),
        write_parquet(tmp_path / "text.parquet", {"label": labels, "at": [*map(str, TIMES), None]}),
    ]
    for unit in ("s", "ms", "us", "ns"):
        array = pa.array([*TIMES, None], pa.timestamp(unit, "UTC" if unit == "us" else None))
        files.append(write_parquet(tmp_path / f"{unit}.parquet", {"label": labels, "at": array}))
    for path in files:
        assert [bags[0][0][0] for _, bags, _ in read(path, time_buckets={"at": bucket})] == expected, path


@pytest.mark.parametrize("text", ["2026-01-05 10:03:00", "2026-01-05T10:03:00.250Z", "2026-01-05", "2026/01/05 10:03"])
def test_times_without_a_bucket_are_refused(tmp_path: Path, text: str) -> None:
    path = write_csv(tmp_path / "a.csv", {"label": [0, 1], "at": [text, text]})
    advice = (
        r"a\.csv: column 'at' has times such as .*, which do not occur again: set data\.time_buckets = "
        r"\{ at = \"hour_of_day\" \}, .*or data\.time, .*or add it to data\.ignore"
    )
    with pytest.raises(DataError, match=advice):
        read(path)
    assert read(path, categorical="at")[0][1][0][0][0] == key("at", text.encode())  # named: as it is
    train = tc.Reader(path, batch_size=2, categorical="at")
    assert len(read(path, features=train.features)) == 2  # a run of an earlier version continues
    write_csv(path, {"label": [0, 1], "at": [text, "never"]})
    assert len(read(path)) == 2


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.date32()])
def test_times_without_a_bucket_are_refused_in_parquet(tmp_path: Path, kind: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"label": [0, 1], "at": pa.array(TIMES[:2]).cast(kind)})
    with pytest.raises(DataError, match=r"a\.parquet: column 'at' has type .*, times, which .* data\.time_buckets"):
        read(path)
    assert len(read(path, time_buckets={"at": "month"})) == 2


def test_time_bucket_errors(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", {"label": [0, 1], "at": ["2026-01-05", "soon"]})
    with pytest.raises(DataError, match=r'a\.csv, line 3: column "at" \(2 of 2\): "soon" is not a time: use seconds'):
        read(path, time_buckets={"at": "month"})
    assert len(read(path, time_buckets={"at": "month"}, on_error="skip")) == 1
    with pytest.raises(DataError, match=r"data\.time_buckets names 'on', but .*a\.csv has no such column"):
        read(path, time_buckets={"on": "month"})
    with pytest.raises(
        DataError, match=r"column 'at' is in data\.time_buckets and in data\.ignore: remove it from one"
    ):
        read(path, time_buckets={"at": "month"}, ignore="at")
    with pytest.raises(
        ConfigError, match=r"data\.time_buckets.* is 'year': it must be a table of .* one of hour_of_day"
    ):
        Data(time_buckets={"at": "year"})  # type: ignore[dict-item]
    huge = write_parquet(tmp_path / "a.parquet", {"label": [0, 1], "at": [float("nan"), 1e300]})
    with pytest.raises(DataError, match=r"row 2: column 'at' is 1e\+300: a time must be a timestamp, seconds since"):
        read(huge, time_buckets={"at": "month"})
    text = write_parquet(tmp_path / "text.parquet", {"label": [0, 0, 0], "at": ["2026-01-05", "", "soon"]})
    with pytest.raises(DataError, match=r"row 3: column 'at' is 'soon': a time must be"):
        read(text, time_buckets={"at": "month"})
    flag = write_parquet(tmp_path / "flag.parquet", {"label": [0], "at": [True]})
    with pytest.raises(DataError, match=r"has type bool; data\.time_buckets must name timestamps, dates, text or num"):
        read(flag, time_buckets={"at": "month"})


# ---- columns that differ in every row


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_column_that_differs_in_every_row_gives_a_warning(tmp_path: Path, ending: str) -> None:
    write: Any = write_csv if ending == "csv" else write_parquet
    columns = {"label": [0, 1] * 60, "id": [f"row {i}" for i in range(120)], "shop": [i // 2 for i in range(120)]}
    path = write(tmp_path / f"a.{ending}", columns)
    words = rf"a\.{ending}: column 'id' has a different value in each of the first 120 rows: .*data\.ignore"
    with pytest.warns(UserWarning, match=words) as caught:
        tc.Reader(path, batch_size=9)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = tc.Reader(path, batch_size=9, ignore="id")
        tc.Reader(path, batch_size=9, features=Features(("id", "shop")))  # no training data
        tc.Reader(write(path, {name: values[:99] for name, values in columns.items()}), batch_size=9)
    assert reader.fields == 1


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_column_of_lists_without_a_separator_gives_a_warning(tmp_path: Path, ending: str) -> None:
    write: Any = write_csv if ending == "csv" else write_parquet
    rng = np.random.default_rng(0)
    tags = ["|".join(f"tag{i}" for i in rng.choice(8, rng.integers(1, 5), replace=False)) for _ in range(300)]
    names = [f"city {i // 2}, state {i // 2 % 50}" for i in range(300)]  # as many elements as values
    path = write(tmp_path / f"a.{ending}", {"label": [0, 1] * 150, "genres": tags, "place": names})
    words = rf"a\.{ending}: column 'genres' has values such as 'tag.*\|.*set data\.separators = \{{ genres = \"\|\" \}}"
    with pytest.warns(UserWarning, match=words) as caught:
        tc.Reader(path, batch_size=9, ignore=[])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tc.Reader(path, batch_size=9, separators={"genres": "|"})
        tc.Reader(path, batch_size=9, categorical=["genres", "place"])


# ---- labels


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.csv", "label,a\n1,x\n0.0,y\n4,z\n", r"line 4: column \"label\" \(1 of 2\): the label \"4\" is neither"),
        ("a.tsv", "label\ta\n1\tx\n0\ty\n0.5\tz\n", r"line 4: .* the label \"0.5\" is neither"),
        (
            "a.libsvm",
            "1 5\n-1 5\n3 5\n",
            r"line 3: the label \"3\" is neither 0 nor 1 \(nor -1\); data\.label_threshold",
        ),
        ("a.libffm", "1 0:5\n-1 0:5\n3 0:5\n", r"line 3: the label \"3\" is neither"),
    ],
)
def test_labels_other_than_0_and_1(tmp_path: Path, name: str, text: str, where: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{re.escape(name)}, {where}"):
        read(path, labelled=True)
    reader = tc.Reader(path, batch_size=9, on_error="skip")
    assert [label for label, _, _ in examples_of(reader)] == [1.0, 0.0]
    assert reader.skipped.count == 1
    assert [label for label, _, _ in read(path, labelled=True, label_threshold=0.25)] == [1.0, 0.0, 1.0]
    assert read(path, labelled=True, label_values="any")[2][0] not in (0, 1)
    assert len(read(path, labelled=False)) == len(read(path, labelled=None)) == 3


def test_labels_other_than_0_and_1_in_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"label": [1, 0, 4], "a": list("xyz")}, row_group_size=2)
    with pytest.raises(
        DataError, match=r"a\.parquet, row 3: column 'label' is 4: a label must be 0 or 1; data\.label_t"
    ):
        read(path, labelled=True)
    assert [label for label, _, _ in read(path, labelled=True, on_error="skip")] == [1.0, 0.0]
    assert [label for label, _, _ in read(path, labelled=True, label_threshold=2)] == [0.0, 0.0, 1.0]
    assert [label for label, _, _ in read(path, labelled=True, label_values="any")] == [1.0, 0.0, 4.0]


# ---- ids carried along


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_carried_columns_stay_with_their_examples(tmp_path: Path, ending: str) -> None:
    write: Any = write_csv if ending == "csv" else write_parquet
    ids = [f'é "{i}"\n' for i in range(50)]
    columns = {"label": [0, 1] * 25, "id": ids, "a": [str(i) for i in range(50)]}
    train = tc.Reader(write(tmp_path / f"train.{ending}", {"label": [1], "a": ["0"]}), batch_size=1)
    path = write(tmp_path / f"a.{ending}", columns, **({"row_group_size": 7} if ending == "parquet" else {}))
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "block_bytes": 60, "features": train.features}
    reader = tc.Reader(path, carry=("id", "a"), **options)
    found = {}
    for batch in reader:
        assert list(reader.carried) == ["id", "a"]
        for name, text, hashed in zip(*(v.to_pylist() for v in reader.carried.values()), batch.ids, strict=True):
            found[name] = text
            assert hashed == key("a", text.encode())
    assert found == dict(zip(ids, columns["a"], strict=True))
    with pytest.raises(DataError, match=r"has no column 'user' to carry along: it has 'label', 'id', 'a'"):
        tc.Reader(path, carry=("user",), **options)


CONFIG = """
[data]
train = "train.csv"
[model]
name = "lr"
[tiers]
mem = "4MB"
[train]
batch_size = 16
tensorboard = false
torch_threads = 1
"""


@pytest.mark.usefixtures("command_folder")
def test_predict_carries_ids_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shops = [f"s{i}" for i in rng.integers(0, 9, 60)]
    write_csv(tmp_path / "train.csv", {"label": rng.integers(0, 2, 60).tolist(), "shop": shops})
    done("train", write_config(tmp_path, CONFIG))
    users = [f"u,{i}" for i in range(60)]
    write_csv(tmp_path / "new.csv", {"user": users, "shop": shops, "age": range(60)})  # type: ignore[dict-item]
    write_parquet(tmp_path / "new.parquet", {"user": users, "shop": shops, "age": list(range(60))})
    done("predict", "run", "train.csv", "--out", "plain.csv")
    expected = arrow_csv.read_csv(tmp_path / "plain.csv")["score"]
    for ending in ("csv", "parquet"):
        flags = ["--id", "user", "--id", "age", "--id", "shop"]
        done("predict", "run", f"new.{ending}", "--out", f"scores.{ending}", *flags)
    from_csv = arrow_csv.read_csv(tmp_path / "scores.csv")
    assert from_csv.column_names == ["user", "age", "shop", "score"]
    assert from_csv["user"].to_pylist() == users
    assert from_csv["shop"].to_pylist() == shops
    assert from_csv["score"] == expected
    from_parquet = pq.read_table(tmp_path / "scores.parquet")
    assert from_parquet.schema.field("age").type == pa.int64()
    assert from_parquet.column("age").to_pylist() == list(range(60))
    for flags, message in (
        (["--out", "s.npy"], "--id needs columns, which 's.npy' cannot have: write .csv or .parquet"),
        (["--id", "score"], '--id is "score", the name of the column of scores: rename the column of the data'),
    ):
        result = invoke("predict", "run", "new.csv", "--id", "user", *flags)
        assert result.exit_code == 2
        assert result.stderr == f"thermocline: {message}\n"


def test_new_keys_survive_the_config_file() -> None:
    data = Data(train="a.csv", separators={"a": "|"}, time_buckets={"t": "weekday"}, line_breaks=True)
    config = tc.Config(data=data)
    assert tc.Config.parse(config.to_toml()) == config
    flags = ['data.separators={ a = "|" }', "data.time_buckets.t=weekday", "data.line_breaks=true"]
    parsed = tc.Config.parse('[data]\ntrain = "a.csv"', flags)
    assert dataclasses.asdict(parsed.data) == dataclasses.asdict(data)
