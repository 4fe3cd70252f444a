"""The look-ahead loads rows of coming batches into DRAM before their batch is pulled, in the memory that it may use."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ssd import SMALL
from helpers.train import budget_for

import thermocline as tc
from thermocline.distributed.split_horizon import SplitHorizon
from thermocline.embedding import table_spec
from thermocline.embedding.backend import ReadCounts
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.pipeline.horizon_length import HorizonLength, SweepReads
from thermocline.pipeline.lookahead import AheadItem, LookAhead
from thermocline.tiers import dram_horizon
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_horizon import DramHorizon

ADAGRAD = tc.Adagrad(lr=0.05)
pytestmark = pytest.mark.timeout(60)


def batches(count: int, keys: int = 4000, ids: int = 40, seed: int = 1) -> list[tc.Batch]:
    """Batches of one bag per example and one id per bag: the ids of a batch are kept as numbers."""
    rng = np.random.default_rng(seed)
    return [tc.Batch(rng.integers(0, keys, ids, np.uint64), np.arange(ids + 1), 1) for _ in range(count)]


def make_table(folder: Path | None, *, rows: int, lookahead: int | str = 16, **options: Any) -> tc.Table:
    mem = budget_for(rows, 4, ADAGRAD, lookahead=True)
    if folder is None:
        return tc.Table(4, ADAGRAD, mem="4MB", name="rows")
    return tc.Table(4, ADAGRAD, mem=mem, lookahead=lookahead, ssd=folder, name="rows", ssd_options=SMALL, **options)


def train(table: tc.Table, loader: Any, **options: Any) -> tc.Prefetch:
    bag = tc.EmbeddingBag(table, 1)
    with tc.prefetch(loader, table, **options) as prepared:
        for batch in prepared:
            bag(batch).square().sum().backward()
            table.step()
    return prepared


def rows_of(table: tc.Table, data: list[tc.Batch]) -> bytes:
    return table.read(np.unique(np.concatenate([batch.ids for batch in data]))).tobytes()


def stage_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("thermocline-")}


def test_rows_are_loaded_before_their_batch_is_pulled(tmp_path: Path) -> None:
    data = batches(200)
    expected = make_table(None, rows=0)
    train(expected, data)
    table = make_table(tmp_path / "a", rows=1500)
    ahead = train(table, data, depth=1).lookahead  # serial: the size of groups does not depend on time
    stats = table.dram.stats()
    assert ahead is not None
    assert stats.loaded_ahead == stats.misses > 1000, "a row was read by the pull of its batch"
    assert ahead.sweeps < 100
    assert ahead.late_rows == 0
    assert ahead.rows_loaded == stats.loaded_ahead
    assert ahead.collected == ahead.consumed == 200
    table.dram.check()
    assert rows_of(table, data) == rows_of(expected, data)
    counts = table.backend.tier_counts()
    assert counts["ssd"] == stats.from_store
    assert sum(counts.values()) == sum(len(np.unique(batch.ids)) for batch in data)


def test_rows_of_many_batches_take_fewer_reads(tmp_path: Path) -> None:
    """DRAM holds an eighth of the rows. Batches loaded together share pages."""
    data, reads = batches(80, keys=16000, ids=100), {}
    for lookahead in (0, 16):
        table = make_table(tmp_path / str(lookahead), rows=2000, lookahead=lookahead)  # of the same memory
        train(table, data, depth=1)
        assert table.store is not None
        before = table.store.stats().reads
        ahead = train(table, data, depth=1).lookahead
        assert (ahead is None) == (lookahead == 0)
        reads[lookahead] = table.store.stats().reads - before
    assert reads[16] < 0.6 * reads[0]


@pytest.mark.parametrize("rows", [150, 1500])  # 150: batches wait for the rows of others
@pytest.mark.parametrize(("lookahead", "parts"), [(1, 1), (8, 2), (64, 1), (64, 2), ("auto", 1), ("auto", 2)])
def test_same_bits_for_any_length(
    lookahead: int | str, parts: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_spec, "_LEAST_MEM", 0)  # "auto" also in little memory
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", parts)
    data = batches(100)
    expected = make_table(None, rows=0)
    train(expected, data)
    table = make_table(tmp_path / "a", rows=rows, lookahead=lookahead)
    ahead = train(table, data, depth=4, pull_window=2).lookahead
    assert ahead is not None
    table.dram.check()
    assert rows_of(table, data) == rows_of(expected, data)


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_of_large_batches_are_not_late(depth: int, tmp_path: Path) -> None:
    """A batch fills a fourth of DRAM: the sweep takes several parts for one of its partitions."""
    table = make_table(tmp_path / "a", rows=3000, lookahead=64)
    ahead = train(table, batches(40, keys=20_000, ids=table.dram.capacity // 4), depth=depth).lookahead
    assert ahead is not None
    misses = table.dram.stats().misses
    # With threads, a batch that training waits for is passed on although memory was not released yet: seldom.
    assert ahead.late_rows <= (0 if depth == 1 else 0.05 * misses)
    assert table.dram.stats().loaded_ahead >= misses - ahead.late_rows


def test_dropped_delayed_reordered_and_partial_hints_do_not_change_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", 2)
    data, load, calls = batches(120), DramHorizon.load, itertools.count()
    expected = make_table(None, rows=0)
    train(expected, data)

    def unreliable(self: DramHorizon, share: float) -> bool:
        number = next(calls)
        if number % 3 == 0:
            return False  # this hint is not used
        if number % 5 == 0:
            time.sleep(0.005)
        if number % 7 == 0:
            self.drop()
        if number % 11 == 0:
            raise tc.BudgetError("no memory for this part")
        if number % 13 == 0:
            self._core.next_part(7, 2)  # not loaded: these keys are visited again after others
        if number % 2 == 0:
            share = 1 / 16
        return load(self, share)

    monkeypatch.setattr(DramHorizon, "load", unreliable)
    for depth, rows in itertools.product((1, 3), (300, 1500)):
        table = make_table(tmp_path / f"{depth}-{rows}", rows=rows)
        train(table, data, depth=depth)
        table.dram.check()
        assert rows_of(table, data) == rows_of(expected, data)


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_of_the_horizon_stays_in_its_budget(depth: int, tmp_path: Path) -> None:
    table = make_table(tmp_path / "a", rows=8000, lookahead="300KB")
    ahead = train(table, batches(600, keys=1 << 40), depth=depth).lookahead
    assert ahead is not None
    assert ahead.sweep_batches < 300
    assert 200_000 < ahead.most_bytes <= ahead.budget == 300_000
    stats = table.dram.stats()
    assert stats.bytes_buffers >= 300_000
    assert stats.bytes_total <= stats.budget


def test_dense_features_of_batches_ahead_are_counted(tmp_path: Path) -> None:
    table = make_table(tmp_path / "a", rows=8000, lookahead="300KB")
    bag, trained, most = tc.EmbeddingBag(table, 1), 0, 0
    dense = torch.zeros(40, 128)  # 20 KB: the budget holds fewer than 15 batches

    def loader() -> Iterator[tc.Batch]:
        nonlocal most
        for number, batch in enumerate(batches(60, keys=1 << 40)):
            most = max(most, number - trained)
            yield tc.Batch(batch.ids, batch.offsets, 1, dense=dense.clone())

    with tc.prefetch(loader(), table, depth=1) as prepared:
        for batch in prepared:
            bag(batch).sum().backward()
            table.step()
            trained += 1
    assert 4 < most < 15


def test_a_pull_that_does_not_fit_drops_the_look_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(tmp_path / "a", rows=1500)
    pin, drop, dropped = table.pin, table.drop_lookahead, list[bool]()

    def pin_after_a_drop(window: Any) -> None:
        if not dropped:
            raise tc.BudgetError("rows loaded ahead hold the memory")
        pin(window)

    monkeypatch.setattr(table, "pin", pin_after_a_drop)
    monkeypatch.setattr(table, "drop_lookahead", lambda: dropped.append(drop()) or True)  # type: ignore[func-returns-value]
    train(table, batches(20), depth=2)
    assert len(dropped) == 1
    table.dram.check()


def test_the_first_batch_does_not_wait_for_a_group(tmp_path: Path) -> None:
    read: list[int] = []

    def loader() -> Iterator[tc.Batch]:
        for i, batch in enumerate(batches(64)):
            read.append(i)
            yield batch
            time.sleep(0.01)

    table = make_table(tmp_path / "a", rows=3000, lookahead=64)
    with tc.prefetch(loader(), table, depth=2) as prepared:
        next(prepared)
        assert len(read) < 12


def test_a_slow_loader_delays_no_batch_until_a_group_is_full(tmp_path: Path) -> None:
    """With a loader slower than training, a batch is delivered before many later ones have been read."""
    read: list[int] = []

    def loader() -> Iterator[tc.Batch]:
        for i, batch in enumerate(batches(40)):
            read.append(i)
            time.sleep(0.004)
            yield batch

    table = make_table(tmp_path / "a", rows=3000, lookahead=64)
    bag = tc.EmbeddingBag(table, 1)
    distances = []
    with tc.prefetch(loader(), table, depth=2) as prepared:
        for i, batch in enumerate(prepared):
            distances.append(len(read) - i)
            bag(batch).sum().backward()
            table.step()
    assert max(distances) < 16


def test_a_loader_that_blocks_holds_back_no_batch(tmp_path: Path) -> None:
    blocked = threading.Event()

    def loader() -> Iterator[tc.Batch]:
        yield from batches(30)
        blocked.wait(20)

    table = make_table(tmp_path / "a", rows=3000, lookahead=64)
    bag = tc.EmbeddingBag(table, 1)
    with tc.prefetch(loader(), table, depth=2) as prepared:
        for _ in range(30):
            bag(next(prepared)).sum().backward()
            table.step()
        assert not blocked.is_set()
        blocked.set()
    table.dram.check()


def test_rows_of_frozen_bags_are_loaded_ahead(tmp_path: Path) -> None:
    data = batches(40)
    table = make_table(tmp_path / "a", rows=800)
    train(table, data)
    table.commit(b"")
    bag = tc.EmbeddingBag(table, 1).requires_grad_(False)
    before = table.dram.stats()
    for batch in tc.prefetch(data, table, depth=1):
        bag(batch)
    after = table.dram.stats()
    assert after.loaded_ahead > before.loaded_ahead
    assert after.reads - before.reads == after.read_hits - before.read_hits > 0, "a row was read late"


def test_a_batch_ahead_that_is_freed_without_release_unpins_its_rows(tmp_path: Path) -> None:
    table = make_table(tmp_path / "a", rows=1500)
    horizon = table.backend.horizon(training=True)
    assert isinstance(horizon, DramHorizon)
    kept, freed = [horizon.add_keys(np.arange(first, first + 100, dtype=np.uint64)) for first in (0, 50)]
    while kept.to_visit or freed.to_visit:
        assert horizon.load()
    assert table.dram.pinned == 150
    del freed
    assert table.dram.pinned == 100  # at once, and only those of no other batch
    kept.release()
    assert table.dram.pinned == 0
    table.dram.check()


def tier_above(*, resident: int, write_back: Callable[[], None]) -> Any:
    """An HBM tier that has all rows, or none, and rows on their way down until `write_back`."""
    return types.SimpleNamespace(
        resident=lambda keys: np.full(len(keys), resident, np.uint8),
        wait_for_write_back=write_back,
        stats=lambda: types.SimpleNamespace(from_ssd=0),
    )


def test_rows_on_their_way_down_are_not_read_from_the_store(tmp_path: Path) -> None:
    """Their write-back would wait until the whole part is read."""
    table = make_table(tmp_path / "a", rows=1500)
    keys = np.arange(100, dtype=np.uint64)
    rows = np.ones((len(keys), table.dram.row_bytes // 4), np.float32)
    above = tier_above(resident=0, write_back=lambda: table.dram.push_stored(keys, rows, dirty=True, unique=True))
    horizon = DramHorizon(table, training=True, above=above)
    batch = horizon.add_keys(keys)
    while batch.to_visit:
        assert horizon.load()
    assert table.dram.loaded_ahead == 0
    np.testing.assert_array_equal(table.dram.read_stored(keys), rows)
    horizon.drop()
    batch.release()
    table.dram.check()


def test_rows_of_the_tier_above_need_no_room_in_dram(tmp_path: Path) -> None:
    table = make_table(tmp_path / "a", rows=1500)
    above = tier_above(resident=1, write_back=lambda: None)
    for tier, full in ((above, False), (None, True)):
        horizon = DramHorizon(table, training=True, above=tier)
        batch = horizon.add_keys(np.arange(table.dram.capacity * 15 // 16, dtype=np.uint64))
        assert horizon.full
        while batch.to_visit:
            assert horizon.load()
        assert horizon.full == full
        horizon.drop()
        batch.release()
    table.dram.check()


def test_releasing_a_batch_counts_the_ids_of_frozen_bags_no_longer(tmp_path: Path) -> None:
    """Over several shards the horizon counts ids itself: what stays counted shortens the look-ahead for good."""
    table = make_table(tmp_path / "a", rows=1500)
    bag = tc.EmbeddingBag(table, 1).requires_grad_(False)
    part = table.backend.horizon(training=True)
    assert isinstance(part, DramHorizon)
    horizon, (batch,) = SplitHorizon([part], lambda keys: [keys]), batches(1)
    item = AheadItem(batch, {table: horizon}, training=True)
    assert horizon.bytes - part.bytes == batch.ids.nbytes
    item.release()
    assert horizon.bytes == part.bytes
    del bag


def test_batches_before_an_error_of_the_loader_are_trained(tmp_path: Path) -> None:
    def loader() -> Iterator[tc.Batch]:
        yield from batches(21)
        raise OSError("the file ends")

    for depth in (1, 4):
        table = make_table(tmp_path / str(depth), rows=3000)
        with pytest.raises(OSError, match="the file ends"):
            train(table, loader(), depth=depth)
        assert table.step_count == 21
        table.discard_gradients()
        table.dram.check()


def test_closing_ends_a_load_that_waits_for_memory(tmp_path: Path) -> None:
    before = threading.active_count()
    table = make_table(tmp_path / "a", rows=200, lookahead=64)
    prepared = tc.prefetch(batches(500), table, depth=4)
    next(prepared)
    start = time.monotonic()
    prepared.close()
    assert time.monotonic() - start < 2
    table.dram.check()
    assert threading.active_count() <= before


def test_evaluation_loads_ahead_and_changes_no_row(tmp_path: Path) -> None:
    data = batches(60)
    table = make_table(tmp_path / "a", rows=600)
    train(table, data[:30])
    table.commit(b"")
    before = rows_of(table, data)
    stored = table.store
    assert stored is not None
    bag = tc.EmbeddingBag(table, 1).eval()
    expected = make_table(None, rows=0)
    train(expected, data[:30])
    expected_bag = tc.EmbeddingBag(expected, 1).eval()
    counts, stats = table.backend.tier_counts(), table.dram.stats()
    with torch.no_grad(), tc.prefetch(data, table, training=False) as prepared:
        for batch, plain in zip(prepared, tc.prefetch(data, expected, training=False), strict=True):
            assert torch.equal(bag(batch), expected_bag(plain))
    assert table.dram.stats().read_ahead > 0
    assert table.dram.stats().loaded_ahead == stats.loaded_ahead
    assert table.backend.tier_counts() == counts, "evaluation counts as training"
    table.dram.check()
    assert table.dram.stats().dirty == 0
    assert rows_of(table, data) == before
    assert len(list(table.rows())) > 0
    trained = {int(key) for batch in data[:30] for key in batch.ids}
    assert {int(key) for keys, _ in table.rows() for key in keys} == trained


@pytest.mark.parametrize("loads", [True, False])
def test_late_rows_of_evaluation_are_counted(loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(30)
    table = make_table(tmp_path / "a", rows=600)
    bag = tc.EmbeddingBag(table, 1)
    train(table, data)
    table.commit(b"")
    table.reopen()  # nothing is in DRAM
    if not loads:
        monkeypatch.setattr(DramHorizon, "load", lambda self, share: False)
    with torch.no_grad(), tc.prefetch(data[:20], table, depth=1, training=False) as prepared:
        for batch in prepared:
            bag.eval()(batch)
    assert prepared.lookahead is not None
    last = len(np.unique(data[19].ids))  # counted when a batch is passed on, before it is read
    expected = sum(len(np.unique(batch.ids)) for batch in data[:20]) - last
    assert prepared.lookahead.late_rows == (0 if loads else expected)


def test_dropping_waits_for_the_part_that_is_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a batch that needs the whole tier fails, because that part is still pinned."""
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", 2)
    load, entered, resume = DramHorizon._load_part, threading.Event(), threading.Event()

    def slow(self: DramHorizon, *part: Any) -> None:
        entered.set()
        resume.wait(20)
        load(self, *part)

    monkeypatch.setattr(DramHorizon, "_load_part", slow)
    table = make_table(tmp_path / "a", rows=1500)
    bag = tc.EmbeddingBag(table, 1)  # registered while it exists
    with tc.prefetch(batches(4), table, depth=2) as prepared:
        assert entered.wait(20)
        dropping = threading.Thread(target=table.drop_lookahead)
        dropping.start()
        dropping.join(0.2)
        assert dropping.is_alive()
        resume.set()
        dropping.join(20)
        assert not dropping.is_alive()
        assert len(list(prepared)) == 4
    del bag
    table.dram.check()


