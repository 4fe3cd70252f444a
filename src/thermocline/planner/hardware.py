"""What one node can do: the figures of predictions, as a TOML file that `thermocline plan --measure` writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Self

from thermocline.config import loader
from thermocline.errors import ConfigError

_KERNELS = (4, 8, 16, 32, 64, 128)


def tail_of(dim: int) -> int:
    """Floats of a row that the memory tier's kernels take one by one: lengths of their own have none."""
    return 0 if dim in _KERNELS else dim % 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Cores, and what Thermocline's own code costs on them: nanoseconds of processor time, however many share it."""

    cores: int
    memory: int
    """Bytes of DRAM."""
    dedup_id_ns: float
    """One id to its working set."""
    pull_row_ns: float
    """One unique key found and pinned in memory, and let go again."""
    plan_id_ns: float
    """One id's slot, and which gradient belongs to it."""
    pool_id_ns: float
    """One id's row found and added to its bag ..."""
    pool_float_ns: float
    """... and each of its floats."""
    pool_tail_ns: float
    """... and once more those beyond the last sixteen, of a length that has no kernel of its own: `tail_of`."""
    sum_id_ns: float
    """One occurrence's gradient found and added to its key's ..."""
    sum_float_ns: float
    """... and each of its floats."""
    sum_tail_ns: float
    """... and once more its tail."""
    apply_row_ns: float
    """One row's optimizer step ..."""
    apply_float_ns: float
    """... and each of its floats, weights and state."""
    apply_tail_ns: float
    """... and once more the tail of its weights."""
    network_ms: float
    """Forward and backward of `network.reference_seconds`, by which networks' times on other machines are told."""
    example_ns: float
    """One example's share of a step beside all this: metrics, labels."""
    step_us: float
    """A step's fixed cost: Python, autograd, metrics ..."""
    ahead_us: float
    """... and that of the threads ahead of it: Python, queues."""
    ask_key_ns: float
    """Over several ranks: one unique key of a rank told to its owner, both sides' work."""
    ask_us: float
    """A step's fixed cost of that, of each rank."""
    exchange_key_ns: float
    """Over several ranks: one unique key's row fetched from its owner, its gradient brought there and added ..."""
    exchange_float_ns: float
    """... and each of its weights."""
    exchange_us: float
    """A step's fixed cost of that, of each rank."""
    average_float_ns: float
    """Over several ranks: one dense number of a rank packed, averaged with the others' and put back."""
    average_us: float
    """The fixed cost of averaging, of each rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The SSD store's device, with the concurrency the store uses."""

    read_us: float
    """One random page, amortised over many in flight."""
    page_us: float
    """One more page beside it."""
    page_bytes: int
    write_gbs: float
    """GB/s of large sequential writes, synced."""
    write_amplification: float
    """Bytes written per byte of rows that leave memory, merging included."""
    miss_row_ns: float
    """Processor time of a row that memory lacks, looked up, and of one that leaves, appended and merged ..."""
    miss_page_ns: float
    """... and of each page read or written for them, verified or checksummed."""
    miss_own: float
    """The share of that which the thread that pulls does itself; others, which read and merge, work beside it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One of a node's GPUs."""

    count: int
    memory: int
    """Bytes of HBM."""
    hbm_gbs: float
    """GB/s of a large copy, read plus write."""
    random_gbs: float
    """GB/s of rows gathered from random places."""
    tflops: float
    """Of float32 matrix products, as torch runs them."""
    step_us: float
    """A step's fixed cost: launches and Python."""
    host_gbs: float
    """GB/s between DRAM and HBM, one way, per GPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Between ranks."""

    node_gbs: float
    """GB/s per rank to other ranks of its node: NVLink, or shared memory."""
    node_us: float
    """Latency of one exchange within the node."""
    network_gbs: float
    """GB/s per node to other nodes."""
    network_us: float
    """Latency of one exchange between nodes."""
    data_gbs: float
    """GB/s per node at which training data arrives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node of a cluster of equal ones."""

    name: str
    source: str
    """Where the figures come from: measured, when and how; or assumed."""
    cpu: Cpu
    disk: Disk
    links: Links
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        for name, value in loader.flatten(self):
            if isinstance(value, (int, float)) and value <= 0:
                raise ValueError(f"Hardware.{name} is {value}: it must be above 0")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a TOML file."""
        try:
            return loader.load(cls, path)
        except ConfigError as error:
            raise ConfigError(f"{error}; `thermocline plan --measure {path}` writes a whole one") from None

    def to_toml(self) -> str:
        """As a file that `load` reads to the same figures."""
        return loader.to_toml(self)


def paper_node(cpu: Cpu, costs: str = "as given") -> Hardware:
    """A node of the source's cluster: 8 GPUs of 32 GB, 48 cores, 1 TB, NVMe RAID-0, 100 Gb RDMA.

    Sizes and the network are the source's; other figures are those of that generation's data sheets (V100 SXM2, PCIe 3,
    eight NVMe disks), at 80 % of the nominal rate where it is one. What a core does is `cpu`'s; `costs` says whence.
    """
    return Hardware(
        name="a node of the source",
        source=f"assumed: sizes of the source, rates of data sheets; costs of a core {costs}",
        cpu=dataclasses.replace(cpu, cores=48, memory=10**12),
        disk=Disk(
            read_us=0.5,
            page_us=0.3,
            page_bytes=4096,
            write_gbs=8.0,
            write_amplification=6.5,
            miss_row_ns=1500.0,
            miss_page_ns=3000.0,
            miss_own=0.5,
        ),
        links=Links(node_gbs=120.0, node_us=20.0, network_gbs=10.0, network_us=10.0, data_gbs=1.0),
        gpu=Gpu(
            count=8,
            memory=32 * 10**9,
            hbm_gbs=720.0,
            random_gbs=300.0,
            tflops=12.0,
            step_us=1500.0,
            host_gbs=6.0,
        ),
    )
