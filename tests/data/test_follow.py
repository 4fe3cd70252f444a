"""`data.follow`: which files are taken, when, and in which order; positions."""

from __future__ import annotations

import gzip
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import thermocline as tc
from thermocline.data.follow import FollowReader
from thermocline.errors import ConfigError, DataError

IDLE = 0.05


def write(path: Path, first: int, count: int = 5, *, name: str | None = None) -> Path:
    """Write examples `first`, ...; the event time is the number of the example. The file appears by a rename."""
    path.parent.mkdir(exist_ok=True)
    text = "label,at,ad\n" + "".join(f"{i % 2},{i},{i % 3}\n" for i in range(first, first + count))
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return temporary.rename(path if name is None else path.with_name(name))


def follow(train: Any, **options: Any) -> FollowReader:
    options = {"follow_idle": IDLE, "time": "at", "shuffle": False, **options}
    batch_size, shuffle = options.pop("batch_size", 2), options.pop("shuffle")
    data = tc.Data(train=[str(train)], follow=True, **options)
    return FollowReader(data, batch_size=batch_size, shuffle=shuffle, tensors=False)


def examples(batches: Any) -> list[list[int]]:
    return [batch.time.tolist() for batch in batches]


def test_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.csv.gz", 100, 3)
    write(tmp_path / "a.csv", 0, 3)
    write(tmp_path / "c.csv", 200, 1)
    # A batch never spans two files.
    assert examples(follow(tmp_path)) == [[0, 1], [2], [100, 101], [102], [200]]
    assert examples(follow(tmp_path / "[ac].csv")) == [[0, 1], [2], [200]]


@pytest.mark.parametrize("path", ["~/data", "~/data/*.csv", "file://{}/data", "{}/data//"])
def test_only_names_below_the_folder_are_temporary(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / ".home" / "_data"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    write(home / "data" / "a.csv", 0, 1)
    batches = list(follow(path.format(home)))
    assert examples(batches) == [[0]]
    assert batches[0].position is not None
    assert [name for name, _ in batches[0].position["files"]] == ["a.csv"]


def test_files_that_appear_while_it_waits(tmp_path: Path) -> None:
    write(tmp_path / "00.csv", 0, 1)
    reader = follow(tmp_path, follow_idle=20)
    taken: list[list[int]] = []
    waited = threading.Event()

    def read() -> None:
        for batch in reader:
            taken.append(batch.time.tolist())  # type: ignore[union-attr]
        waited.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for i in range(1, 4):
            while not reader.waiting:
                time.sleep(0.01)
            write(tmp_path / f"{i:02}.csv", i, 1)
            deadline = time.monotonic() + 10
            while len(taken) <= i and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        reader.stop_waiting()
        thread.join()
    assert taken == [[0], [1], [2], [3]]


def test_waiting_is_no_busy_loop(tmp_path: Path) -> None:
    write(tmp_path / "00.csv", 0, 1)
    reader = follow(tmp_path, follow_idle=1)
    batches = iter(reader)
    next(batches)
    before, calls = time.thread_time(), []
    reader.while_waiting = lambda: calls.append(reader.waiting)  # type: ignore[func-returns-value]
    assert next(batches, None) is None
    assert time.thread_time() - before < 0.1
    assert 1 <= len(calls) <= 7
    assert all(calls)


def test_temporary_names_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 0, 1)
    for name in (".b.csv", "_b.csv", "b.csv.tmp", "b.csv.inprogress", "b.csv._COPYING_"):
        write(tmp_path / "b.csv", 7, 1, name=name)
    (tmp_path / "_temporary").mkdir()
    write(tmp_path / "_temporary" / "c.csv", 8, 1)
    assert examples(follow(tmp_path)) == [[0]]
    assert examples(follow(tmp_path / "**" / "*")) == [[0]]


