"""The GPU benchmarks at tiny size, under Triton's interpreter: they run, and record what their pages cite."""

from __future__ import annotations

import importlib
import json
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
