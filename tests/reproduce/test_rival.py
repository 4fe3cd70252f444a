"""The MPI rival in a reproduction: the talk's cost rule, and where there is MPI, the same AUC from its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from thermocline.reproduce import auc_time, mpi, paper, places, rival
from thermocline.reproduce.experiment import Setup, Work

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
