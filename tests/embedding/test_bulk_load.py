"""Bulk loading: the store has every row, as after single puts, but without a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import thermocline as tc
from thermocline.embedding import bulk_load
from thermocline.tiers.ssd import SsdStore

ADS = tc.SyntheticAds(keys=50_000, fields=7, batch_size=8, seed=3)


def tier() -> tc.DramTier:
    return tc.DramTier(4, tc.RowWiseAdagrad(lr=0.1), budget="4MB", seed=5)


@pytest.mark.parametrize("piece", [bulk_load.PIECE, 7_000, 1_000])
def test_fill_store_writes_every_row_without_a_log(tmp_path: Path, piece: int) -> None:
    rows, total = tier(), sum(ADS.keys)
    progress = []
    with SsdStore.open(tmp_path / "rows", row_bytes=rows.row_bytes) as store:
        done = bulk_load.fill_store(
            store, ADS, rows.initial_rows, piece=piece, after=lambda n: progress.append(n) or True
        )  # type: ignore[func-returns-value]
        assert done == progress[-1] == total == len(store)
        assert progress == sorted(set(progress))
        stats = store.stats()
        assert (stats.rows_in_base, stats.rows_in_log, stats.merges) == (total, 0, 0)
        assert stats.bytes_written < 1.3 * stats.bytes_put + 8192 * stats.partitions
        store.commit()
        store.check()
    with SsdStore.open(tmp_path / "rows") as store:
        keys = ADS.some_keys(0, total)
        found, values = store.get(keys)
        assert found.all()
        assert np.array_equal(values.view(np.float32).reshape(total, -1), rows.initial_rows(keys))


def test_interrupted_fill_store_resumes(tmp_path: Path) -> None:
    rows, total, done, calls = tier(), sum(ADS.keys), 0, 0
    while done < total:
        calls += 1
        with SsdStore.open(tmp_path / "rows", row_bytes=rows.row_bytes) as store:
            end = done + 9_000
            done = bulk_load.fill_store(
                store,
                ADS,
                rows.initial_rows,
                done=done,
                piece=4_000,
                after=lambda n, end=end: n < end,  # type: ignore[misc]
            )
            store.commit()
            assert len(store) == done
    assert 4 < calls < 8
    with SsdStore.open(tmp_path / "rows") as store:
        assert store.stats().rows_in_log == 0
        assert store.get(ADS.some_keys(0, total))[0].all()


def test_resuming_needs_the_same_piece_size(tmp_path: Path) -> None:
    """Pieces of another size end at other rows: rows in between would be missing."""
    rows = tier()
    with SsdStore.open(tmp_path / "rows", row_bytes=rows.row_bytes) as store:
        done = bulk_load.fill_store(store, ADS, rows.initial_rows, piece=4_000, after=lambda n: n < 9_000)
        with pytest.raises(ValueError, match=f"done is {done}: no piece of about 7000 rows ends there"):
            bulk_load.fill_store(store, ADS, rows.initial_rows, done=done, piece=7_000)
        assert (
            bulk_load.fill_store(store, ADS, rows.initial_rows, done=done, piece=4_000) == sum(ADS.keys) == len(store)
        )


def test_error_in_rows_is_raised(tmp_path: Path) -> None:
    def fails(keys: bulk_load.Keys) -> bulk_load.Floats:
        raise ValueError("no rows today")

    with SsdStore.open(tmp_path / "rows", row_bytes=8) as store, pytest.raises(ValueError, match="no rows today"):
        bulk_load.fill_store(store, ADS, fails, piece=1_000)


def test_fill_top_loads_clean_rows() -> None:
    table = tc.Table(4, tc.SGD(lr=0.1), mem="16MB", device="cpu")
    bulk_load.fill_top(table, bulk_load.pieces(ADS, 9_000))
    keys = ADS.some_keys(0, sum(ADS.keys))
    assert len(np.unique(keys)) == len(keys)
    assert table.dram.stats().resident == len(keys)
    assert not list(table.dram.dirty_rows())
    assert np.array_equal(table.dram.read(keys), table.dram.initial_rows(keys))
    table.close()