def test_two_threads_load_parts_of_one_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ranks the look-ahead and the thread of hints load: mixed parts lost pins, or unpinned rows twice."""
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", 2)
    table = make_table(tmp_path / "a", rows=1500)
    horizon = table.backend.horizon(training=True)
    assert isinstance(horizon, DramHorizon)
    horizon._part = 8
    data = batches(10)
    ahead = [horizon.add_keys(batch.ids) for batch in data]
    threads = [threading.Thread(target=lambda: [horizon.load(1.0) for _ in range(60)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while any(batch.to_visit for batch in ahead):
        assert horizon.load()
    assert table.dram.pinned == len(np.unique(np.concatenate([batch.ids for batch in data])))
    for batch in ahead:
        batch.release()
    horizon.drop()
    assert table.dram.pinned == 0
    table.dram.check()


def test_a_part_is_chosen_and_pulled_while_the_one_before_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part at a time left the disk idle while the next one was gathered, looked up above and pinned."""
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", 2)
    load, together, at_once = DramHorizon._load_part, threading.Barrier(2, timeout=20), 0

    def paired(self: DramHorizon, *part: Any) -> None:
        nonlocal at_once
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()
            at_once += 1
        load(self, *part)

    table = make_table(tmp_path / "a", rows=1500)
    horizon = table.backend.horizon(training=True)
    assert isinstance(horizon, DramHorizon)
    horizon._part = 50
    monkeypatch.setattr(DramHorizon, "_load_part", paired)
    data = batches(2, ids=60)
    ahead = [horizon.add_keys(batch.ids) for batch in data]
    while any(batch.to_visit for batch in ahead):
        assert horizon.load()
        if horizon._core.gathered >= horizon._core.partitions:
            together.abort()  # the last part may have no partner
    assert at_once >= 1  # the second thread of a pair may see `abort` instead
    horizon.drop()
    table.dram.check()


