"""Predicted costs against sums computed by hand, and their dependence on the cluster."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.planner import CPU, DISK, LINKS, NODE

from thermocline.errors import ConfigError
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.cost_model import MAX_CORE_UTILIZATION, Cluster, CostTerm, StepCost, Workload, predict
from thermocline.planner.hardware import Hardware, paper_node, scalar_tail
from thermocline.planner.ssd_model import LARGE_STORE_WRITES, merge_writes

# 2 keys in every example, and 8 of 8000 others on average: U(n) = 2 + 8000 * (1 - 0.999^n).
KEYS = KeyDistribution(np.array([2.0, 8000.0]), np.array([1.0, 0.001]))
WORK = Workload(
    name="by hand",
    key_distribution=KEYS,
    fields=10,
    dim=8,
    row_bytes=64,
    row_floats=16,
    multiply_adds=1e4,
    floats=1000.0,
    step_floats=100.0,
    dense_parameters=10_000,
    dense_time=3.0,
    dense_parallel_share=0.75,
    dense_time_1_thread=2.0,
    batch=100,
    read_ns=300.0,
)


def unique(examples: float) -> float:
    return 2 + 8000 * (1 - 0.999**examples)


def term_of(cost: StepCost, description: str) -> CostTerm:
    (term,) = [term for term in cost.terms if description in term.description]
    return term


def seconds(cost: StepCost, description: str) -> float:
    return term_of(cost, description).seconds


def test_step_in_dram_is_the_sum_of_its_terms_over_the_cores() -> None:
    prediction = predict(WORK, Cluster(), NODE)
    rows = unique(100)
    prefetch = 100 * 300 + 1000 * (10 + 5) + rows * 50 + 1e3 * 400
    shared = 1000 * (2 + 8 * 0.5) * 2 + rows * (4 + 16 * 1)
    shared += 0.75 * 3 * 0.1e6
    alone = 0.25 * 3 * 0.1e6 + 100 * 50 + 1e3 * 1000  # one thread
    assert prediction.processor_seconds == pytest.approx((prefetch + shared + alone) * 1e-9)
    assert prediction.resources["cores"] == pytest.approx((prefetch + shared + alone) / 4 / MAX_CORE_UTILIZATION * 1e-9)
    assert prediction.seconds == pytest.approx((shared / 4 + alone) * 1e-9)
    assert prediction.slowest_resource == "cores"
    assert prediction.slowest_stage == "train"
    assert prediction.to_json()["examples_per_s"] == pytest.approx(100 / prediction.seconds)


def test_row_length_without_kernel_costs_its_scalar_tail() -> None:
    """11 of 27 floats are processed one by one, per id, gradient and row; 32 floats have a compiled kernel."""
    even, odd = (dataclasses.replace(WORK, dim=dim, row_floats=2 * dim) for dim in (32, 27))
    tails = {dim: scalar_tail(dim) for dim in (1, 8, 16, 17, 27, 64, 128, 129)}
    assert tails == {1: 1, 8: 0, 16: 0, 17: 1, 27: 11, 64: 0, 128: 0, 129: 1}
    pooled, updated = (
        [seconds(predict(work, Cluster(), NODE), text) * 4e9 for work in (even, odd)]
        for text in ("pool rows", "update rows")
    )
    assert pooled == [pytest.approx(1000 * (2 + 32 * 0.5)), pytest.approx(1000 * (2 + 27 * 0.5 + 11 * 0.25))]
    rows = unique(100)
    assert updated == [
        pytest.approx(1000 * (2 + 32 * 0.5) + rows * (4 + 64)),
        pytest.approx(1000 * (2 + 27 * 0.5 + 11 * 0.25) + rows * (4 + 54 + 11 * 0.5)),
    ]


def test_window_is_deduplicated_again() -> None:
    one, many = (predict(dataclasses.replace(WORK, window=w), Cluster(), NODE) for w in (1, 10))
    assert seconds(one, "deduplicate ids") == pytest.approx(1000 * 10e-9 / 4)
    assert seconds(many, "deduplicate ids") == pytest.approx((1000 + unique(100)) * 10e-9 / 4)


def test_each_rank_runs_the_network_with_one_thread() -> None:
    network = term_of(predict(WORK, Cluster(ranks=4), NODE), "dense network")
    assert network.processor_seconds == pytest.approx(4 * 2.0 * 0.1e-3)
    assert network.seconds == pytest.approx(2.0 * 0.1e-3)


def test_missing_rows_cost_page_reads_and_writes() -> None:
    prediction = predict(WORK, Cluster(mem_rows=4001), NODE)
    missing = prediction.figures["from_disk"]
    assert missing == pytest.approx(unique(100) * (1 - KEYS.hit_rate(4001, 100)))
    pages = 8002 * 72 / 4096
    wanted = pages * (1 - math.exp(-missing / pages))
    density = wanted / pages
    expected = sum(density * (1 - density) ** gap * (gap + 1) for gap in range(5)) + 4 * (1 - density) ** 5
    assert seconds(prediction, "read pages") == pytest.approx(wanted * expected * 1e-6)
    written = missing * 72 * 5 * merge_writes(8002 * 72) / LARGE_STORE_WRITES
    assert seconds(prediction, "write evicted rows") == pytest.approx(written / 0.5e9)
    requests = wanted * (1 - density) ** 5
    lookup = term_of(prediction, "look up and verify")
    assert lookup.processor_seconds == pytest.approx(missing * 5e-6 + requests * 3e-6 + written / 4096 * 1e-6)
    assert lookup.seconds == pytest.approx(0.5 * lookup.processor_seconds)  # the share of the pulling thread
    # A slow disk bounds the step.
    slow = dataclasses.replace(NODE, disk=dataclasses.replace(DISK, read_us=4000.0, page_us=1000.0))
    assert predict(WORK, Cluster(mem_rows=4001), slow).slowest_resource == "disk"


def test_two_hops_send_each_key_of_a_node_once() -> None:
    cluster = Cluster(nodes=2, ranks=4)
    two, flat = (predict(dataclasses.replace(WORK, hops=hops), cluster, NODE) for hops in ("two", "flat"))  # type: ignore[arg-type]
    per_key = 8 * WORK.dim + 1 / 8
    fixed = 2e-6 * LINKS.network_us
    assert seconds(two, "gradients between nodes") == pytest.approx(unique(400) / 2 * per_key / 1e9 + fixed)
    assert seconds(flat, "gradients between nodes") == pytest.approx(4 * unique(100) / 2 * per_key / 1e9 + fixed)
    assert seconds(two, "keys between nodes") == pytest.approx(unique(400) / 2 * 8 / 1e9 + 3e-6 * LINKS.network_us)
    assert seconds(two, "gradients within the node") > seconds(flat, "gradients within the node")
    # Cores handle every key of a rank; with two hops, the keys of a node again.
    handled = 4 * unique(100), 4 * unique(100) + unique(400)
    for prediction, keys in zip((flat, two), handled, strict=True):
        cost = keys * (30 + 8 * 4) + 4 * 200e3
        assert seconds(prediction, "pack, send and sum") == pytest.approx(cost * 1e-9 / 4)
    half = predict(dataclasses.replace(WORK, wire="bf16"), cluster, NODE)
    saved = seconds(two, "gradients between nodes") - seconds(half, "gradients between nodes")
    assert saved == pytest.approx(unique(400) / 2 * 4 * WORK.dim / 1e9)
    assert not [term for term in predict(WORK, Cluster(), NODE).terms if "link" in term.resource]


def test_dense_sync_cost_is_proportional_to_averaged_floats() -> None:
    def network_seconds(synced: float, syncs: float) -> float:
        work = dataclasses.replace(WORK, sync="all", synced=synced, syncs=syncs)
        return seconds(predict(work, Cluster(nodes=4), NODE), "dense models averaged (all)")

    assert network_seconds(1, 1) == pytest.approx(8 * 10_000 * 0.75 / 1e9 + 2e-6 * LINKS.network_us)
    assert network_seconds(0.1, 0.05) == pytest.approx(8 * 1000 * 0.75 / 1e9 + 2e-6 * LINKS.network_us / 20)
    assert seconds(predict(WORK, Cluster(nodes=4), NODE), "dense gradients, every step") == pytest.approx(
        network_seconds(1, 1)
    )


def test_scope_nodes_averages_gradients_within_the_node_every_step() -> None:
    work = dataclasses.replace(WORK, sync="v_frozen", synced=0.1, syncs=0.05, sync_scope="nodes")
    two = predict(work, Cluster(nodes=4, ranks=2), NODE)
    floats = 8 * 10_000 * (1 + 0.1 / 2) / 2
    within = floats / LINKS.node_gbs * 1e-9 + 2e-6 * LINKS.node_us * (1 + 0.05 / 2)
    assert seconds(two, "dense gradients of the node") == pytest.approx(within)
    between = seconds(predict(dataclasses.replace(work, sync_scope="ranks"), Cluster(nodes=4), NODE), "dense models")
    assert seconds(two, "dense models averaged") == pytest.approx(between)


def test_window_pulls_popular_rows_once() -> None:
    one, many = (predict(dataclasses.replace(WORK, window=w), Cluster(mem_rows=4001), NODE) for w in (1, 10))
    assert many.figures["pulled"] == pytest.approx(unique(1000) / 10)
    assert many.figures["pulled"] < one.figures["pulled"]


def test_gpu_terms() -> None:
    cluster = Cluster(ranks=2, gpu=True, hbm_rows=2000.0)
    prediction = predict(WORK, cluster, NODE)
    assert 0 < prediction.figures["hbm_hits"] < 1
    moved = unique(200) * (1 - prediction.figures["hbm_hits"]) / 2 * WORK.row_bytes
    assert seconds(prediction, "rows to HBM") == pytest.approx(moved / 10e9)
    assert seconds(prediction, "matrix") == pytest.approx(2 * 100 * 1e4 / 10e12)
    with pytest.raises(ValueError, match="'round' has no GPU"):
        predict(WORK, cluster, dataclasses.replace(NODE, gpu=None))


def test_hardware_file_round_trip_and_errors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "node.toml"
    for node in (NODE, dataclasses.replace(NODE, gpu=None), paper_node(CPU)):
        path.write_text(node.to_toml())
        assert Hardware.load(path) == node
    path.write_text(NODE.to_toml().replace("read_us = 4.0", "read_us = 0.0"))
    with pytest.raises(ValueError, match=r"disk.read_us is 0\.0: it must be above 0.*--measure"):
        Hardware.load(path)
    path.write_text("name = 3")
    with pytest.raises(ValueError, match="name is 3: it must be text"):
        Hardware.load(path)


def test_hardware_file_of_an_older_version_names_the_command_that_writes_a_new_one(tmp_path: Path) -> None:
    """A missing key is reported with its file, once, and with the remedy."""
    path = tmp_path / "node.toml"
    path.write_text(
        "\n".join(line for line in NODE.to_toml().splitlines() if not line.startswith("dense_reference_ms"))
    )
    expected = f"{path}: cpu.dense_reference_ms is missing: it must be a number; `thermocline plan --measure {path}`"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)} writes a complete file$"):
        Hardware.load(path)
