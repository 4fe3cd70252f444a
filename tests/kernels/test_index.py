"""Index kernels against their references: find, find_or_insert with and without eviction, rebuild, clear."""

from __future__ import annotations

import pytest
import torch
from helpers.index import ODD_KEYS, IndexPair, random_keys

from thermocline.kernels.evict import COUNTS, EVICTED, LOST, SHORT, VISITS, choose_victims, choose_victims_reference
from thermocline.kernels.find import LANES, find
from thermocline.kernels.find_resident import find_resident, find_resident_reference
from thermocline.kernels.index import EMPTY_KEY, ENTRIES, Index
from thermocline.kernels.insert import find_or_insert
from thermocline.kernels.rebuild import entries_reference, rebuild

SIZES = [0, 1, LANES - 1, LANES, LANES + 1, 3 * LANES + 5]
BIG = pytest.param(1_000_003, marks=pytest.mark.gpu)


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("count", [*SIZES, BIG])
def test_insert_then_find(count: int, unique: bool, device: str) -> None:
    table = IndexPair(max(1, count), 2 * count, device)
    keys = random_keys(count, device, seed=count, unique=unique)
    table.insert(keys, now=1, unique=unique)  # all miss
    table.insert(keys, now=2, unique=unique)  # all hit
    table.check_find(keys)
    table.check_find(random_keys(count, device, seed=count + 1))  # few or none are resident
    table.check_find(keys[:0])


def test_find_in_an_empty_index(device: str) -> None:
    index = Index.empty(100, device)
    assert find(index, random_keys(50, device, seed=1)).tolist() == [-1] * 50
    assert 100 <= index.entries < 110


def test_one_key_for_all_ids(device: str) -> None:
    for key in ODD_KEYS:
        table = IndexPair(4, 8, device)
        plan, _ = table.insert(torch.full((5 * LANES + 1,), key, device=device), now=1)
        assert plan.slots.unique().tolist() == [0]


def test_hits_and_misses_in_one_batch(device: str) -> None:
    table = IndexPair(700, 1000, device)
    keys = random_keys(600, device, seed=3)
    table.insert(keys[:300], now=1)
    mixed = keys[torch.randint(0, 600, (900,), generator=torch.Generator().manual_seed(1)).to(device)]
    table.insert(mixed, now=2)
    table.check_find(keys)


