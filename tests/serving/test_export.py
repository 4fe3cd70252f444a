"""`thermocline export` against the rows of the run: base, delta, several ranks' stores, rows in DRAM only."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from thermocline import serving
from thermocline.embedding.key_hash import hash_keys
from thermocline.serving import ServedRows, publication as publication_module
from thermocline.serving.changes import merge_by_hash
from thermocline.serving.snapshot import StoredRows
from thermocline.training.publish import publish_table


def train(table: tc.Table, seed: int, steps: int = 3) -> None:
    rng = np.random.default_rng(seed)
    bag = tc.EmbeddingBag(table, fields=2)
    for _ in range(steps):
        batch = tc.Batch(rng.integers(0, 3000, 400).astype(np.uint64), np.arange(0, 401), 2)
        bag(batch).square().sum().backward()
        table.step()


def expect_rows(path: Path, table: tc.Table) -> None:
    expect_snapshot(serving.open(path), table)


def expect_snapshot(snapshot: serving.Snapshot, table: tc.Table) -> None:
    keys, rows = (np.concatenate(parts) for parts in zip(*table.rows(), strict=True))
    read, found = snapshot.find(keys)
    assert found.all()
    assert read.tobytes() == np.ascontiguousarray(rows[:, : table.dim]).tobytes()
    assert sum(len(piece.keys) for piece in StoredRows(snapshot._state.views[table.name])) == len(keys)
    unseen = np.arange(10**6, 10**6 + 50, dtype=np.uint64)
    assert snapshot.lookup(unseen).tobytes() == np.ascontiguousarray(table.read(unseen)[:, : table.dim]).tobytes()


@pytest.mark.parametrize("ssd", [True, False])
def test_base_and_delta_have_the_rows_of_the_table(tmp_path: Path, ssd: bool) -> None:
    path = tmp_path / "published"
    with contextlib.closing(tc.Table(4, tc.Adagrad(lr=0.1), mem="8MB", ssd=tmp_path / "ssd" if ssd else None)) as table:
        train(table, 0)
        version = publish_table(table, path, step=3)
        assert version.kind == "base"
        expect_rows(path, table)
        train(table, 1, steps=1)
        with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning, match="neither a store nor"):
            version = publish_table(table, path, step=4, delta=True)
        assert version.kind == "delta"
        assert 0 < version.tables[0].rows <= 400
        assert version.tables[0].deleted == 0
        expect_rows(path, table)
        with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning):
            assert publish_table(table, path, step=4, delta=True).tables[0].rows == 0
        expect_rows(path, table)


def test_a_delta_reads_the_log_that_was_merged_since_the_version(tmp_path: Path) -> None:
    path = tmp_path / "published"
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", name="t", ssd=tmp_path / "store")) as table:
        train(table, 0)
        publish_table(table, path, step=1)
        for step in range(2, 5):
            train(table, step)
            table.backend.flush()
            assert table.store is not None
            table.store.merge()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # all rows would be compared
                publish_table(table, path, step=step, delta=True)
            expect_rows(path, table)


def test_keys_that_are_gone_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "published"
    options = {"mem": "8MB", "name": "t"}
    first, second = tc.Table(4, tc.SGD(lr=0.1), **options), tc.Table(4, tc.SGD(lr=0.1), **options)
    with contextlib.closing(first), contextlib.closing(second):
        train(first, 0)
        train(second, 1)
        publish_table(first, path, step=1)
        with pytest.warns(RuntimeWarning, match="all rows are compared with version 1"):
            version = publish_table(second, path, step=2, delta=True)
        assert version.tables[0].deleted > 0
        expect_rows(path, second)
        keys = np.concatenate([keys for keys, _ in first.rows()])
        trained = set(np.concatenate([keys for keys, _ in second.rows()]).tolist())
        _, found = serving.open(path).find(keys)
        assert found.tolist() == [int(key) in trained for key in keys]


@pytest.mark.parametrize("otherwise", ["initial", "zero", "shared"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_keys_that_are_not_admitted_have_the_vector_of_evaluation(
    tmp_path: Path, otherwise: Any, precision: Any
) -> None:
    path, admission = tmp_path / "published", tc.Admission(count=3, otherwise=otherwise)
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", admission=admission, precision=precision)) as table:
        bag = tc.EmbeddingBag(table, 1)
        for keys in ([1, 2], [1, 2], [1, 3]):
            bag(tc.Batch(np.uint64(keys), np.arange(3), 1)).square().sum().backward()
            table.step()
        publish_table(table, path, step=3)
        keys = np.arange(1, 10, dtype=np.uint64)
        with torch.no_grad():
            expected = bag.eval()(tc.Batch(keys, np.arange(10), 1))[:, 0].numpy()
    snapshot = serving.open(path)
    if otherwise == "initial" and precision != "fp32":
        with pytest.raises(ValueError, match="no initializer for unseen keys"):
            snapshot.lookup(keys)
        return
    assert snapshot.lookup(keys).tobytes() == expected.tobytes()
    assert snapshot.find(keys)[1].tolist() == [True, *[False] * 8]
    with serving.Publication(path) as publication:
        publication.compact()
    assert serving.open(path).lookup(keys).tobytes() == expected.tobytes()


def test_a_delta_reads_only_the_rows_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "published"
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", ssd=tmp_path / "ssd")) as table:
        train(table, 0, steps=10)
        publish_table(table, path, step=10)
        train(table, 1, steps=1)
        read: list[int] = []
        version = publish_table(table, path, step=11, delta=True, advance=read.append)
        assert 0 < sum(read) == version.tables[0].rows <= 400
        expect_rows(path, table)


def test_a_delta_reads_the_version_before_it_once_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "published", list[str]()
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", ssd=tmp_path / "ssd")) as table:
        train(table, 0)
        publish_table(table, path, step=1)
        for name in ("read_current", "read_version", "version_names", "versions"):
            original = getattr(publication_module, name)

            def count(*arguments: Any, name: str = name, original: Any = original) -> Any:
                calls.append(name)
                return original(*arguments)

            monkeypatch.setattr(publication_module, name, count)
        for step in range(2, 5):
            train(table, step, steps=1)
            calls.clear()
            publish_table(table, path, step=step, delta=True)
            assert sorted(calls) == ["read_current", "read_version", "version_names"]
        expect_rows(path, table)


@pytest.mark.parametrize("seed", range(3))
def test_replayed_versions_equal_the_store_over_deletes_merges_and_kills(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "published", np.random.default_rng(seed)
    small = {"segment_bytes": 1 << 16, "partition_bytes": 1 << 16, "min_log_bytes": 1 << 17, "write_buffer": 1 << 14}
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="8MB", ssd=tmp_path / "ssd", ssd_options=small)
    consumers, epochs, outcomes = [], [], []
    with contextlib.closing(table):
        train(table, seed)
        publish_table(table, path, step=0)
        for step in range(1, 40):
            kind = rng.choice(["train", "train", "delete", "merge", "kill", "kill to an earlier commit"])
            if kind == "train":
                train(table, 1000 * seed + step, steps=int(rng.integers(1, 4)))
            elif kind == "delete":
                table.backend.flush(table.store)
                table.store.delete(rng.integers(0, 3000, 200).astype(np.uint64))
                epochs.append(table.store.commit())
                table.reopen()
            elif kind == "merge":
                table.backend.flush(table.store)
                table.store.merge()
            elif epochs:  # rows after the commit are lost
                table.reopen(epochs[-1 if kind == "kill" else 0])
            if rng.random() < 0.3:
                table.backend.flush(table.store)
                epochs.append(table.store.commit())
            if rng.random() < 0.5:
                consumers.append(serving.open(path))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                publish_table(table, path, step=step, delta=True)
            outcomes.append([str(warning.message) for warning in caught])
            expect_rows(path, table)
            if consumers and rng.random() < 0.5:
                consumer = consumers.pop(int(rng.integers(len(consumers))))
                assert consumer.refresh()
                expect_snapshot(consumer, table)
    assert all("all rows are compared with version" in text for texts in outcomes for text in texts)
    assert 5 < sum(not texts for texts in outcomes) < len(outcomes)  # both ways of finding changes


def test_a_delta_for_a_consumer_has_all_changes_since_its_version(tmp_path: Path) -> None:
    path = tmp_path / "published"
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", ssd=tmp_path / "ssd")) as table:
        train(table, 0)
        publish_table(table, path, step=1, served=ServedRows(max_rows=10**6))
        slow, fast = (serving.open(path, consumer=name) for name in ("slow", "fast"))
        for step in (2, 3):
            train(table, step, steps=1)
            with pytest.warns(RuntimeWarning, match="a cap on rows"):
                publish_table(table, path, step=step, delta=True)
            fast.refresh()
        with pytest.raises(ValueError, match="a base is not for one consumer"):
            publish_table(table, path, step=3, consumer="slow")
        train(table, 4, steps=1)
        with pytest.warns(RuntimeWarning, match="compared with version 1"):
            version = publish_table(table, path, step=4, delta=True, consumer="slow")
        assert (version.number, version.kind, version.previous) == (4, "delta", 1)
        for snapshot in (slow, fast):
            snapshot.refresh()
            expect_snapshot(snapshot, table)
        with serving.Publication(path) as publication:
            publication.compact()
            publication.retire(1)
        train(table, 5, steps=1)
        with pytest.warns(RuntimeWarning, match="a base is published: version 4 of consumer 'slow' was deleted"):
            version = publish_table(table, path, step=5, delta=True, consumer="slow")
        assert (version.kind, version.tables[0].max_rows) == ("base", 10**6)  # the rule is that of the version before
        slow.refresh()
        expect_snapshot(slow, table)
        train(table, 6, steps=1)
        read: list[int] = []
        with pytest.warns(RuntimeWarning, match="other rows are served"):
            publish_table(table, path, step=6, delta=True, served=ServedRows())
        slow.refresh()
        train(table, 7, steps=1)
        publish_table(table, path, step=7, delta=True)
        train(table, 8, steps=1)
        version = publish_table(table, path, step=8, delta=True, consumer="slow", advance=read.append)
        assert version.previous == version.number - 2
        assert sum(read) == version.tables[0].rows <= 800  # from the log, not from all rows
        slow.refresh()
        expect_snapshot(slow, table)


@pytest.mark.parametrize("delta", [False, True])
def test_rows_below_the_threshold_or_beyond_the_cap_are_not_served(tmp_path: Path, delta: bool) -> None:
    path = tmp_path / "published"

    def norms() -> dict[int, float]:
        pieces = [(keys, ServedRows.norms(rows[:, :4])) for keys, rows in table.rows()]
        return {int(k): float(norm) for keys, norm in pieces for k, norm in zip(keys, norm, strict=True)}

    def served() -> set[int]:
        pieces = StoredRows(serving.open(path).state.views[table.name])
        return {int(key) for piece in pieces for key in piece.keys}

    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.2), mem="8MB", ssd=tmp_path / "ssd")) as table:
        train(table, 0)
        least = float(np.median(list(norms().values())))
        publish_table(table, path, step=3, served=ServedRows(min_norm=least))
        assert served() == {key for key, norm in norms().items() if norm >= least}
        if delta:
            train(table, 1, steps=2)  # norms shrink: rows fall below the threshold
            read: list[int] = []
            version = publish_table(table, path, step=5, delta=True, advance=read.append)
            assert version.tables[0].deleted > 100
            assert sum(read) <= 800
            assert served() == {key for key, norm in norms().items() if norm >= least}
        capped = ServedRows(min_norm=least, max_rows=100)
        if delta:
            with pytest.warns(RuntimeWarning, match="other rows are served than before"):
                publish_table(table, path, step=6, delta=True, served=capped)
            train(table, 2, steps=2)
            with pytest.warns(RuntimeWarning, match="a cap on rows"):
                publish_table(table, path, step=7, delta=True)
        else:
            publish_table(table, path, step=6, served=capped)
        expected = sorted(norms().items(), key=lambda item: (-item[1], int(hash_keys(np.uint64([item[0]]))[0])))
        assert served() == {key for key, norm in expected[:100] if norm >= least}


@pytest.mark.parametrize("ssd", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_served_by_their_statistics(tmp_path: Path, ssd: bool, seed: int) -> None:
    """Thresholds of frequency and score against the statistics of every key, over deltas, deletes and decays."""
    path, rng = tmp_path / "published", np.random.default_rng(seed)
    rule = ServedRows(min_frequency=3, min_score=0.6, nonclick_coeff=0.2)
    table = tc.Table(
        4, tc.Adagrad(lr=0.1), mem="8MB", ssd=tmp_path / "ssd" if ssd else None,
        statistics=["frequency", "show", "click"],
    )  # fmt: skip
    bag = tc.EmbeddingBag(table, 1)

    def step() -> None:
        keys = rng.zipf(1.3, 300).astype(np.uint64) % np.uint64(200)
        label = torch.from_numpy(rng.integers(0, 2, 300).astype(np.float32))
        bag(tc.Batch(keys, np.arange(301), 1, label=label)).square().sum().backward()
        table.step()

    def expect() -> None:
        keys = np.concatenate([keys for keys, _ in table.rows()])
        seen = table.read_statistics(keys)
        scores = (seen["show"].astype(float) - seen["click"]) * 0.2 + seen["click"]
        expected = {int(key) for key in keys[(seen["frequency"] >= 3) & (scores >= 0.6)]}
        assert 0 < len(expected) < len(keys)
        snapshot = serving.open(path)
        pieces = list(StoredRows(snapshot.state.views[table.name]))
        assert {int(key) for piece in pieces for key in piece.keys} == expected
        served = np.array(sorted(expected), np.uint64)
        assert snapshot.lookup(served).tobytes() == np.ascontiguousarray(table.read(served)[:, :4]).tobytes()

    with contextlib.closing(table):
        step()
        publish_table(table, path, step=1, served=rule)
        expect()
        for number in range(2, 6):
            step()
            with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning, match="neither a store nor"):
                publish_table(table, path, step=number, delta=True)
            expect()
        table.expire(tc.Expiry(every=1, decay=0.5))  # scores fall, also of rows that no step has changed since
        with pytest.warns(RuntimeWarning, match="were decayed since" if ssd else "neither a store nor"):
            version = publish_table(table, path, step=6, delta=True)
        assert version.tables[0].deleted > 0
        expect()
        with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning):
            assert publish_table(table, path, step=6, delta=True).tables[0].rows == 0
        with serving.Publication(path) as publication:  # the rule stays in a compacted version
            publication.compact()
        step()
        with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning):
            publish_table(table, path, step=7, delta=True)
        expect()


def test_thresholds_need_the_statistics(tmp_path: Path) -> None:
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB", statistics=["show"])) as table:
        train_one(table, [1])
        with pytest.raises(ValueError, match="min_frequency is 2: it needs the statistic 'frequency', but rows have"):
            publish_table(table, tmp_path / "a", step=1, served=ServedRows(min_frequency=2))
        with pytest.raises(ValueError, match=r"min_score is 0\.5: it needs the statistic 'click'"):
            publish_table(table, tmp_path / "a", step=1, served=ServedRows(min_score=0.5))


def train_one(table: tc.Table, keys: list[int]) -> None:
    tc.EmbeddingBag(table, 1)(tc.Batch(np.uint64(keys), np.arange(len(keys) + 1), 1)).square().sum().backward()
    table.step()


@pytest.mark.parametrize("ssd", [True, False])
def test_the_shared_row_is_always_served(tmp_path: Path, ssd: bool) -> None:
    path, admission = tmp_path / "published", tc.Admission(count=2, otherwise="shared")
    table = tc.Table(
        4, tc.SGD(lr=0.01), mem="8MB", ssd=tmp_path / "ssd" if ssd else None, admission=admission,
        statistics=["frequency"], initial=tc.Normal(scale=0.1),
    )  # fmt: skip
    with contextlib.closing(table):
        bag = tc.EmbeddingBag(table, 1)

        def step(keys: list[int]) -> None:
            bag(tc.Batch(np.uint64(keys), np.arange(len(keys) + 1), 1)).square().sum().backward()
            table.step()

        def expect(keys: list[int]) -> None:
            with torch.no_grad():
                expected = bag.eval()(tc.Batch(np.uint64(keys), np.arange(len(keys) + 1), 1))[:, 0].numpy()
            bag.train()
            assert serving.open(path).lookup(np.uint64(keys)).tobytes() == expected.tobytes()

        step([1, 1, 1, 2, 2, 3])
        for served in (ServedRows(min_norm=1e6), ServedRows(max_rows=1), ServedRows(min_frequency=1000)):
            version = publish_table(table, path, step=1, served=served)
            assert version.tables[0].rows == 1
            expect([3, 7])
        step([4, 5])
        with contextlib.nullcontext() if ssd else pytest.warns(RuntimeWarning):
            version = publish_table(table, path, step=2, delta=True)
        assert version.tables[0].rows == 1
        expect([3, 7])


def test_the_cap_serves_equal_norms_in_hash_order() -> None:
    keys = np.arange(100, dtype=np.uint64)
    keys = keys[np.argsort(hash_keys(keys))]
    weights = np.where(np.arange(100) % 5 == 0, np.float32(2), np.float32(1))[:, None]
    pieces: Any = [(keys[first : first + 7], weights[first : first + 7], {}) for first in range(0, 100, 7)]
    chosen = np.concatenate([part for part, _ in ServedRows(max_rows=30).select(lambda: pieces)])
    ones = keys[weights[:, 0] == 1]
    assert set(chosen.tolist()) == {*keys[weights[:, 0] == 2].tolist(), *ones[:10].tolist()}
    assert len(list(ServedRows(max_rows=1000).select(lambda: pieces))) == len(pieces)
    weights[:50:2] = np.nan  # below all norms: served after all others, and not at all with min_norm
    sound, broken = (keys[chosen].tolist() for chosen in (~np.isnan(weights[:, 0]), np.isnan(weights[:, 0])))
    for rule, expected in (
        (ServedRows(max_rows=85), {*sound, *broken[:10]}),
        (ServedRows(max_rows=100), {*sound, *broken}),
        (ServedRows(max_rows=85, min_norm=0.5), {*sound}),
    ):
        assert {int(key) for part, _ in rule.select(lambda: pieces) for key in part} == expected
    for bad in ({"min_norm": -1.0}, {"max_rows": 0}, {"min_frequency": -1}, {"min_score": float("nan")}):
        with pytest.raises(ValueError, match="it must be"):
            ServedRows(**bad)


def test_a_base_of_an_older_step_warns(tmp_path: Path) -> None:
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="8MB")) as table:
        train(table, 0)
        publish_table(table, tmp_path / "published", step=3, precision="int8")
        with pytest.warns(RuntimeWarning, match="rows of step 2, the current version 1 those of step 3"):
            version = publish_table(table, tmp_path / "published", step=2)
        assert version.tables[0].precision == "int8"  # the precision is that of the version before


def test_merge_by_hash_orders_streams_of_any_piece_sizes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        keys = np.unique(rng.integers(0, 10**6, rng.integers(0, 500)).astype(np.uint64))
        keys = keys[np.argsort(hash_keys(keys))]
        owner = rng.integers(0, 3, len(keys))
        streams = []
        for i in range(3):
            own = keys[owner == i]
            cuts = np.sort(rng.integers(0, len(own) + 1, 4))
            streams.append([(part, part[:, None].astype(np.float32)) for part in np.split(own, cuts)])
        merged = list(merge_by_hash(streams))
        assert np.concatenate([np.empty(0, np.uint64), *(k for k, _ in merged)]).tolist() == keys.tolist()
        assert all((rows[:, 0] == part.astype(np.float32)).all() for part, rows in merged)
