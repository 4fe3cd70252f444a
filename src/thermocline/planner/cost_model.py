"""Predicts the time of one training step, per stage and per resource.

Symbols: b examples per rank and step, z ids per example, R ranks per node, N nodes, W steps per pull window, d weights
per row, U(n) expected unique keys of n examples (`KeyDistribution`), c cores of a node. Costs (`Cpu`) are processor
seconds, rates (`Disk`, `LinkSpeeds`, `Gpu`) are bytes per second. Every term is seconds per step:

    read              bR examples * read cost / c; bR * bytes per example / data rate
    dedup, load       bRz ids * cost / c; with W > 1, R U(b) unique keys are deduplicated again over the window
    pull DRAM         U(bRNW) / (WN) rows * cost / c
    pull SSD          rows that miss in DRAM: pages read, evicted bytes * write amplification / write rate; with a
                      look-ahead, stage "look-ahead": rows of several batches together (`ssd_model`)
    route keys        unique keys sent to their owners, 8 bytes each, ahead of training
    train, exchange   rows and gradients, per node between nodes: two hops U(bR) (N-1)/N, flat R U(b) (N-1)/N;
                      per rank within the node: two hops U(b) (R-1)/R, flat U(b) (R-1)/(RN)
    train, CPU        bRz ids pooled and summed, U(bRN)/N rows updated, dense network: cost / c; Python: one thread
    train, GPU        random and sequential bytes / rate, matrix products / FLOPS, launches
    train, dense      all-reduce within the node (n = R) and between nodes (n = N): 8 bytes * floats * (n-1)/n / rate

Stages overlap, the terms of one stage run one after the other, and a resource serves one term at a time:

    step = max(max over stages of the sum of `seconds`, max over resources of the sum of `busy_seconds`)

The model describes the steady state: caches are warm and every key has a row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from thermocline.config.dense_sync import Scope, SyncMode
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.wire_format import wire_bytes
from thermocline.embedding.table_spec import LookAheadLimits, Policy
from thermocline.errors import require
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.hardware import Hardware, scalar_tail
from thermocline.planner.ssd_model import (
    KEY_BYTES,
    LARGE_STORE_WRITES,
    MIN_LOG_BYTES,
    LookAheadPlan,
    merge_writes,
    missing_rows,
    page_reads,
    plan_lookahead,
)

DenseOptimizer = Literal["sgd", "adagrad", "adam"]
MAX_CORE_UTILIZATION = 0.87
"""Utilization of the cores when they bound the step: overlapping stages do not fill them. Fitted to trainings."""
_GPU_FLOATS_MOVED = 2.5
"""GPU: floats read or written per float that an operation writes."""
_GPU_SORT_PASSES = 16
"""GPU: reads and writes per id to sort the ids of a batch by slot."""
_GPU_PROBE_BYTES = 64
"""GPU: bytes read per id to find its slot."""
_OPTIMIZER_FLOATS = {"sgd": 3, "adagrad": 5, "adam": 7}
"""Floats read or written per dense parameter and step: the gradient once, weight and moments twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its data and its training settings."""

    name: str
    key_distribution: KeyDistribution
    fields: int
    dim: int
    """Weights per row."""
    row_bytes: int
    """Bytes of a stored row, weights and optimizer state."""
    row_floats: int
    """Floats of a row during training, weights and optimizer state."""
    multiply_adds: float
    """Matrix products of the dense network, forward and backward, per example."""
    floats: float
    """Floats written by its other operations, per example."""
    step_floats: float
    """Floats written by its other operations, per step."""
    dense_parameters: int
    dense_time: float
    """Processor time of forward, loss, backward and dense optimizer, in units of the reference network
    (`op_counter.reference_network_seconds` on the same machine), all cores."""
    dense_parallel_share: float
    """Fraction of `dense_time` that all cores share; one thread does the rest."""
    dense_time_1_thread: float
    """`dense_time` with one thread, as each of several ranks runs: no thread waits for another."""
    batch: int
    """Examples per rank and step."""
    window: int = 1
    """Steps that share one pull from DRAM and SSD."""
    dense_optimizer: DenseOptimizer = "adam"
    sync: SyncMode = "gradients"
    """Synchronization of the dense parameters: gradients, or a mode of periodic averaging."""
    synced: float = 1.0
    """Floats averaged per dense parameter and step: 1 for gradients, 2/k for "v_frozen" every k steps."""
    syncs: float = 1.0
    """All-reduces per step."""
    sync_scope: Scope = "ranks"
    """"nodes": `synced` and `syncs` are between nodes; the ranks of a node also average gradients every step."""
    hops: Hops = "two"
    wire: Wire = "fp32"
    """Precision of rows and gradients between nodes."""
    example_bytes: float = 0.0
    """Stored bytes per example; 0 for generated data."""
    read_ns: float = 0.0
    """Processor time to read or generate one example."""
    policy: Policy = "lru_lfu"
    dense_features: int = 0
    """Dense features per example."""

    def __post_init__(self) -> None:
        for name in ("batch", "window"):
            require(getattr(self, name) >= 1, f"Workload.{name}", getattr(self, name), "at least 1")

    def figures(self) -> dict[str, Any]:
        """Fields as JSON values; the key distribution as its number of keys and ids per example."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "key_distribution")
        keys = {"keys": self.key_distribution.num_keys, "nonzeros": self.key_distribution.ids_per_example}
        return {**{name: getattr(self, name) for name in names}, **keys}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes, and the part of each that the training uses."""

    nodes: int = 1
    ranks: int = 1
    """Per node; with GPUs, one per GPU."""
    gpu: bool = False
    mem_rows: float = math.inf
    """Rows that fit in the DRAM tiers of a node."""
    hbm_rows: float = 0.0
    """Rows that fit in the HBM tier of a GPU."""
    lookahead: LookAheadLimits | None = None
    """Limits of the look-ahead of a rank; None: rows are read window by window."""
    min_log_bytes: int = MIN_LOG_BYTES
    """Log size of the SSD store of a rank below which nothing is merged."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks"):
            require(getattr(self, name) >= 1, f"Cluster.{name}", getattr(self, name), "at least 1")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclasses.dataclass(frozen=True, slots=True)
