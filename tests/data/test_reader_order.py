"""Epochs, shards, positions and threads: the examples that a reader returns, and their order."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.reader import Example, contents, examples_of, write_arrow, write_files
from hypothesis import given, settings, strategies as st

import thermocline as tc
from thermocline.errors import DataError

KINDS = ["csv", "gz", "zst", "mixed", "parquet", "arrow", "streams", "weights"]


ANY: dict[str, Any] = {"label_values": "any"}
"""The label of an example is the number of its file."""


def make_files(folder: Path, kind: str, files: int = 3, lines: int = 60) -> tuple[list[str], dict[str, Any]]:
    """Write files in which every example has a unique value."""
    rows = [[(i, f"{i * lines + j}", f"u{j % 7}", j % 5 - 1.5) for j in range(lines)] for i in range(files)]
    if kind in ("parquet", "arrow", "streams"):
        ending = "arrow" if kind == "streams" else kind
        paths = [folder / f"{i}.{ending}" for i in range(files)]
        for i, (path, part) in enumerate(zip(paths, rows, strict=True)):
            table = pa.table({name: [row[k] for row in part] for k, name in enumerate(("label", "id", "user", "x"))})
            if kind == "parquet":
                pq.write_table(table, path, row_group_size=7)
            else:
                write_arrow(table, path, rows=7, stream=kind == "streams" and i != 1)  # one of them is a file
        return [str(path) for path in paths], {"numeric": ("x",), **ANY}
    if kind == "weights":
        texts = [b"".join(b"%d %s:%g\n" % (row[0], row[1].encode(), row[3]) for row in part) for part in rows]
        return write_files(folder, texts, ".svm"), {**ANY}
    header = b"label,id,user,x\n"
    texts = [header + "".join(",".join(map(str, row)) + "\n" for row in part).encode() for part in rows]
    if kind == "mixed":
        paths = write_files(folder / "a", texts[:1], ".csv") + write_files(folder / "b", texts[1:2], ".csv", ".gz")
        return [*paths, *write_files(folder / "c", texts[2:], ".csv")], {"numeric": ("x",), **ANY}
    return write_files(folder, texts, ".csv", None if kind == "csv" else f".{kind}"), {"numeric": ("x",), **ANY}


def reader(folder: Path, kind: str, **options: Any) -> tc.Reader:
    paths, columns = make_files(folder, kind)
    return tc.Reader(paths, **{"batch_size": 13, "block_bytes": 100, "shuffle_buffer": 30, **columns, **options})


def ordered(batches: Any) -> list[Example]:
    return sorted(examples_of(batches))


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_epoch_is_a_permutation_of_the_data(tmp_path: Path, kind: str) -> None:
    plain = reader(tmp_path, kind)
    whole = examples_of(plain)
    assert len(set(whole)) == 180
    assert [len(batch) for batch in plain] == [13] * 13 + [11]
    assert examples_of(plain) == whole
    shuffled = reader(tmp_path, kind, shuffle=True, seed=4)
    epochs = []
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        epochs.append(examples_of(shuffled))
        assert sorted(epochs[-1]) == sorted(whole)
        assert epochs[-1] != whole
    assert epochs[0] != epochs[1] != epochs[2]
    shuffled.set_epoch(1)
    assert examples_of(shuffled) == epochs[1]
    assert examples_of(reader(tmp_path, kind, shuffle=True, seed=5)) != epochs[0]
    assert examples_of(reader(tmp_path, kind, shuffle=True, seed=4)) == epochs[0]


def test_epochs_differ_in_the_order_of_splits_and_within_them(tmp_path: Path) -> None:
    paths, _ = make_files(tmp_path, "csv", files=1)
    one_block = tc.Reader(paths, ignore=("x",), batch_size=7, shuffle=True, **ANY)
    row_groups = reader(tmp_path, "parquet", shuffle=True, shuffle_buffer=1)
    whole = examples_of(reader(tmp_path, "parquet"))
    group = {example[1]: i // 60 * 9 + i % 60 // 7 for i, example in enumerate(whole)}
    within, blocks = [], []
    for epoch in range(3):
        one_block.set_epoch(epoch)
        row_groups.set_epoch(epoch)
        within.append(examples_of(one_block))
        numbers = [group[example[1]] for example in examples_of(row_groups)]
        blocks.append([number for number, _ in itertools.groupby(numbers)])
        assert sorted(blocks[-1]) == list(range(27))  # a shuffle chunk is one row group
    assert within[0] != within[1] != within[2] != within[0]
    assert blocks[0] != blocks[1] != blocks[2] != blocks[0]


def test_shuffle_chunks_differ_in_order(tmp_path: Path) -> None:
    table = pa.table({"label": [0.0] * 100, "id": list(range(100))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    chunks = tc.Reader(tmp_path / "a.parquet", raw_keys=True, shuffle=True, shuffle_buffer=25, batch_size=25)
    orders = {tuple((batch.ids % np.uint64(25)).tolist()) for batch in chunks}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(25)) for order in orders)


def test_shuffling_mixes_examples_within_and_across_files(tmp_path: Path) -> None:
    shuffled = reader(tmp_path, "csv", shuffle=True, batch_size=30)
    files = [collections.Counter(example[0] for example in examples_of([batch])) for batch in shuffled]
    assert sum(len(count) == 3 for count in files) >= 3  # a batch has examples of all files
    whole = tc.Reader(make_files(tmp_path, "csv")[0], numeric=("x",), batch_size=30, shuffle=True, **ANY)
    keys = np.array([example[1][0][0][0] for example in examples_of(whole)])
    plain = np.array([example[1][0][0][0] for example in examples_of(reader(tmp_path, "csv"))])
    rank = np.argsort(plain)[np.argsort(np.argsort(keys))]
    assert (np.abs(np.diff(rank)) == 1).mean() < 0.1  # one shuffle chunk: neighbours are separated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_are_disjoint_and_complete(tmp_path: Path, kind: str, shards: int) -> None:
    for shuffle in (False, True):
        whole = ordered(reader(tmp_path, kind, shuffle=shuffle))
        for epoch in (0, 1):
            parts = [reader(tmp_path, kind, shuffle=shuffle, shard=(i, shards)) for i in range(shards)]
            for part in parts:
                part.set_epoch(epoch)
            results = [examples_of(part) for part in parts]
            assert all(results)
            assert sorted(example for part in results for example in part) == whole


@given(st.data())
@settings(max_examples=40)
def test_any_block_size_shards_and_seed(tmp_path: Path, data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.integers(0, 9999999999), min_size=1, max_size=40, unique=True))
    cut = data.draw(st.integers(0, len(lines)))
    texts = ["".join(f"0 {line}\n" for line in part).encode() for part in (lines[:cut], lines[cut:]) if part]
    folder = tmp_path / str(time.monotonic_ns())
    paths = write_files(folder, texts, ".svm", data.draw(st.sampled_from([None, ".gz"])))
    options = {
        "block_bytes": data.draw(st.integers(1, 50)),
        "batch_size": data.draw(st.integers(1, 20)),
        "shuffle": data.draw(st.booleans()),
        "shuffle_buffer": data.draw(st.integers(1, 30)),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
        "threads": data.draw(st.integers(1, 4)),
    }
    count = data.draw(st.integers(1, 3))
    examples = []
    for number in range(count):
        if count > len(texts) and not paths[0].endswith(".gz"):
            options["block_bytes"] = 1  # every shard gets a block of even the shortest file
        part = tc.Reader(paths, shard=(number, count), **options)
        batches = list(part)
        examples += examples_of(batches)
        if batches:
            stop = data.draw(st.integers(0, len(batches) - 1))
            assert list(map(contents, part.seek(batches[stop].position))) == list(map(contents, batches[stop + 1 :]))
    assert sorted(examples) == ordered(tc.Reader(paths, batch_size=99))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_resuming_at_any_batch_gives_identical_batches(tmp_path: Path, kind: str, shuffle: bool) -> None:
    for shard in ((0, 1), (1, 2)):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": 9, "shard": shard}
        one = reader(tmp_path, kind, **options)
        one.set_epoch(2)
        batches = list(one)
        expected = [contents(batch) for batch in batches]
        for number, batch in enumerate(batches):
            position = json.loads(json.dumps(batch.position))
            other = reader(tmp_path, kind, **options) if number % 4 == 0 else one
            assert [contents(rest) for rest in other.seek(position)] == expected[number + 1 :]
            assert [contents(again) for again in other] == expected  # the next iteration is a whole epoch


@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_threads(tmp_path: Path, kind: str) -> None:
    for shuffle in (False, True):
        runs = [reader(tmp_path, kind, shuffle=shuffle, threads=threads) for threads in (1, 2, 7)]
        results = [[contents(batch) for batch in run] for run in runs]
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_shards_of_one_small_file_have_nearly_equal_sizes(tmp_path: Path, count: int) -> None:
    """A file of 1.1 blocks of the default size must not be divided 10:1."""
    lines = "".join(f"{n % 2},{n},value-{n % 977}\n" for n in range(60_000))
    path = tmp_path / "a.csv"
    path.write_text("label,number,name\n" + lines)
    assert path.stat().st_size > 1 << 20
    shards = [tc.Reader(path, batch_size=512, shard=(number, count)) for number in range(count)]
    sizes = [sum(batch.examples for batch in shard) for shard in shards]
    assert sum(sizes) == 60_000
    assert max(sizes) < 1.2 * min(sizes)


def test_uneven_shards_give_a_warning(tmp_path: Path) -> None:
    table = pa.table({"label": [0.0, 1.0] * 300, "name": [f"n{n % 7}" for n in range(600)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=200)
    with pytest.warns(UserWarning, match=r"^3 blocks for 2 shards: some have 2 and others 1; ranks that train on"):
        tc.Reader(tmp_path / "a.parquet", batch_size=16, shard=(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tc.Reader(tmp_path / "a.parquet", batch_size=16, shard=(1, 2))  # rank 0 has said so
        tc.Reader(tmp_path / "a.parquet", batch_size=16, shard=(0, 3))


def test_resuming_with_another_batch_size(tmp_path: Path) -> None:
    first = reader(tmp_path, "csv", shuffle=True)
    batches = list(first)
    other = reader(tmp_path, "csv", shuffle=True, batch_size=5)
    assert examples_of(other.seek(batches[3].position)) == examples_of(batches[4:])


def test_resuming_with_on_error_skip(tmp_path: Path) -> None:
    lines = [f"{i % 2},a{i}" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["label,a", *lines[:30], "bad", *lines[30:]]) + "\n")
    options: dict[str, Any] = {"batch_size": 5, "block_bytes": 60}
    batches = []
    with pytest.raises(DataError, match="line 32: 1 column where 2"):
        batches.extend(tc.Reader(tmp_path / "a.csv", threads=1, **options))
    rest = tc.Reader(tmp_path / "a.csv", on_error="skip", **options)
    expected = examples_of(tc.Reader(tmp_path / "a.csv", on_error="skip", **options))
    assert examples_of(batches) + examples_of(rest.seek(batches[-1].position)) == expected
    assert len(expected) == 40


def test_resuming_after_the_last_batch_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a\n1,x\nbad\n0,y\n")
    reader = tc.Reader(tmp_path / "a.csv", on_error="skip", batch_size=2)
    (batch,) = reader
    assert list(reader.seek(batch.position)) == []


def test_positions_of_other_data_or_settings_are_rejected(tmp_path: Path) -> None:
    paths, columns = make_files(tmp_path, "csv")
    options: dict[str, Any] = {"batch_size": 13, "block_bytes": 100, **columns}
    position = next(iter(tc.Reader(paths, **options))).position
    assert len(list(tc.Reader(paths, **options).seek(position))) == 13
    changes: list[tuple[Any, dict[str, Any], str]] = [
        (paths[:2], {}, "its files is '3 files"),
        (paths[::-1], {}, "its files is"),
        (paths, {"seed": 1}, "its seed is 0, but this reader's is 1"),
        (paths, {"shuffle": True}, "its shuffle is False, but this reader's is True"),
        (paths, {"shard": (0, 2)}, r"its shard is \[0, 1\], but this reader's is \[0, 2\]"),
        (paths, {"block_bytes": 101}, "its block_bytes is 100, but this reader's is 101"),
        (paths, {"numeric": (), "ignore": ("x",)}, "its features is"),
        (paths, {"label_threshold": 1.0}, "its features is"),
    ]
    features = tc.Reader(paths, **options).features
    changes.append(
        (paths, {"features": dataclasses.replace(features, statistics={"x": (1.0, 2.0)})}, "its features is")
    )
    for files, change, message in changes:
        with pytest.raises(DataError, match=message):
            tc.Reader(files, **{**options, **change}).seek(position)
    one = tc.Reader(paths, **options)
    for damaged in (None, {}, {**position, "epoch": -1}, {**position, "unit": "1"}, {**position, "unit": 10**6}):
        with pytest.raises(DataError, match=r"this position (is damaged|belongs to other data)"):
            one.seek(damaged)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="example is 1000, but its shuffle chunk has"):
        list(one.seek({**position, "example": 1000}))
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in paths:
        (moved / Path(path).name).write_bytes(Path(path).read_bytes())
    assert len(list(tc.Reader(moved, **options).seek(position))) == 13  # same files in another folder
    first, last = (moved / Path(paths[i]).name for i in (0, 2))
    text = first.read_bytes(), last.read_bytes()
    assert len(text[0]) != len(text[1])
    first.write_bytes(text[1])
    last.write_bytes(text[0])
    with pytest.raises(DataError, match="its files is"):  # same names and same total size
        tc.Reader(moved, **options).seek(position)


def test_prefetching_is_bounded_and_ends_with_the_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.data.text_blocks import TextBlocks

    loaded: list[int] = []
    load = TextBlocks.load

    def counting_load(self: TextBlocks, split: Any) -> Any:
        loaded.append(split.start)
        return load(self, split)

    monkeypatch.setattr(TextBlocks, "load", counting_load)
    one = reader(tmp_path, "csv", batch_size=1, threads=2)
    before = threading.active_count()
    batches = iter(one)
    next(batches)
    time.sleep(0.2)
    assert len(loaded) <= 1 + 3 + 1  # the current block and those prefetched, of more than 20
    assert threading.active_count() > before
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    for kind in ("gz", "parquet"):
        (tmp_path / kind).mkdir()
        for _ in zip(range(2), reader(tmp_path / kind, kind, shuffle=True), strict=False):
            pass
    assert threading.active_count() == before


@pytest.mark.parametrize("sample", [300, 1 << 18], ids=["partial sample", "whole file"])
def test_estimated_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    monkeypatch.setattr("thermocline.data.formats._HEAD", sample)
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        one = reader(tmp_path / kind, kind, block_bytes=None)
        assert 9 <= one.estimated_batches() <= 24
        assert 4 <= reader(tmp_path / kind, kind, shard=(1, 2)).estimated_batches() <= 12
        if kind in ("parquet", "arrow"):
            assert len(one) == 14
            assert len(reader(tmp_path / kind, kind, shard=(1, 2))) == len(
                list(reader(tmp_path / kind, kind, shard=(1, 2)))
            )
        else:
            with pytest.raises(TypeError, match="estimated_batches"):
                len(one)