def test_parts_that_wait_for_a_thread_are_not_loaded_after_a_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", 2)
    load, started, resume = DramHorizon._load_part, threading.Semaphore(0), threading.Event()

    def slow(self: DramHorizon, *part: Any) -> None:
        started.release()
        resume.wait(20)
        load(self, *part)

    monkeypatch.setattr(DramHorizon, "_load_part", slow)
    table = make_table(tmp_path / "a", rows=1500)
    horizon = table.backend.horizon(training=True)
    assert isinstance(horizon, DramHorizon)
    horizon._part = 50
    ahead = [horizon.add_keys(batch.ids) for batch in batches(10)]
    loading = threading.Thread(target=lambda: [horizon.load() for _ in range(3)])
    loading.start()
    assert started.acquire(timeout=20)
    assert started.acquire(timeout=20)
    while horizon._core.gathered == 0 or len(horizon._loads) < 3:
        time.sleep(0.001)  # the third part is chosen while two are being loaded
    dropping = threading.Thread(target=horizon.drop)
    dropping.start()
    while not horizon._dropped:
        time.sleep(0.001)
    resume.set()
    for thread in (dropping, loading):
        thread.join(20)
        assert not thread.is_alive()
    assert table.dram.pinned == 0
    assert table.dram.loaded_ahead == 0
    for batch in ahead:
        batch.release()
    table.dram.check()


