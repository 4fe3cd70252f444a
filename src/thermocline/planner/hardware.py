"""Figures of one node: costs of cores, rates of disk, GPU and links. `thermocline plan --measure` writes them as TOML.

A field's unit is the end of its name: `_ns` and `_us` are times, `_gbs` is 10^9 bytes per second.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Self

from thermocline.config import loader
from thermocline.errors import ConfigError

_UNROLLED_DIMS = (4, 8, 16, 32, 64, 128)
"""Row lengths with a compiled kernel of the DRAM tier: TC_FOR_DIM in csrc/dram/kernels_impl.h."""


def scalar_tail(dim: int) -> int:
    """Floats of a row of `dim` weights that the DRAM tier's kernels process one by one instead of 16 at a time."""
    return 0 if dim in _UNROLLED_DIMS else dim % 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Cores and memory of a node, and the processor time of Thermocline's operations, summed over all threads."""

    cores: int
    memory: int
    """Bytes of DRAM."""
    dedup_id_ns: float
    """Deduplicate one id."""
    pull_row_ns: float
    """Look up, pin and unpin one unique key in the DRAM tier."""
    plan_id_ns: float
    """Compute slot and gradient index of one id."""
    pool_id_ns: float
    """Add the row of one id to its bag: fixed part."""
    pool_float_ns: float
    """Per weight of that row."""
    pool_tail_ns: float
    """Additionally per float of `scalar_tail(dim)`."""
    sum_id_ns: float
    """Add the gradient of one id to the sum of its key: fixed part."""
    sum_float_ns: float
    """Per weight of that row."""
    sum_tail_ns: float
    """Additionally per float of `scalar_tail(dim)`."""
    apply_row_ns: float
    """Optimizer step of one row: fixed part."""
    apply_float_ns: float
    """Per float of that row, weights and optimizer state."""
    apply_tail_ns: float
    """Additionally per float of `scalar_tail(dim)`."""
    dense_reference_ms: float
    """`op_counter.reference_network_seconds`: scales dense network times that were measured on another machine."""
    example_ns: float
    """Per example: metrics, labels."""
    step_us: float
    """Fixed cost of a step on the training thread: Python, autograd, metrics."""
    prefetch_us: float
    """Fixed cost of a step on the prefetch threads: Python, queues."""
    route_key_ns: float
    """Several ranks: send one unique key to its owner, sender and receiver together."""
    route_us: float
    """Fixed cost of sending keys, per step and rank."""
    exchange_key_ns: float
    """Several ranks: fetch the row of one unique key from its owner, return its gradient and add it: fixed part."""
    exchange_float_ns: float
    """Per weight of that row."""
    exchange_us: float
    """Fixed cost of exchanging rows and gradients, per step and rank."""
    allreduce_float_ns: float
    """Several ranks: pack, average and unpack one float of the dense parameters, per rank."""
    allreduce_us: float
    """Fixed cost of one all-reduce, per rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Device of the SSD store, at the concurrency that the store uses."""

    read_us: float
    """Read one random page, amortised over the requests in flight."""
    page_us: float
    """Read one additional adjacent page in the same request."""
    page_bytes: int
    write_gbs: float
    """Large sequential writes, synced."""
    write_amplification: float
    """Bytes written per byte of evicted rows, merging included, into a store of many base files."""
    miss_row_ns: float
    """Processor time to find and verify one row missing in DRAM, and to evict one."""
    miss_read_ns: float
    """Processor time of one read request for that."""
    miss_write_ns: float
    """Processor time per page that the log and merges write for evicted rows."""
    miss_thread_share: float
    """Fraction of that processor time on the pulling thread; reader and merge threads do the rest concurrently."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPUs of a node; all rates are per GPU."""

    count: int
    memory: int
    """Bytes of HBM per GPU."""
    hbm_gbs: float
    """Large device copy, bytes read plus bytes written."""
    random_gbs: float
    """Gather of rows from random addresses."""
    tflops: float
    """float32 matrix products by torch."""
    step_us: float
    """Fixed cost of a step: kernel launches and Python."""
    host_gbs: float
    """Copy between DRAM and HBM, one direction."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bandwidth and latency between ranks, and bandwidth of the training data."""

    node_gbs: float
    """Between ranks of one node, per rank: NVLink or shared memory."""
    node_us: float
    """Latency of one exchange within the node."""
    network_gbs: float
    """Between nodes, per node."""
    network_us: float
    """Latency of one exchange between nodes."""
    data_gbs: float
    """Training data to the node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node of a homogeneous cluster. Every figure is above 0."""

    name: str
    source: str
    """Origin of the figures: date and method of a measurement, or "assumed"."""
    cpu: Cpu
    disk: Disk
    links: LinkSpeeds
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        for name, value in loader.flatten(self):
            if isinstance(value, (int, float)) and value <= 0:
                raise ValueError(f"Hardware.{name} is {value}: it must be above 0")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file; raise ConfigError with the file's name if it is not readable or not complete."""
        try:
            return loader.load(cls, path)
        except ConfigError as error:
            raise ConfigError(f"{error}; `thermocline plan --measure {path}` writes a complete file") from None

    def to_toml(self) -> str:
        """Text of a file that `load` reads back to equal figures."""
        return loader.to_toml(self)


REFERENCE_CPU = Cpu(
    cores=2,
    memory=25276518400,
    dedup_id_ns=22.3,
    pull_row_ns=79.6,
    plan_id_ns=6.81,
    pool_id_ns=4.58,
    pool_float_ns=0.603,
    pool_tail_ns=0.302,
    sum_id_ns=0.728,
    sum_float_ns=0.757,
    sum_tail_ns=0.414,
    apply_row_ns=1.79,
    apply_float_ns=0.965,
    apply_tail_ns=0.747,
    dense_reference_ms=142.5,
    example_ns=32.0,
    step_us=463.0,
    prefetch_us=303.0,
    route_key_ns=31.2,
    route_us=369.0,
    exchange_key_ns=2.11,
    exchange_float_ns=4.58,
    exchange_us=645.0,
    allreduce_float_ns=2.31,
    allreduce_us=320.0,
)
"""Costs of a core without a measurement: the second of three in benchmarks/results/plan-2026-11-15.json."""
REFERENCE_SOURCE = "measured 2026-11-15 on two cores of a virtual x86-64 machine"


def paper_node(cpu: Cpu = REFERENCE_CPU, cpu_source: str = REFERENCE_SOURCE) -> Hardware:
    """Node of the cluster of Zhao et al. (MLSys 2020), with the core costs of `cpu`.

    The paper gives 8 GPUs of 32 GB, 48 cores, 1 TB of DRAM, NVMe RAID-0 and 100 Gb/s RDMA. The other figures are
    assumed from data sheets of that generation (V100 SXM2, PCIe 3, eight NVMe disks), nominal rates at 80 %.
    `cpu_source` states the origin of `cpu`.
    """
    return Hardware(
        name="a node of the cluster of Zhao et al. (2020)",
        source=f"assumed: sizes of the paper, rates of data sheets; costs of a core {cpu_source}",
        cpu=dataclasses.replace(cpu, cores=48, memory=10**12),
        disk=Disk(
            read_us=0.5,
            page_us=0.3,
            page_bytes=4096,
            write_gbs=8.0,
            write_amplification=6.5,
            miss_row_ns=2000.0,
            miss_read_ns=2500.0,
            miss_write_ns=6000.0,
            miss_thread_share=0.5,
        ),
        links=LinkSpeeds(node_gbs=120.0, node_us=20.0, network_gbs=10.0, network_us=10.0, data_gbs=1.0),
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
