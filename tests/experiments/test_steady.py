"""Models A to E in the steady state: placing rows by popularity, the meter, one stretch, and the claims."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from experiments import machine, popularity, steady, steady_meter, steady_report
from experiments.__main__ import command_line
from experiments.experiment import Setup, StepContext, Table
from thermocline.data.paper_models import PaperModel
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.kernels import INTERPRETED
from thermocline.models import ModelConfig, build

TINY = Setup(effort=0.001, scale=1e6, mpi=False)


# ---- rows by popularity


def test_the_most_popular_keys_are_those_with_the_highest_frequencies() -> None:
    ads = tc.SyntheticAds(keys=[400, 3000, 20_000], nonzeros=3, zipf=[0.0, 1.05, 1.3])
    frequencies = []
    for field, (count, zipf) in enumerate(zip(ads.keys, ads.zipf, strict=True)):
        weights = np.arange(1, count + 1) ** -zipf
        frequencies += [(share, -field, -rank) for rank, share in enumerate(weights / weights.sum())]
    order = sorted(frequencies, reverse=True)
    found = popularity.Popularity(ads)
    for rows in (1, 10, 777, 5000, sum(ads.keys)):
        counts = found.counts(rows)
        expected = np.bincount([-field for _, field, _ in order[:rows]], minlength=3)
        if rows == 777:  # 400 keys of equal frequency are taken together or not at all
            assert counts[0] in (0, 400)
        else:
            assert np.abs(counts - expected).max() <= 1
        assert counts.sum() <= rows


def test_pieces_have_every_key_once_and_the_rarest_first() -> None:
    ads = tc.SyntheticAds(keys=9000, fields=4)
    order = popularity.Popularity(ads)
    pieces = list(order.pieces(1000, 5000, piece=300))
    keys = np.concatenate(pieces)
    assert len(np.unique(keys)) == len(keys) == order.counts(5000).sum() - order.counts(1000).sum()
    first = np.concatenate([[0], np.cumsum(ads.keys)[:-1]])
    top, bound = order.counts(1300), order.counts(1000)
    expected = [ads.some_keys(int(f + a), int(f + b)) for f, a, b in zip(first, bound, top, strict=True)]
    assert sorted(pieces[-1]) == sorted(np.concatenate(expected))


def test_placed_rows_are_found_without_a_read_of_the_store(tmp_path: Path) -> None:
    ads = tc.SyntheticAds(keys=30_000, fields=3)
    with tc.SsdStore.open(tmp_path, row_bytes=20) as store:
        tier = tc.Table(4, tc.RowWiseAdagrad(lr=0.1), mem="1MB").dram
        store.put(keys := ads.some_keys(0, 30_000), tier.initial_rows(keys))
        store.commit()
    table = tc.Table(4, tc.RowWiseAdagrad(lr=0.1), mem="1MB", ssd=tmp_path)
    placed = popularity.place(table, ads)
    assert placed["hbm_placed"] == 0
    assert 5_000 < placed["dram_placed"] == table.dram.capacity < 30_000
    popular = [ads.key_of(field, rank) for field in range(3) for rank in range(min(ads.keys))]
    table.dram.read(np.array(popular, np.uint64))
    assert table.dram.stats().read_hits == len(popular)
    table.close()


# ---- the meter


COUNTS = types.SimpleNamespace(hits=0, misses=0, puts=0, puts_in_pulls=0, evictions=0, pinned=0)


class FakeTable:
    """Counters of a table without tiers below DRAM."""

    hbm = store = None

    def __init__(self) -> None:
        self.dram = types.SimpleNamespace(stats=lambda: COUNTS)


def run_meter(monkeypatch: pytest.MonkeyPatch, ahead: list[int], **limits: Any) -> tuple[Any, int]:
    """Train batches of one example and 0.1 s until the meter stops; `ahead` are the batches ahead per batch."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(steady_meter.time, "perf_counter", lambda: clock.now)
    options = {"ramp": 100.0, "seconds": 10.0, "horizons": 5, "commit": 1e9, "resident_before": 0, **limits}
    meter = steady_meter.SteadyMeter(FakeTable(), **options)
    for number in range(10_000):
        clock.now += 0.1
        batches = ahead[min(number, len(ahead) - 1)]
        stats = types.SimpleNamespace(batches_ahead=batches, most_bytes=batches)
        if not meter.after_batch(1, stats if ahead else None, []):
            return meter, number + 1
    raise AssertionError("the meter did not stop")


