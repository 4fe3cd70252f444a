"""A step's time, stage by stage, and the resource that bounds it. docs/plan.md has the formulas in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from thermocline.config.dense_sync import SyncMode
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.wire_format import width
from thermocline.errors import require
from thermocline.planner.cache_model import Popularity
from thermocline.planner.hardware import Hardware, tail_of
from thermocline.tiers.dram import Policy

DenseOptimizer = Literal["sgd", "adagrad", "adam"]
KEY_BYTES = 8
KEPT_BUSY = 0.87
"""Of the cores' time, when they are what bounds a step: overlapping stages do not fill them. Fitted to trainings."""
FLOATS_MOVED = 2.5
"""On a GPU: floats read or written for each that an operation writes."""
SORT_PASSES = 16
"""On a GPU: times an id is read or written to bring a batch's ids in the order of their slots."""
OPTIMIZER_FLOATS = {"sgd": 3, "adagrad": 5, "adam": 7}
"""Floats read or written per dense parameter and step: gradient, and twice weight and moments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its data, and how it is trained."""

    name: str
    popularity: Popularity
    fields: int
    dim: int
    """Weights per row."""
    row_bytes: int
    """Of a row as it is stored, weights and optimizer state."""
    row_floats: int
    """Of a row as it is trained, weights and optimizer state."""
    multiply_adds: float
    """Of the dense network's matrix products, per example, forward and backward."""
    floats: float
    """Written by its other operations, per example, forward and backward."""
    step_floats: float
    """Written by them per step."""
    dense_parameters: int
    network: float
    """Forward, loss, backward and dense optimizer of a step on cores, as timed inside a training somewhere: times
    `network.reference_seconds` there."""
    network_shared: float
    """The part of that which all cores share; the rest is one thread's."""
    network_alone: float
    """The same by one thread, as each of several ranks runs it: no thread waits for another."""
    batch: int
    """Examples per rank and step."""
    window: int = 1
    """Steps that share one pull from memory and SSD."""
    dense_optimizer: DenseOptimizer = "adam"
    sync: SyncMode = "gradients"
    """What ranks average of their dense parameters: gradients, or what a merge of models does."""
    synced: float = 1.0
    """How many numbers per dense parameter are averaged per step: 1 of gradients, 2/k of merges "v_frozen"."""
    syncs: float = 1.0
    """How often per step anything is averaged."""
    hops: Hops = "two"
    """Of keys, rows and gradients between nodes."""
    wire: Wire = "fp32"
    """Of rows and gradients between nodes."""
    example_bytes: float = 0.0
    """Of the training data as it is stored; 0: it is made up."""
    read_ns: float = 0.0
    """Processor time to read one example, or to make it up."""
    policy: Policy = "lru_lfu"

    def __post_init__(self) -> None:
        for name in ("batch", "window"):
            require(getattr(self, name) >= 1, f"Workload.{name}", getattr(self, name), "at least 1")

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        own = (field.name for field in dataclasses.fields(self) if field.name != "popularity")
        keys = {"keys": self.popularity.keys, "nonzeros": self.popularity.nonzeros}
        return {**{name: getattr(self, name) for name in own}, **keys}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes, and what of them is used."""

    nodes: int = 1
    ranks: int = 1
    """Per node; with GPUs, one each."""
    gpu: bool = False
    mem_rows: float = math.inf
    """Rows that a node holds in memory."""
    hbm_rows: float = 0.0
    """Rows that a GPU holds."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks"):
            require(getattr(self, name) >= 1, f"Cluster.{name}", getattr(self, name), "at least 1")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One piece of a step's work."""

    stage: str
    resource: str
    """cores, disk, host link, node link, network, data link, GPU: what is busy meanwhile."""
    seconds: float
    """It takes, if nothing else uses the node."""
    what: str
    processor: float = 0.0
    """Processor seconds of the node; 0: none."""
    busy: float = 0.0
    """Seconds of the resource; of cores, those of all of them together, which are never all kept busy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes."""

    terms: tuple[Term, ...]
    examples: int
    """Of all ranks."""
    figures: dict[str, float]
    """What the terms are made of: unique keys, hit rates, bytes."""

    def by(self, what: Literal["stage", "resource"]) -> dict[str, float]:
        """Seconds of each stage or resource, in order of first use."""
        sums: dict[str, float] = {}
        for term in self.terms:
            name = getattr(term, what)
            sums[name] = sums.get(name, 0.0) + (term.seconds if what == "stage" else term.busy)
        return sums

    @property
    def seconds(self) -> float:
        """Of a step: stages overlap, pieces of one stage follow one another, a resource does one thing at a time."""
        return max(*self.by("stage").values(), *self.by("resource").values())

    @property
    def slowest_stage(self) -> str:
        stages = self.by("stage")
        return max(stages, key=lambda name: stages[name])

    @property
    def slowest_resource(self) -> str:
        resources = self.by("resource")
        return max(resources, key=lambda name: resources[name])

    @property
    def processor_seconds(self) -> float:
        """Of one node and step, on all its cores together."""
        return sum(term.processor for term in self.terms)

    def to_json(self) -> dict[str, Any]:
        return {
            "step_seconds": self.seconds,
            "examples_per_s": self.examples / self.seconds,
            "slowest_stage": self.slowest_stage,
            "slowest_resource": self.slowest_resource,
            "processor_seconds": self.processor_seconds,
            "stages": self.by("stage"),
            "resources": self.by("resource"),
            "terms": [dataclasses.asdict(term) for term in self.terms],
            "figures": self.figures,
        }


