"""`python -m experiments`, very small: every experiment runs, and its tables contain the results of its steps."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.browser as browser
import numpy as np
import pytest
from typer.testing import CliRunner

import thermocline as tc
from experiments import (
    __main__ as cli,
    auc_time,
    figures,
    hashing,
    launch,
    models,
    paper,
    quantization,
    registry,
    runner,
)
from experiments.experiment import Setup, StepContext
from experiments.results import ExperimentResults
from thermocline.kernels import INTERPRETED

TINY = ("--quick", "--effort", "0.001", "--scale", "1/1000000", "--device", "cpu")
ONE_PROCESS = ("hashing", "quantization", "models", "steady", "auc_time", "nonzeros")
"""Experiments of one process; test_ranks.py runs those of several processes, which take seconds to start."""
ONLY = ("--only", ",".join(ONE_PROCESS))


def invoke(*words: str) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(cli.app, words)


@contextlib.contextmanager
def without_mpi() -> Iterator[None]:
    """Make the MPI baseline unavailable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "mpi_missing", lambda: "this test is small")
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the experiments once for all pytest workers; tests must not change the folder."""
    import torch

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / "experiments-report"
    with (root / "experiments-report.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            threads = torch.get_num_threads()
            unfinished = root / "experiments-unfinished"
            with without_mpi():
                result = invoke(*TINY, *ONLY, "--out", str(unfinished), "--cache", str(unfinished / "cache"))
            torch.set_num_threads(threads)
            assert result.exit_code == 0, result.output
            assert "the report is" in result.output
            unfinished.rename(folder)
    return folder


def results(report: Path, experiment: str) -> dict[str, Any]:
    found = ExperimentResults.read(report / "results", experiment)
    assert found is not None
    return found.values


def rows(report: Path, name: str) -> list[dict[str, str]]:
    with (report / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_experiment_is_on_the_page_and_runs_once(report: Path, tmp_path: Path) -> None:
    page = (report / "index.html").read_text()
    assert set(ONE_PROCESS) < set(registry.NAMES)
    for name in ONE_PROCESS:
        assert f'<section id="{name}">' in page
    assert "The MPI parameter server did not run: this test is small." in page
    assert "steps are done" not in page
    assert not (report / "cache/work").exists()
    with without_mpi():
        result = invoke(*TINY, *ONLY, "--out", str(tmp_path), "--cache", str(report / "cache"))
    assert "0 steps run" in result.output
    assert (tmp_path / "index.html").read_text() == page


def test_the_page_needs_no_other_file(report: Path) -> None:
    page = (report / "index.html").read_text()
    for name in ("2000/svg", "1999/xlink"):
        page = page.replace(f'="http://www.w3.org/{name}"', "")
    page = page.replace("url(#", "").replace('xlink:href="#', "")
    for word in ("src=", "<script", "@import", "url(", "http://", "https://", "xlink:href"):
        assert word not in page


def test_the_published_report_is_rebuilt_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuild docs/reproduction without drawing: tables, claims and text are those in the repository."""
    published = Path(__file__).parents[2] / "docs/reproduction"
    monkeypatch.setattr(figures, "draw", lambda figure, stem: "<svg></svg>")
    outcome = runner.rebuild(published, tmp_path)
    for folder, count in (("tables", 2 * 35), ("results", len(registry.NAMES) - 1)):  # "steady" has no results yet
        files = sorted((published / folder).iterdir())
        assert len(files) == count
        assert [file.name for file in files] == sorted(file.name for file in (tmp_path / folder).iterdir())
        assert all(file.read_bytes() == (tmp_path / folder / file.name).read_bytes() for file in files)
    svg = re.compile("<svg.*?</svg>", re.DOTALL)
    old, new = (svg.sub("", (path / "index.html").read_text()) for path in (published, tmp_path))
    assert old == new
    assert len(outcome.claims) == 22
    for claim, _ in outcome.claims:
        drawn = [name for name in os.listdir(published / "figures") if name.endswith(f"-{claim.part}.svg")]
        assert drawn, f"no figure shows: {claim.text}"
    assert sum(bool(claim.paper) for claim, _ in outcome.claims) == 11
    assert sum(not claim.holds for claim, _ in outcome.claims) == 3


