"""`thermocline export` against the rows of the run: base, delta, several ranks' stores, rows in DRAM only."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import thermocline as tc
from thermocline import serving
from thermocline.embedding.key_hash import hash_keys
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
    snapshot = serving.open(path)
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
        version = publish_table(table, path, step=4, delta=True)
        assert version.kind == "delta"
        assert 0 < version.tables[0].rows <= 400
        assert version.tables[0].deleted == 0
        expect_rows(path, table)
        assert publish_table(table, path, step=4, delta=True).tables[0].rows == 0
        expect_rows(path, table)


def test_keys_that_are_gone_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "published"
    options = {"mem": "8MB", "name": "t"}
    first, second = tc.Table(4, tc.SGD(lr=0.1), **options), tc.Table(4, tc.SGD(lr=0.1), **options)
    with contextlib.closing(first), contextlib.closing(second):
        train(first, 0)
        train(second, 1)
        publish_table(first, path, step=1)
        version = publish_table(second, path, step=2, delta=True)
        assert version.tables[0].deleted > 0
        expect_rows(path, second)
        keys = np.concatenate([keys for keys, _ in first.rows()])
        trained = set(np.concatenate([keys for keys, _ in second.rows()]).tolist())
        _, found = serving.open(path).find(keys)
        assert found.tolist() == [int(key) in trained for key in keys]


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
