"""The memory of the machine: control groups, and the refusal of budgets that exceed it."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.config import EXAMPLE

import thermocline as tc
from thermocline.errors import ConfigError
from thermocline.utils import machine
from thermocline.utils.machine import _cgroup_limits, memory_bytes, require_memory


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pretend that the machine has 25 GB."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 25 * 10**9)
    return 25 * 10**9


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/rank\n", {"memory.max": "max", "job/memory.max": "8000", "job/rank/memory.max": "max"}, [8000]),
        ("0::/job\n", {"memory.max": "9000"}, [9000]),  # a container sees its own group as the root
        ("4:cpu:/a\n3:cpuacct,memory:/b\n", {"memory/b/memory.limit_in_bytes": "7000"}, [7000]),
        ("4:cpu:/a\n", {"memory.max": "1"}, []),
    ],
)
def test_limits_of_control_groups(groups: str, limits: dict[str, str], expected: list[int], tmp_path: Path) -> None:
    (tmp_path / "self").write_text(groups)
    for name, limit in limits.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(limit + "\n")
    assert list(_cgroup_limits(tmp_path / "self", tmp_path / "root")) == expected
    assert list(_cgroup_limits(tmp_path / "missing", tmp_path / "root")) == []
    assert 2**26 < memory_bytes() < 2**50


@pytest.mark.usefixtures("small_machine")
def test_table_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def table(mem: str, **options: Any) -> tc.Table:
        return tc.Table(4, tc.SGD(lr=0.1), mem=mem, **options)

    with pytest.raises(
        ValueError, match=r"^mem is 500 GB, but the machine has 25 GB of memory: lower it, or set mem_overcommit=True"
    ):
        table("500GB")
    with pytest.raises(ValueError, match=r"^mem \+ ssd_mem is 26 GB, but the machine has 25 GB"):
        table("24GB", ssd=tmp_path / "rows", ssd_mem="2GB")
    assert not (tmp_path / "rows").exists()
    assert table("500GB", mem_overcommit=True).dram.capacity > 10**9
    assert table("24GB").spec.mem == 24 * 10**9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"^mem is 7 GB, 28 GB for 4 ranks on this machine, but the machine has 25 GB"):
        table("7GB")
    require_memory(6 * 10**9, name="mem", override="")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    require_memory(20 * 10**9, name="mem", override="")


@pytest.mark.usefixtures("small_machine")
def test_budgets_of_open_tables_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def table(mem: str, name: str, **options: Any) -> tc.Table:
        return tc.Table(4, tc.SGD(lr=0.1), mem=mem, name=name, **options)

    monkeypatch.setattr(machine, "_reserved", weakref.WeakKeyDictionary())  # without tables of other tests
    first = table("10GB", "ads", ssd=tmp_path / "rows", ssd_mem="2GB")
    second = table("8GB", "users")
    uncounted = table("100GB", "large", mem_overcommit=True)
    together = r"^mem is 6 GB, and open tables of this process have 'ads' 12 GB, 'users' 8 GB: 26 GB together, but the "
    with pytest.raises(ValueError, match=together + r"machine has 25 GB of memory: lower them, close\(\) tables"):
        table("6GB", "items")
    config = tc.Config.parse(EXAMPLE, ["tiers.mem=6GB", "tiers.ssd=none", f"train.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"^tiers.mem is 6 GB, and open tables .* 'users' 8 GB: 26 GB together"):
        tc.Run(config)
    assert not (tmp_path / "run").exists()
    second.close()
    third = table("6GB", "items")
    del third  # garbage
    assert table("13GB", "more").spec.mem == 13 * 10**9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"'ads' 12 GB: 13 GB together, 26 GB for 2 ranks on this machine"):
        table("1GB", "small")
    for opened in (first, uncounted):
        opened.close()


@pytest.mark.usefixtures("small_machine")
def test_config_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    run_dir = f"train.run_dir={tmp_path / 'run'}"
    config = tc.Config.parse(EXAMPLE, ["tiers.mem=500GB", "tiers.ssd=none", run_dir])
    with pytest.raises(
        ConfigError, match=r"^tiers.mem is 500 GB, but the machine has 25 GB of memory.*tiers.mem_overcommit = true"
    ):
        tc.Run(config)
    assert not (tmp_path / "run").exists()


def test_first_rows_cost_the_same_whatever_the_budget() -> None:
    """Memory is touched as rows arrive: 20,000 rows in half of the machine's memory, and in 64 MB."""
    keys = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    grown = {}
    for budget in (64 << 20, memory_bytes() // 2):
        tier = tc.DramTier(16, tc.Adagrad(lr=0.1), budget=budget, threads=1)
        before, start = _resident_bytes(), time.process_time()
        tier.pin(keys)
        grown[budget] = _resident_bytes() - before, time.process_time() - start
        tier.check()
    (small, _), (large, seconds) = grown.values()
    # Huge pages: the metadata and each of the 64 parts of the index begin on their own.
    assert large < small + 80 * (2 << 20)
    assert seconds < 5


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