@pytest.mark.skipif(browser.find() is None, reason=browser.ABSENT)
def test_the_published_report_fits_1280_pixels_and_folds_provenance(tmp_path: Path) -> None:
    program = browser.find()
    assert program is not None
    with browser.started(program, tmp_path) as tab:
        tab.open(Path(__file__).parents[2] / "docs/reproduction/index.html", width=1280, dark=False)
        browser.check_readable(tab, 1280)
        too_wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        assert tab.value(f"{too_wide}.map(e => e.closest('figure, section').id)") == []
        assert tab.value("[...document.querySelectorAll('details.made')].map(e => e.open)") == [False] * 8
        headings = tab.value("[...document.querySelectorAll('#summary th')].map(e => e.innerText)")
        assert headings == ["Claim", "Printed", "Here", "Verdict"]
        drawn = "[...document.querySelectorAll('#summary td a')].map(a => !!document.querySelector(a.hash + ' svg'))"
        assert tab.value(drawn) == [True] * 22


@pytest.mark.skipif(browser.find() is None, reason=browser.ABSENT)
def test_the_page_is_readable_in_a_browser(report: Path, tmp_path: Path) -> None:
    program = browser.find()
    assert program is not None
    with browser.started(program, tmp_path) as tab:
        for width in (400, 1400):
            tab.open(report / "index.html", width=width, dark=False)
            browser.check_readable(tab, width)
        ids = tab.value("[...document.querySelectorAll('figure')].map(f => f.id)")
    assert sorted(ids) == sorted(path.stem for path in (report / "tables").glob("*.csv"))


def test_the_quantization_table_has_the_results_of_its_steps(report: Path) -> None:
    measured = results(report, "quantization")
    table = {row["rows"]: row for row in rows(report, "quantization-table")}
    cases = quantization.cases(Setup(effort=0.001, scale=1e6))
    assert list(table) == [case.name for case in cases]
    for case in cases:
        row, result = table[case.name], measured[case.name]
        assert float(row["test AUC"]) == result["auc"]
        assert (
            int(row["bytes per row"]) == case.precision.row_bytes(case.dim, tc.RowWiseAdagrad()) == result["row_bytes"]
        )
        assert int(row["bytes of rows"]) == result["rows"] * result["row_bytes"]
    assert table["int8, dim 32"]["bytes per row"] == table["fp32"]["bytes per row"]
    assert len({result["auc"] for result in measured.values()}) > len(measured) // 2  # the trainings differ


