"""benchmarks/serving.py at a small size: every figure is measured, and rows are those that were published."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OPTIONS = argparse.Namespace(rows=5000, deltas=3, delta_rows=20, rounds=1, exports=2)


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serving")


def test_all_claims_are_measured(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark_module, "installed", lambda name: False)
    record, claims = benchmark_module.measure(tmp_path, OPTIONS, list(benchmark_module.PARTS))
    assert record["peers"] == {}
    assert len(claims) == 8
    assert len(record["exports"]) == 2
    assert all(claim.value > 0 for claim in claims)
    assert not list(tmp_path.iterdir())  # the parts delete their files, so that 1e8 rows need space for one of them


def test_parts_are_measured_alone(benchmark_module: Any, tmp_path: Path) -> None:
    record, claims = benchmark_module.measure(tmp_path, OPTIONS, ["lookups"])
    assert [claim.name for claim in claims] == ["lookups by one core, page cache"]
    assert "direct" not in record
    assert "exports" not in record


def test_peers_are_read_completely_before_they_are_timed(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import engines

    calls: list[str] = []

    class Peer(engines.Ours):
        def read_all(self) -> int:
            calls.append("read_all")
            return super().read_all()

        def get(self, keys: Any) -> Any:
            calls.append("get")
            result = super().get(keys)
            self.check(keys, result)
            return result

    monkeypatch.setattr(benchmark_module, "installed", lambda name: True)
    monkeypatch.setitem(engines.ENGINES, "lmdb", Peer)
    keys = engines.Data(3000, 64).keys(np.arange(3000))
    assert benchmark_module.peer("lmdb", tmp_path, keys, 1)["lmdb"]["median"] > 0
    assert calls == ["read_all", *["get"] * 60]
    assert not list(tmp_path.iterdir())
