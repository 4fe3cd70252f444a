"""Experiments of several processes: the cost rule, the MPI rival, k-step Adam, what is measured or predicted."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import thermocline as tc
from thermocline.reproduce import auc_time, k_step, mpi, paper, places, rival, scalability
from thermocline.reproduce.experiment import Figure, Setup, Table, Work
from thermocline.reproduce.processes import events_of

WHY = mpi.missing()


def test_the_cost_rule_gives_the_papers_own_figures() -> None:
    """Speed-up x MPI nodes / (10 x GPU nodes), as printed, up to the rounding of what is printed."""
    node = paper.load()["nodes"]
    for name, model in paper.load()["models"].items():
        cost = rival.Cost(gpus=node["gpus"] * node["gpu_nodes"], cores=node["cores"] * model["mpi_nodes"])
        assert cost.ours == node["cpu_nodes_per_gpu_node"] * node["gpu_nodes"]
        assert cost.rival == model["mpi_nodes"]
        low, high = ((model["speedup"] + off) * cost.rival / cost.ours for off in (-0.05, 0.05))
        assert low - 0.05 <= model["cost_normalised"] <= high + 0.05, name


def test_the_arithmetic_is_printed() -> None:
    assert "costs are equal" in rival.Cost(gpus=0, cores=16).words()
    assert rival.Cost(gpus=0, cores=16).ours == rival.Cost(gpus=0, cores=16).rival
    assert "1/8 of a GPU node = 1.25 CPU nodes" in rival.Cost(gpus=1, cores=16).words()
    assert "speed-up x 0.267" in rival.Cost(gpus=1, cores=16).words()


def test_without_mpi_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_launch", lambda: None)
    assert places.find("rival") == "Not on this machine: baselines/mpi_ps is not here: only a source tree has it."
    assert auc_time.RIVAL not in auc_time.sides()


@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_ranks_end_with_the_auc_of_one_process(tmp_path: Path) -> None:
    setup = Setup(effort=0.001, scale=1e6)
    runs = {step.name: step for step in auc_time.steps(setup)}
    results = {}
    for number, side in enumerate((auc_time.MEMORY, auc_time.RIVAL)):
        folder = tmp_path / str(number)
        folder.mkdir()
        results[side] = runs[side].run(Work(folder))
    ours, theirs = results.values()
    assert ours is not None
    assert theirs is not None
    assert abs(ours["test_auc"] - theirs["test_auc"]) < auc_time.ALIKE
    assert [p["examples"] for p in ours["points"]] == [p["examples"] for p in theirs["points"]]
    assert all(a["seconds"] < b["seconds"] for a, b in zip(theirs["points"], theirs["points"][1:], strict=False))


def test_ranks_merge_every_k_steps_and_are_tested(tmp_path: Path) -> None:
    setup = Setup(effort=0.001)
    step = k_step.steps(setup)[-1]
    result = step.run(Work(tmp_path))
    assert result is not None
    assert 0.4 < result["auc"] < 0.8
    assert result["examples_per_s"] > 0
    assert f"every = {k_step.chosen(setup)[-1]}" in (tmp_path / "ranks.toml").read_text()
    results = {f"k = {k}": {**result, "auc": 0.7 - k / 10_000} for k in k_step.chosen(setup)}
    section = k_step.section(setup, results)
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    assert [row[0] for row in table.rows] == list(k_step.chosen(setup))
    assert section.claims[0].holds


def test_a_launcher_that_takes_too_long_ends_with_its_processes(tmp_path: Path) -> None:
    """It is told which one; nothing of it lives on."""
    mark = tmp_path / "alive"
    child = f"import time, pathlib\nfor _ in range(600): pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    launcher = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    with pytest.raises(tc.ThermoclineError, match="this test did not end within 3 s"):
        events_of("this test", launcher, os.environ, tmp_path, 3.0)
    time.sleep(0.5)
    mark.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not mark.exists()
    with pytest.raises(tc.ThermoclineError, match="this test failed: oh no"):
        events_of("this test", [sys.executable, "-c", "import sys; sys.exit('oh no')"], os.environ, tmp_path, 60.0)


def test_what_is_measured_and_what_is_predicted_stay_apart() -> None:
    told = {
        "cores": 4,
        "here": [{"ranks": n, "examples_per_s": 900.0 * n} for n in (1, 2, 4)],
        "beyond": [{"ranks": 4 * n, "nodes": n, "examples_per_s": 3000.0 * n} for n in (2, 4)],
    }
    results = {"predictions": told, **{f"{n} ranks": {"examples_per_s": 1000.0 * n**0.9} for n in (1, 2, 4)}}
    section = scalability.section(Setup(), results)
    for figure in section.parts:
        if isinstance(figure, Figure):
            kinds = {series.kind: series for series in figure.series}
            assert list(kinds["measured"].x) == [1, 2, 4]
            assert list(kinds["predicted"].x) == [1, 2, 4, 8, 16]
        else:
            assert [row[2] for row in figure.rows][3:] == [None, None]  # beyond this machine nothing is measured
            assert set(figure.predicted) == {"examples/s foreseen", "speed-up foreseen"}
    assert scalability.measured(6) == [1, 2, 4, 6]
    assert scalability.measured(1) == [1]
