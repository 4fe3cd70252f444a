"""Unique keys and hit rates: the formulas against counted keys and the DRAM tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import thermocline as tc
from thermocline.data import key_stats
from thermocline.embedding.table_spec import Policy
from thermocline.planner.cache_model import KeyDistribution

DISTRIBUTIONS = {
    "one id per field": {"keys": 50_000, "fields": 8},
    "many ids per field": {"keys": 20_000, "fields": 4, "nonzeros": 40, "zipf": 1.3},
    "uniform": {"keys": 3000, "fields": 2, "zipf": 0.0},
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_unique_keys_match_generated_data(distribution: str) -> None:
    options = DISTRIBUTIONS[distribution]
    for size in (100, 2000, 20_000):
        ads = tc.SyntheticAds(batch_size=size, tensors=False, **options)  # type: ignore[arg-type]
        keys = KeyDistribution.zipf(ads.keys, ads.zipf, ads.nonzeros[0])
        assert keys.num_keys == pytest.approx(sum(ads.keys))
        assert keys.ids_per_example == pytest.approx(ads.nonzeros[0], rel=1e-3)
        counted = np.mean([len(np.unique(ads.batch(number).ids)) for number in range(3)])
        assert keys.unique_keys(size) == pytest.approx(counted, rel=0.04)


def test_unique_keys_match_counted_data() -> None:
    ads = tc.SyntheticAds(keys=5000, fields=5, batch_size=500, examples=50_000, tensors=False)
    _, counts = key_stats.count_keys(ads)
    keys = KeyDistribution.counted(counts, 50_000)
    assert keys.ids_per_example == pytest.approx(5)
    counted = np.mean([len(np.unique(ads.batch(number).ids)) for number in range(20)])
    assert keys.unique_keys(500) == pytest.approx(counted, rel=0.03)


def test_key_of_every_example_is_always_present() -> None:
    keys = KeyDistribution(np.array([1.0, 100.0]), np.array([1.0, 0.01]))
    assert keys.unique_keys(1) == pytest.approx(2.0)
    assert keys.unique_keys(10**9) == pytest.approx(101.0)
    assert keys.hit_rate(1, 1, "lfu") == pytest.approx(0.5)
    assert keys.hit_rate(101, 1, "lru") == 1.0


def test_hit_rate_increases_with_cache_size() -> None:
    ads = tc.SyntheticAds(keys=10**9, fields=10, tensors=False)
    keys = KeyDistribution.zipf(ads.keys, ads.zipf, 10)
    policies: tuple[Policy, ...] = ("lru", "lfu", "lru_lfu")
    for policy in policies:
        rates = [keys.hit_rate(rows, 4096, policy) for rows in (1e4, 1e6, 1e8, 1e9)]
        assert rates == sorted(rates)
        assert rates[-1] == 1.0
    assert keys.hit_rate(1e6, 4096, "lru") <= keys.hit_rate(1e6, 4096, "lfu")


@pytest.mark.parametrize(("policy", "tolerance"), [("lru", 0.02), ("lfu", 0.08), ("lru_lfu", 0.06)])
def test_hit_rate_matches_dram_tier(tmp_path: Path, policy: Policy, tolerance: float) -> None:
    ads = tc.SyntheticAds(keys=60_000, fields=6, batch_size=500, tensors=False)
    keys = KeyDistribution.zipf(ads.keys, ads.zipf, 6)
    all_keys = ads.some_keys(0, sum(ads.keys))
    with tc.SsdStore.open(tmp_path / "rows", row_bytes=64, mem_budget="32MB") as store:
        store.put(all_keys, np.zeros((len(all_keys), 64), np.uint8))
        tier = tc.DramTier(8, tc.Adagrad(lr=0.1), budget="2MB", store=store, policy=policy)
        for number in range(300):
            if number == 200:
                before = tier.stats()
            slots = tier.pull(tc.WorkingSet.of(ads.batch(number).ids).keys)
            tier.unpin(slots)
        after = tier.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    assert after.initialised == 0  # every key has a row
    measured = hits / (hits + misses)
    assert 0.5 < measured < 0.95
    assert keys.hit_rate(tier.capacity, 500, policy) == pytest.approx(measured, abs=tolerance)
