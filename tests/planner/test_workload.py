"""Workloads of configs and presets, the `plan` command, and calibration at small sizes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.planner import NODE
from typer.testing import CliRunner

import thermocline as tc
from thermocline.cli.main import app
from thermocline.planner import calibrate, dense_timing, workload as workloads
from thermocline.planner.hardware import Hardware
from thermocline.planner.op_counter import count_ops
from thermocline.planner.workload import cluster_of, preset_config, workload_of

CONFIG = """
[data]
format = "synth"
[data.synth]
keys = 20_000
fields = 4
dense = 3
[model]
name = "{model}"
dim = 6
hidden = [10]
batch_norm = false
[tiers]
mem = "{mem}"
[train]
batch_size = 200
optimizer = "adagrad"
"""


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measurements of this machine's speed, which take seconds: these tests do not depend on it."""
    monkeypatch.setattr(workloads, "reference_network_seconds", lambda: 0.1)
    monkeypatch.setattr(dense_timing, "_MIN_STEPS", 1)
    monkeypatch.setattr(dense_timing, "_SECONDS", 0.0)


def config_of(model: str = "dnn", mem: str = "64MB", sets: tuple[str, ...] = ()) -> tc.Config:
    return tc.Config.parse(CONFIG.format(model=model, mem=mem), sets)


def test_operations_of_a_network_are_counted() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    ops = count_ops(net, lambda examples: torch.zeros(examples, 5))
    assert ops.multiply_adds == 3 * (5 * 7 + 7)  # forward, and gradients of inputs and weights
    assert ops.floats == 2 * 7  # ReLU, forward and backward


@pytest.mark.parametrize("model", ["lr", "fm", "dnn", "widedeep", "deepfm", "dcn", "dcnv2", "dlrm", "autoint"])
def test_every_model_has_a_workload(model: str) -> None:
    work = workload_of(config_of(model))
    assert work.dense_parameters > 0
    assert work.floats > 0
    assert work.dense_time > 0
    assert 0 <= work.dense_parallel_share <= 1
    assert (work.multiply_adds > 0) == (model not in ("lr", "fm"))
    assert work.key_distribution.ids_per_example == pytest.approx(4, rel=1e-3)
    assert work.read_ns > 0


def test_dense_timing_scales_with_the_network() -> None:
    """The number of torch threads is restored; a larger network takes longer."""
    before = torch.get_num_threads()
    model = config_of().resolve().model
    small, large = (
        dense_timing.time_dense_network(dataclasses.replace(model, hidden=hidden), 4, 3, 200, "adam", 1)
        for hidden in ((10,), (2000, 500))
    )
    assert torch.get_num_threads() == before
    for part in (*small, *large):
        assert part.caller == pytest.approx(part.total, rel=0.5, abs=2e-3)  # one thread: no other thread works
    assert small.network.total < large.network.total
    assert small.optimizer.total < large.optimizer.total


def test_parallel_share_from_time_of_calling_thread() -> None:
    assert dense_timing.parallel_share(dense_timing.CpuTime(2.0, 1.0), 2) == pytest.approx(1)
    assert dense_timing.parallel_share(dense_timing.CpuTime(2.0, 2.0), 2) == 0
    assert dense_timing.parallel_share(dense_timing.CpuTime(4.0, 2.5), 4) == pytest.approx(0.5)
    assert dense_timing.parallel_share(dense_timing.CpuTime(2.0, 2.0), 1) == 1  # not observable with one thread


def test_low_precision_rows_are_smaller() -> None:
    configs = [config_of(sets=(f"precision.kind={kind}",)) for kind in ("fp32", "int4")]
    fp32, int4 = (workload_of(config) for config in configs)
    assert (fp32.row_bytes, int4.row_bytes) == (4 * 12, 4 * (1 + 1 + 6))  # one word of codes, one for the row's scale
    rows = [
        cluster_of(config, work, NODE, nodes=1, ranks=1).mem_rows
        for config, work in zip(configs, (fp32, int4), strict=True)
    ]
    assert 1.1 * rows[0] < rows[1]
    json.dumps(int4.figures())


def test_hashed_keys_are_counted_after_hashing() -> None:
    work = workload_of(config_of(sets=("data.hashing.k=50", "data.hashing.fields=per_field")))
    assert 90 < work.key_distribution.num_keys <= 100  # two slots per bin
    assert work.example_bytes == 0


def test_keys_of_files_are_counted(tmp_path: Path) -> None:
    ads = tc.SyntheticAds(keys=1000, fields=4, batch_size=100, examples=3000, tensors=False)
    ads.write(tmp_path / "ads.parquet")
    text = f"[data]\ntrain = [{json.dumps(str(tmp_path / 'ads.parquet'))}]\n[model]\nname = 'lr'\n"
    work = workload_of(tc.Config.parse(text, ["train.batch_size=100"]))
    assert work.key_distribution.ids_per_example == pytest.approx(4)
    assert work.key_distribution.num_keys == len(np.unique(np.concatenate([batch.ids for batch in ads])))
    assert work.example_bytes == pytest.approx((tmp_path / "ads.parquet").stat().st_size / 3000, rel=0.05)


