"""A step's time, stage by stage, and the resource that bounds it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from thermocline.errors import require
from thermocline.plan.hardware import Hardware
from thermocline.plan.popularity import Popularity
from thermocline.tables.mem import Policy
from thermocline.tables.precision import FP32, Precision

KEY_BYTES = 8
FLOATS_MOVED = 2.5
"""On a GPU: floats read or written for each that an operation writes."""
SORT_PASSES = 16
"""On a GPU: times an id is read or written to bring a batch's ids in the order of their slots."""
OPTIMIZER_FLOATS = 7
"""On a GPU: floats read or written per dense parameter and step (Adam): gradient, and twice weight and moments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its data, and how it is trained."""

    name: str
    popularity: Popularity
    fields: int
    dim: int
    """Weights per row."""
    state: int
    """Floats of optimizer state per row."""
    multiply_adds: float
    """Of the dense network's matrix products, per example, forward and backward."""
    floats: float
    """Written by its other operations, per example, forward and backward."""
    step_floats: float
    """Written by them per step."""
    operations: int
    """Of torch, per step."""
    dense_parameters: int
    batch: int
    """Examples per rank and step."""
    window: int = 1
    """Steps that share one pull from memory and SSD."""
    every: int = 1
    """Steps between dense synchronisations."""
    example_bytes: float = 0.0
    """Of the training data as it is stored; 0: it is made up."""
    read_ns: float = 0.0
    """Processor time to read one example, or to make it up."""
    policy: Policy = "lru_lfu"
    precision: Precision = FP32
    """How weights are stored."""

    def __post_init__(self) -> None:
        for name in ("batch", "window", "every"):
            require(getattr(self, name) >= 1, f"Workload.{name}", getattr(self, name), "at least 1")

    @property
    def row_bytes(self) -> int:
        """As rows are stored."""
        return 4 * (self.precision.weight_words(self.dim) + self.state)

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        own = (field.name for field in dataclasses.fields(self) if field.name != "popularity")
        keys = {"keys": self.popularity.keys, "nonzeros": self.popularity.nonzeros, "row_bytes": self.row_bytes}
        return {**{name: getattr(self, name) for name in own}, **keys, "precision": self.precision.layout}


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
    exchange: Literal["flat", "two_hops"] = "two_hops"

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
    """Of that resource, if nothing else used it."""
    what: str
    processor: float = 0.0
    """Processor seconds of the node; 0: none."""


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
            sums[name] = sums.get(name, 0.0) + term.seconds
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
    terms = [*_read(work, counts, hardware), *_pull(work, cluster, counts, hardware)]
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


def _on_cores(stage: str, nanoseconds: float, hardware: Hardware, what: str) -> Term:
    """Work that all cores of the node share."""
    processor = nanoseconds * 1e-9
    return Term(stage, "cores", processor / hardware.cpu.cores, what, processor)


def _read(work: Workload, counts: _Counts, hardware: Hardware) -> list[Term]:
    terms = [_on_cores("read", counts.examples * work.read_ns, hardware, "examples read and parsed, or made up")]
    if work.example_bytes:
        seconds = counts.examples * work.example_bytes / hardware.links.data_gbs * 1e-9
        terms.append(Term("read", "data link", seconds, "bytes of examples"))
    return terms