def test_forward_passes_outside_the_pipeline_take_the_memory_of_the_look_ahead(tmp_path: Path) -> None:
    data = batches(60, keys=100_000)
    table = make_table(tmp_path / "a", rows=1000, lookahead=64)
    bag = tc.EmbeddingBag(table, 1)
    (other,) = batches(1, keys=100_000, ids=table.dram.capacity // 2, seed=2)
    with tc.prefetch(data, table, depth=2) as prepared:
        for i, batch in enumerate(prepared):
            bag(batch).sum().backward()
            table.step()
            if i % 15 == 14:
                with torch.no_grad():
                    expected = bag(other)
                assert torch.equal(bag(other), expected)
    table.dram.check()


def test_an_error_of_a_load_is_raised_by_the_batch_that_needs_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(40)
    for depth in (1, 4):
        table = make_table(tmp_path / str(depth), rows=1500)
        with monkeypatch.context() as patch:
            patch.setattr(DramHorizon, "load", lambda self, share: (_ for _ in ()).throw(tc.CorruptionError("page 7")))
            ahead = train(table, data, depth=depth).lookahead
        assert ahead is not None
        assert table.step_count == 40
        assert ahead.loads_cut_short == 40
        table.dram.check()


def test_reopening_the_table_while_groups_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups collected before `reopen` belong to the closed store. Their batches are pulled from the new one."""
    load, reopened = DramHorizon.load, threading.Event()

    def late(self: DramHorizon, share: float) -> bool:
        if threading.current_thread().name == "thermocline-look-ahead" and table.step_count > 0:
            reopened.wait(20)
        return load(self, share)

    data = batches(60)
    table = make_table(tmp_path / "a", rows=1500)
    table.commit(b"")
    bag = tc.EmbeddingBag(table, 1)
    monkeypatch.setattr(DramHorizon, "load", late)
    with tc.prefetch(data, table, depth=2) as prepared:
        for i, batch in enumerate(prepared):
            if i == 1:
                time.sleep(0.1)  # the look-ahead waits, and the stages have no batch
                table.reopen()
                reopened.set()
            bag(batch).square().sum().backward()
            table.step()
    table.dram.check()
    expected = make_table(None, rows=0)
    train(expected, data[1:])
    assert rows_of(table, data) == rows_of(expected, data)


def test_reopening_the_table_while_rows_are_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull finds the store closed, and continues with the new one."""
    pin, reopened, pulling = DramTier.pin, threading.Event(), threading.Event()

    def late(self: DramTier, keys: Any) -> Any:
        if threading.current_thread().name == "thermocline-pull" and table.step_count > 0:
            pulling.set()
            reopened.wait(20)
        return pin(self, keys)

    data = batches(20)
    table = make_table(tmp_path / "a", rows=1500, lookahead=0)
    table.commit(b"")
    bag = tc.EmbeddingBag(table, 1)
    monkeypatch.setattr(DramTier, "pin", late)
    with tc.prefetch(data, table, depth=2) as prepared:
        for i, batch in enumerate(prepared):
            bag(batch).square().sum().backward()
            table.step()
            if i == 1:
                assert pulling.wait(20)
                table.reopen()
                reopened.set()
    table.dram.check()


@pytest.mark.parametrize("thread", ["read", "look-ahead"])
def test_dropped_on_a_thread_of_the_look_ahead(thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may finalize the pipeline there: the thread must not join those that wait for it."""
    before = set(threading.enumerate())
    held, dropped, holder = threading.Event(), threading.Event(), []
    load = DramHorizon.load

    def drop() -> None:
        held.wait(20)
        holder.clear()
        dropped.set()

    def loader() -> Iterator[tc.Batch]:
        for i, batch in enumerate(batches(500)):
            if thread == "read" and i == 3:
                drop()
            yield batch

    def dropping(self: DramHorizon, share: float) -> bool:
        if thread == "look-ahead" and not dropped.is_set():
            drop()
        return load(self, share)

    monkeypatch.setattr(DramHorizon, "load", dropping)
    table = make_table(tmp_path / "a", rows=1500)
    bag = tc.EmbeddingBag(table, 1)  # registered while it exists
    holder += [bag, tc.prefetch(loader(), table, depth=3)]
    held.set()
    assert dropped.wait(20)
    end = time.monotonic() + 20
    while (running := stage_threads() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running
    while table.dram.stats().pinned and time.monotonic() < end:
        time.sleep(0.01)
    table.dram.check()


def lengths(sweeps: int, reads: Callable[[int], float], cost: Callable[[int], float]) -> list[int]:
    """Return the length of each of `sweeps` sweeps: reads per batch by length, cost of a read by sweep."""
    length, sizes = HorizonLength(None), []
    for sweep in range(sweeps):
        sizes.append(size := length.batches)
        length.swept(size, SweepReads(size * reads(size), size), SweepReads(cost(sweep), 1))
    return sizes


def test_the_horizon_grows_until_reads_become_dearer() -> None:
    dearer = lengths(13, lambda size: size + 100, lambda _: 10)  # short horizons save nothing yet
    assert dearer[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert dearer[7:] == [64, 64, 64, 64, 128, 128]  # tried again after four sweeps
    limited = HorizonLength(5)
    for _ in range(6):
        limited.swept(limited.batches, SweepReads(0, 0), SweepReads(10, 1))
    assert limited.batches == 5


def test_the_horizon_grows_while_the_device_becomes_slower() -> None:
    """The costs of a read that changed between two sweeps are no cost of the longer horizon."""
    assert lengths(8, lambda size: 1000 / size, lambda sweep: 10 * 3**sweep) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert lengths(10, lambda size: 10 * size, lambda sweep: 2.0**-sweep)[6:] == [64, 64, 64, 64]


class CountedReads:
    """Stands for the horizon of a table: its reads so far, and what they cost."""

    def __init__(self, read_cost: float, page_cost: float) -> None:
        self.read_counts = ReadCounts(0, 0, read_cost, page_cost)
        self.position = 0.0

    def read(self, reads: int) -> None:
        self.read_counts = self.read_counts._replace(reads=self.read_counts.reads + reads)
        self.position += 0.5


def test_the_costs_of_tables_are_weighted_by_their_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on a slow device that has few reads in a sweep hardly changes the price of the sweep."""
    fast, slow = CountedReads(10, 1), CountedReads(1010, 101)
    both: list[Any] = [fast, slow]
    ahead = LookAhead([], both, LookAheadLimits(None, 1 << 20), depth=1, training=True)
    ahead._counts = {horizon: horizon.read_counts for horizon in both}
    costs: list[SweepReads] = []
    monkeypatch.setattr(ahead._length, "swept", lambda batches, read, cost: costs.append(cost))
    for many, few in [(99, 1), (0, 0), (50, 50)]:
        for _ in range(2):  # parts of a sweep
            fast.read(many)
            slow.read(few)
            ahead.stats.collected += 1
            ahead._count_reads(both)
    assert costs == [SweepReads(20, 2), SweepReads(510, 51), SweepReads(510, 51)]


@pytest.mark.parametrize("lookahead", ["3GB", -1, "much", 1.5, True])
def test_values_that_are_refused(lookahead: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="lookahead"):
        tc.Table(4, ADAGRAD, mem="4GB", ssd=tmp_path / "a", lookahead=lookahead)


def test_limits_of_a_setting() -> None:
    assert LookAheadLimits.of(0, 1 << 30, 64) is None
    assert LookAheadLimits.of("auto", 1 << 20, 64) is None
    assert LookAheadLimits.of("100MB", 1 << 30, 64) == LookAheadLimits(None, 100_000_000)
    few, many = LookAheadLimits.of(32, 1 << 30, 2048), LookAheadLimits.of("auto", 1 << 30, 32)
    assert few is not None
    assert many is not None
    assert (few.batches, many.batches) == (32, None)
    assert few.bytes == (1 << 30) // 16
    assert many.bytes == (1 << 30) // 4


def test_table_and_loader_are_freed_without_the_cycle_collector(tmp_path: Path) -> None:
    """Else a table that is made again would need its memory twice."""
    gc.collect()
    gc.disable()
    try:
        for training in (True, False):
            table = make_table(tmp_path / str(training), rows=1500)
            bag = tc.EmbeddingBag(table, 1)
            for batch in tc.prefetch(batches(20), table, training=training):
                if training:
                    bag(batch).sum().backward()
                    table.step()
            alive = weakref.ref(table)
            del table, bag, batch
            assert alive() is None
    finally:
        gc.enable()