def predict(work: Workload, cluster: Cluster, hardware: Hardware) -> Prediction:
    """One step of every rank, in the steady state: caches are warm, every key has a row."""
    if cluster.gpu and hardware.gpu is None:
        raise ValueError(f"the cluster is to train on GPUs, but {hardware.name} has none")
    counts = _Counts(work, cluster)
    terms = [*_read(work, cluster.ranks, counts, hardware), *_pull(work, cluster, counts, hardware)]
    terms += _exchange(work, cluster, counts, hardware)
    terms += _train_gpu(work, counts, hardware) if cluster.gpu else _train_cpu(work, cluster, counts, hardware)
    terms += _dense_sync(work, cluster, hardware)
    kept = tuple(term for term in terms if term.seconds > 0)
    return Prediction(kept, work.batch * cluster.world, counts.figures())


class _Counts:
    """How many rows are where, per step."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        unique = work.popularity.unique
        self.examples = work.batch * cluster.ranks  # of a node
        self.ids = self.examples * work.popularity.nonzeros
        self.rank_unique = unique(work.batch)
        self.node_unique = unique(self.examples)
        self.world_unique = unique(self.examples * cluster.nodes)
        pull = work.batch * cluster.world * work.window
        self.pulled = unique(pull) / work.window / cluster.nodes  # of a node's own rows
        hbm = cluster.hbm_rows * cluster.world if cluster.gpu else 0.0
        mem = cluster.mem_rows * cluster.nodes
        self.hbm_hits = work.popularity.hit_rate(hbm, pull, "lru") if hbm else 0.0
        # Rows in HBM are not also counted in memory: together they are one larger cache.
        self.hits = work.popularity.hit_rate(mem + hbm, pull, work.policy)
        self.from_memory = self.pulled * (1 - self.hbm_hits)
        self.from_disk = self.pulled * (1 - self.hits)

    def figures(self) -> dict[str, float]:
        """Per step, of a node unless a rank's."""
        names = ("ids", "rank_unique", "node_unique", "world_unique", "pulled", "hbm_hits", "hits", "from_disk")
        return {name: getattr(self, name) for name in names}


def _on_cores(
    stage: str, nanoseconds: float, hardware: Hardware, what: str, ranks: int = 1, shared: float = 1.0
) -> Term:
    """Work of which all cores of the node share a part; the rest is done by one thread of each rank."""
    processor, cores = nanoseconds * 1e-9, hardware.cpu.cores
    seconds = processor * (shared / cores + (1 - shared) / min(ranks, cores))
    return Term(stage, "cores", seconds, what, processor, processor / cores / KEPT_BUSY)


def _elsewhere(stage: str, resource: str, seconds: float, what: str) -> Term:
    """Work of something else than cores."""
    return Term(stage, resource, seconds, what, 0.0, seconds)


def _read(work: Workload, ranks: int, counts: _Counts, hardware: Hardware) -> list[Term]:
    ahead = 1e3 * hardware.cpu.ahead_us * ranks
    terms = [
        _on_cores("read", counts.examples * work.read_ns, hardware, "examples read and parsed, or made up"),
        _on_cores("load", ahead, hardware, "threads ahead of training", ranks, 0.0),
    ]
    if work.example_bytes:
        seconds = counts.examples * work.example_bytes / hardware.links.data_gbs * 1e-9
        terms.append(_elsewhere("read", "data link", seconds, "bytes of examples"))
    return terms