def test_the_settings_of_a_step_contain_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached result of another constant is not used."""

    def settings() -> list[str]:
        return [json.dumps(dict(step.settings)) for step in quantization.steps(Setup(effort=0.001, scale=1e6))]

    before = settings()
    monkeypatch.setattr(quantization, "HIDDEN", (8,))
    assert not set(before) & set(settings())


def test_the_claims_about_quantization_can_fail() -> None:
    setup = Setup(effort=1.0)
    cases = quantization.trainings(setup)
    same = {case.name: {"auc": 0.75} for case in cases}
    held = {claim.text: claim.holds for claim in quantization._claims(setup, same)}
    assert [text for text, holds in held.items() if holds] == [text for text in held if "lossless" in text]
    better = {case.name: {"auc": 0.7 + 0.01 * case.precision.stochastic} for case in cases}
    better["int8, scale learned from a wide range"] = {"auc": 0.72}
    assert all(claim.holds for claim in quantization._claims(setup, better))
    better["int2, nearest, range of the row"] = {"auc": 0.72}
    assert sum(not claim.holds for claim in quantization._claims(setup, better)) == 1


@pytest.mark.parametrize("name", [quantization.INT16, quantization.ROW8, quantization.LEARNED8])
def test_lossless_is_the_mean_over_seeds(name: str) -> None:
    """Each training is compared with fp32 of the same seed; one bad seed is chance, a bad mean is not."""
    setup = Setup(effort=1.0)
    auc = {case.name: {"auc": 0.7 + 0.01 * case.seed} for case in quantization.trainings(setup)}

    def lost() -> list[str]:
        claims = quantization._claims(setup, auc)
        return [claim.text for claim in claims if "lossless" in claim.text and claim.asserted and not claim.holds]

    auc[quantization.with_seed(name, 1)]["auc"] -= 0.002
    assert not lost()
    auc[quantization.with_seed(name, 4)]["auc"] -= 0.002
    assert len(lost()) == 1


def test_every_seed_is_a_separate_training() -> None:
    setup = Setup(effort=1.0, seed=7)
    cases = quantization.trainings(setup)
    configs = {case.name: quantization.config(setup, case) for case in cases}
    assert len({step.name for step in quantization.steps(setup)}) == len(cases) == len(configs)
    for name in quantization.compared(setup):
        runs = [configs[quantization.with_seed(name, seed)] for seed in range(quantization.SEEDS)]
        assert [run.train.seed for run in runs] == [run.data.synth.seed for run in runs] == [7, 8, 9, 10, 11]
        assert len({(run.precision, run.train.batch_size, run.train.dense_lr) for run in runs}) == 1
    small = configs[quantization.with_small_batches(quantization.FP32)].train
    large = configs[quantization.FP32].train
    assert large.batch_size / small.batch_size == large.dense_lr / small.dense_lr == 4


def test_the_hashing_tables_have_the_results_of_their_steps(report: Path) -> None:
    measured = results(report, "hashing")
    setup = Setup(effort=0.001, scale=1e6)
    for dataset in ("image", "web"):
        table = rows(report, f"hashing-table-{dataset}")
        assert [row["model"] for row in table][:2] == ["LR", "DNN"]
        for row in table:
            name = row["model"].removeprefix("hash+DNN, ")
            result = measured[f"{dataset}, {name}"]
            assert float(row["test AUC"]) == result["auc"]
            assert int(row["trained rows"]) == result["rows"]
            assert int(row["bytes of rows"]) == result["rows"] * result["row_bytes"]
    # Trained rows: the distinct slots of all examples, counted without training.
    for method, name, log2_k in hashing._rows(setup, "image"):
        k = None if log2_k is None else hashing.bins(setup, log2_k)
        data = hashing.config(setup, "image", method, k).data
        synth = data.synth
        ads = tc.SyntheticAds(
            keys=synth.keys, fields=synth.fields, nonzeros=synth.nonzeros, zipf=synth.zipf, examples=synth.examples,
            hashing=data.hashing, seed=synth.seed,
        )  # fmt: skip
        slots = np.unique(np.concatenate([batch.ids for batch in ads]))
        assert measured[f"image, {name}"]["rows"] == len(slots)


@pytest.mark.parametrize(
    ("lr", "dnn", "lost"),
    [
        (0.70, 0.80, []),
        (0.78, 0.80, ["hash+DNN at the largest k lies between LR and DNN"]),
        (0.70, 0.76, ["hash+DNN at the largest k lies between LR and DNN"]),
        (0.80, 0.78, ["the network beats logistic regression", "hash+DNN at the largest k lies between LR and DNN"]),
    ],
)
def test_the_claims_about_hashing_can_fail(lr: float, dnn: float, lost: list[str]) -> None:
    setup = Setup(effort=1.0)
    auc: dict[str, Any] = {"web, LR": {"auc": lr}, "web, DNN": {"auc": dnn}}
    for index, (_, name, _) in enumerate(row for row in hashing._rows(setup, "web") if row[0] == "op_osrp"):
        auc[f"web, {name}"] = {"auc": 0.77 - 0.002 * index}
    claims = hashing._claims(setup, "web", auc)
    assert [claim.text for claim in claims if not claim.holds] == [f"web: {text}" for text in lost]
    assert all(claim.asserted for claim in claims)
    auc["web, OP+OSRP, k = 2^22"] = {"auc": 0.77}
    auc["web, OP+OSRP, k = 2^22, hash 2"] = {"auc": 0.79}
    assert hashing._auc("web", "OP+OSRP, k = 2^22", auc) == pytest.approx(0.78)  # the mean over hash functions
    assert not next(claim.holds for claim in hashing._claims(setup, "web", auc) if "falls" in claim.text)


def test_a_gpu_hashes_at_a_scale_that_leaves_bins_for_every_nonzero() -> None:
    """There, and only there, every row of hash+DNN is claimed to lie between LR and DNN."""
    cpu, gpu = Setup(effort=1.0), Setup(effort=1.0, device="cuda")
    assert hashing.bins_per_nonzero(cpu, "image") == pytest.approx(3.5, abs=0.1)
    assert hashing.bins_per_nonzero(gpu, "image") == pytest.approx(350, abs=10)
    assert hashing.bins_per_nonzero(gpu, "web") > hashing.LEAST_BINS
    auc: dict[str, Any] = {"image, LR": {"auc": 0.70}, "image, DNN": {"auc": 0.80}}
    for index, (_, name, _) in enumerate(row for row in hashing._rows(gpu, "image") if row[0] == "op_osrp"):
        auc[f"image, {name}"] = {"auc": 0.77 - 0.0065 * index}

    def held(setup: Setup) -> dict[str, bool]:
        return {claim.text: claim.holds for claim in hashing._claims(setup, "image", auc)}

    every = "image: every row of hash+DNN lies between LR and DNN"
    assert held(gpu)[every]
    assert every not in held(cpu)
    auc["image, LR"]["auc"] = 0.71
    assert not held(gpu)[every]
    (claim,) = [claim for claim in hashing._claims(gpu, "image", auc) if claim.text == every]
    assert claim.detail == "LR 0.7100, DNN 0.8000; 1 of 11 rows outside, 0.7050"
    assert claim.asserted
    configs = [hashing.config(gpu, "web", method, 1000) for method in ("op_osrp", "modulo")]
    assert {(c.data.synth.keys, c.train.batch_size) for c in configs} == {(199_359_035, 8192)}


def test_the_papers_numbers_are_in_separate_columns(report: Path) -> None:
    published = paper.load()["hashing"]
    for dataset in ("image", "web"):
        table = {row["model"]: row for row in rows(report, f"hashing-table-{dataset}")}
        assert float(table["LR"]["AUC (Zhao 2026)"]) == published[dataset]["lr"]["auc"]
        for paper_row in published[dataset]["hash"]:
            row = table.get(f"hash+DNN, OP+OSRP, k = 2^{paper_row['log2_k']}")
            if row is not None:
                assert float(row["AUC (Zhao 2026)"]) == paper_row["auc"]
                assert int(row["nonzero weights (Zhao 2026)"]) == paper_row["weights"]
        assert table[next(m for m in table if "modulo" in m)]["AUC (Zhao 2026)"] == ""


def test_the_models_table_and_curves_have_the_results_of_their_steps(report: Path) -> None:
    measured = results(report, "models")
    table = {row["model"]: row for row in rows(report, "models-table")}
    assert list(table) == list(models.NAMES)
    for name, row in table.items():
        tiers, memory = measured[f"{name}, tiers"], measured[f"{name}, memory"]
        assert float(row["examples/s"]) == tiers["examples_per_s"]
        assert float(row["examples/s, all in DRAM"]) == memory["examples_per_s"]
        assert tiers["rows"] == tiers["plan"]["keys"] == int(row["keys"])  # every key has a row on SSD
        points = tiers["points"]
        assert sum(point["batches"] for point in points) == tiers["batches"] == points[-1]["batch"]
        assert all(0 <= point["mem_hits"] <= point["mem_all"] for point in points)
        assert points[0]["bytes_read"] > 0  # DRAM was empty
        assert all(point["disk_bytes"] >= tiers["rows"] * tiers["row_bytes"] for point in points)
    drawn = json.loads((report / "tables/models-ssd-bytes-read.json").read_text())["series"]
    read = {series["name"]: series for series in drawn}
    point = measured["E, tiers"]["points"][0]
    assert read["E"]["y"][0] == pytest.approx(point["bytes_read"] / point["batches"] / 1e6)


def test_the_steady_tables_have_the_results_of_their_steps(report: Path) -> None:
    measured = results(report, "steady")
    table = {row["model"]: row for row in rows(report, "steady-table")}
    placed = {row["model"]: row for row in rows(report, "steady-rows")}
    assert list(table) == list(placed) == list(models.NAMES)
    for name, row in table.items():
        result = measured[name]
        assert float(row["examples/s"]) == result["tiers"]["examples_per_s"]
        assert float(row["examples/s, all in DRAM"]) == result["memory"]["examples_per_s"]
        assert int(placed[name]["rows placed in DRAM"]) == result["tiers"]["dram_placed"] > 0
        assert all(point["bytes_read"] >= 0 for point in result["cold"]["curve"])
        assert sum(point["bytes_read"] for point in result["cold"]["curve"]) > 0  # the tiers above were empty


def test_the_tiers_change_no_bit_of_auc(report: Path) -> None:
    tiers, memory = results(report, "auc_time").values()
    assert [point["auc"] for point in tiers["points"]] == [point["auc"] for point in memory["points"]]
    assert tiers["test_auc"] == memory["test_auc"]
    assert {float(row["difference of AUC"]) for row in rows(report, "auc_time-difference")} == {0.0}


def test_an_unfinished_curve_is_an_error(tmp_path: Path) -> None:
    """A shorter training of one side would not be comparable with the other."""
    step = next(step for step in auc_time.steps(Setup(effort=0.001, scale=1e6)) if step.name == auc_time.MEMORY)
    with pytest.raises(tc.ThermoclineError, match=r"1 of 4 training steps took .* a smaller --effort"):
        step.run(StepContext(tmp_path, limit=0.0))


def test_a_quick_run_prints_claims_and_succeeds(report: Path, tmp_path: Path) -> None:
    result = invoke(*TINY, "--out", str(tmp_path), "--cache", str(report / "cache"), "--only", "hashing")
    assert result.exit_code == 0
    assert "the network beats logistic regression" in result.output


def test_falling_curves_tolerate_noise() -> None:
    assert hashing.falls([0.75, 0.74, 0.74, 0.73])
    assert not hashing.falls([0.75, 0.74, 0.745, 0.73])
    assert not hashing.falls([0.75, 0.7499, 0.75])
    assert not hashing.falls([0.7, 0.7005, 0.7])


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    from experiments.training import train

    config = hashing.config(Setup(effort=0.004, scale=1e6), "image", "op_osrp", 40)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    expected = train(config, StepContext(whole))
    assert expected is not None
    calls = 0
    result = None
    while result is None:
        result = train(config, StepContext(cut, limit=0.0))  # stops after eight steps
        calls += 1
    assert calls > 1
    assert {**result, "examples_per_s": 0} == {**expected, "examples_per_s": 0}


def test_errors_are_one_line() -> None:
    for words, text in (
        (("--only", "modles"), "did you mean"),
        (("--scale", "7"), "--scale is"),
        (("--effort", "0"), "--effort"),
        (("--from", "nowhere"), "contains no results"),
        (("--from", "nowhere", "--quick"), "--from rebuilds"),
    ):
        result = invoke(*words)
        assert result.exit_code == 2
        assert text in result.output
        assert len(result.output.strip().splitlines()) == 1


def test_models_run_on_the_interpreted_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run through HBM, DRAM and SSD, and with all rows in HBM; only the device of the kernels differs from a GPU."""
    from experiments import training

    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")

    def table(dim: int, optimizer: Any, setup: Setup, **budgets: Any) -> tc.Table:
        return tc.Table(dim, optimizer, seed=setup.seed, device="interpreter", **budgets)

    monkeypatch.setattr(training, "make_table", table)
    setup = Setup(device="cuda", effort=0.001, scale=2e7)
    steps = {step.name: step for step in models.steps(setup)}
    tiers = steps["B, tiers"].run(StepContext(tmp_path))
    assert tiers is not None
    assert tiers["rows"] == tiers["plan"]["keys"]
    assert sum(point["reads"] for point in tiers["points"]) > 0
    assert 0 < sum(point["hbm_hits"] for point in tiers["points"]) < sum(point["hbm_all"] for point in tiers["points"])
    memory = steps["B, memory"].run(StepContext(tmp_path))
    assert memory is not None
    assert all(point["hbm_hits"] == point["hbm_all"] for point in memory["points"])