def test_success_marker(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        write(tmp_path / f"day={day}" / "part-0.csv", 10 * day, 1)
    (tmp_path / "day=1" / "_SUCCESS").write_text("")
    reader = follow(tmp_path / "day=*" / "part-*", follow_complete="_SUCCESS")
    assert examples(reader) == [[10]]
    (tmp_path / "day=2" / "_SUCCESS").write_text("")
    assert examples(reader) == [[10], [20]]


def test_a_file_that_changes_after_it_was_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 0, 1)
    batches = iter(follow(tmp_path, follow_idle=5))
    next(batches)
    with path.open("a") as file:
        file.write("1,5,5\n")
    with pytest.raises(DataError, match=r"a\.csv changed after it was read: it had 18 bytes, now it has 24\. "):
        next(batches)


def test_a_late_file_is_reported_once_and_not_read(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", 1, 1)
    reader = follow(tmp_path, follow_idle=0.5)
    batches = iter(reader)
    assert next(batches).time.tolist() == [1]  # type: ignore[union-attr]
    write(tmp_path / "a.csv", 0, 1)
    write(tmp_path / "c.csv", 2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert examples(batches) == [[2]]
    assert [str(warning.message) for warning in caught] == [
        f"{tmp_path}/a.csv is not read: it appeared after b.csv, and data.follow = true reads files in the order of "
        "their names"
    ]


def test_files_without_examples_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text("label,at,ad\n")
    (tmp_path / "c.csv").write_text("label,at,ad\n\n\n")
    write(tmp_path / "d.csv", 3, 1)
    assert examples(follow(tmp_path)) == [[3]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_positions(tmp_path: Path, shuffle: bool) -> None:
    for i in range(4):
        write(tmp_path / f"{i}.csv", 10 * i, 5)
    batches = list(follow(tmp_path, shuffle=shuffle))
    assert (examples(batches)[0] != [0, 1]) == shuffle
    for i, batch in enumerate(batches):
        position = json.loads(json.dumps(batch.position))
        # Files read to their end are not needed any more.
        for file in range(i // 3 + (i % 3 == 2)):
            (tmp_path / f"{file}.csv").unlink(missing_ok=True)
        rest = list(follow(tmp_path, shuffle=shuffle).seek(position)) if i < 11 else []
        assert examples(rest) == examples(batches[i + 1 :])
        assert [b.position for b in rest] == [b.position for b in batches[i + 1 :]]


def test_positions_of_other_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 0, 5)
    write(tmp_path / "b.csv", 10, 5)
    first, *_, last = [batch.position for batch in follow(tmp_path)]
    with pytest.raises(DataError, match="this position belongs to other data or settings: its features is"):
        follow(tmp_path, batch_size=3).seek(first)
    with pytest.raises(DataError, match="this position is damaged: KeyError: 'files'"):
        follow(tmp_path).seek({name: value for name, value in first.items() if name != "files"})
    write(tmp_path / "a.csv", 0, 6)
    for position in (first, last):
        with pytest.raises(DataError, match=r"a\.csv changed after it was read: it had 42 bytes, now it has 48"):
            list(follow(tmp_path).seek(position))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.csv is missing: it had 42 bytes, and was trained only in part"):
        list(follow(tmp_path).seek(first))


def test_a_late_file_of_a_resumed_run(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", 1, 1)
    write(tmp_path / "d.csv", 2, 1)
    last = list(follow(tmp_path))[-1].position
    write(tmp_path / "c.csv", 2, 1)
    with pytest.warns(RuntimeWarning, match=r"c\.csv is not read: it appeared after d\.csv"):
        assert list(follow(tmp_path).seek(last)) == []


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has had no file with examples for 0\.05 s \(data\.follow_idle\)"):
        follow(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.follow = true needs a folder or a glob, and .*/no/ is none"):
        follow(tmp_path / "no")
    with pytest.raises(ConfigError, match=r"data\.train .* it must be one folder or glob with follow = true"):
        tc.Data(train=["a", "b"], follow=True)
    with pytest.raises(ConfigError, match=r"data\.follow_idle is 5: it must be left out unless follow = true"):
        tc.Data(follow_idle=5)
    with pytest.raises(ConfigError, match=r"data\.follow_idle is '5 parsecs': it must be a duration above 0"):
        tc.Data(follow=True, follow_idle="5 parsecs")
    with pytest.raises(ConfigError, match=r"train\.epochs is 2: it must be 1 with data\.follow = true"):
        tc.Config(data=tc.Data(follow=True), train=tc.Train(epochs=2))
