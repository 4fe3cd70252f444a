"""`thermocline reproduce`, very small: every experiment runs, and its figures are those of its steps."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.browser as browser
import numpy as np
import pytest
from helpers.cli import invoke

import thermocline as tc
from experiments import auc_time, hashing, models, mpi, paper, places, quantization
from experiments.experiment import Setup
from thermocline.kernels import INTERPRETED

TINY = ("--quick", "--effort", "0.001", "--scale", "1/1000000", "--device", "cpu")
HERE = ("hashing", "quantization", "models", "auc_time", "nonzeros")
"""Experiments of one process. Ranks take seconds to start: test_ranks.py has those, very few."""
ONLY = [word for name in HERE for word in ("--only", name)]


@contextlib.contextmanager
def without_rival() -> Iterator[None]:
    """MPI's ranks take seconds to start: test_ranks.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "missing", lambda: "this test is small")
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("report")
    with without_rival():
        result = invoke("reproduce", *TINY, *ONLY, "--out", str(folder))
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert "the report is" in result.output
    return folder


def results(report: Path, experiment: str) -> dict[str, Any]:
    records = [json.loads(path.read_text()) for path in (report / "steps" / experiment).glob("*-*.json")]
    return {record["step"]: record["result"] for record in records}


def rows(report: Path, name: str) -> list[dict[str, str]]:
    with (report / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_experiment_is_on_the_page_and_none_is_done_again(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert set(HERE) < set(places.PLACES)
    for name in HERE:
        assert f'<section id="{name}">' in page
    assert "The MPI rival did not run: this test is small." in page
    assert "steps are done" not in page
    assert not (report / "work").exists()
    with without_rival():
        result = invoke("reproduce", *TINY, *ONLY, "--out", str(report))
    assert "0 steps done" in result.output
    assert (report / "index.html").read_text() == page


def test_the_page_needs_nothing_else(report: Path) -> None:
    page = (report / "index.html").read_text()
    for word in ("src=", "<script", "@import", "url(", "http://", "https://"):
        assert word not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")


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


def test_rows_of_few_bits_are_what_was_trained(report: Path) -> None:
    got = results(report, "quantization")
    table = {row["rows"]: row for row in rows(report, "quantization-table")}
    cases = quantization.cases(Setup(effort=0.001, scale=1e6))
    assert list(table) == [case.name for case in cases]
    for case in cases:
        row, result = table[case.name], got[case.name]
        assert float(row["test AUC"]) == result["auc"]
        assert int(row["bytes a row"]) == case.precision.row_bytes(case.dim, tc.RowWiseAdagrad()) == result["row_bytes"]
        assert int(row["bytes of rows"]) == result["rows"] * result["row_bytes"]
    assert table["int8, dim 32"]["bytes a row"] == table["fp32"]["bytes a row"]
    assert len({result["auc"] for result in got.values()}) > len(got) // 2  # they were trained, each in its own way


def test_a_step_is_known_by_all_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept results of other constants are not taken for these."""

    def settings() -> list[str]:
        return [json.dumps(dict(step.settings)) for step in quantization.steps(Setup(effort=0.001, scale=1e6))]

    before = settings()
    monkeypatch.setattr(quantization, "HIDDEN", (8,))
    assert not set(before) & set(settings())


def test_the_claims_about_few_bits_can_fail() -> None:
    setup = Setup(effort=1.0)
    cases = quantization.trainings(setup)
    same = {case.name: {"auc": 0.75} for case in cases}
    held = {claim.text: claim.holds for claim in quantization._claims(setup, same)}
    assert [text for text, holds in held.items() if holds] == [text for text in held if "lossless" in text]
    better = {case.name: {"auc": 0.7 + 0.01 * case.precision.stochastic} for case in cases}
    better["int8, learned from a wide range"] = {"auc": 0.72}
    assert all(claim.holds for claim in quantization._claims(setup, better))
    better["int2, nearest, range of the row"] = {"auc": 0.72}
    assert sum(not claim.holds for claim in quantization._claims(setup, better)) == 1


@pytest.mark.parametrize("name", [quantization.INT16, quantization.ROW8, quantization.LEARNED8])
def test_lossless_is_the_mean_over_seeds(name: str) -> None:
    """Each against fp32 of its own seed, whose data are others; one bad seed may be chance, all of them are not."""
    setup = Setup(effort=1.0)
    auc = {case.name: {"auc": 0.7 + 0.01 * case.seed} for case in quantization.trainings(setup)}

    def lost() -> list[str]:
        claims = quantization._claims(setup, auc)
        return [claim.text for claim in claims if "lossless" in claim.text and claim.asserted and not claim.holds]

    auc[quantization.again(name, 1)]["auc"] -= 0.002
    assert not lost()
    auc[quantization.again(name, 4)]["auc"] -= 0.002
    assert len(lost()) == 1


def test_seeds_are_trainings_of_their_own() -> None:
    setup = Setup(effort=1.0, seed=7)
    cases = quantization.trainings(setup)
    configs = {case.name: quantization.config(setup, case) for case in cases}
    assert len({step.name for step in quantization.steps(setup)}) == len(cases) == len(configs)
    for name in quantization.compared(setup):
        runs = [configs[quantization.again(name, seed)] for seed in range(quantization.SEEDS)]
        assert [run.train.seed for run in runs] == [run.data.synth.seed for run in runs] == [7, 8, 9, 10, 11]
        assert len({(run.precision, run.train.batch_size, run.train.dense_lr) for run in runs}) == 1
    small = configs[quantization.smaller(quantization.FP32)].train
    large = configs[quantization.FP32].train
    assert large.batch_size / small.batch_size == large.dense_lr / small.dense_lr == 4


def test_the_hashing_tables_are_what_was_trained(report: Path) -> None:
    got = results(report, "hashing")
    setup = Setup(effort=0.001, scale=1e6)
    for world in ("image", "web"):
        table = rows(report, f"hashing-table-{world}")
        assert [row["model"] for row in table][:2] == ["LR", "DNN"]
        for row in table:
            name = row["model"].removeprefix("hash+DNN, ")
            result = got[f"{world}, {name}"]
            assert float(row["test AUC"]) == result["auc"]
            assert int(row["rows trained"]) == result["rows"]
            assert int(row["bytes of rows"]) == result["rows"] * result["row_bytes"]
    # Rows really trained: all slots of all examples, counted without any training.
    for method, name, log2_k in hashing._rows(setup, "image"):
        k = None if log2_k is None else hashing.bins(setup, log2_k)
        data = hashing.config(setup, "image", method, k).data
        synth = data.synth
        ads = tc.SyntheticAds(
            keys=synth.keys, fields=synth.fields, nonzeros=synth.nonzeros, zipf=synth.zipf, examples=synth.examples,
            hashing=data.hashing, seed=synth.seed,
        )  # fmt: skip
        slots = np.unique(np.concatenate([batch.ids for batch in ads]))
        assert got[f"image, {name}"]["rows"] == len(slots)


@pytest.mark.parametrize(
    ("lr", "dnn", "lost"),
    [
        (0.70, 0.80, []),
        (0.78, 0.80, ["hash+DNN at the largest k lies between the two"]),
        (0.70, 0.76, ["hash+DNN at the largest k lies between the two"]),
        (0.80, 0.78, ["the network beats logistic regression", "hash+DNN at the largest k lies between the two"]),
    ],
)
def test_the_claims_about_hashing_can_fail(lr: float, dnn: float, lost: list[str]) -> None:
    setup = Setup(effort=1.0)
    auc: dict[str, Any] = {"web, LR": {"auc": lr}, "web, DNN": {"auc": dnn}}
    for place, (_, name, _) in enumerate(row for row in hashing._rows(setup, "web") if row[0] == "op_osrp"):
        auc[f"web, {name}"] = {"auc": 0.77 - 0.002 * place}
    claims = hashing._claims(setup, "web", auc)
    assert [claim.text for claim in claims if not claim.holds] == [f"web: {text}" for text in lost]
    assert all(claim.asserted for claim in claims)
    auc["web, OP+OSRP, k = 2^22"] = {"auc": 0.77}
    auc["web, OP+OSRP, k = 2^22, hash 2"] = {"auc": 0.79}
    assert hashing._auc("web", "OP+OSRP, k = 2^22", auc) == pytest.approx(0.78)  # the mean over hash functions
    assert not next(claim.holds for claim in hashing._claims(setup, "web", auc) if "falls" in claim.text)


def test_the_papers_figures_stand_in_columns_of_their_own(report: Path) -> None:
    published = paper.load()["hashing"]
    for world in ("image", "web"):
        table = {row["model"]: row for row in rows(report, f"hashing-table-{world}")}
        assert float(table["LR"]["AUC (the paper)"]) == published[world]["lr"]["auc"]
        for theirs in published[world]["hash"]:
            row = table.get(f"hash+DNN, OP+OSRP, k = 2^{theirs['log2_k']}")
            if row is not None:
                assert float(row["AUC (the paper)"]) == theirs["auc"]
                assert int(row["nonzero weights (the paper)"]) == theirs["weights"]
        assert table[next(m for m in table if "modulo" in m)]["AUC (the paper)"] == ""


def test_the_models_table_and_curves_are_what_was_measured(report: Path) -> None:
    got = results(report, "models")
    table = {row["model"]: row for row in rows(report, "models-table")}
    assert list(table) == list(models.NAMES)
    for name, row in table.items():
        tiers, memory = got[f"{name}, tiers"], got[f"{name}, memory"]
        assert float(row["examples/s"]) == tiers["examples_per_s"]
        assert float(row["examples/s, all in DRAM"]) == memory["examples_per_s"]
        assert tiers["rows"] == tiers["plan"]["keys"] == int(row["keys"])  # every key has its row on disk
        points = tiers["points"]
        assert sum(point["batches"] for point in points) == tiers["batches"] == points[-1]["batch"]
        assert all(0 <= point["mem_hits"] <= point["mem_all"] for point in points)
        assert points[0]["bytes_read"] > 0  # memory was empty
        assert all(point["disk_bytes"] >= tiers["rows"] * tiers["row_bytes"] for point in points)
    read = {
        series["name"]: series for series in json.loads((report / "tables/models-ssd-e.json").read_text())["series"]
    }
    point = got["E, tiers"]["points"][0]
    assert read["read for batches"]["y"][0] == pytest.approx(point["bytes_read"] / point["batches"] / 1e6)


def test_the_tiers_change_no_bit_of_auc(report: Path) -> None:
    tiers, memory = results(report, "auc_time").values()
    assert [point["auc"] for point in tiers["points"]] == [point["auc"] for point in memory["points"]]
    assert tiers["test_auc"] == memory["test_auc"]
    assert {float(row["difference of AUC"]) for row in rows(report, "auc_time-difference")} == {0.0}


def test_a_curve_that_is_not_finished_is_none(tmp_path: Path) -> None:
    """Trained half as long, one side's AUC would be compared with the other's at the end."""
    from experiments.experiment import Work

    step = next(step for step in auc_time.steps(Setup(effort=0.001, scale=1e6)) if step.name == auc_time.MEMORY)
    with pytest.raises(tc.ThermoclineError, match=r"1 of 4 steps took .* a smaller --effort"):
        step.run(Work(tmp_path, limit=0.0))


def test_claims_are_told_but_a_quick_run_proves_none(report: Path) -> None:
    result = invoke("reproduce", *TINY, "--out", str(report), "--only", "hashing")
    assert result.exit_code == 0
    assert "the network beats logistic regression" in result.output


def test_falling_curves() -> None:
    assert hashing.falls([0.75, 0.74, 0.74, 0.73])
    assert not hashing.falls([0.75, 0.74, 0.745, 0.73])
    assert not hashing.falls([0.75, 0.7499, 0.75])
    assert not hashing.falls([0.7, 0.7005, 0.7])


def test_a_training_that_is_cut_anywhere_ends_with_the_same_bits(tmp_path: Path) -> None:
    from experiments.experiment import Work
    from experiments.training import train

    config = hashing.config(Setup(effort=0.004, scale=1e6), "image", "op_osrp", 40)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    expected = train(config, Work(whole))
    assert expected is not None
    calls = 0
    found = None
    while found is None:
        found = train(config, Work(cut, limit=0.0))  # ends after eight steps each time
        calls += 1
    assert calls > 1
    assert {**found, "examples_per_s": 0} == {**expected, "examples_per_s": 0}


def test_errors_are_one_line() -> None:
    for words, text in (
        (("--only", "modles"), "did you mean"),
        (("--scale", "7"), "--scale is"),
        (("--effort", "0"), "--effort"),
    ):
        result = invoke("reproduce", *words)
        assert result.exit_code == 2
        assert text in result.output
        assert len(result.output.strip().splitlines()) == 1


def test_a_gpus_part_of_the_models_runs_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through HBM, DRAM and SSD, and with the rows in HBM, as on a GPU: only the kernels' device differs."""
    from experiments import training
    from experiments.experiment import Work

    if not INTERPRETED:
        pytest.skip("kernels are not interpreted here: TRITON_INTERPRET=1")

    def table(dim: int, optimizer: Any, setup: Setup, **budgets: Any) -> tc.Table:
        return tc.Table(dim, optimizer, seed=setup.seed, device="interpreter", **budgets)

    monkeypatch.setattr(training, "table", table)
    setup = Setup(device="cuda", effort=0.001, scale=2e7)
    steps = {step.name: step for step in models.steps(setup)}
    tiers = steps["C, tiers"].run(Work(tmp_path))
    assert tiers is not None
    assert tiers["rows"] == tiers["plan"]["keys"]
    assert sum(point["reads"] for point in tiers["points"]) > 0
    assert 0 < sum(point["hbm_hits"] for point in tiers["points"]) < sum(point["hbm_all"] for point in tiers["points"])
    memory = steps["C, memory"].run(Work(tmp_path))
    assert memory is not None
    assert all(point["hbm_hits"] == point["hbm_all"] for point in memory["points"])
