"""Published versions against a dict of rows: random bases and deltas, deletes, consumers that skip versions, damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline import serving
from thermocline.core import _core
from thermocline.embedding.key_hash import hash_keys
from thermocline.errors import CorruptionError, LockError, NotFoundError, ThermoclineError
from thermocline.serving import Publication, TableRows, sort_by_hash
from thermocline.serving.row_format import encode
from thermocline.utils import atomic_file

DIM = 3
RANGE = 2000
Oracle = dict[int, np.ndarray]


def table_rows(rows: Oracle, deleted: Sequence[int] | None = None, *, dim: int = DIM, name: str = "t") -> TableRows:
    keys = np.array(list(rows), np.uint64)
    order = np.argsort(hash_keys(keys))
    values = np.array([rows[int(key)] for key in keys[order]], np.float32).reshape(-1, dim)
    cut = len(keys) // 2
    pieces = [(keys[order][:cut], values[:cut]), (keys[order][cut:], values[cut:])]
    gone = None if deleted is None else lambda: np.array(deleted, np.uint64)
    return TableRows(name=name, dim=dim, rows=pieces, deleted=gone, seed=5, initial=(1, 0.5))


def change(oracle: Oracle, rng: random.Random, count: int) -> tuple[Oracle, list[int]]:
    """Change, insert and delete random rows; return the changed rows and the deleted keys."""
    changed = {rng.randrange(RANGE): np.float32([rng.random() for _ in range(DIM)]) for _ in range(count)}
    deleted = [key for key in {rng.randrange(RANGE) for _ in range(count // 2)} if key not in changed]
    oracle.update(changed)
    for key in deleted:
        oracle.pop(key, None)
    return changed, deleted


def expect_equal(snapshot: serving.Snapshot, oracle: Oracle) -> None:
    keys = np.arange(RANGE, dtype=np.uint64)
    rows, found = snapshot.find(keys, missing="zero")
    assert found.tolist() == [key in oracle for key in range(RANGE)]
    assert all(rows[key].tobytes() == oracle[key].tobytes() for key in oracle)
    assert not rows[~found].any()


@pytest.mark.parametrize("seed", range(4))
def test_consumers_at_any_version_read_the_rows_of_the_current_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    oracle: Oracle = {}
    changed, _ = change(oracle, rng, 500)
    consumers = []
    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows(oracle)], step=0)
        for step in range(1, 15):
            if rng.random() < 0.4:
                consumers.append(serving.open(tmp_path, consumer=f"c{step}"))
            changed, deleted = change(oracle, rng, rng.choice([0, 5, 300]))
            publication.publish_delta([table_rows(changed, deleted)], step=step, event_time=100.0 + step)
            if rng.random() < 0.2:
                publication.compact()
            if rng.random() < 0.2:
                publication.publish_base([table_rows(oracle)], step=step)
            if rng.random() < 0.2:
                publication.retire(keep_bases=1)
            for consumer in consumers:
                if rng.random() < 0.5:
                    consumer.refresh()
                    expect_equal(consumer, oracle)
                    assert consumer.version.step == step
        for consumer in [*consumers, serving.open(tmp_path)]:
            consumer.refresh()
            expect_equal(consumer, oracle)
            assert not consumer.refresh()
        number = publication.current.number
        assert (
            serving.consumers(tmp_path) == publication.consumers() == {f"c{c._consumer[1:]}": number for c in consumers}
        )


@pytest.mark.parametrize(("deltas", "lookups"), [(39, 2_000), pytest.param(1_000, 1_000_000, marks=pytest.mark.long)])
def test_lookups_while_deltas_arrive_are_neither_torn_nor_stale(tmp_path: Path, deltas: int, lookups: int) -> None:
    """Version v has the value v in all rows but one, which it deletes; the next version inserts it again."""
    keys = np.arange(300, dtype=np.uint64)
    torn: list[int] = []
    stale: list[tuple[int, int]] = []
    counts = [0, 0]
    stop = threading.Event()

    def rows_of(version: int) -> Oracle:
        return {key: np.full(DIM, version, np.float32) for key in range(300) if key != version % 300}

    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows(rows_of(0))], step=0)
        snapshot = serving.open(tmp_path)

        def read(number: int) -> None:
            rng = np.random.default_rng(number)
            while not stop.is_set() or counts[number] < lookups // 2:
                begun = snapshot.version.step  # rows of an earlier version, deleted ones among them, would be stale
                some = keys[rng.integers(0, 300, 20)]
                some[0] = begun % 300  # deleted in that version
                rows, found = snapshot.find(some, missing="zero")
                version = int(rows.max())
                expected = np.float32(version) * (some[:, None] != version % 300)
                if not (rows == expected).all() or found.tolist() != (some != version % 300).tolist():
                    torn.append(version)
                if version < begun:
                    stale.append((begun, version))
                counts[number] += 1

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, deltas + 1):
            publication.publish_delta([table_rows(rows_of(version), [version % 300])], step=version)
            assert snapshot.refresh()
        stop.set()
        for thread in threads:
            thread.join()
    assert torn == []
    assert stale == []
    assert sum(counts) >= lookups
    assert snapshot.version.step == deltas


def test_direct_reads_equal_the_mapping(tmp_path: Path) -> None:
    rng = random.Random(0)
    oracle: Oracle = {}
    change(oracle, rng, 1500)
    with Publication(tmp_path, precision="fp32") as publication:
        publication.publish_base([table_rows(oracle)], step=0)
        direct = serving.open(tmp_path, direct=True)
        expect_equal(direct, oracle)
        for step in range(1, 4):
            publication.publish_delta([table_rows(*change(oracle, rng, 200))], step=step)
            direct.refresh()
            expect_equal(direct, oracle)
        publication.compact()
        direct.refresh()
        expect_equal(direct, oracle)
        file = tmp_path / direct.version.folder / "table-0.rows"
        data = bytearray(file.read_bytes())
        data[4096 + 500] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptionError, match="page 1"):  # every page that is read is verified
            direct.lookup(np.arange(RANGE))


def test_follow_serves_new_versions_and_reports_damage(tmp_path: Path) -> None:
    with Publication(tmp_path) as publication, published(publication, {1: np.float32([1, 2, 3])}) as snapshot:
        snapshot.follow(0.02)
        publication.publish_delta([table_rows({1: np.float32([4, 5, 6])})], step=1)
        wait_until(lambda: snapshot.version.step == 1)
        assert snapshot.lookup([1]).tolist() == [[4, 5, 6]]
        (tmp_path / "CURRENT").write_bytes(b"{")
        wait_until(lambda: isinstance(snapshot.error, CorruptionError))
        assert snapshot.lookup([1]).tolist() == [[4, 5, 6]]
        (tmp_path / "CURRENT").unlink()
        wait_until(lambda: isinstance(snapshot.error, NotFoundError))


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "no file", "no delta", "other delta", "swapped", "manifest", "other manifest"]
)
def test_a_damaged_version_is_refused_and_the_version_before_is_served(tmp_path: Path, damage: str) -> None:
    oracle: Oracle = {key: np.float32([key, 1, 2]) for key in range(500)}
    with Publication(tmp_path) as publication, published(publication, oracle) as snapshot:
        for step in (1, 2, 3):
            rows = {key: np.float32([key, step, 0]) for key in range(400)}
            publication.publish_delta([table_rows(rows, [450 + step])], step=step)
        second, third = tmp_path / "v0000000003-delta", tmp_path / "v0000000004-delta"
        file, manifest = third / "table-0.rows", third / "manifest.json"
        if damage == "flip":
            data = bytearray(file.read_bytes())
            data[9000] ^= 1
            file.write_bytes(data)
        elif damage == "truncate":
            file.write_bytes(file.read_bytes()[:-4096])
        elif damage == "no file":
            file.unlink()
        elif damage == "no delta":
            shutil.rmtree(second)
        elif damage == "other delta":
            shutil.copy(second / "table-0.rows", file)
        elif damage == "swapped":
            second.rename(tmp_path / "other")
            third.rename(second)
            (tmp_path / "other").rename(third)
        elif damage == "manifest":
            manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
        else:
            shutil.copy(second / "manifest.json", manifest)
        with pytest.raises((CorruptionError, NotFoundError)):
            snapshot.refresh()
        assert snapshot.version.step == 0
        expect_equal(snapshot, oracle)
        with pytest.raises((CorruptionError, NotFoundError)):
            serving.open(tmp_path)


@pytest.mark.parametrize("point", ["manifest", "files"])
def test_a_version_that_is_deleted_while_it_is_opened(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = Publication(tmp_path / "published")
    publication.publish_base([table_rows({1: np.ones(DIM, np.float32)})], step=1)
    pending = [{2: np.ones(DIM, np.float32)}]

    def replace_version() -> None:
        if pending:
            publication.publish_base([table_rows(pending.pop())], step=2)
            publication.retire(1)

    def first(called: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (replace_version(), called(*arguments))[1]

    def then(called: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (called(*arguments), replace_version())[0]

    if point == "manifest":  # read already
        monkeypatch.setattr(serving.version, "_check_file", first(serving.version._check_file))
    else:
        monkeypatch.setattr(serving.snapshot, "version_chain", then(serving.snapshot.version_chain))
    with publication, serving.open(publication.path) as snapshot:
        assert not pending
        assert snapshot.find([1, 2], missing="zero")[1].tolist() == [False, True]


def test_roll_back_serves_the_earlier_rows_and_needs_a_base_next(tmp_path: Path) -> None:
    oracle: Oracle = {1: np.float32([1, 1, 1]), 2: np.float32([2, 2, 2])}
    with Publication(tmp_path) as publication, published(publication, oracle) as snapshot:
        publication.publish_delta([table_rows({1: np.float32([9, 9, 9])}, [2])], step=1)
        snapshot.refresh()
        assert publication.roll_back(1).number == 1
        assert snapshot.refresh()
        expect_equal(snapshot, oracle)
        with pytest.raises(ThermoclineError, match="publish a base"):
            publication.publish_delta([table_rows({})], step=2)
        assert publication.publish_base([table_rows({3: np.float32([3, 3, 3])})], step=2).number == 3
        snapshot.refresh()
        expect_equal(snapshot, {3: np.float32([3, 3, 3])})
        publication.publish_delta([table_rows({})], step=3)
        with pytest.raises(NotFoundError, match="no version 77: it has 1 to 4"):
            publication.roll_back(77)


def test_a_delta_for_a_consumer_continues_from_its_version(tmp_path: Path) -> None:
    rng = random.Random(4)
    oracle: Oracle = {key: np.float32([key, 0, 0]) for key in range(0, RANGE, 2)}
    with Publication(tmp_path) as publication, published(publication, oracle) as first:
        assert publication.position("slow") == "no version of consumer 'slow' is recorded"
        publication.publish_delta([table_rows(*change(oracle, rng, 100))], step=1)
        slow = serving.open(tmp_path, consumer="slow")
        then, follower = dict(oracle), serving.open(tmp_path)
        for step in (2, 3):  # keys of these deltas that version 2 does not have may be gone again later
            publication.publish_delta([table_rows(*change(oracle, rng, 300))], step=step)
            follower.refresh()
        oracle = {key: row for key, row in oracle.items() if key in then or key % 3}
        position = publication.position("slow")
        assert not isinstance(position, str)
        assert (position.number, position.step) == (2, 1)
        changed = {key: row for key, row in oracle.items() if key not in then or (then[key] != row).any()}
        deleted = [key for key in then if key not in oracle]
        version = publication.publish_delta([table_rows(changed, deleted)], step=4, previous=2)
        assert (version.number, version.previous) == (5, 2)
        for snapshot in (first, slow, follower, serving.open(tmp_path)):
            snapshot.refresh()
            expect_equal(snapshot, oracle)
        assert publication.consumers() == {"slow": 5}
        publication.compact()
        publication.retire(1)
        assert publication.position("slow") == "version 5 of consumer 'slow' was deleted"
        with pytest.raises(NotFoundError, match="no version 5"):
            publication.publish_delta([table_rows({})], step=5, previous=5)
        slow.refresh()
        publication.precision = "int8"
        publication.publish_base([table_rows(oracle)], step=5)
        assert "other tables or precisions" in str(publication.position("slow"))


def test_no_delta_continues_from_a_damaged_version_of_a_consumer(tmp_path: Path) -> None:
    oracle: Oracle = {key: np.float32([key, 1, 2]) for key in range(500)}
    with Publication(tmp_path) as publication, published(publication, oracle):
        for step in (1, 2, 3):
            publication.publish_delta([table_rows({key: np.float32([key, step, 0]) for key in range(400)})], step=step)
            if step == 1:
                serving.open(tmp_path, consumer="slow")
        file = tmp_path / "v0000000002-delta" / "table-0.rows"
        data = bytearray(file.read_bytes())
        data[9000] ^= 1
        file.write_bytes(data)
        assert "version 2 of consumer 'slow' is damaged" in str(publication.position("slow"))
        with pytest.raises(CorruptionError):
            publication.roll_back(2)
        assert publication.current is not None
        assert publication.current.number == 4


def test_a_delta_is_deleted_with_the_version_that_it_continues_from(tmp_path: Path) -> None:
    oracle: Oracle = {key: np.float32([key, 1, 2]) for key in range(500)}
    with Publication(tmp_path) as publication, published(publication, oracle):
        publication.publish_delta([table_rows(oracle)], step=1)
        publication.publish_base([table_rows(oracle)], step=2)
        publication.publish_base([table_rows(oracle)], step=3)
        publication.publish_delta([table_rows(oracle)], step=4, previous=2)
        publication.publish_delta([table_rows(oracle)], step=5, previous=4)
        assert publication.retire(2) == [1, 2, 5]
        with pytest.raises(NotFoundError, match="no version 5"):
            publication.roll_back(5)
        with serving.open(tmp_path) as opened:
            assert opened.version.number == 6
            expect_equal(opened, oracle)


def test_the_version_that_was_rolled_back_to_is_kept(tmp_path: Path) -> None:
    oracle: Oracle = {1: np.float32([1, 1, 1])}
    with Publication(tmp_path) as publication, published(publication, oracle) as snapshot:
        publication.publish_delta([table_rows({2: np.float32([2, 2, 2])})], step=1)
        publication.publish_base([table_rows({3: np.float32([3, 3, 3])})], step=2)
        publication.roll_back(2)
        assert publication.retire(keep_bases=1) == []  # version 2 is older than the last base, but current
        snapshot.refresh()
        expect_equal(snapshot, {**oracle, 2: np.float32([2, 2, 2])})
        with serving.open(tmp_path) as opened:
            expect_equal(opened, {**oracle, 2: np.float32([2, 2, 2])})


def test_missing_keys(tmp_path: Path) -> None:
    from thermocline.embedding.initializers import Uniform
    from thermocline.embedding.reference import initial_weights

    with Publication(tmp_path) as publication, published(publication, {7: np.float32([1, 2, 3])}) as snapshot:
        rows = snapshot.lookup([7, 8])
        expected = initial_weights(Uniform(scale=0.5), 5, 0, 8, DIM)
        assert rows[0].tolist() == [1, 2, 3]
        assert rows[1].tobytes() == np.float32(expected).tobytes()
        assert snapshot.lookup([8], missing="zero").tolist() == [[0, 0, 0]]
        with pytest.raises(KeyError, match="1 of 2 keys have no row, first 8"):
            snapshot.lookup([7, 8], missing="error")
        assert snapshot.lookup([]).shape == (0, DIM)
        with pytest.raises(KeyError, match="no table 'x'"):
            snapshot.lookup([7], table="x")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_lower_precision(tmp_path: Path, precision: str) -> None:
    rng = np.random.default_rng(0)
    rows = {key: rng.normal(size=DIM).astype(np.float32) for key in range(300)}
    rows[5] = np.float32([2, 2, 2])
    with Publication(tmp_path, precision=precision) as publication, published(publication, rows) as snapshot:
        read = snapshot.lookup(np.arange(300))
        for key, row in rows.items():
            bound = 2**-11 * np.abs(row).max() if precision == "fp16" else (row.max() - row.min()) / 255 * 0.501
            assert np.abs(read[key] - row).max() <= bound + 1e-7
        publication.publish_delta([table_rows({5: np.float32([1, 1, 1])})], step=1)
        compacted = publication.compact()
        assert compacted.tables[0].precision == precision
        snapshot.refresh()
        assert snapshot.lookup([5]).tolist() == [[1, 1, 1]]
    with pytest.raises(OverflowError):
        encode(np.float32([[1e6, 0]]), "fp16")
    with pytest.raises(OverflowError):
        encode(np.float32([[np.inf, 0]]), "int8")


def test_a_version_is_durable_before_current_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its files are synced, then its folder, then, after it was renamed, the folder of the publication."""
    events: list[tuple[str, Any]] = []
    sync_files, sync_folder = _core.sync_files, atomic_file.sync_folder

    def files_synced(paths: list[bytes]) -> None:
        sync_files(paths)
        events.append(("files", {Path(os.fsdecode(path)).name for path in paths}))

    def folder_synced(path: Path) -> None:
        sync_folder(path)
        current = json.loads((tmp_path / "CURRENT").read_text())["number"] if (tmp_path / "CURRENT").exists() else 0
        events.append((path.name, (sorted(each.name for each in tmp_path.glob("v*")), current)))

    monkeypatch.setattr(_core, "sync_files", files_synced)
    monkeypatch.setattr(atomic_file, "sync_folder", folder_synced)
    with Publication(tmp_path) as publication:
        version = publication.publish_base(
            [table_rows({1: np.float32([2.0])}, dim=1)], step=1, files={"extra.txt": b"x"}
        )
    written = {each.name for each in (tmp_path / version.folder).iterdir()}
    assert written == {"manifest.json", "table-0.rows", "extra.txt"}
    assert events[0] == ("files", written)
    assert events[1][0].startswith(".tmp-")
    assert events[2:] == [(tmp_path.name, ([version.folder], 0)), (tmp_path.name, ([version.folder], 1))]
    with pytest.raises(NotFoundError):
        sync_files([os.fsencode(tmp_path / "none")])