@pytest.mark.parametrize("load", [0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("entries", [5, 10, 150, pytest.param(4_000_000, marks=pytest.mark.gpu)])
def test_load_factors(entries: int, load: float, device: str) -> None:
    """Long searches through full blocks and around the end; searches end also in a full index."""
    count = int(entries * load)
    keys = random_keys(count, device, seed=entries)
    table = IndexPair(count, entries, device)
    table.insert(keys, now=1)
    table.check_find(keys)
    table.check_find(random_keys(count, device, seed=entries + 1))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("count", [*SIZES, BIG])
def test_find_resident(count: int, stored: bool, device: str) -> None:
    """The slots and `last_use` of an insertion that inserts nothing; a repetition in the same batch changes nothing."""
    table = IndexPair(max(1, count), 2 * count, device)
    keys = random_keys(count, device, seed=count, unique=False)
    table.insert(keys, now=1, count_visits=True)
    part = keys[torch.randint(0, max(1, count), (count // 2,), generator=torch.Generator().manual_seed(2)).to(device)]
    for batch, wanted in ((2, keys), (3, part), (3, part), (4, part)):
        slots = torch.full((len(wanted) + 3,), -77, dtype=torch.int32, device=device)
        missing = torch.zeros(1, dtype=torch.int64, device=device)
        now = torch.tensor([batch], device=device) if stored else batch
        find_resident(table.index, table.residents, wanted, slots[: len(wanted)], missing, now=now)
        expected = find_resident_reference(table.expected, wanted, used=table.used, now=batch)
        assert torch.equal(slots[: len(wanted)], expected)
        assert slots[len(wanted) :].tolist() == [-77] * 3
        assert missing.item() == 0
        table.check()
        options = {"used": table.used, "now": batch, "completed": 0, "count_visits": True}
        plan = find_or_insert(table.index, table.residents, wanted, **options)  # type: ignore[arg-type]
        assert torch.equal(plan.slots, expected)
        table.check()


def test_find_resident_counts_ids_without_a_slot(device: str) -> None:
    """Keys that were never inserted, and evicted ones whose entry remains in a full block of the index."""
    table = IndexPair(40, 130, device)
    keys = random_keys(120, device, seed=9)
    for batch in range(3):
        table.insert(keys[40 * batch : 40 * batch + 40], now=batch + 1, completed=batch, count_visits=True)
    wanted = keys[torch.randint(0, 120, (300,), generator=torch.Generator().manual_seed(3)).to(device)]
    slots = torch.empty(len(wanted), dtype=torch.int32, device=device)
    missing = torch.zeros(1, dtype=torch.int64, device=device)
    find_resident(table.index, table.residents, wanted, slots, missing, now=7)
    expected = find_resident_reference(table.expected, wanted, used=table.used, now=7)
    assert torch.equal(slots, expected)
    assert missing.item() == int((expected < 0).sum()) > 0
    table.check()


def test_full_index_reports_lost_ids(device: str) -> None:
    table = IndexPair(100, 2 * ENTRIES, device)
    entries = table.index.entries
    keys = random_keys(entries + 6, device, seed=1)
    keys = keys[keys != EMPTY_KEY]
    plan = find_or_insert(table.index, table.residents, keys, used=0, now=1, completed=0)
    assert plan.counts[LOST.value] == len(keys) - entries
    assert len(entries_reference(table.index)[0]) == 0  # nothing was inserted
    assert (plan.slots < 0).all()


@pytest.mark.parametrize("scale", [1, pytest.param(20000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count_visits", [False, True])
def test_eviction_over_many_batches(count_visits: bool, scale: int, device: str) -> None:
    """Batches in flight overlap: pinned slots are never evicted. The index is rebuilt when removed keys fill it."""
    table = IndexPair(80 * scale, 160 * scale, device)
    pool = random_keys(400 * scale, device, seed=9)
    draw = torch.Generator().manual_seed(5)
    evicted = rebuilds = 0
    for now in range(1, 30):
        ids = pool[(torch.rand(36 * scale, generator=draw) ** 2 * len(pool)).long().to(device)]
        if table.occupied + len(ids) > 0.9 * table.index.entries:
            table.rebuild()
            rebuilds += 1
        _, expected = table.insert(ids, now=now, completed=now - 2, count_visits=count_visits)
        assert not expected.short
        evicted += len(expected.victims)
        table.check_find(pool[:: len(pool) // 60])
    assert evicted > 200 * scale
    assert rebuilds > 0


def test_numbers_in_device_memory(device: str) -> None:
    """Recorded launches read slots in use and batch numbers from memory, and always include the kernels of eviction."""
    table = IndexPair(30, 100, device)
    pool, evicted = random_keys(60, device, seed=9), 0
    for now in range(1, 6):
        ids = pool[torch.arange(7 * now, 7 * now + 12, device=device) % 60]
        _, expected = table.insert(ids, now=now, completed=now - 1, count_visits=True, stored=True)
        evicted += len(expected.victims)
    assert evicted > 0


def test_frequent_rows_are_kept(device: str) -> None:
    """Two of three batches have the same keys, the third has others: only those are evicted."""
    table = IndexPair(100, 300, device)
    keys = random_keys(400, device, seed=3)
    for now in range(1, 19):
        ids = keys[:60] if now % 3 else keys[60 + 15 * (now // 3) :][:15]
        plan, _ = table.insert(ids, now=now, completed=now - 1, count_visits=True)
        assert int(plan.counts[EVICTED.value]) == 0 or now % 3 == 0, "a frequent key was evicted"
    assert int(plan.counts[EVICTED.value]) == 15


def test_renumber(device: str) -> None:
    """Ages and pins are unchanged after batch numbers are lowered."""
    table = IndexPair(50, 150, device)
    keys = random_keys(120, device, seed=4)
    for now in (1, 2, 3):
        table.insert(keys[20 * (now - 1) :][:20] if now < 3 else keys[:10], now=now, count_visits=True)
    for residents in (table.residents, table.expected):
        residents.renumber(2)
    _, expected = table.insert(keys[60:80], now=2, completed=0, count_visits=True)
    assert len(expected.victims) == 10
    assert not set(expected.victims.tolist()) & set(range(10)), "slots of batch 3, renumbered to 1, are pinned"
    table.check_find(keys)


def test_pinned_slots_are_never_evicted(device: str) -> None:
    """Too few slots are evictable: `short` is the number of missing slots, and nothing is inserted."""
    table = IndexPair(100, 300, device)
    keys = random_keys(260, device, seed=2)
    table.insert(keys[:60], now=1)
    table.insert(keys[60:100], now=2)
    before = table.residents.keys.clone()
    _, expected = table.insert(torch.cat([keys[50:60], keys[100:161]]), now=3, completed=1)
    assert expected.short == 61 - 50  # keys 0 to 49 are evictable
    assert torch.equal(table.residents.keys, before)
    plan, expected = table.insert(torch.cat([keys[50:60], keys[100:150]]), now=4, completed=1)
    assert sorted(plan.victims[:50].tolist()) == list(range(50))
    _, expected = table.insert(keys[200:260], now=5, completed=1)
    assert expected.short == 60


@pytest.mark.parametrize("capacity", [1, 4095, 4096, 4097, 10000, pytest.param(20_000_000, marks=pytest.mark.gpu)])
def test_choose_victims(capacity: int, device: str) -> None:
    """Oldest first, frequent ones later, then by slot; ages above the last class count as equal."""
    draw = torch.Generator().manual_seed(capacity)
    batch = torch.randint(0, 3000, (capacity,), generator=draw, dtype=torch.int32)
    visits = torch.randint(0, 8, (capacity,), generator=draw, dtype=torch.int32)
    last_use = ((batch << VISITS.value) | visits).to(device)
    evictable = int((batch <= 2500).sum())
    for need in sorted({0, 1, capacity // 3, evictable, evictable + 1}):
        counts = torch.zeros(COUNTS, dtype=torch.int64, device=device)
        counts[EVICTED.value] = need
        victims = torch.full((capacity + 2,), -77, dtype=torch.int32, device=device)
        choose_victims(last_use, 3000, 2500, counts, victims)
        expected = choose_victims_reference(last_use, 3000, 2500, need)
        if expected is None:
            assert counts[SHORT.value] == 1
            assert counts[EVICTED.value] == 0
            expected = victims[:0]
        assert torch.equal(victims[: len(expected)], expected)
        assert (victims[len(expected) :] == -77).all()


def test_rebuild_and_clear(device: str) -> None:
    table = IndexPair(300, 500, device)
    keys = random_keys(300, device, seed=4)
    table.insert(keys, now=1)
    rebuild(table.index, table.residents, table.used)
    table.check()
    table.check_find(keys)
    rebuild(table.index, table.residents, 0)
    assert len(entries_reference(table.index)[0]) == 0
    rebuild(table.index, table.residents, table.used)
    table.index.clear()
    assert find(table.index, keys).max() == -1


def test_removed_key_is_inserted_again(device: str) -> None:
    """Its entry may still exist, be empty, or belong to another key."""
    table = IndexPair(8, 15, device)
    keys = random_keys(24, device, seed=6)
    for now in range(1, 30):
        if table.occupied > 12:
            table.rebuild()
        table.insert(keys[torch.arange(now, now + 8) % 24], now=now, completed=now - 1)


@pytest.mark.gpu
def test_slots_are_deterministic(device: str) -> None:
    """Races change only the positions of entries in the index."""
    pool = random_keys(300_000, device, seed=1)
    runs = []
    for _ in range(10):
        table = IndexPair(200_000, 400_000, device)
        seen = []
        for now in range(1, 6):
            ids = pool[(torch.arange(400_000, device=device) * 7919 * now) % len(pool)][: 100_000 * 2]
            plan, expected = table.insert(ids[:150_000], now=now, completed=now - 1)
            seen += [plan.slots, plan.new_keys[: len(expected.new_keys)]]
            if now % 2 == 0:
                table.rebuild()
        runs.append(seen)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