def test_cluster_uses_the_budgets_of_the_config() -> None:
    config = config_of(mem="1MB")
    work = workload_of(config)
    with pytest.raises(tc.ConfigError, match=r"tiers\.mem of all ranks holds .* rows, but the data has 20,000 keys"):
        cluster_of(config, work, NODE, nodes=1, ranks=1)
    config = config_of(mem="1MB", sets=("tiers.ssd=rows",))
    one = cluster_of(config, work, NODE, nodes=1, ranks=1)
    assert one.mem_rows == pytest.approx(tc.DramTier(6, tc.Adagrad(lr=0.1), budget="1MB").capacity, rel=0.2)
    four = cluster_of(config, work, NODE, nodes=1, ranks=4)
    assert four.mem_rows == pytest.approx(4 * one.mem_rows)
    gpus = cluster_of(config, work, NODE, nodes=1, ranks=None)
    assert (gpus.ranks, gpus.gpu) == (2, True)
    assert gpus.hbm_rows > 0
    cores = config_of(mem="1MB", sets=("tiers.ssd=rows", "tiers.device=cpu"))
    assert not cluster_of(cores, work, NODE, nodes=1, ranks=None).gpu


SYNCS = [
    ((), 1.0, 1.0, "gradients"),
    (("every=20",), 2 / 20, 1 / 20, "v_frozen"),
    (("every=20", "merge=params"), 1 / 20, 1 / 20, "params"),
    (("every=20", "merge=all"), 3 / 20, 1 / 20, "all"),
    (("every=1", "merge=all"), 3.0, 1.0, "all"),
    (("every=4", "merge=all", "every_m=6", "every_v=8"), 1 / 4 + 1 / 6 + 1 / 8, 1 / 4 + 1 / 6 - 1 / 12, "all"),
]


@pytest.mark.parametrize(("sets", "synced", "syncs", "mode"), SYNCS)
def test_dense_sync_volume_of_config(sets: tuple[str, ...], synced: float, syncs: float, mode: str) -> None:
    """Steady state: tensors per average / steps per average, as `PeriodicAveraging` sends them."""
    flags = ("train.dense_optimizer=adam", *(f"dist.dense_sync.{flag}" for flag in sets))
    work = workload_of(config_of(sets=flags))
    assert (work.synced, work.syncs) == (pytest.approx(synced), pytest.approx(syncs))
    assert work.sync == mode


def test_dense_sync_depends_on_optimizer_moments() -> None:
    params = workload_of(config_of(sets=("dist.dense_sync.every=5", "dist.dense_sync.merge=all")))
    assert params.synced == pytest.approx(2 / 5)  # parameters and Adagrad's one moment
    with pytest.raises(tc.ConfigError, match=r'"v_frozen" needs train\.dense_optimizer "adam", not "adagrad"'):
        workload_of(config_of(sets=("dist.dense_sync.every=5",)))


def test_preset_has_the_published_size() -> None:
    work = workload_of(preset_config("E/100000", ["train.batch_size=64", "train.pull_window=3"]))
    assert work.dense_parameters == pytest.approx(7e6, rel=0.01)
    assert work.key_distribution.num_keys == pytest.approx(2e6)
    assert work.key_distribution.ids_per_example == pytest.approx(500, rel=1e-3)
    assert (work.batch, work.window) == (64, 3)


