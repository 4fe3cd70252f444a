"""The GPU benchmarks at tiny size, under Triton's interpreter: they run, and record what their pages cite."""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_workload_has_mlperfs_shape(load: Any) -> None:
    workload = load("dlrm_workload")
    assert len(workload.MULTI_HOT) == len(workload.CRITEO) == 26
    assert sum(workload.MULTI_HOT) == 214
    for total in (300, 104_200_000, 160_000_000):
        rows = workload.rows_per_feature(total)
        assert sum(rows) == total
        assert min(rows) >= 1
    batch = workload.make_batch(workload.rows_per_feature(300), workload.MULTI_HOT, 5, seed=1)
    assert (batch.examples, batch.fields, len(batch.ids)) == (5, 26, 5 * 214)
    assert batch.dense.shape == (5, 13)
    keys = [key for piece in workload.keys_of_rows(workload.rows_per_feature(300)) for key in piece.tolist()]
    assert len(set(keys)) == 300
    assert set(batch.ids.tolist()) <= set(keys)


def test_mlperf_dcnv2_runs(load: Any, tmp_path: Path) -> None:
    load("mlperf_dcnv2").main(["--tiny", "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert sum(record["rows"]) == 300
    for size in ("3", "2"):
        assert record[size]["ids"] == int(size) * 214
        assert record[size]["rows_in"] == 0, "all rows are in HBM"
        assert record[size]["samples_per_second"] > 0


def test_dlrm_beyond_hbm_moves_rows(load: Any, tmp_path: Path) -> None:
    load("dlrm_beyond_hbm").main(["--tiny", "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["dram"] == 1200
    assert 0 < record["resident"] < 1200
    assert 0 < record["training"]["hit_rate"] < 1
    assert record["training"]["rows_in"] > 0


# ---- hbm_e2e.py


def test_measured_steps_are_those_between_ends_of_sweeps(load: Any) -> None:
    """A sweep that ends during the warm-up, or after the last batch was collected, does not count."""
    ahead = load("thermocline.pipeline.lookahead").LookAheadStats()
    measured = load("hbm_e2e").MeasuredSteps(ahead, warm=4, sweeps=3, batches=20)
    marks = []
    for steps, sweeps in enumerate([0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5, 6, 6]):
        ahead.sweeps, ahead.collected = sweeps, steps + 7
        if measured.ends_here(steps):
            marks.append(steps)
        if measured.over:
            break
    assert marks == [6, 9, 12]
    assert ahead.collected == 20, "fewer sweeps than were asked for: the batches ran out"


def test_measurement_is_over_after_enough_sweeps_or_without_look_ahead_after_two_marks(load: Any) -> None:
    ahead = load("thermocline.pipeline.lookahead").LookAheadStats()
    measured = load("hbm_e2e").MeasuredSteps(ahead, warm=0, sweeps=1, batches=100)
    for ahead.sweeps in (1, 2):
        assert not measured.over
        assert measured.ends_here(ahead.sweeps)
    assert measured.over
    measured = load("hbm_e2e").MeasuredSteps(None, warm=3, sweeps=1, batches=100)
    assert [steps for steps in range(10) if not measured.over and measured.ends_here(steps)] == [3, 6]


def test_training_through_three_tiers_is_measured_in_whole_sweeps(load: Any, tmp_path: Path) -> None:
    load("hbm_e2e").main(["--tiny", "--tiers-only", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    tiers = record["tiers"]
    assert len(tiers["sweeps"]) == 2
    assert sum(sweep["steps"] for sweep in tiers["sweeps"]) == tiers["steps"]
    read = sum(sweep["steps"] * sweep["kb_per_example"] for sweep in tiers["sweeps"])
    assert tiers["steps"] * tiers["kb_per_example"] == pytest.approx(read)
    assert read > 0
    assert record["claims"][-1]["name"] == "whole sweeps of the look-ahead measured"
    assert record["claims"][-1]["met"]


# ---- hbm_step.py, hbm_tier.py


def test_a_step_is_measured_for_all_sides_and_row_precisions(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--tiny", "--precision", "bf16", "--rows", "fp32,int8", "--sides", "torch,loop,auto"]
    module = load("hbm_step")
    monkeypatch.setattr(module, "WARM", 1)
    monkeypatch.setattr(module, "BATCHES", 2)
    module.main([*options, "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["precision"] == "bf16"
    ours = {f"{side} window 1{rows}" for side in ("loop", "auto") for rows in ("", " rows int8")}
    assert set(record["2"]) == {"torch", *ours}
    assert all(figures["ms"] > 0 for figures in record["2"].values())
    names = [claim["name"] for claim in record["claims"]]
    assert names == ["2 in an own loop, against torch", "2 through Trainer, rows in int8, against fp32"]


def test_targets_of_a_step_depend_on_the_precision(load: Any) -> None:
    module = load("hbm_step")
    figures = {"auto window 1": {"ms": 2.6}, "auto window 1 rows fp16": {"ms": 2.5}}
    args = types.SimpleNamespace(windows="1", precision="bf16", rows="fp32,fp16")
    large, rows = module.claims_of(65536, figures, args)
    assert (large.target, large.met) == (2.5, False)
    assert (rows.target, rows.met) == (2.6, True)
    args = types.SimpleNamespace(windows="1", precision="fp32", rows="fp32")
    assert module.claims_of(65536, figures, args) == []
    assert [claim.target for claim in module.claims_of(16384, figures, args)] == [2.2]


def test_the_median_round_of_a_depth_counts(load: Any) -> None:
    module = load("hbm_tier")
    assert module.TARGET == 3.5
    assert module.median_run([{"ms": 5.0}, {"ms": 3.0}, {"ms": 4.0}]) == {"ms": 4.0}


# ---- gpu_soak.py


def test_soak_and_comparison_of_bits_run(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("hbm_step"), "BATCHES", 2)
    load("gpu_soak").main(["--tiny", "--json", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    samples = record["soak"]["samples"]
    assert len(samples) == record["soak"]["steps"] == 6
    assert all(sample["resident"] > 0 for sample in samples)
    assert record["auto"]["steps"] == record["off"]["steps"] == 6
    assert record["auto"]["digest"] == record["off"]["digest"]
    (equal,) = (claim for claim in record["claims"] if claim["name"].startswith("bits after 6 steps"))
    assert equal["met"]


def test_growth_is_that_of_the_last_third(load: Any) -> None:
    soak = load("gpu_soak")
    steady = [{"resident": value} for value in (10, 50, 90, 100, 99, 100, 100, 98, 100)]
    assert soak.growth(steady, "resident") == 1.0
    assert soak.growth([*steady[:-1], {"resident": 102}], "resident") == 1.02 > soak.LIMITS["resident"]
