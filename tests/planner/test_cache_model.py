"""Unique keys and hit rates: the formulas against counted keys and a real memory tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import thermocline as tc
from thermocline.data import key_stats
from thermocline.planner.cache_model import Popularity
from thermocline.tiers.dram import Policy

WORLDS = {
    "one id per field": {"keys": 50_000, "fields": 8},
    "many ids per field": {"keys": 20_000, "fields": 4, "nonzeros": 40, "zipf": 1.3},
    "all alike": {"keys": 3000, "fields": 2, "zipf": 0.0},
}


@pytest.mark.parametrize("world", WORLDS)
def test_unique_keys_are_those_of_the_generated_data(world: str) -> None:
    options = WORLDS[world]
    for size in (100, 2000, 20_000):
        ads = tc.SyntheticAds(batch_size=size, tensors=False, **options)  # type: ignore[arg-type]
        popularity = Popularity.zipf(ads.keys, ads.zipf, ads.nonzeros[0])
        assert popularity.keys == pytest.approx(sum(ads.keys))
        assert popularity.nonzeros == pytest.approx(ads.nonzeros[0], rel=1e-3)
        counted = np.mean([len(np.unique(ads.batch(number).ids)) for number in range(3)])
        assert popularity.unique(size) == pytest.approx(counted, rel=0.04)


def test_unique_keys_of_data_that_was_counted() -> None:
    ads = tc.SyntheticAds(keys=5000, fields=5, batch_size=500, examples=50_000, tensors=False)
    _, counts = key_stats.count_keys(ads)
    popularity = Popularity.counted(counts, 50_000)
    assert popularity.nonzeros == pytest.approx(5)
    counted = np.mean([len(np.unique(ads.batch(number).ids)) for number in range(20)])
    assert popularity.unique(500) == pytest.approx(counted, rel=0.03)


def test_a_key_of_every_example_is_always_there() -> None:
    popularity = Popularity(np.array([1.0, 100.0]), np.array([1.0, 0.01]))
    assert popularity.unique(1) == pytest.approx(2.0)
    assert popularity.unique(10**9) == pytest.approx(101.0)
    assert popularity.hit_rate(1, 1, "lfu") == pytest.approx(0.5)
    assert popularity.hit_rate(101, 1, "lru") == 1.0


def test_more_memory_never_hits_less() -> None:
    ads = tc.SyntheticAds(keys=10**9, fields=10, tensors=False)
    popularity = Popularity.zipf(ads.keys, ads.zipf, 10)
    policies: tuple[Policy, ...] = ("lru", "lfu", "lru_lfu")
    for policy in policies:
        rates = [popularity.hit_rate(rows, 4096, policy) for rows in (1e4, 1e6, 1e8, 1e9)]
        assert rates == sorted(rates)
        assert rates[-1] == 1.0
    assert popularity.hit_rate(1e6, 4096, "lru") <= popularity.hit_rate(1e6, 4096, "lfu")


@pytest.mark.parametrize(("policy", "off"), [("lru", 0.02), ("lfu", 0.08), ("lru_lfu", 0.06)])
def test_hit_rates_are_those_of_the_memory_tier(tmp_path: Path, policy: Policy, off: float) -> None:
    ads = tc.SyntheticAds(keys=60_000, fields=6, batch_size=500, tensors=False)
    popularity = Popularity.zipf(ads.keys, ads.zipf, 6)
    places = ((field, rank) for field, count in enumerate(ads.keys) for rank in range(count))
    keys = np.fromiter((ads.key_of(*place) for place in places), np.uint64)
    with tc.SsdStore.open(tmp_path / "rows", row_bytes=64, mem_budget="32MB") as store:
        store.put(keys, np.zeros((len(keys), 64), np.uint8))
        tier = tc.DramTier(8, tc.Adagrad(lr=0.1), budget="2MB", store=store, policy=policy)
        for number in range(300):
            if number == 200:
                before = tier.stats()
            slots = tier.pull(tc.WorkingSet.of(ads.batch(number).ids).keys)
            tier.unpin(slots)
        after = tier.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    assert after.initialised == 0  # every key had a row
    measured = hits / (hits + misses)
    assert 0.5 < measured < 0.95
    assert popularity.hit_rate(tier.capacity, 500, policy) == pytest.approx(measured, abs=off)