def test_plan_command(tmp_path: Path) -> None:
    node, config = tmp_path / "node.toml", tmp_path / "ads.toml"
    node.write_text(NODE.to_toml())
    config.write_text(CONFIG.format(model="dnn", mem="64MB"))
    run = CliRunner().invoke
    base = ["plan", str(config), "--hardware", str(node), "--set", "tiers.device=cpu", "--json"]
    done = run(app, base)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["slowest_resource"] == "cores"
    assert report["step_seconds"] == pytest.approx(report["stages"]["train"])
    assert report["lookahead"] is None
    ahead = [*base[:-1], "--set", "tiers.mem=1MB", "--set", "tiers.ssd=rows", "--set", "tiers.lookahead=4"]
    report = json.loads(run(app, [*ahead, "--json"]).stdout)["lookahead"]
    assert (report["batches"], report["bounded_by"]) == (4, "batches")
    assert 0 < report["bytes"] <= report["limit_bytes"] < 1e6
    assert min(report[name] for name in ("missing_rows", "reads", "read_bytes", "step_seconds_without")) > 0
    text = " ".join(run(app, ahead, env={"COLUMNS": "160"}).stdout.split())
    assert "look-ahead: 4 batches of a rank (limited by tiers.lookahead)" in text
    assert "B; a step without it:" in text
    config.write_text(config.read_text() + '[dist]\nhops = "flat"\nwire = "fp16"\ndense_sync = { every = 20 }\n')
    done = run(app, [*base, "--nodes", "2", "--ranks", "2", "--set", "train.dense_optimizer=adam"])
    assert done.exit_code == 0, done.output
    work = json.loads(done.stdout)["workload"]
    assert (work["hops"], work["wire"], work["sync"], work["synced"]) == ("flat", "fp16", "v_frozen", 0.1)
    cluster = ["plan", "--preset", "B/100000", "--hardware", f"paper:{node}", "--nodes", "4"]
    done = run(app, [*cluster, "--set", "dist.dense_sync.every=20"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    for text in ("4 x 8 GPUs", "dense models averaged (v_frozen), 0.1 numbers", "slowest resource", "assumed"):
        assert text in " ".join(done.stdout.split()), text
    for wrong in (["plan"], ["plan", str(config), "--preset", "E"], ["plan", str(config), "--hardware", str(config)]):
        done = run(app, wrong)
        assert done.exit_code == 2, done.output


USAGE_ERRORS = [
    (["--preset", "Z"], "unknown preset 'Z': write one of A, B, C, D, E"),
    (["--preset", "E", "--set", "dist.hops=three"], "--set dist.hops"),
    (["--preset", "E", "--set", "train.batch=3"], "batch_size"),
    (["csv.toml"], "no.csv: no such file"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS)
def test_usage_errors_are_raised_before_measuring(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.chdir(tmp_path)
    Path("csv.toml").write_text('[data]\ntrain = ["no.csv"]\n')
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_measuring_is_reported_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout contains the report only, as --json needs."""
    monkeypatch.setattr(calibrate, "measure", lambda *args: NODE)
    monkeypatch.chdir(tmp_path)
    base = ["plan", "--preset", "B/100000"]
    done = CliRunner().invoke(app, base)
    assert "takes about a minute (--measure FILE saves the result, --hardware FILE reads it)" in done.stderr
    done = CliRunner().invoke(app, [*base, "--hardware", "paper", "--measure", "node.toml", "--json"])
    assert json.loads(done.stdout)["hardware"]["source"].endswith("costs of a core measured on this machine now")
    assert "saved to node.toml: use it with --hardware node.toml" in done.stderr
    done = CliRunner().invoke(app, [*base, "--hardware", "paper:node.toml"])
    assert "costs of a core of node.toml" in " ".join(done.stdout.split())
    assert not done.stderr


def test_given_hardware_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "measure", measure)
    (tmp_path / "node.toml").write_text(NODE.to_toml())
    for hardware, source in (
        ("paper", "costs of a core measured 2026-11-15 on two cores of a virtual x86-64 machine"),
        (f"paper:{tmp_path / 'node.toml'}", "costs of a core of"),
        (tmp_path / "node.toml", NODE.source),
    ):
        done = CliRunner().invoke(app, ["plan", "--preset", "B/100000", "--hardware", str(hardware), "--json"])
        assert done.exit_code == 0, done.output
        assert source in json.loads(done.stdout)["hardware"]["source"]
        assert done.stderr == ""


@pytest.mark.timeout(600)
def test_calibration_measures_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part gives figures of a plausible size; benchmarks/plan.py measures their accuracy."""
    small = {"_KEYS": 20_000, "_BATCH": 256, "_BATCH_PAIRS": 3, "_ROUNDS": 1, "_DISK_KEYS": 100_000, "_DISK_PULLS": 20}
    small |= {"_TRAINING_STEPS": 10, "_TRAINING_ROUNDS": 1, "_WRITE_BYTES": 1 << 23}
    for name, value in small.items():
        monkeypatch.setattr(calibrate, name, value)
    few_repeats = functools.partial(calibrate.measure_ranks, repeats=5, training_steps=40)
    monkeypatch.setattr(calibrate, "measure_ranks", few_repeats)
    done = CliRunner().invoke(app, ["plan", "--measure", str(tmp_path / "node.toml")])
    assert done.exit_code == 0, done.output
    node = Hardware.load(tmp_path / "node.toml")
    assert "measured" in node.source
    assert 1 < node.cpu.dedup_id_ns < 1000
    assert 1 < node.cpu.dense_reference_ms < 10_000
    assert 0.1 < node.disk.read_us < 10_000
    assert 0.001 < node.links.node_gbs < 100
    assert 1 < node.cpu.route_key_ns < 10_000
    assert 10 < node.cpu.exchange_us < 1e6
    assert 0.05 < node.cpu.allreduce_float_ns < 1000
    assert (node.gpu is not None) == torch.cuda.is_available()
