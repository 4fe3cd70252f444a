"""`tc.DramTier`: pins, budgets, errors, consistency with the store, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import dram
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.tiers.dram import KnownSlots


def keys_of(*keys: int) -> Any:
    return np.array(keys, np.uint64)


def small_store(path: Path, row_bytes: int) -> tc.SsdStore:
    return tc.SsdStore.open(path, row_bytes=row_bytes, **SMALL)


def test_a_training_loop() -> None:
    tier = tc.DramTier(4, tc.SGD(lr=1.0), budget="1MB", initial=tc.Constant(value=1.0))
    lookup = dram.lookup(tier, keys_of(5, 6, 5), [0, 2, 3])
    assert dram.pool(tier, lookup).tolist() == [[2] * 4, [1] * 4]
    dram.update(tier, lookup, np.array([[1] * 4, [10] * 4], np.float32))
    dram.release(tier, lookup)
    assert tier.read([5, 6, 7])[:, 0].tolist() == [-10, 0, 1]
    stats = tier.stats()
    assert (stats.resident, stats.dirty, stats.pinned, stats.misses) == (2, 2, 0, 2)
    assert "4" in repr(tier)
    assert "memory only" in repr(tier)


def test_torch_tensors_are_not_copied() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: tensors as arguments are NOT tested")
    tier = tc.DramTier(4, tc.SGD(lr=1.0), budget="1MB", initial=tc.Constant())
    ids = torch.tensor([-1, 2**62, -1])  # int64 bit patterns
    lookup = dram.lookup(tier, ids, torch.tensor([0, 2, 3]))
    out = torch.ones(2, 4)
    dram.pool(tier, lookup, out=out)
    assert out.abs().sum() == 0
    grad = torch.ones(2, 4, requires_grad=True)
    dram.update(tier, lookup, grad)
    dram.release(tier, lookup)
    assert tier.read(keys_of(2**64 - 1, 2**62))[:, 0].tolist() == [-2, -1]


def test_budget_includes_index_and_metadata() -> None:
    for budget in ("100KB", "1MB", "50MB"):
        tier = tc.DramTier(16, tc.Adam(), budget=budget)
        stats = tier.stats()
        parts = stats.bytes_rows + stats.bytes_metadata + stats.bytes_index + stats.bytes_buffers
        assert parts == stats.bytes_total <= stats.budget
        assert stats.bytes_total > 0.98 * stats.budget
        assert stats.bytes_rows == stats.capacity * tier.row_bytes


def test_full_tier_without_a_store_is_an_error() -> None:
    tier = tc.DramTier(16, tc.SGD(), budget="100KB")
    slots = tier.pull(np.arange(tier.capacity, dtype=np.uint64))
    tier.unpin(slots, dirty=True)
    with pytest.raises(tc.BudgetError, match=r"budget of 100000 bytes holds \d+ rows.*add a store"):
        tier.pull(keys_of(2**40))
    tier.check()
    with pytest.raises(tc.BudgetError, match="the minimum is"):
        tc.DramTier(16, tc.SGD(), budget=1000)


def test_working_set_over_budget_names_budget_and_rows(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", 64) as store:
        tier = tc.DramTier(16, tc.SGD(), budget="100KB", store=store)
        need = tier.capacity + 5
        with pytest.raises(
            tc.BudgetError, match=f"working set of {need} rows .* 100000 bytes holds {tier.capacity} rows"
        ):
            dram.lookup(tier, np.arange(need, dtype=np.uint64))
        tier.check()
        slots = tier.pull(np.arange(tier.capacity, dtype=np.uint64))  # exactly the capacity fits
        tier.unpin(slots)


def test_only_trained_keys_exist(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", 64) as store:
        tier = tc.DramTier(16, tc.SGD(), budget="100KB", store=store)
        tier.read(np.arange(100, dtype=np.uint64))
        slots = tier.pull(np.arange(50, dtype=np.uint64))
        tier.unpin(slots[:20], dirty=True)
        tier.unpin(slots[20:])
        tier.flush()
        assert len(store) == 20
        assert tier.stats().reads == 100


def test_rows_beyond_dram_are_there_after_reopen(tmp_path: Path) -> None:
    optimizer = tc.Adagrad(lr=0.1)
    table = tc.ReferenceTable(4, optimizer)
    random = np.random.default_rng(0)
    store = small_store(tmp_path / "s", 32)
    tier = tc.DramTier(4, optimizer, budget="60KB", store=store)
    assert tier.capacity < 1000
    for step in range(1, 40):
        ids = random.integers(0, 4000, 300).astype(np.uint64)
        grad = random.normal(size=(300, 4)).astype(np.float32)
        lookup = dram.lookup(tier, ids)
        dram.update(tier, lookup, grad, step=step)
        dram.release(tier, lookup)
        table.update(ids, grad, None, "none", step=step)
    stats = tier.stats()
    assert stats.evictions > 3 * tier.capacity
    assert stats.from_store > 0
    tier.flush()
    store.commit()
    store.close()
    keys = np.array(sorted(table.rows), np.uint64)
    with small_store(tmp_path / "s", 32) as store:
        tier = tc.DramTier(4, optimizer, budget="60KB", store=store)
        np.testing.assert_array_equal(tier.read(keys).view(np.uint32), table.read(keys).view(np.uint32))
        assert len(store) == len(keys)


def test_flush_to_another_store(tmp_path: Path) -> None:
    tier = tc.DramTier(4, tc.SGD(), budget="1MB")
    tier.push(np.arange(10, dtype=np.uint64), np.arange(40, dtype=np.float32).reshape(10, 4))
    with small_store(tmp_path / "s", 16) as store:
        tier.flush(store)
        assert len(store) == 10
        tier.push(keys_of(3), np.ones((1, 4), np.float32))
        tier.flush(store)
        assert store.stats().bytes_put == 11 * (16 + 8)  # the second flush wrote one row
        loaded = tc.DramTier(4, tc.SGD(), budget="1MB")
        for keys, rows in store.scan():
            loaded.push(keys, rows.view(np.float32), dirty=False)
        assert loaded.stats().dirty == 0
        np.testing.assert_array_equal(loaded.read(range(10)), tier.read(range(10)))


def test_pins_keep_rows_in_place(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", 16) as store:
        tier = tc.DramTier(4, tc.SGD(), budget="30KB", store=store, initial=tc.Constant())
        pinned = tier.pull(keys_of(1, 2))
        tier.write(pinned, np.full((2, 4), 7, np.float32))
        for first in range(100, 5000, 50):
            slots = tier.pull(np.arange(first, first + 50, dtype=np.uint64))
            assert not set(slots.tolist()) & set(pinned.tolist())
            tier.unpin(slots, dirty=True)
        assert tier.rows(pinned).tolist() == [[7] * 4] * 2
        with pytest.raises(tc.ThermoclineError, match="2 rows are still pinned"):
            tier.check()
        tier.unpin(pinned)
        tier.check()
        with pytest.raises(tc.ThermoclineError, match="not pinned"):
            tier.unpin(pinned)


def test_policies_keep_different_rows(tmp_path: Path) -> None:
    kept = {}
    for policy in ("lru", "lfu", "lru_lfu"):
        with small_store(tmp_path / policy, 16) as store:
            tier = tc.DramTier(4, tc.SGD(), budget="60KB", store=store, policy=policy)  # type: ignore[arg-type]
            hot = np.arange(tier.capacity // 4, dtype=np.uint64)
            for _ in range(5):
                tier.unpin(tier.pull(hot))
            for first in range(1000, 1000 + 8 * tier.capacity, 50):
                tier.unpin(tier.pull(np.arange(first, first + 50, dtype=np.uint64)))
            before = tier.stats().hits
            tier.unpin(tier.pull(hot))
            kept[policy] = tier.stats().hits - before
    assert kept == {"lru": 0, "lfu": len(hot), "lru_lfu": len(hot)}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_and_evictions_do_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    def train(threads: int) -> tuple[bytes, tc.DramStats]:
        with small_store(tmp_path / str(threads), 32) as store:
            tier = tc.DramTier(4, tc.Adagrad(), budget="300KB", store=store, threads=threads, shards=4)
            random = np.random.default_rng(1)
            for step in range(1, 15):
                lookup = dram.lookup(tier, random.integers(0, 9000, 4000).astype(np.uint64), np.arange(0, 4001, 40))
                dram.update(tier, lookup, random.normal(size=(100, 4)).astype(np.float32), step=step)
                dram.release(tier, lookup)
            return tier.read(range(9000)).tobytes(), tier.stats()

    rows, stats = train(threads)
    want_rows, want_stats = train(1)
    assert rows == want_rows
    assert stats.evictions > 1000
    assert (stats.hits, stats.evictions) == (want_stats.hits, want_stats.evictions)


def test_concurrent_pulls_lose_no_update(tmp_path: Path) -> None:
    # Three threads add to shared rows in a tier that holds a fraction of them.
    with small_store(tmp_path / "s", 16) as store:
        tier = tc.DramTier(4, tc.SGD(lr=1.0), budget="100KB", store=store, initial=tc.Constant())
        update_lock = threading.Lock()
        counts = np.zeros(3000, np.int64)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    ids = random.integers(0, 3000, 200).astype(np.uint64)
                    lookup = dram.lookup(tier, ids)
                    with update_lock:  # one thread updates rows at a time; the others pull and evict
                        dram.update(tier, lookup, -np.ones((200, 4), np.float32))
                        np.add.at(counts, ids, 1)
                    dram.release(tier, lookup)
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not errors
        tier.check()
        assert tier.stats().evictions > 1000
        np.testing.assert_array_equal(tier.read(range(3000)), np.repeat(counts[:, None], 4, axis=1))


def test_closed_store_is_an_error_and_leaves_no_pin(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s", 16)
    tier = tc.DramTier(4, tc.SGD(), budget="100KB", store=store)
    store.close()
    with pytest.raises(tc.ThermoclineError, match="closed"):
        tier.pull(keys_of(1, 2, 3))
    tier.check()
    assert tier.stats().resident == 0


def test_invalid_arguments(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", 20) as store, pytest.raises(tc.ThermoclineError, match="row_bytes=16"):
        tc.DramTier(4, tc.SGD(), store=store)
    with pytest.raises(ValueError, match="policy is 'mru'"):
        tc.DramTier(4, tc.SGD(), policy="mru")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim is 0"):
        tc.DramTier(0, tc.SGD())
    with pytest.raises(ValueError, match="shards is 3"):
        tc.DramTier(4, tc.SGD(), shards=3)
    with pytest.raises(ValueError, match="seed is -1"):
        tc.DramTier(4, tc.SGD(), seed=-1)
    tier = tc.DramTier(4, tc.SGD(), budget="100KB")
    ids = keys_of(1, 2, 3)
    for offsets in ([1, 3], [0, 2], [0, 3, 2, 3], [0, 4]):
        with pytest.raises(tc.ThermoclineError, match="offsets must begin with 0"):
            dram.lookup(tier, ids, offsets)
    tier.check()  # no call left a pin
    lookup = dram.lookup(tier, ids, [0, 3])
    with pytest.raises(ValueError, match=r"sums has shape \(2, 4\)"):
        tier.apply_gradients(lookup.slots, np.ones((2, 4), np.float32))
    with pytest.raises(TypeError, match="float32"):
        tier.apply_gradients(lookup.slots, np.ones((3, 4)))
    with pytest.raises(ValueError, match="step is 0: it must be at least 1"):
        dram.update(tier, lookup, np.ones((1, 4), np.float32), step=0)
    with pytest.raises(tc.ThermoclineError, match=r"slot .* is out of range"):
        tier.unpin(np.array([10**6], np.uint32))
    with pytest.raises(tc.ThermoclineError, match="flush needs a store"):
        tier.flush()


def test_working_set() -> None:
    working_set = tc.WorkingSet.of(keys_of(7, 3, 7, 7, 2**64 - 1, 3))
    assert working_set.keys.tolist() == [7, 3, 2**64 - 1]
    assert working_set.inverse.tolist() == [0, 1, 0, 0, 2, 1]
    assert working_set.starts.tolist() == [0, 3, 5, 6]
    assert working_set.order.tolist() == [0, 2, 3, 1, 5, 4]
    assert len(working_set) == 3
    assert len(tc.WorkingSet.of([])) == 0
    ids = np.random.default_rng(0).zipf(1.3, 300_000).astype(np.uint64)
    one, four = tc.WorkingSet.of(ids, threads=1), tc.WorkingSet.of(ids, threads=4)
    for name in ("keys", "inverse", "starts", "order"):
        np.testing.assert_array_equal(getattr(one, name), getattr(four, name))
    np.testing.assert_array_equal(one.keys[one.inverse], ids)


@pytest.mark.parametrize("dim", [3, 16])  # 16: whole cache lines, written with streaming stores
@pytest.mark.parametrize("unique", [False, True])
def test_push_replaces_rows_in_dram_and_in_the_store(unique: bool, dim: int, tmp_path: Path) -> None:
    """More rows than one task copies: resident, evicted and new. A read returns the last pushed row."""
    rng = np.random.default_rng(1)
    keys = rng.permutation(20000).astype(np.uint64)
    rows = rng.random((20000, dim), np.float32)
    with tc.SsdStore.open(tmp_path / "store", row_bytes=4 * dim) as store:
        tier = tc.DramTier(dim, tc.SGD(), budget="1MB", store=store, threads=3)
        tier.push(keys[:15000], rows[::-1][:15000], unique=unique)
        tier.push(keys[5000:], rows[5000:], unique=unique)
        tier.push(keys[:5000], rows[:5000], unique=unique)
        assert tier.stats().evictions > 0
        assert np.array_equal(tier.read(keys), rows)
        again = rng.integers(0, 20000, 30000)  # repeated keys: the last row is kept
        last = rng.random((30000, dim), np.float32)
        tier.push(keys[again], last)
        rows[again] = last  # NumPy also keeps the last
        assert np.array_equal(tier.read(keys), rows)
        tier.check()


@pytest.mark.parametrize("dim", [4, 16])  # rows of 16 bytes, and of 64, which are copied past the caches
def test_push_with_known_slots(dim: int) -> None:
    """Slots of this tier, of another one, of keys that were erased since, unknown and wrong ones: the same rows."""
    rng = np.random.default_rng(dim)
    tier, other = (tc.DramTier(dim, tc.SGD(lr=1.0), budget="1MB", initial=tc.Constant()) for _ in range(2))
    rows: dict[int, float] = {}

    def slots_of(source: tc.DramTier, keys: Any) -> Any:
        slots = np.empty(len(keys), np.uint32)
        source.read_into(keys, np.empty((len(keys), dim), np.float32), slots)
        return slots

    def push(keys: Any, known: KnownSlots | None) -> None:
        values = rng.random(len(keys), np.float32)
        tier.push_stored(keys, np.repeat(values[:, None], dim, 1), unique=True, known=known)
        rows.update(zip(keys.tolist(), values.tolist(), strict=True))

    def some(count: int) -> Any:
        return rng.choice(3000, count, replace=False).astype(np.uint64)

    push(some(2500), None)
    other.push_stored(some(2500), np.ones((2500, dim), np.float32))
    version = tier.slots_version
    assert tier.keeps_slots
    assert version != other.slots_version
    for number in range(12):
        keys = some(1500)
        kind = number % 4
        slots = slots_of(other if kind == 1 else tier, keys)
        if kind == 0:  # resident keys only: no lookup
            keys, slots = keys[slots != 2**32 - 1], slots[slots != 2**32 - 1]
        if kind == 2:  # erased keys, whose slots other keys get
            erased = some(700)
            tier.erase(erased)
            for key in erased.tolist():
                rows.pop(key, None)
            push(some(900), None)
        if kind == 3:
            slots[::3] = rng.integers(0, 2**32, len(slots[::3]))
        known = other.slots_version if kind == 1 else 0 if kind == 3 else version
        push(keys, KnownSlots(slots, known))
        expected = [rows.get(key, 0.0) for key in range(3000)]
        assert tier.read(np.arange(3000, dtype=np.uint64))[:, 0].tolist() == expected
        version = tier.slots_version if kind == 2 else version
    tier.check()


def test_slots_of_a_tier_with_a_store_are_not_known(tmp_path: Path) -> None:
    store = small_store(tmp_path, 16)
    tier = tc.DramTier(4, tc.SGD(lr=1.0), budget="64KB", store=store, initial=tc.Constant())
    tier.push(keys_of(1, 2), np.ones((2, 4), np.float32))
    slots = np.empty(2, np.uint32)
    tier.read_into(keys_of(1, 2), np.empty((2, 4), np.float32), slots)
    assert not tier.keeps_slots
    assert slots.tolist() == [2**32 - 1] * 2
    tier.push_stored(keys_of(1, 2), np.full((2, 4), 3, np.float32), unique=True, known=KnownSlots(slots * 0, 1))
    assert tier.read([1, 2])[:, 0].tolist() == [3, 3]
    with pytest.raises(tc.ThermoclineError, match="slots have 1 elements, expected 2"):
        tier.read_into(keys_of(1, 2), np.empty((2, 4), np.float32), slots[:1])
    store.close()