def _pull(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    cpu, disk, terms = hardware.cpu, hardware.disk, []
    if not cluster.gpu:
        deduped = counts.ids + (counts.rank_unique * cluster.ranks if work.window > 1 else 0.0)  # again over the window
        terms.append(_on_cores("dedup", deduped * cpu.dedup_id_ns, hardware, "ids to unique keys"))
        terms.append(_on_cores("pull MEM", counts.pulled * cpu.pull_row_ns, hardware, "rows found and pinned"))
        terms.append(_on_cores("load", counts.ids * cpu.plan_id_ns, hardware, "slots and gradients of ids"))
    elif counts.from_memory:
        moved = counts.from_memory * (cpu.pull_row_ns + work.row_bytes / 4 * cpu.pool_float_ns)
        terms.append(_on_cores("pull MEM", 2 * moved, hardware, "rows up to HBM and down again"))
        assert hardware.gpu is not None
        size = counts.from_memory / cluster.ranks * work.row_bytes
        terms.append(
            _elsewhere("load", "host link", size / hardware.gpu.host_gbs * 1e-9, "rows up; down is the other way")
        )
    if counts.from_disk:
        rows = counts.from_disk * work.window
        wanted, seconds = _pages(work, cluster, rows, hardware)
        terms.append(_elsewhere("pull SSD", "disk", seconds / work.window, "pages with missing rows"))
        size = counts.from_disk * (work.row_bytes + KEY_BYTES) * disk.write_amplification
        # By the thread that pulls: rows leave as others come.
        terms.append(_elsewhere("pull SSD", "disk", size / disk.write_gbs * 1e-9, "evicted rows, and merging"))
        cost = counts.from_disk * disk.miss_row_ns
        cost += (wanted / work.window + size / disk.page_bytes) * disk.miss_page_ns
        what = "rows looked up, verified; others evicted, merged"
        looked_up = _on_cores("pull SSD", cost, hardware, what, cluster.ranks, 0.0)
        terms.append(dataclasses.replace(looked_up, seconds=looked_up.seconds * disk.miss_own))
    return terms


def _pages(work: Workload, cluster: Cluster, rows: float, hardware: Hardware) -> tuple[float, float]:
    """One get, of a node: pages with rows, and the seconds of reading them.

    They come in the order of the hash; gaps are bridged where that is cheaper than another request.
    """
    disk = hardware.disk
    pages = work.popularity.keys / cluster.nodes * (work.row_bytes + KEY_BYTES) / disk.page_bytes
    wanted = -pages * math.expm1(-rows / pages)
    density = min(wanted / pages, 1.0)
    most = int(min(disk.read_us / disk.page_us, 15.0))  # pages that the store reads rather than ask again
    again = (1 - density) ** (most + 1)  # the next wanted page is further away
    bridged = sum(density * (1 - density) ** gap * (gap + 1) for gap in range(most + 1))
    return wanted, wanted * (again * disk.read_us + bridged * disk.page_us) * 1e-6


def _exchange(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    """Keys to their owners ahead of time; then rows to the worker, gradients to the owner.

    Per rank within the node, per node between nodes.
    """
    links, cpu, ranks, nodes = hardware.links, hardware.cpu, cluster.ranks, cluster.nodes
    if cluster.world == 1:
        return []
    two = work.hops == "two" and nodes > 1
    handled = counts.rank_unique * ranks + (counts.node_unique if two else 0.0)
    near = counts.rank_unique * (ranks - 1) / (ranks if two or nodes == 1 else cluster.world)
    far = (counts.node_unique if two else counts.rank_unique * ranks) * (nodes - 1) / nodes
    terms = []
    if not cluster.gpu:
        keys = handled * cpu.ask_key_ns + 1e3 * cpu.ask_us * ranks
        rows = handled * (cpu.exchange_key_ns + work.dim * cpu.exchange_float_ns) + 1e3 * cpu.exchange_us * ranks
        terms.append(_on_cores("ask", keys, hardware, "keys told to their owners", ranks, 0.0))
        terms.append(_on_cores("train", rows, hardware, "rows and gradients packed, sent, summed", ranks, 0.0))
    for name, keys, row, rate, delay, what in (
        ("node link", near, 4 * work.dim, links.node_gbs, links.node_us, "within the node"),
        ("network", far, width(work.wire, work.dim), links.network_gbs, links.network_us, "between nodes"),
    ):
        if keys:
            terms.append(_elsewhere("ask", name, keys * KEY_BYTES / rate * 1e-9 + 3e-6 * delay, f"keys {what}"))
            seconds = keys * (2 * row + 1 / 8) / rate * 1e-9 + 2e-6 * delay
            terms.append(_elsewhere("train", name, seconds, f"rows and gradients {what}, hops: {work.hops}"))
    return terms


def _train_cpu(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    cpu, dim, ranks = hardware.cpu, work.dim, cluster.ranks
    tail = tail_of(dim)
    pool = counts.ids * (cpu.pool_id_ns + dim * cpu.pool_float_ns + tail * cpu.pool_tail_ns)
    grads = counts.ids * (cpu.sum_id_ns + dim * cpu.sum_float_ns + tail * cpu.sum_tail_ns)
    updated = counts.world_unique / cluster.nodes  # each by its owner, once
    rows = updated * (cpu.apply_row_ns + work.row_floats * cpu.apply_float_ns + tail * cpu.apply_tail_ns)
    network = ranks * (work.network if ranks == 1 else work.network_alone) * cpu.network_ms * 1e6
    rest = counts.examples * cpu.example_ns + 1e3 * ranks * cpu.step_us
    return [
        _on_cores("train", pool, hardware, "rows gathered and pooled"),
        _on_cores("train", network, hardware, "the network, both ways, and its optimizer", ranks, work.network_shared),
        _on_cores("train", grads + rows, hardware, "gradients summed, rows updated"),
        _on_cores("train", rest, hardware, "metrics, Python", ranks, 0.0),
    ]


def _train_gpu(work: Workload, counts: _Counts, hardware: Hardware) -> list[Term]:
    """Of one GPU; all of them work at once."""
    gpu = hardware.gpu
    assert gpu is not None
    ids, unique = work.batch * work.popularity.nonzeros, counts.rank_unique
    random = ids * (64 + 4 * work.dim) + ids * 4 * work.dim + unique * 2 * work.row_bytes
    streamed = ids * KEY_BYTES * SORT_PASSES
    streamed += 4 * FLOATS_MOVED * (work.batch * work.floats + work.step_floats)
    streamed += 4 * OPTIMIZER_FLOATS[work.dense_optimizer] * work.dense_parameters
    products = 2 * work.batch * work.multiply_adds
    return [
        _elsewhere("train", "GPU", random / gpu.random_gbs * 1e-9, "keys found, rows pooled, gradients, updates"),
        _elsewhere("train", "GPU", streamed / gpu.hbm_gbs * 1e-9, "ids sorted, activations, dense optimizer"),
        _elsewhere("train", "GPU", products / gpu.tflops * 1e-12, "matrix products, forward and backward"),
        _elsewhere("train", "GPU", gpu.step_us * 1e-6, "launches and Python"),
    ]


def _dense_sync(work: Workload, cluster: Cluster, hardware: Hardware) -> list[Term]:
    """All-reduce within the node, then between nodes: each sends and receives what is averaged about twice."""
    cpu, links, floats, terms = hardware.cpu, hardware.links, work.synced * work.dense_parameters, []
    what = "dense gradients" if work.sync == "gradients" else f"dense models merged ({work.sync})"
    what += ", every step" if work.syncs == 1 else f", {work.synced:.3g} numbers per parameter and step"
    for name, parts, rate, delay in (
        ("node link", cluster.ranks, links.node_gbs, links.node_us),
        ("network", cluster.nodes, links.network_gbs, links.network_us),
    ):
        if parts > 1:
            seconds = 8 * floats * (parts - 1) / parts / rate * 1e-9 + 2e-6 * delay * work.syncs
            terms.append(_elsewhere("train", name, seconds, what))
    if cluster.world > 1 and not cluster.gpu:
        cost = (floats * cpu.average_float_ns + 1e3 * work.syncs * cpu.average_us) * cluster.ranks
        terms.append(_on_cores("train", cost, hardware, "dense parameters packed and averaged", cluster.ranks, 0.0))
    return terms
