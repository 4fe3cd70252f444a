"""benchmarks/serving.py at a small size: every figure is measured, and rows are those that were published."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_all_claims_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("serving")
    monkeypatch.setattr(benchmark, "installed", lambda name: False)
    record, claims = benchmark.measure(tmp_path, 5000, deltas=3, delta_rows=20, rounds=1)
    assert record["peers"] == {}
    assert len(claims) == 8
    assert all(claim.value > 0 for claim in claims)