class CostTerm:
    """One part of a step's work."""

    stage: str
    resource: str
    """cores, disk, host link, node link, network, data link or GPU."""
    seconds: float
    """Duration on an otherwise idle node."""
    description: str
    processor_seconds: float = 0.0
    """Processor time on all cores of the node; 0 if the resource is not the cores."""
    busy_seconds: float = 0.0
    """Time for which the resource is occupied: cores, processor time / cores / MAX_CORE_UTILIZATION."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted cost of one step of all ranks."""

    terms: tuple[CostTerm, ...]
    examples: int
    """Examples per step of all ranks."""
    figures: dict[str, float]
    """Counts per step behind the terms: unique keys, hit rates, rows."""
    lookahead: LookAheadPlan | None = None
    """The look-ahead; None: it is off, or all rows are in DRAM."""

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per stage, in order of first use."""
        sums: dict[str, float] = {}
        for term in self.terms:
            sums[term.stage] = sums.get(term.stage, 0.0) + term.seconds
        return sums

    @property
    def resources(self) -> dict[str, float]:
        """Busy seconds per resource, in order of first use."""
        sums: dict[str, float] = {}
        for term in self.terms:
            sums[term.resource] = sums.get(term.resource, 0.0) + term.busy_seconds
        return sums

    @property
    def seconds(self) -> float:
        """Duration of the step: the slowest stage or the busiest resource."""
        return max(*self.stages.values(), *self.resources.values())

    @property
    def slowest_stage(self) -> str:
        stages = self.stages
        return max(stages, key=lambda name: stages[name])

    @property
    def slowest_resource(self) -> str:
        resources = self.resources
        return max(resources, key=lambda name: resources[name])

    @property
    def processor_seconds(self) -> float:
        """Processor time of one node, all cores."""
        return sum(term.processor_seconds for term in self.terms)

    def to_json(self) -> dict[str, Any]:
        return {
            "step_seconds": self.seconds,
            "examples_per_s": self.examples / self.seconds,
            "slowest_stage": self.slowest_stage,
            "slowest_resource": self.slowest_resource,
            "processor_seconds": self.processor_seconds,
            "stages": self.stages,
            "resources": self.resources,
            "terms": [dataclasses.asdict(term) for term in self.terms],
            "figures": self.figures,
            "lookahead": None if self.lookahead is None else self.lookahead.to_json(),
        }


def predict(work: Workload, cluster: Cluster, hardware: Hardware) -> StepCost:
    """Predict one step of every rank in the steady state; ValueError if the cluster uses GPUs the hardware lacks."""
    if cluster.gpu and hardware.gpu is None:
        raise ValueError(f"cluster.gpu is True, but hardware {hardware.name!r} has no GPU: pass gpu=False")
    counts = _RowCounts(work, cluster, plan_lookahead(work, cluster, hardware.disk))
    terms = [*_read_terms(work, cluster.ranks, counts, hardware), *_pull_terms(work, cluster, counts, hardware)]
    terms += _exchange_terms(work, cluster, counts, hardware)
    terms += _gpu_terms(work, counts, hardware) if cluster.gpu else _cpu_terms(work, cluster, counts, hardware)
    terms += _dense_sync_terms(work, cluster, hardware)
    nonzero = tuple(term for term in terms if term.seconds > 0)
    return StepCost(nonzero, work.batch * cluster.world, counts.figures(), counts.lookahead)


class _RowCounts:
    """Ids and rows per step, of a node unless stated otherwise."""

    def __init__(self, work: Workload, cluster: Cluster, lookahead: LookAheadPlan | None) -> None:
        keys = work.key_distribution
        self.examples = work.batch * cluster.ranks
        self.ids = self.examples * keys.ids_per_example
        self.rank_unique = keys.unique_keys(work.batch)
        self.node_unique = keys.unique_keys(self.examples)
        self.world_unique = keys.unique_keys(self.examples * cluster.nodes)
        window_examples = work.batch * cluster.world * work.window
        self.pulled = keys.unique_keys(window_examples) / work.window / cluster.nodes  # rows that the node owns
        hbm = cluster.hbm_rows * cluster.world if cluster.gpu else 0.0
        self.hbm_hits = keys.hit_rate(hbm, window_examples, "lru") if hbm else 0.0
        self.from_dram = self.pulled * (1 - self.hbm_hits)
        self.lookahead = lookahead
        if lookahead is None:
            self.from_disk = missing_rows(work, cluster, work.window) / work.window
        else:
            self.from_disk = lookahead.missing_rows
        self.hits = 1 - self.from_disk / self.pulled  # of rows pulled; loaded ahead once, a row is a hit later

    def figures(self) -> dict[str, float]:
        names = ("ids", "rank_unique", "node_unique", "world_unique", "pulled", "hbm_hits", "hits", "from_disk")
        return {name: getattr(self, name) for name in names}


def _cpu_term(
    stage: str, nanoseconds: float, hardware: Hardware, description: str, ranks: int = 1, parallel_share: float = 1.0
) -> CostTerm:
    """Work on cores: all cores of the node share `parallel_share` of it, one thread per rank does the rest."""
    processor, cores = nanoseconds * 1e-9, hardware.cpu.cores
    seconds = processor * (parallel_share / cores + (1 - parallel_share) / min(ranks, cores))
    return CostTerm(stage, "cores", seconds, description, processor, processor / cores / MAX_CORE_UTILIZATION)


def _device_term(stage: str, resource: str, seconds: float, description: str) -> CostTerm:
    """Work of a resource other than the cores, which it occupies for its whole duration."""
    return CostTerm(stage, resource, seconds, description, 0.0, seconds)


def _read_terms(work: Workload, ranks: int, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    prefetch = 1e3 * hardware.cpu.prefetch_us * ranks
    terms = [
        _cpu_term("read", counts.examples * work.read_ns, hardware, "read and parse, or generate, examples"),
        _cpu_term("load", prefetch, hardware, "prefetch threads: Python, queues", ranks, 0.0),
    ]
    if work.example_bytes:
        seconds = counts.examples * work.example_bytes / hardware.links.data_gbs * 1e-9
        terms.append(_device_term("read", "data link", seconds, "bytes of examples"))
    return terms


def _pull_terms(work: Workload, cluster: Cluster, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    cpu, terms = hardware.cpu, []
    if not cluster.gpu:
        window_keys = counts.rank_unique * cluster.ranks if work.window > 1 else 0.0
        dedup = (counts.ids + window_keys) * cpu.dedup_id_ns
        terms.append(_cpu_term("dedup", dedup, hardware, "deduplicate ids"))
        terms.append(_cpu_term("pull DRAM", counts.pulled * cpu.pull_row_ns, hardware, "look up and pin rows"))
        terms.append(_cpu_term("load", counts.ids * cpu.plan_id_ns, hardware, "slots and gradient index of ids"))
    elif counts.from_dram:
        assert hardware.gpu is not None
        one_way = counts.from_dram * (cpu.pull_row_ns + work.row_bytes / 4 * cpu.pool_float_ns)
        terms.append(_cpu_term("pull DRAM", 2 * one_way, hardware, "copy rows to and from HBM buffers"))
        seconds = counts.from_dram / cluster.ranks * work.row_bytes / hardware.gpu.host_gbs * 1e-9
        terms.append(_device_term("load", "host link", seconds, "rows to HBM; evicted rows use the other direction"))
    if counts.from_disk:
        terms += _ssd_terms(work, cluster, counts, hardware)
    return terms


def _ssd_terms(work: Workload, cluster: Cluster, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    """Rows missing in DRAM are read; the reading thread evicts as many rows, which the store appends and merges.

    With a look-ahead, several batches are read together by a thread of its own; else a window by the pull.
    """
    disk, ahead = hardware.disk, counts.lookahead
    batches, stage = (work.window, "pull SSD") if ahead is None else (ahead.batches_together, "look-ahead")
    reads = page_reads(work, cluster.nodes, counts.from_disk * batches, disk)
    entry_bytes = work.row_bytes + KEY_BYTES
    stored = merge_writes(work.key_distribution.num_keys / cluster.world * entry_bytes, cluster.min_log_bytes)
    evicted_bytes = counts.from_disk * entry_bytes * disk.write_amplification * stored / LARGE_STORE_WRITES
    cost = counts.from_disk * disk.miss_row_ns + reads.requests / batches * disk.miss_read_ns
    cost += evicted_bytes / disk.page_bytes * disk.miss_write_ns
    lookup = _cpu_term(stage, cost, hardware, "look up and verify rows; evict and merge rows", cluster.ranks, 0.0)
    terms = [
        _device_term(stage, "disk", reads.seconds / batches, "read pages with missing rows"),
        _device_term(stage, "disk", evicted_bytes / disk.write_gbs * 1e-9, "write evicted rows, and merge"),
        dataclasses.replace(lookup, seconds=lookup.seconds * disk.miss_thread_share),
    ]
    if ahead is not None:
        collected = counts.ids * hardware.cpu.dedup_id_ns
        pinned = ahead.rows_together / ahead.batches_together * hardware.cpu.pull_row_ns
        terms.append(_cpu_term("read", collected, hardware, "collect keys of coming batches"))
        terms.append(_cpu_term(stage, pinned, hardware, "look up and pin rows of coming batches"))
    return terms


def _exchange_terms(work: Workload, cluster: Cluster, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    """Keys to their owners ahead of training; then rows to the workers and gradients to the owners.

    Keys are counted per rank on the node link and per node on the network.
    """
    links, cpu, ranks, nodes = hardware.links, hardware.cpu, cluster.ranks, cluster.nodes
    if cluster.world == 1:
        return []
    two_hops = work.hops == "two" and nodes > 1
    node_keys = counts.rank_unique * (ranks - 1) / (ranks if two_hops or nodes == 1 else cluster.world)
    network_keys = (counts.node_unique if two_hops else counts.rank_unique * ranks) * (nodes - 1) / nodes
    terms = []
    if not cluster.gpu:
        handled = counts.rank_unique * ranks + (counts.node_unique if two_hops else 0.0)
        keys = handled * cpu.route_key_ns + 1e3 * cpu.route_us * ranks
        rows = handled * (cpu.exchange_key_ns + work.dim * cpu.exchange_float_ns) + 1e3 * cpu.exchange_us * ranks
        terms.append(_cpu_term("route keys", keys, hardware, "send keys to their owners", ranks, 0.0))
        terms.append(_cpu_term("train", rows, hardware, "pack, send and sum rows and gradients", ranks, 0.0))
    wire = wire_bytes(work.wire, work.dim)
    for link, keys, row_bytes, rate, latency, scope in (
        ("node link", node_keys, 4 * work.dim, links.node_gbs, links.node_us, "within the node"),
        ("network", network_keys, wire, links.network_gbs, links.network_us, "between nodes"),
    ):
        if keys:
            seconds = keys * KEY_BYTES / rate * 1e-9 + 3e-6 * latency
            terms.append(_device_term("route keys", link, seconds, f"keys {scope}"))
            # A row, a gradient and a presence bit per key.
            seconds = keys * (2 * row_bytes + 1 / 8) / rate * 1e-9 + 2e-6 * latency
            terms.append(_device_term("train", link, seconds, f"rows and gradients {scope}, hops: {work.hops}"))
    return terms


def _cpu_terms(work: Workload, cluster: Cluster, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    cpu, dim, ranks = hardware.cpu, work.dim, cluster.ranks
    tail = scalar_tail(dim)
    pool = counts.ids * (cpu.pool_id_ns + dim * cpu.pool_float_ns + tail * cpu.pool_tail_ns)
    sum_gradients = counts.ids * (cpu.sum_id_ns + dim * cpu.sum_float_ns + tail * cpu.sum_tail_ns)
    updated = counts.world_unique / cluster.nodes  # each row once, by its owner
    update = updated * (cpu.apply_row_ns + work.row_floats * cpu.apply_float_ns + tail * cpu.apply_tail_ns)
    dense = ranks * (work.dense_time if ranks == 1 else work.dense_time_1_thread) * cpu.dense_reference_ms * 1e6
    python = counts.examples * cpu.example_ns + 1e3 * ranks * cpu.step_us
    share = work.dense_parallel_share
    return [
        _cpu_term("train", pool, hardware, "gather and pool rows"),
        _cpu_term("train", dense, hardware, "dense network, forward and backward, and its optimizer", ranks, share),
        _cpu_term("train", sum_gradients + update, hardware, "sum gradients, update rows"),
        _cpu_term("train", python, hardware, "metrics, Python", ranks, 0.0),
    ]


def _gpu_terms(work: Workload, counts: _RowCounts, hardware: Hardware) -> list[CostTerm]:
    """Work of one GPU; the GPUs run in parallel."""
    gpu = hardware.gpu
    assert gpu is not None
    ids, unique = work.batch * work.key_distribution.ids_per_example, counts.rank_unique
    random = ids * (_GPU_PROBE_BYTES + 4 * work.dim) + ids * 4 * work.dim + unique * 2 * work.row_bytes
    sequential = ids * KEY_BYTES * _GPU_SORT_PASSES
    sequential += 4 * _GPU_FLOATS_MOVED * (work.batch * work.floats + work.step_floats)
    sequential += 4 * _OPTIMIZER_FLOATS[work.dense_optimizer] * work.dense_parameters
    flops = 2 * work.batch * work.multiply_adds
    return [
        _device_term("train", "GPU", random / gpu.random_gbs * 1e-9, "find keys, pool rows, gradients, updates"),
        _device_term("train", "GPU", sequential / gpu.hbm_gbs * 1e-9, "sort ids, activations, dense optimizer"),
        _device_term("train", "GPU", flops / gpu.tflops * 1e-12, "matrix products, forward and backward"),
        _device_term("train", "GPU", gpu.step_us * 1e-6, "launches and Python"),
    ]


def _dense_sync_terms(work: Workload, cluster: Cluster, hardware: Hardware) -> list[CostTerm]:
    """All-reduce within the node, then between nodes: reduce-scatter and all-gather, (n-1)/n of the floats each.

    With scope "nodes" gradients are averaged within the node, and a merge only gathers the slices there.
    """
    cpu, links, terms = hardware.cpu, hardware.links, []
    floats = node_floats = work.synced * work.dense_parameters
    syncs = node_syncs = work.syncs
    text = "dense gradients" if work.sync == "gradients" else f"dense models averaged ({work.sync})"
    text += ", every step" if work.syncs == 1 else f", {work.synced:.3g} numbers per parameter and step"
    node_text = text
    if work.sync_scope == "nodes" and cluster.ranks > 1:
        node_floats, node_syncs = work.dense_parameters + floats / 2, 1 + syncs / 2
        node_text = "dense gradients of the node, every step; merged slices"
    for link, members, rate, latency, amount, times, what in (
        ("node link", cluster.ranks, links.node_gbs, links.node_us, node_floats, node_syncs, node_text),
        ("network", cluster.nodes, links.network_gbs, links.network_us, floats, syncs, text),
    ):
        if members > 1:
            seconds = 8 * amount * (members - 1) / members / rate * 1e-9 + 2e-6 * latency * times
            terms.append(_device_term("train", link, seconds, what))
    if cluster.world > 1 and not cluster.gpu:
        cost = (node_floats * cpu.allreduce_float_ns + 1e3 * node_syncs * cpu.allreduce_us) * cluster.ranks
        terms.append(_cpu_term("train", cost, hardware, "pack and average dense parameters", cluster.ranks, 0.0))
    return terms
