"""Predicted reads and look-ahead: against simulated pages, counted keys, and the look-ahead of a training."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.planner import DISK, NODE
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.planner import workload
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.cost_model import Cluster, Workload, predict
from thermocline.planner.ssd_model import merge_writes, missing_rows, page_reads, plan_lookahead

BATCH = 256
RAMP_UP = 100
"""Batches until the look-ahead has its length."""


def work_of(ads: tc.SyntheticAds, **values: Any) -> Workload:
    keys = KeyDistribution.zipf(ads.keys, ads.zipf, sum(ads.nonzeros) / 2)
    figures: dict[str, Any] = dict.fromkeys(
        ("multiply_adds", "floats", "step_floats", "dense_parameters", "dense_time", "dense_time_1_thread"), 0
    )
    rows = {"dim": 8, "row_bytes": 64, "row_floats": 16, "fields": ads.fields, "batch": BATCH}
    return Workload(name="zipf", key_distribution=keys, dense_parallel_share=1.0, **figures, **{**rows, **values})


@pytest.mark.parametrize("zipf", [0.0, 1.05, 1.3])
def test_unique_keys_of_a_horizon_are_within_4_percent(zipf: float) -> None:
    ads = tc.SyntheticAds(keys=200_000, fields=10, zipf=zipf, batch_size=BATCH, tensors=False)
    work = work_of(ads)
    ids = [ads.batch(number).ids for number in range(128)]
    for batches in (1, 8, 32, 128):
        counted = np.mean([len(np.unique(np.concatenate(ids[i : i + batches]))) for i in range(0, 128, batches)])
        assert work.key_distribution.unique_keys(BATCH * batches) == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize("rows", [50, 1000, 6000, 40_000])
def test_reads_match_simulated_pages(rows: int) -> None:
    """Rows at random pages; gaps of up to read_us / page_us = 4 pages are read along."""
    work = work_of(tc.SyntheticAds(keys=500_000, fields=1, tensors=False))
    pages = 500_000 * (64 + 8) // 4096
    rng, requests, read, touched = np.random.default_rng(rows), [], [], []
    for _ in range(5):
        wanted = np.unique(rng.integers(0, pages, rows))
        gaps = np.diff(wanted) - 1
        requests.append(1 + np.count_nonzero(gaps > 4))
        read.append(len(wanted) + gaps[gaps <= 4].sum())
        touched.append(len(wanted))
    predicted = page_reads(work, 1, rows, DISK)
    assert predicted.pages == pytest.approx(np.mean(touched), rel=0.03)
    assert predicted.requests == pytest.approx(np.mean(requests), rel=0.1, abs=2)
    assert predicted.bytes == pytest.approx(4096 * np.mean(read), rel=0.03)


def test_the_limits_of_the_look_ahead() -> None:
    work = work_of(tc.SyntheticAds(keys=10**7, fields=10, tensors=False))
    unique = work.key_distribution.unique_keys

    def plan(limits: LookAheadLimits | None, mem_rows: float = 3e6, **values: Any) -> Any:
        return plan_lookahead(work, Cluster(mem_rows=mem_rows, lookahead=limits, **values), DISK)

    assert plan(None) is None
    assert plan(LookAheadLimits(8, 10**9), mem_rows=math.inf) is None
    few = plan(LookAheadLimits(3, 10**9))
    assert (few.batches, few.bounded_by) == (3, "batches")
    small = plan(LookAheadLimits(None, 2_000_000))
    assert small.bounded_by == "bytes"
    assert 4 < small.batches < 64
    assert 0.8 * 2_000_000 < small.bytes <= 2_000_000
    ranks = plan(LookAheadLimits(None, 2_000_000), ranks=2)
    assert ranks.batches < small.batches  # keys of hints
    rows = plan(LookAheadLimits(None, 10**9), mem_rows=20_000)
    assert rows.bounded_by == "rows"
    assert unique(BATCH * rows.batches) <= 17_500 < unique(BATCH * (rows.batches + 1))
    large = plan(LookAheadLimits(None, 10**9))
    assert large.batches > 50 * small.batches
    assert large.reads < 0.5 * small.reads
    assert large.missing_rows < small.missing_rows


@pytest.mark.parametrize("files", [1, 8])
def test_bytes_written_by_merges_are_within_10_percent(tmp_path: Path, files: int) -> None:
    rows, rng = 30_000, np.random.default_rng(0)
    stored = rows * (56 + 8)
    keys = rng.integers(0, 2**63, rows, dtype=np.uint64)
    options = {**SMALL, "partition_bytes": stored // files * 4 // 3, "background_merge": False}
    with tc.SsdStore.open(tmp_path, row_bytes=56, **options) as store:
        store.put(keys, np.zeros((rows, 56), np.uint8))
        store.merge()
        for number in range(900):
            if number == 300:
                before = store.stats()
            store.put(rng.choice(keys, 100, replace=False), np.zeros((100, 56), np.uint8))
        after = store.stats()
    measured = (after.bytes_written - before.bytes_written) / (after.bytes_put - before.bytes_put)
    assert merge_writes(stored, 0, stored / files) == pytest.approx(measured, rel=0.1)


def test_a_step_with_look_ahead() -> None:
    """Batches are read together by a stage of its own, in less time per batch than windows by the pull."""
    work = work_of(tc.SyntheticAds(keys=10**6, fields=10, tensors=False))
    slow = dataclasses.replace(NODE, disk=dataclasses.replace(DISK, read_us=100.0, page_us=10.0))
    limits = LookAheadLimits(512, 10**9)
    without, ahead = (predict(work, Cluster(mem_rows=400_000, lookahead=value), slow) for value in (None, limits))
    assert without.lookahead is None
    assert ahead.lookahead is not None
    assert ahead.lookahead.batches == 512
    assert "look-ahead" not in without.stages
    assert "pull SSD" not in ahead.stages
    assert ahead.resources["disk"] < 0.7 * without.resources["disk"]
    together = ahead.lookahead.batches_together
    missing = missing_rows(work, Cluster(mem_rows=400_000), together) / together
    assert ahead.figures["from_disk"] == pytest.approx(missing)
    assert ahead.figures["hits"] == pytest.approx(1 - missing / ahead.figures["pulled"])
    report = ahead.to_json()["lookahead"]
    assert report["read_bytes"] == pytest.approx(page_reads(work, 1, together * missing, slow.disk).bytes / together)
    assert report["bytes"] <= report["limit_bytes"]


def test_rows_and_bytes_of_a_training_are_within_25_percent(tmp_path: Path) -> None:
    ads = tc.SyntheticAds(keys=60_000, fields=8, zipf=1.05, batch_size=BATCH, tensors=False)
    # In much less memory, room for the next growth of the horizon's arrays takes a quarter of it.
    table = tc.Table(8, tc.Adagrad(lr=0.1), mem="4MB", lookahead="1MB", ssd=tmp_path / "rows", device="cpu")
    bag = tc.EmbeddingBag(table, 8)

    def train(first: int, count: int) -> tuple[Any, int]:
        """Return the counters of the look-ahead, and its sweeps before it reached its length."""
        ramp_up = 0
        with tc.prefetch((ads.batch(number) for number in range(first, first + count)), table, depth=1) as prepared:
            for number, batch in enumerate(prepared):
                bag(batch).sum().backward()
                table.step()
                if number == RAMP_UP:
                    ramp_up = prepared.lookahead.sweeps
        return prepared.lookahead, ramp_up

    train(0, 1200)  # most keys get a row
    before = table.dram.stats()
    ahead, ramp_up = train(1200, 600)
    after = table.dram.stats()
    limits = table.spec.lookahead
    assert limits is not None
    work = work_of(ads, policy=table.spec.policy)
    plan = plan_lookahead(work, Cluster(mem_rows=table.dram.capacity, lookahead=limits), DISK)
    assert plan is not None
    assert plan.bytes == pytest.approx(ahead.most_bytes, rel=0.35)  # serial: no restored batches
    assert plan.batches_together == pytest.approx((600 - RAMP_UP) / (ahead.sweeps - ramp_up), rel=0.25)
    assert plan.missing_rows == pytest.approx((after.misses - before.misses) / 600, rel=0.25)
    table.close()


def test_a_network_is_timed_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps of a network of 7M parameters: at most 5e9 multiply-adds each, whatever the batch."""
    timed = []

    def time_dense_network(model: Any, fields: int, dense: int, batch: int, *_: Any) -> Any:
        timed.append(batch)
        one = workload.CpuTime(1.0, 1.0)
        return workload.DenseTiming(one, one)

    monkeypatch.setattr(workload, "time_dense_network", time_dense_network)
    monkeypatch.setattr(workload, "reference_network_seconds", lambda: 1.0)
    config = workload.preset_config("E/1000")
    figures = workload._measure_network(config.model, 100, 0, 4096, "adam")
    assert figures["multiply_adds"] > 1e7
    assert all(batch * figures["multiply_adds"] <= 5.1e9 for batch in timed)
