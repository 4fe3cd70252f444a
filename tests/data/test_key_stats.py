"""Key statistics: exact up to the limit, close above it; suggested sizes against the hit rates of a real tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import SMALL, done, write_config

import thermocline as tc
from thermocline.data.key_stats import KeyCounter, KeyHistogram, count_keys
from thermocline.planner.tier_sizing import describe, suggest_sizes, tiers_toml
from thermocline.utils.text_format import format_size


def exact(ids: Any) -> tuple[int, float, float]:
    """Number of keys, and the shares of the top 1 % and 10 %, computed directly."""
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    return len(counts), *(counts[: round(len(counts) * share)].sum() / counts.sum() for share in (0.01, 0.1))


def count_ids(ids: Any, limit: int) -> tuple[KeyCounter, KeyHistogram]:
    counter = KeyCounter(limit)
    for part in np.array_split(ids, 13):
        counter.add(part, np.zeros(len(part), np.uint16))
        counter._count()  # as if each part filled the buffer
    return counter, counter.result()


@pytest.fixture(scope="module")
def zipf_ids() -> Any:
    ads = tc.SyntheticAds(keys=200_000, fields=1, zipf=1.05, batch_size=1 << 17, examples=1 << 20, tensors=False)
    return np.concatenate([batch.ids for batch in ads])


def test_counts_are_exact_below_the_limit(zipf_ids: Any) -> None:
    counter, histogram = count_ids(zipf_ids, 1 << 20)
    keys, top1, top10 = exact(zipf_ids)
    assert counter.rate == 1
    assert (histogram.keys, histogram.occurrences) == (keys, len(zipf_ids))
    assert np.array_equal(np.sort(histogram.counts), np.sort(np.unique(zipf_ids, return_counts=True)[1]))
    assert histogram.share_of_top(0.01) == pytest.approx(top1, abs=1e-4)
    assert histogram.share_of_top(0.1) == pytest.approx(top10, abs=1e-4)


def test_counts_are_close_above_the_limit(zipf_ids: Any) -> None:
    counter, histogram = count_ids(zipf_ids, 8192)
    keys, top1, top10 = exact(zipf_ids)
    assert counter.rate <= 1 / 16
    assert len(histogram.counts) <= 2 * 8192
    assert histogram.keys == pytest.approx(keys, rel=0.05)
    assert histogram.occurrences == pytest.approx(len(zipf_ids), rel=0.03)
    assert histogram.share_of_top(0.01) == pytest.approx(top1, abs=0.02)
    assert histogram.share_of_top(0.1) == pytest.approx(top10, abs=0.02)
    assert histogram.counts.max() == np.unique(zipf_ids, return_counts=True)[1].max()  # frequent keys are exact


def test_consecutive_raw_keys_are_sampled_uniformly() -> None:
    _, histogram = count_ids(np.tile(np.arange(100_000, dtype=np.uint64), 2), 4096)
    assert histogram.keys == pytest.approx(100_000, rel=0.1)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.05, 1.3])
def test_zipf_exponent_is_estimated(exponent: float) -> None:
    ads = tc.SyntheticAds(keys=3000, fields=1, zipf=exponent, batch_size=1 << 16, examples=1 << 19, tensors=False)
    _, histogram = count_ids(np.concatenate([batch.ids for batch in ads]), 1 << 20)
    assert histogram.zipf() == pytest.approx(exponent, abs=0.08)


def test_report_counts_examples_fields_and_nonzeros() -> None:
    lists = [[[1, 2], [10]], [[1], []], [[3], [10, 11, 12]]]
    batch = tc.Batch.from_lists(lists, label=np.array([1.0, 0.0, 0.0], np.float32))
    report, _ = count_keys([batch, batch])
    assert (report["examples"], report["nonzeros"], report["keys"], report["fields"]) == (6, 16, 6, 2)
    assert report["positive"] == pytest.approx(1 / 3)
    assert report["nonzeros_per_example"] == {"mean": 16 / 6, "least": 1, "most": 4}
    assert [field["keys"] for field in report["per_field"]] == [3, 3]
    with pytest.raises(ValueError, match="no examples"):
        count_keys([])


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_suggested_memory_gives_the_predicted_hit_rate(tmp_path: Path, target: float) -> None:
    ads = tc.SyntheticAds(keys=40_000, fields=3, batch_size=256, examples=256 * 300, tensors=False)
    report, histogram = count_keys(ads)
    optimizer = tc.SGD(lr=0.1)
    sizes = suggest_sizes(histogram, report["batches"], 8, optimizer, 1)
    mem = next(size["mem"] for size in sizes["mem_for_hit_rate"] if size["hit_rate"] == target)
    with tc.SsdStore.open(tmp_path / "rows", row_bytes=32, mem_budget="32MB") as store:
        tier = tc.DramTier(8, optimizer, budget=mem, store=store, policy="lru", threads=1)
        for batch in ads:
            pins = tier.pin(tc.WorkingSet.of(batch.ids, threads=1).keys)
            tier.core.mark_dirty(pins.slots())
            pins.release()
        stats = tier.stats()
    assert stats.hits / (stats.hits + stats.from_store) == pytest.approx(target, abs=0.06)
    unique = np.mean([len(np.unique(batch.ids)) for batch in ads])
    assert sizes["unique_rows_per_batch"] == pytest.approx(unique, rel=0.05)


def test_least_memory_is_consistent() -> None:
    """`least_mem` holds the pinned batches, is at most the size of all rows, and no suggested size is below it."""
    ads = tc.SyntheticAds(keys=40_000, fields=3, batch_size=256, examples=256 * 60, tensors=False)
    report, histogram = count_keys(ads)
    for pinned in (1, 4, 100):
        sizes = suggest_sizes(histogram, report["batches"], 8, tc.SGD(lr=0.1), pinned)
        assert sizes["least_mem"] <= min(size["mem"] for size in sizes["mem_for_hit_rate"]) <= sizes["mem_for_all_rows"]
        assert (sizes["least_mem"] == sizes["mem_for_all_rows"]) == (pinned == 100)
        lines = list(describe({**report, "batch_size": 256, "model": {"name": "", "optimizer": "", **sizes}}, 10**9))
        batches = "1 batch" if pinned == 1 else f"{pinned} batches"
        least = format_size(sizes["least_mem"])
        assert f"least mem    {least}: the rows of {batches}, pinned at the same time" in lines


def test_tiers_section_fits_the_machine() -> None:
    sizes = {
        "mem_for_all_rows": 50_000_000_000,
        "mem_for_hit_rate": [{"mem": 3_000_000_000}, {"mem": 7_210_000_000}, {"mem": 30_000_000_000}],
        "least_mem": 100_000_000,
        "ssd_mem": 32_000_000,
    }
    assert tiers_toml(sizes, 128_000_000_000) == '[tiers]\nmem = "50GB"'
    small = tiers_toml(sizes, 16_000_000_000)
    assert small == '[tiers]\nmem = "7300MB"\nssd = "rows"\nssd_mem = "32MB"'
    tc.Config.parse(small)


def test_data_stats_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    report = json.loads(done("data", "stats", config, "--json"))
    ids = np.concatenate([batch.ids for batch in tc.SyntheticAds(keys=3000, fields=4, examples=1600)])
    assert (report["examples"], report["keys"]) == (1600, len(np.unique(ids)))
    assert report["model"]["row_bytes"] == 4 * 3 * 4
    text = done("data", "stats", config)
    for words in (
        "1,600, ",
        "4 per example in 4 fields",
        "Zipf",
        "48 bytes per key (dnn, adam)",
        "100%  mem",
        "[tiers]",
    ):
        assert words in text
    some = json.loads(done("data", "stats", config, "--json", "--examples", 300, "--split", "test"))
    assert some["examples"] == 300
    few = ["--valid-examples", 0, "--test-examples", 0]
    done("data", "synth", "d", "--format", "libsvm", "--keys", 3000, "--fields", 4, "--examples", 1600, *few)
    files = json.loads(done("data", "stats", "d/train.libsvm", "--set", "data.raw_keys=true", "--json"))
    assert files["keys"] == report["keys"]
    assert SMALL.count("keys = 3000") == 1  # both data sets have the same keys