@pytest.mark.parametrize("point", ["publish.files_written", "publish.folder_renamed", "run.file_written"])
def test_a_writer_killed_at_any_point_leaves_the_version_before(tmp_path: Path, point: str) -> None:
    program = """
import sys, numpy as np
from thermocline.serving import Publication, TableRows
with Publication(sys.argv[1]) as publication:
    one = (np.uint64([1]), np.float32([[float(sys.argv[2])]]))
    rows = [TableRows(name="t", dim=1, rows=[one])]
    if publication.current is None:
        publication.publish_base(rows, step=0)
    else:
        publication.publish_delta(rows, step=1)
"""

    def run(value: int, **env: str) -> int:
        command = [sys.executable, "-c", program, str(tmp_path), str(value)]
        return subprocess.run(command, env={**subprocess.os.environ, **env}, check=False).returncode

    assert run(1) == 0
    assert run(2, THERMOCLINE_KILL_AT=point) == -9
    assert serving.open(tmp_path).lookup([1]).tolist() == [[1]]
    assert run(3) == 0
    assert serving.open(tmp_path).lookup([1]).tolist() == [[3]]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name[0] == "v") == [
        "v0000000001-base", "v0000000002-delta",
    ]  # fmt: skip
    assert not list(tmp_path.glob(".tmp-*"))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no published version"):
        serving.open(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileExistsError, match="not a publication"):
        Publication(tmp_path)
    (tmp_path / "notes.txt").unlink()
    with Publication(tmp_path) as publication:
        with pytest.raises(LockError, match="another process publishes"):
            Publication(tmp_path)
        with pytest.raises(NotFoundError, match="publish a base"):
            publication.publish_delta([table_rows({})], step=0)
        publication.publish_base([table_rows({1: np.float32([1, 2, 3])})], step=5)
        with pytest.raises(ValueError, match="publish a base"):
            publication.publish_delta([table_rows({1: np.float32([1, 2])}, dim=2)], step=6)
        with pytest.raises(ValueError, match="step is 4"):
            publication.publish_delta([table_rows({})], step=4)
        with pytest.raises(ValueError, match="the delta has tables"):
            publication.publish_delta([table_rows({}, name="u")], step=6)
        unsorted = [(np.uint64([1, 2, 3, 4]), np.zeros((4, DIM), np.float32))]
        with pytest.raises(ThermoclineError, match="ascend"):
            publication.publish_base([TableRows(name="t", dim=DIM, rows=unsorted)], step=6)
        publication.publish_base([TableRows(name="t", dim=DIM, rows=sort_by_hash(unsorted))], step=6)
        assert len(list(tmp_path.glob("v*"))) == 2
        assert not list(tmp_path.glob(".tmp-*"))
    with pytest.raises(ValueError, match="consumer is"):
        serving.open(tmp_path, consumer="../x")


def test_serving_loads_no_torch(tmp_path: Path) -> None:
    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows({1: np.float32([1, 2, 3])})], step=0)
    program = (
        "import sys; from thermocline import serving; print(serving.open(sys.argv[1]).lookup([1]).tolist());"
        "assert not {'torch', 'pyarrow', 'pydantic'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout == "[[1.0, 2.0, 3.0]]\n"


def test_the_manifest_is_json_with_step_event_time_and_files(tmp_path: Path) -> None:
    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows({1: np.float32([1, 2, 3])})], step=3, event_time=1.5)
    manifest = json.loads((tmp_path / "v0000000001-base" / "manifest.json").read_text())
    assert (manifest["step"], manifest["event_time"], manifest["kind"]) == (3, 1.5, "base")
    assert manifest["tables"][0]["rows"] == 1


def published(publication: Publication, oracle: Oracle) -> serving.Snapshot:
    publication.publish_base([table_rows(oracle)], step=0)
    return serving.open(publication.path)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
