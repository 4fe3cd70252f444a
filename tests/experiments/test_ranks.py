"""Experiments of several processes: the cost rule, the MPI baseline, k-step Adam, scalability, launching of jobs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import thermocline as tc
from experiments import auc_time, k_step, launch, models, mpi_baseline, paper, runner, scalability
from experiments.experiment import Figure, Setup, StepContext, Table
from thermocline.data.paper_models import PaperModel
from thermocline.utils.cpu_affinity import limit_cores

MPI_MISSING = launch.mpi_missing()


def test_the_cost_rule_gives_the_papers_numbers() -> None:
    """Speed-up x MPI nodes / (10 x GPU nodes) equals the printed value within its rounding."""
    node = paper.load()["nodes"]
    for name, model in paper.load()["models"].items():
        cost = mpi_baseline.Cost(gpus=node["gpus"] * node["gpu_nodes"], cores=node["cores"] * model["mpi_nodes"])
        assert cost.gpu_side == node["cpu_nodes_per_gpu_node"] * node["gpu_nodes"]
        assert cost.mpi_side == model["mpi_nodes"]
        low, high = ((model["speedup"] + off) * cost.mpi_side / cost.gpu_side for off in (-0.05, 0.05))
        assert low - 0.05 <= model["cost_normalised"] <= high + 0.05, name


def test_the_cost_arithmetic_is_explained() -> None:
    assert "costs are equal" in mpi_baseline.Cost(gpus=0, cores=16).explanation()
    assert mpi_baseline.Cost(gpus=0, cores=16).gpu_side == mpi_baseline.Cost(gpus=0, cores=16).mpi_side
    assert "1/8 of a GPU node = 1.25 CPU nodes" in mpi_baseline.Cost(gpus=1, cores=16).explanation()
    assert "speed-up x 0.267" in mpi_baseline.Cost(gpus=1, cores=16).explanation()


def test_the_reason_for_missing_mpi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.mpi_launch, "missing", lambda: "mpi4py is not installed")
    chosen = {"mpi_baseline": mpi_baseline.EXPERIMENT}
    outcome = runner.run(tmp_path, chosen, Setup(), cache=tmp_path / "cache")
    assert "Not run on this machine: mpi4py is not installed." in outcome.page.read_text()
    assert auc_time.MPI not in auc_time.sides(Setup())


@pytest.mark.skipif(MPI_MISSING is not None, reason=str(MPI_MISSING))
def test_mpi_ranks_reach_the_auc_of_one_process(tmp_path: Path) -> None:
    setup = Setup(effort=0.001, scale=1e6)
    runs = {step.name: step for step in auc_time.steps(setup)}
    results = {}
    for number, side in enumerate((auc_time.MEMORY, auc_time.MPI)):
        folder = tmp_path / str(number)
        folder.mkdir()
        results[side] = runs[side].run(StepContext(folder))
    single, mpi = results.values()
    assert single is not None
    assert mpi is not None
    assert abs(single["test_auc"] - mpi["test_auc"]) < auc_time.TOLERANCE
    assert [p["examples"] for p in single["points"]] == [p["examples"] for p in mpi["points"]]
    assert all(a["seconds"] < b["seconds"] for a, b in zip(mpi["points"], mpi["points"][1:], strict=False))


@pytest.mark.skipif(MPI_MISSING is not None, reason=str(MPI_MISSING))
def test_the_mpi_baseline_trains_for_the_requested_time(tmp_path: Path) -> None:
    setup = Setup(effort=0.001, scale=1e6, cores=2)
    (step,) = [step for step in mpi_baseline.steps(setup) if step.owner is None]
    assert step.name == "A, 2 ranks"
    begin = time.monotonic()
    result = step.run(StepContext(tmp_path, limit=200.0))
    assert result is not None
    assert result["examples_per_s"] > 0
    assert result["steps"] >= 2 * mpi_baseline.LOG_EVERY
    assert step.settings["seconds"] < time.monotonic() - begin  # a hang would exceed the limit


def gpu_result(name: str, rate: float, *, reads: float = 1000.0) -> dict[str, Any]:
    """Return a made-up result of models.py with two points, of which the second is measured."""
    plan = PaperModel.parse(f"{name}/1000")
    point = {"batches": 2, "disk_bytes": 100, "mem_hits": 1, "mem_all": 2, "hbm_hits": 1, "hbm_all": 2, "merges": 0,
             "bytes_read": 5, "bytes_written": 5, "merged": 0, "pull_seconds": 0.1}  # fmt: skip
    return {
        "plan": dataclasses.asdict(plan), "row_bytes": plan.row_bytes, "rows": plan.keys, "batch_examples": 512,
        "examples_per_s": rate, "hbm_budget": plan.hbm, "mem_budget": plan.mem, "store_mem": 1, "stage_ms": {},
        "points": [{**point, "batch": 2, "reads": 9e9}, {**point, "batch": 4, "reads": 2 * reads}],
    }  # fmt: skip


def test_models_larger_than_hbm_are_compared_with_the_bounds_of_hbm_and_disk() -> None:
    """The disk allows 512 examples x 100,000 reads/s / 1,000 reads per batch, and half of that if a batch's bytes
    take twice as long."""
    setup = Setup(device="cuda", cores=16)
    results: dict[str, Any] = {"disk": {"reads_per_s": 100_000.0, "bytes_per_s": 5e9}}
    for name, rate in {"A": 1.0, "B": 1.0, "C": 41_000.0, "D": 40_000.0, "E": 8_500.0}.items():
        results[f"{name}, tiers"] = gpu_result(name, rate)
        results[f"{name}, memory"] = {"examples_per_s": 10_000.0 if name == "E" else 200_000.0}
    section = models.section(setup, results)
    bounds = {claim.text.split(",")[0]: claim for claim in section.claims if "larger than HBM" in claim.text}
    assert {name: claim.holds for name, claim in bounds.items()} == {"model C": True, "model D": False, "model E": True}
    assert "the disk allows 51,200: 512 examples per batch of 1,000 reads at 100,000/s and" in bounds["model D"].detail
    assert "share 0.78" in bounds["model D"].detail
    (table,) = [part for part in section.parts if isinstance(part, Table) and part.name == "bounds"]
    assert [row[-1] for row in table.rows] == pytest.approx([1 / 51_200, 1 / 51_200, 41 / 51.2, 40 / 51.2, 0.85])
    results["disk"]["bytes_per_s"] = 2.5 / 0.02  # of the 2.5 bytes per batch
    slower = {claim.text.split(",")[0]: claim.holds for claim in models.section(setup, results).claims}
    assert slower["model D"]
    del results["disk"]
    assert not [claim for claim in models.section(Setup(device="cpu"), results).claims if "HBM" in claim.text]


def test_models_that_fit_hbm_are_compared_with_the_mpi_baseline() -> None:
    setup = Setup(device="cuda", cores=16)
    results: dict[str, Any] = {}
    for name in models.NAMES:
        results[f"{name}, tiers"] = gpu_result(name, 3_000.0)
        results[f"{name}, memory"] = {"examples_per_s": 9_000.0 if name == "A" else 11_000.0}
        results |= {f"{name}, {n} ranks": {"examples_per_s": rate} for n, rate in ((8, 1000.0), (16, 900.0))}
    section = mpi_baseline.section(setup, results)
    assert {claim.text.split(",")[0]: claim.holds for claim in section.claims} == {"model A": False, "model B": True}
    assert section.claims[0].detail == "9,000 and 1,000 (8 ranks): 9.0 times"
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    cost = pytest.approx(9 * (16 / 48) / 1.25)
    assert table.rows[0][1:7] == (3000.0, 9000.0, "8 ranks", 1000.0, 9.0, cost)
    assert table.rows[4][5] == 3.0  # E does not fit HBM: through the tiers
    assert not mpi_baseline.section(Setup(device="cpu", cores=16), results).claims


def test_k_step_ranks_merge_and_are_evaluated(tmp_path: Path) -> None:
    setup = Setup(effort=0.001)
    step = k_step.steps(setup)[-1]
    result = step.run(StepContext(tmp_path))
    assert result is not None
    assert 0.4 < result["auc"] < 0.8
    assert result["examples_per_s"] > 0
    assert f"every = {k_step.periods(setup)[-1]}" in (tmp_path / "ranks.toml").read_text()


def test_k_step_claim_is_about_the_mean_of_three_seeds() -> None:
    """A loss of 0.14 % for one seed of three holds, a mean loss of 0.14 % does not; speeds and losses are averaged."""
    setup = Setup()
    assert [step.name for step in k_step.steps(setup)][:4] == [
        f"k = {k}, seed {n}" for k, n in ((1, 0), (1, 1), (1, 2), (5, 0))
    ]
    for losses, holds in (((0.0, 0.0014, 0.0), True), ((0.0014, 0.0013, 0.0015), False)):
        results = {
            k_step.step_name(k, seed): {
                "auc": (0.7 + seed / 100) * (1 - (k > 10) * losses[seed]),
                "examples_per_s": 5.0 + seed,
                "ranks": 2,
            }
            for k in k_step.periods(setup)
            for seed in k_step.seeds(setup)
        }
        section = k_step.section(setup, results)
        (table,) = [part for part in section.parts if isinstance(part, Table)]
        assert [row[0] for row in table.rows] == list(k_step.periods(setup))
        mean = sum((0.7 + seed / 100) * (1 - loss) for seed, loss in enumerate(losses)) / 3
        assert table.rows[3][1:5] == (
            pytest.approx(mean), f"{-sum(losses) / 3:+.2%}", f"{-max(losses):+.2%} to {-min(losses):+.2%}", 6.0,
        )  # fmt: skip
        assert section.claims[0].holds is holds
        lost = f"{sum(losses) / 3:.2%} lost at most"
        assert section.claims[0].ours == f"holds to k = {100 if holds else 10}; {lost}"


def test_a_job_that_exceeds_its_limit_ends_with_all_processes(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib\nfor _ in range(600): pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    launcher = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    with pytest.raises(tc.ThermoclineError, match="this test: no end within 3 s"):
        launch.run_job("this test", launcher, os.environ, tmp_path, 3.0)
    time.sleep(0.5)
    mark.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not mark.exists()
    with pytest.raises(tc.ThermoclineError, match="this test failed: oh no"):
        launch.run_job("this test", [sys.executable, "-c", "import sys; sys.exit('oh no')"], os.environ, tmp_path, 60.0)


def test_measured_and_predicted_speeds_are_separate_series() -> None:
    predictions = {
        "cores": 4,
        "here": [{"ranks": n, "examples_per_s": 900.0 * n} for n in (1, 2, 4)],
        "beyond": [{"ranks": 4 * n, "nodes": n, "examples_per_s": 3000.0 * n} for n in (2, 4)],
    }
    results = {"predictions": predictions, **{f"{n} ranks": {"examples_per_s": 1000.0 * n**0.9} for n in (1, 2, 4)}}
    section = scalability.section(Setup(), results)
    for figure in section.parts:
        if isinstance(figure, Figure):
            kinds = {series.kind: series for series in figure.series}
            assert list(kinds["measured"].x) == [1, 2, 4]
            assert list(kinds["predicted"].x) == [1, 2, 4, 8, 16]
        else:
            assert [row[2] for row in figure.rows][3:] == [None, None]  # several machines are not measured
            assert set(figure.predicted) == {"examples/s by plan", "speed-up by plan"}
    assert scalability.rank_counts(6) == [1, 2, 4, 6]
    assert scalability.rank_counts(1) == [1]


def test_processes_started_with_bound_affinity_inherit_it() -> None:
    count = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    before = os.sched_getaffinity(0)
    with limit_cores(1):
        assert subprocess.run(count, capture_output=True, text=True, check=True).stdout == "1\n"
    assert os.sched_getaffinity(0) == before