def test_the_measurement_begins_when_the_look_ahead_has_stopped_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = [batch // 10 for batch in range(401)]  # 1 more batch per second up to 40
    meter, batches = run_meter(monkeypatch, growing)
    begin = meter._samples[meter._steady]["batches"]
    assert 380 + 2 * 40 <= begin < 400 + 2 * 40 + 20  # twice the horizon later
    assert batches - begin == 5 * 40  # five horizons are longer than 10 s


def test_the_measurement_lasts_the_longer_of_time_and_horizons(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, batches = run_meter(monkeypatch, [3])
    begin = meter._samples[meter._steady]["batches"]
    assert begin >= 80  # no growth for 8 % of the longest ramp-up
    assert batches - begin == pytest.approx(100, abs=1)


def test_the_ramp_up_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, _ = run_meter(monkeypatch, list(range(2000)), ramp=30.0, horizons=0)
    assert meter._samples[meter._steady]["seconds"] == pytest.approx(30.0, abs=0.2)
    cold, batches = run_meter(monkeypatch, [3], ramp=0.0, horizons=0)
    assert cold._steady == 0
    assert batches == pytest.approx(100, abs=1)


# ---- the cycle of batches, and the DRAM's 40 %

H200 = Setup(device="cuda", cores=16, dram=125 << 30, memory=80 << 30, mpi=False)


def paper_model(name: str) -> PaperModel:
    return PaperModel.parse(f"{name}/1000")


def test_the_cycle_has_ten_of_the_longest_horizons() -> None:
    for setting, batches in (("auto", None), ("1400MB", None), ("100", 100)):
        setup = dataclasses.replace(H200, lookahead=setting)
        step = next(step for step in steady.steps(setup) if step.name == "E")
        ids = step.settings["batch"] * 500
        limits = LookAheadLimits.of(step.settings["lookahead"], step.settings["mem"], 52)
        assert limits is not None
        longest = batches or limits.bytes / (steady.AHEAD_BYTES_PER_ID * ids)
        assert 10 * longest <= step.settings["cycle"] <= 10 * (longest + 1)


def test_the_cycle_stays_inside_its_memory() -> None:
    plan = paper_model("E")
    ids = steady.models.batch_size(H200, plan) * plan.nonzeros
    large = dataclasses.replace(H200, lookahead="2GB")
    assert 8 * ids * steady.cycle(large, plan) <= steady.CYCLE_BYTES
    small = dataclasses.replace(large, dram=16 << 30)
    assert 3 << 30 < 8 * ids * steady.cycle(small, plan) <= 4 << 30


def test_without_reads_from_ssd_there_is_no_look_ahead_and_a_cycle_of_1000_batches() -> None:
    for name in "ABC":  # HBM and DRAM hold all rows
        assert steady.lookahead(H200, paper_model(name)) == 0
        assert steady.cycle(H200, paper_model(name)) == 1000
    for name in "DE":
        assert steady.lookahead(dataclasses.replace(H200, lookahead="64"), paper_model(name)) == 64


def test_dram_of_all_models_is_40_percent_of_the_rows_of_e() -> None:
    assert {steady.dram(paper_model(name)) for name in steady.NAMES} == {round(0.4 * 200_000_000 * 52)}
    assert steady.models.dram_budget(paper_model("E")) == steady.dram(paper_model("A"))


def test_the_option_of_the_look_ahead_is_part_of_the_command() -> None:
    setup = Setup.from_options(quick=True, scale=None, effort=None, seed=0, device="cpu", lookahead="1400MB")
    assert setup.lookahead == "1400MB"
    assert Setup(**setup.record()) == setup
    assert "lookahead" not in dataclasses.replace(setup, lookahead="auto").record()
    command = command_line(quick=False, scale=None, effort=None, seed=0, names=["steady:E"], lookahead="1400MB")
    assert command == "python -m experiments --only steady:E --lookahead 1400MB"


# ---- a stretch


def test_training_is_that_of_the_trainer_until_the_meter_ends_it() -> None:
    from experiments import training

    class Meter:
        def __init__(self) -> None:
            self.examples: list[int] = []
            self.stages_at_end: Any = ()

        def after_batch(self, examples: int, ahead: Any, stages: Any) -> bool:
            assert ahead is None
            assert [stage.name for stage in stages]
            self.examples.append(examples)
            return len(self.examples) < 5

    before = torch.get_num_threads()
    ads = tc.SyntheticAds(keys=900, fields=3, batch_size=8)
    batches = [training.page_locked(batch) for batch in itertools.islice(ads, 2)]
    table = tc.Table(4, tc.RowWiseAdagrad(lr=0.1), mem="1MB")
    model = build(ModelConfig(name="dnn", dim=4, hidden=(8,), dropout=0.0, batch_norm=False), table, 3)
    meter, dense = Meter(), torch.optim.Adam(model.parameters(), lr=0.01)
    graphs = training.train_metered(itertools.cycle(batches), model, dense, meter, depth=2, pull_window=1)
    torch.set_num_threads(before)
    assert meter.examples == [8] * 5
    assert graphs == {"steps": 5, "recorded": 0, "reason": ""}
    assert sum(stage.items for stage in meter.stages_at_end) > 0
    table.close()


@pytest.mark.long
def test_a_stretch_on_the_interpreted_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place rows in HBM and DRAM, train, probe, train from a cold start and with all rows in HBM."""
    from experiments import training

    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")

    def table(dim: int, optimizer: Any, setup: Setup, **budgets: Any) -> tc.Table:
        if "ssd" in budgets:
            budgets["hbm"] = 24_000  # for fewer rows than the model has
        return tc.Table(dim, optimizer, seed=setup.seed, device="interpreter", **budgets)

    monkeypatch.setattr(training, "make_table", table)
    monkeypatch.setattr(steady_meter, "WARM_UP", 1)
    setup = Setup(device="cuda", effort=0.001, scale=2e7, mpi=False)
    step = next(step for step in steady.steps(setup) if step.name == "B")
    result = step.run(StepContext(tmp_path))
    tiers = result["tiers"]
    assert 0 < tiers["hbm_placed"] < result["plan"]["keys"]
    warm, cold = (
        {name: sum(point[name] for point in result[part]["curve"]) for name in ("mem_all", "hbm_hits", "hbm_all")}
        for part in ("tiers", "cold")
    )
    assert 0 < warm["mem_all"] < warm["hbm_all"] - warm["hbm_hits"] + 1  # HBM asks DRAM for what it lacks
    assert cold["hbm_hits"] / cold["hbm_all"] < warm["hbm_hits"] / warm["hbm_all"] < 1
    assert result["memory"]["steady"]["hbm_hits"] == result["memory"]["steady"]["hbm_all"]
    assert result["rival"] == {}
    assert result["tiers"]["graphs"]["steps"] > 0
    assert result["lookahead"] == step.settings["lookahead"]
    assert {"fill", "place", "tiers", "disk", "cold", "memory"} <= set(result["seconds"])
    assert not (tmp_path / "rows").exists()
    section = steady.section(setup, {"B": result})
    assert "Not measured yet: A, C, D, E." in section.text[-1]


def test_parts_measured_before_an_interruption_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float, int]] = []

    def measure(config: Any, count: int, seconds: float, context: Any, *, skip: float, prepared: int) -> Any:
        asked.append((count, seconds - skip, prepared))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"examples_per_s": 7.0}

    monkeypatch.setattr(steady.mpi_baseline, "measure", measure)
    monkeypatch.setattr(steady, "ranks", lambda setup, plan: [2, 4])
    monkeypatch.setattr(steady, "RIVAL_SHORT", 2_000.0)
    monkeypatch.setattr(steady, "SECONDS", 3_000.0)
    step = next(step for step in steady.steps(TINY) if step.name == "A")
    with pytest.raises(KeyboardInterrupt):
        step.run(StepContext(tmp_path))
    kept = json.loads((tmp_path / steady.PARTS).read_text())
    assert {"plan", "cycle", "tiers", "disk", "memory", "cold"} <= set(kept)
    assert kept["tiers"]["examples_per_s"] > 0
    assert kept["rival"] == {"2": {"examples_per_s": 7.0}}
    assert kept["seconds"]["tiers"] > 0
    assert kept["commit"] == machine.commit()
    assert [(count, round(seconds, 3)) for count, seconds, _ in asked] == [(2, 3.0), (4, 2.0)]  # others are shorter
    assert asked[0][2] == min(kept["cycle"], steady.CYCLE)


# ---- claims


def made_up(name: str, rate: float, **changes: Any) -> dict[str, Any]:
    """Return a result in which every claim holds at 60,000 examples/s."""
    plan = PaperModel.parse(f"{name}/1000")
    steady_part = {"examples": 3.6e6, "seconds": 60.0, "batches": 3600, "reads": 1e6, "bytes_read": 7.2e10,
                   "mem_hits": 6, "mem_all": 10, "hbm_hits": 9, "hbm_all": 10}  # fmt: skip
    memory = {"budget": 100, "counted": 90, "ahead": 10, "ahead_limit": 20, "store_budget": 100, "store": 10,
              "process_grew": 150, "hbm_budget": 10, "row_bytes": plan.row_bytes}  # fmt: skip
    result: dict[str, Any] = {
        "plan": dataclasses.asdict(plan), "batch_examples": 1000, "cycle": 1280, "seconds": {"tiers": 100.0},
        "tiers": {"examples_per_s": rate, "steady": steady_part, "horizon": 100, "ramp_seconds": 20.0, "curve": [],
                  "stage_ms": {"train": 5.0}, "memory": memory, "hbm_placed": 1, "dram_placed": 2},
        "cold": {"examples_per_s": 1.0, "curve": []},
        "memory": {"examples_per_s": 200_000.0},
        "disk": {"replay": {"size": 73728, "reads_per_s": 20_000.0}},
        "rival": {"8": {"examples_per_s": 2_900.0}, "16": {"examples_per_s": 2_000.0}},
    }  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = result
        for parent in parents:
            part = part[parent]
        part[last] = value
    return result


def lost(setup: Setup, *runs: dict[str, Any]) -> list[str]:
    section = steady.section(setup, {run["plan"]["name"]: run for run in runs})
    return [claim.text for claim in section.claims if not claim.holds]


def test_the_claims_about_the_steady_state_can_fail() -> None:
    setup = Setup(device="cuda", cores=16)
    good = [made_up(name, 60_000.0) for name in "ABCDE"]
    assert lost(setup, *good) == []
    changes: dict[str, dict[str, Any]] = {
        "trains at 3 or more times": {"rival__8": {"examples_per_s": 21_000.0}},
        "the slower of HBM and the replayed reads": {"disk__replay": {"size": 1, "reads_per_s": 21_000.0}},
        "reads 40 KB or less": {"tiers__steady__bytes_read": 3.6e6 * 41e3},
        "stay inside the budget": {"tiers__memory__counted": 101},
        "60 s and 5 horizons": {"cycle": 999},
    }
    for text, change in changes.items():
        assert [text in claim for claim in lost(setup, made_up("E", 60_000.0, **change))] == [True], text
    slow = lost(setup, made_up("E", 39_000.0))
    assert any("40,000 or more" in claim for claim in slow)
    assert not [claim for claim in lost(Setup(device="cpu"), made_up("E", 1.0)) if "trains" in claim]


def test_short_measurements_are_named() -> None:
    setup = Setup(device="cuda")
    for change in ({"tiers__steady__seconds": 59.0}, {"tiers__steady__batches": 499}):
        assert any("5 horizons are measured" in claim for claim in lost(setup, made_up("D", 60_000.0, **change)))
    without = made_up("D", 60_000.0, tiers__horizon=0)
    assert not lost(setup, without)  # 1,280 batches suffice where there is no look-ahead


def test_speed_ups_of_a_and_b_are_reported_but_not_asserted() -> None:
    section = steady.section(Setup(device="cuda"), {name: made_up(name, 3_000.0) for name in "ABC"})
    times = {claim.text.split()[1]: claim for claim in section.claims if "MPI" in claim.text}
    assert {name: claim.asserted for name, claim in times.items()} == {"A": False, "B": False, "C": True}
    assert "3,000 and 2,900 examples/s (8 ranks): 1.0 times" in times["C"].detail


def test_models_that_fit_hbm_are_compared_with_all_rows_in_hbm() -> None:
    runs = {name: made_up(name, 3_000.0) for name in "ABC"}
    assert [steady_report.compared(run) for run in runs.values()] == [200_000.0, 200_000.0, 3_000.0]
    section = steady.section(Setup(device="cuda"), runs)
    details = {claim.text.split()[1]: claim.detail for claim in section.claims if "MPI" in claim.text}
    assert details["A"] == "200,000 and 2,900 examples/s (8 ranks): 69.0 times"


def test_the_tables_show_claims_hit_rates_and_bytes() -> None:
    section = steady.section(Setup(device="cuda"), {"E": made_up("E", 60_000.0)})
    tables = {part.name: part for part in section.parts if isinstance(part, Table)}
    speeds = dict(zip(tables["table"].columns, tables["table"].rows[0], strict=True))
    assert speeds["examples/s, replay"] == pytest.approx(3.6 * 20_000)
    assert speeds["share of the lower bound"] == pytest.approx(60 / 72)
    rows = dict(zip(tables["rows"].columns, tables["rows"].rows[0], strict=True))
    assert (rows["HBM hit rate"], rows["DRAM hit rate"], rows["SSD KB read per example"]) == (0.9, 0.6, 20.0)
    assert (rows["DRAM in use / budget"], rows["process / budgets"]) == (0.9, 0.75)
    nothing_read = copy.deepcopy(made_up("A", 60_000.0))
    del nothing_read["disk"]["replay"]
    assert steady_report.share_of_bound(nothing_read) == pytest.approx(0.3)