def _pull(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    cpu, disk, terms = hardware.cpu, hardware.disk, []
    if not cluster.gpu:
        terms.append(_on_cores("dedup", counts.ids * cpu.dedup_id_ns, hardware, "ids to unique keys"))
        terms.append(_on_cores("pull MEM", counts.pulled * cpu.pull_row_ns, hardware, "rows found and pinned"))
        terms.append(_on_cores("load", counts.ids * cpu.plan_id_ns, hardware, "slots and gradients of ids"))
    elif counts.from_memory:
        moved = counts.from_memory * (cpu.pull_row_ns + work.row_bytes / 4 * cpu.pool_float_ns)
        terms.append(_on_cores("pull MEM", 2 * moved, hardware, "rows up to HBM and down again"))
        assert hardware.gpu is not None
        size = counts.from_memory / cluster.ranks * work.row_bytes
        terms.append(Term("load", "host link", size / hardware.gpu.host_gbs * 1e-9, "rows up; down is the other way"))
    if counts.from_disk:
        seconds = _read_seconds(work, cluster, counts.from_disk * work.window, hardware) / work.window
        terms.append(Term("pull SSD", "disk", seconds, "pages with missing rows"))
        size = counts.from_disk * (work.row_bytes + KEY_BYTES) * disk.write_amplification
        terms.append(Term("write back", "disk", size / disk.write_gbs * 1e-9, "evicted rows, and merging"))
        cost = counts.from_disk * disk.miss_row_ns
        terms.append(_on_cores("pull SSD", cost, hardware, "rows looked up, verified; others evicted, merged"))
    return terms


def _read_seconds(work: Workload, cluster: Cluster, rows: float, hardware: Hardware) -> float:
    """One get: pages in the order of the hash, gaps bridged where that is cheaper than another request."""
    disk = hardware.disk
    pages = work.popularity.keys / cluster.nodes * (work.row_bytes + KEY_BYTES) / disk.page_bytes
    wanted = -pages * math.expm1(-rows / pages)
    density = min(wanted / pages, 1.0)
    most = int(min(disk.read_us / disk.page_us, 15.0))  # pages that the store reads rather than ask again
    again = (1 - density) ** (most + 1)  # the next wanted page is further away
    bridged = sum(density * (1 - density) ** gap * (gap + 1) for gap in range(most + 1))
    return wanted * (again * disk.read_us + bridged * disk.page_us) * 1e-6


def _exchange(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    """Keys and rows to the worker, gradients to the owner: per rank within the node, per node between nodes."""
    links, bytes_per_key = hardware.links, KEY_BYTES + 8 * work.dim
    rank, node = cluster.ranks, cluster.nodes
    terms = []
    if node > 1:
        if cluster.exchange == "two_hops":
            crossing, near = counts.node_unique, counts.rank_unique * (rank - 1) / rank
        else:
            crossing, near = counts.rank_unique * rank, counts.rank_unique * (rank - 1) / cluster.world
        size = crossing * (node - 1) / node * bytes_per_key
        seconds = size / links.network_gbs * 1e-9 + 3e-6 * links.network_us
        terms.append(Term("train", "network", seconds, f"rows and gradients between nodes, {cluster.exchange}"))
    else:
        near = counts.rank_unique * (rank - 1) / rank
    if rank > 1:
        seconds = near * bytes_per_key / links.node_gbs * 1e-9 + 3e-6 * links.node_us
        terms.append(Term("train", "node link", seconds, "rows and gradients within the node"))
    return terms


def _train_cpu(work: Workload, cluster: Cluster, counts: _Counts, hardware: Hardware) -> list[Term]:
    cpu, dim = hardware.cpu, work.dim
    pool = counts.ids * (cpu.pool_id_ns + dim * cpu.pool_float_ns)
    grads = counts.ids * (cpu.sum_id_ns + dim * cpu.sum_float_ns)
    rows = counts.rank_unique * cluster.ranks * (cpu.apply_row_ns + dim * cpu.apply_float_ns)
    products = counts.examples * work.multiply_adds * cpu.multiply_add_ns
    touched = (counts.examples * work.floats + cluster.ranks * work.step_floats) * cpu.written_float_ns
    stepped = work.dense_parameters * cluster.ranks * cpu.parameter_ns
    fixed = cpu.step_us + work.operations * cpu.operation_us
    rest = counts.examples * cpu.example_ns + 1e3 * fixed * cluster.ranks
    return [
        _on_cores("train", pool, hardware, "rows gathered and pooled"),
        _on_cores("train", products, hardware, "matrix products, forward and backward"),
        _on_cores("train", touched, hardware, "all else of the network"),
        _on_cores("train", grads + rows, hardware, "gradients summed, rows updated"),
        _on_cores("train", stepped, hardware, "dense optimizer"),
        _on_cores("train", rest, hardware, "loss, metrics, Python"),
    ]


def _train_gpu(work: Workload, counts: _Counts, hardware: Hardware) -> list[Term]:
    """Of one GPU; all of them work at once."""
    gpu = hardware.gpu
    assert gpu is not None
    ids, unique = work.batch * work.popularity.nonzeros, counts.rank_unique
    pooled = work.row_bytes - 4 * work.state
    random = ids * (64 + pooled) + ids * 4 * work.dim + unique * 2 * work.row_bytes
    streamed = ids * KEY_BYTES * SORT_PASSES
    streamed += 4 * FLOATS_MOVED * (work.batch * work.floats + work.step_floats)
    streamed += 4 * OPTIMIZER_FLOATS * work.dense_parameters
    products = 2 * work.batch * work.multiply_adds
    return [
        Term("train", "GPU", random / gpu.random_gbs * 1e-9, "keys found, rows pooled, gradients, updates"),
        Term("train", "GPU", streamed / gpu.hbm_gbs * 1e-9, "ids sorted, activations, dense optimizer"),
        Term("train", "GPU", products / gpu.tflops * 1e-12, "matrix products, forward and backward"),
        Term("train", "GPU", gpu.step_us * 1e-6, "launches and Python"),
    ]


def _dense_sync(work: Workload, cluster: Cluster, hardware: Hardware) -> list[Term]:
    """All-reduce within the node, then between nodes: each sends and receives the parameters about twice."""
    links, size, terms = hardware.links, 8 * work.dense_parameters, []
    for name, parts, rate, delay in (
        ("node link", cluster.ranks, links.node_gbs, links.node_us),
        ("network", cluster.nodes, links.network_gbs, links.network_us),
    ):
        if parts > 1:
            seconds = size * (parts - 1) / parts / rate * 1e-9 + 2e-6 * delay
            terms.append(Term("train", name, seconds / work.every, f"dense gradients, every {work.every}"))
    return terms
