"""Formulas of `planner/scale_model.py` against small stores and played ranks, and the limits that scale.py predicts."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

import pytest

import thermocline as tc
from thermocline.planner.hardware import paper_node
from thermocline.planner.scale_model import Ranks, StoreShape, StoreSize

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def missed(checks: list[Any]) -> list[str]:
    return [f"{check.what}: predicted {check.predicted}, got {check.measured}" for check in checks if not check.passed]


@pytest.mark.parametrize("row_bytes", [1, 16, 52, 500, 2100, 5000, 100_000])
def test_page_size_is_that_of_the_store(tmp_path: Path, row_bytes: int) -> None:
    tc.SsdStore.open(tmp_path / "s", row_bytes=row_bytes).close()
    identity = (tmp_path / "s" / "STORE").read_bytes()
    assert struct.unpack_from("<II", identity, 40) == (row_bytes, StoreShape(row_bytes=row_bytes).page_bytes)


@pytest.mark.parametrize("row_bytes", [16, 52])
def test_index_files_and_manifest_of_a_store(load: Any, tmp_path: Path, row_bytes: int) -> None:
    checks, _ = load("scale_checks").check_store(tmp_path, 100_000, row_bytes)
    assert not missed(checks)


def test_index_per_key_is_the_measured_one() -> None:
    # docs/benchmarks/lookahead.md: 2.31 bytes per key, at 1.5e8 keys of 16 bytes.
    assert StoreSize(StoreShape(row_bytes=16), 1.5e8).index_bytes / 1.5e8 == pytest.approx(2.3, rel=0.05)


def test_open_files_of_a_store_are_bounded() -> None:
    shape = StoreShape(row_bytes=52)
    assert StoreSize(shape, 1e8).open_files < 500
    assert StoreSize(shape, 1e9).open_files < StoreSize(shape, 1e12).open_files < 1300


def test_connections_are_those_of_the_planned_groups(load: Any) -> None:
    checks = load("scale_checks")
    assert not missed([checks.check_connections(Ranks(*size)) for size in ((8, 8), (64, 8), (16, 1), (1000, 8))])


def test_gloo_has_one_connection_per_pair_that_communicates(load: Any) -> None:
    assert not missed(load("scale_checks").check_sockets(12))


def test_torchrun_has_two_connections_per_rank(load: Any) -> None:
    assert not missed([load("scale_times").check_rendezvous(3)])


def test_messages_and_bytes_of_64_ranks(load: Any) -> None:
    assert not missed(load("scale_checks").check_traffic(Ranks(8, 8), batch=64, dim=8))


def test_no_limit_binds_below_64_nodes_and_1e11_keys(load: Any) -> None:
    scale = load("scale")
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        for keys in (1e9, 1e10, 1e11):
            limits = scale.Job(nodes, keys, paper_node()).limits
            assert max(limits.values()) < 1, (nodes, keys, limits)
    # The cap of 4,096 extents did bind.
    assert scale.Job(1, 1e11, paper_node()).former_extents > 3


def test_predicted_step_is_that_of_the_planner(load: Any) -> None:
    scale = load("scale")
    work = scale.workload(1e10)
    cost = scale.Job(4, 1e10, paper_node()).step(work)
    assert cost is not None
    within, between = scale.Job(4, 1e10, paper_node()).traffic(work)
    # The network is busy with keys, rows, gradients and dense gradients: bytes / rate, and latencies below 1 ms.
    assert cost.resources["network"] == pytest.approx(between / 10e9, abs=1e-3)
    assert cost.resources["node link"] == pytest.approx(within / 120e9, abs=1e-3)
