"""The soak: a run of seconds, and that a wrong bit, an unexpected end and an exceeded bound are failures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from soak import processes
from soak.lane import Lane
from soak.main import Soak
from soak.report import Report
from soak.resources import DISK

LANE = Lane(0, 1, 7, True)


@pytest.fixture
def soak(tmp_path: Path) -> Soak:
    numbers = {"disk_mb": 64, "seed": 1, "hours": 0.0, "minutes": 1.0, "cores": 1.0}
    options = argparse.Namespace(folder=str(tmp_path), report="", keep=None, **numbers)
    return Soak(options)


def test_a_report_is_kept_beside_those_of_other_soaks(soak: Soak) -> None:
    soak.options.keep = soak.folder / "results"
    soak.report.commit, soak.report.started, soak.report.attempts = "0123456789", "2026-01-02 03:04:05", 7
    assert soak.run() == 0
    names = ["soak-2026-01-02-0123456789-1.json", "soak-2026-01-02-0123456789-1.txt"]
    assert sorted(path.name for path in soak.options.keep.iterdir()) == names
    assert json.loads((soak.options.keep / names[0]).read_text())["attempts"] == 7
    assert "7 attempts" in (soak.options.keep / names[1]).read_text()


@pytest.mark.faults
def test_a_soak_of_seconds(tmp_path: Path) -> None:
    main = Path(__file__).with_name("main.py")
    command = [sys.executable, str(main), "--hours", "0.001", "--minutes", "0.02", "--folder", str(tmp_path)]
    run = subprocess.run([*command, "--seed", "2"], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["different"] for each in report["compared"]] == [[]]
    assert report["compared"][0]["rows"] > 1000
    assert report["compared"][0]["rows"] == report["compared"][0]["published"]
    assert report["attempts"] >= 1
    assert report["peaks"]["samples"] > 3
    assert "equal" in (tmp_path / "report.txt").read_text()
    # A new process continues with the same lane.
    again = Report.read(tmp_path)
    assert again is not None
    assert again.open_lanes[0]["number"] == 0


def states(step: int, world: int) -> tuple[list[processes.Arrays], processes.Arrays]:
    """Return the states of an uninterrupted run's ranks, which have every `world`th key, and what they publish."""
    keys, rows = np.arange(7, dtype=np.uint64), np.arange(28, dtype=np.float32).reshape(7, 4)
    common = {"dim": np.array([2]), "steps": np.array([step])}
    ranks = [{"keys": keys[rank::world], "rows": rows[rank::world], **common} for rank in range(world)]
    weights = np.ascontiguousarray(rows[:, :2]).view(np.uint8)
    return ranks, {"step": np.array([step]), "keys": keys, "weights": weights}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("wrong", ["", "bit", "missing", "published key", "published step"])
def test_differences_are_failures(soak: Soak, wrong: str, world: int) -> None:
    expected, served = states(9, world)
    restored = dict(expected[-1])
    if wrong == "bit":
        rows = restored["rows"].copy()
        rows.view(np.uint8)[1, 5] ^= 1
        restored["rows"] = rows
    elif wrong == "missing":
        restored |= {"keys": restored["keys"][:1], "rows": restored["rows"][:1]}
    elif wrong == "published key":
        served["keys"] = served["keys"] + np.uint64(1) * (served["keys"] == 5)
    elif wrong == "published step":
        served["step"] = served["step"] - 1
    for rank, state in enumerate([*expected[:-1], restored]):
        processes.save_state(soak.folder / f"restored.{rank}.npz", state)
    processes.save_state(soak.folder / "restored.published.npz", served)
    reference: Any = SimpleNamespace(state=lambda step: expected, growth=lambda: (0, 0))
    soak.references[0] = reference
    soak.compare(dataclasses.replace(LANE, world=world), 9)
    assert bool(soak.report.failures) == bool(wrong)
    assert bool(soak.report.compared[0]["different"]) == bool(wrong)


@pytest.mark.parametrize(
    ("fault", "codes", "log", "end"),
    [
        ("kill all", [-9, -9], "", "killed"),
        ("kill one", [-9, 1], "RankError: rank 0 is gone", "killed, other ranks ended with RankError"),
        ("kill one", [-9, 1], "AssertionError", "FAILED"),
        ("kill one", [-9, 0], "", "FAILED"),
        ("full disk", [1], "DiskFullError: free some space", "stopped by the full disk"),
        ("full disk", [1], "CorruptionError: page 7", "FAILED"),
        ("full disk", [-11], "", "FAILED"),
        ("terminate", [143], "", "terminated and saved"),
        ("terminate", [-15], "", "terminated before training"),
        ("slow disk", [1], "RuntimeError", "FAILED"),
        ("long", [0], "", "FAILED"),
    ],
)
def test_ends_of_attempts(soak: Soak, fault: str, codes: list[int], log: str, end: str) -> None:
    file = soak.folder / "log"
    file.write_text(log)
    ranks: Any = SimpleNamespace(codes=dict(enumerate(codes)), log=file)
    assert soak.judge(fault, ranks, "") == end
    assert bool(soak.report.failures) == (end == "FAILED")


def test_an_exceeded_bound_is_one_failure(soak: Soak) -> None:
    soak.report.peaks.disk = DISK
    soak.write()
    assert not soak.report.failures
    soak.report.peaks.disk = DISK + 1
    soak.write()
    soak.write()
    assert [each["bound"] for each in soak.report.failures] == ["disk"]
    assert f"disk is {DISK + 1}, above its bound {DISK}" in (soak.folder / "report.txt").read_text()


def test_a_failpoint_kills_the_fork_and_no_other(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        processes.set_failpoint("run.file_synced:2")
        for number in range(3):
            processes.atomic_file.atomic_write(tmp_path / f"{number}", b"")

    ranks = processes.Ranks(1, tmp_path / "log", work)
    while not ranks.poll():
        pass
    assert ranks.codes == {0: -signal.SIGKILL}
    assert (tmp_path / "0").exists()
    assert not (tmp_path / "1").exists()
    assert processes.atomic_file._kill_at == ""


def test_the_config_of_a_lane_is_fixed_and_budgets_vary(tmp_path: Path) -> None:
    from thermocline.config.resume import MAY_CHANGE, differences

    configs = [LANE.attempt_config(tmp_path, random.Random(seed), 10).resolve() for seed in range(8)]
    changed = {name for config in configs for name in differences(configs[0], config)}
    assert changed <= MAY_CHANGE
    assert {"tiers.mem", "tiers.lookahead", "train.depth", "dist.overlap", "publish.every_steps"} <= changed
    assert not {name for name in changed if name.startswith(("expiry", "admission", "train.schedule"))}
    lanes = [Lane(0, 2, seed, False).attempt_config(tmp_path, random.Random(0), 10) for seed in range(8)]
    assert all(lane.admission is not None and lane.publish.folder is not None for lane in lanes)
    assert {lane.dist.dense_sync.every for lane in lanes} == {1, 8}
