"""Set-up of one rank from torchrun's environment: topology, GPU, NUMA binding, process groups. `tc.join_ranks`.

Every rank reports what it observes: its place on its machine, the GPUs, their links. Rank 0 decides on the topology and
the transport of GPU tensors, and all ranks receive the decision (`decide_job`), or the same error.

Called on the main thread at start-up. Only `join_ranks` blocks: until all ranks have joined, at most `dist.timeout`
seconds, then it raises `RankError`. The module loads torch only in `join_ranks`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thermocline
from thermocline.config.distributed import Dist
from thermocline.distributed.topology import Topology, nvlink_pairs
from thermocline.errors import ConfigError
from thermocline.utils.cpu_affinity import numa_nodes, pci_numa_node

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

Facts = dict[str, Any]
"""Observations of one rank, as JSON values."""
_SYSFS = Path("/sys")


def is_rank0() -> bool:
    """Return whether this process prints for its job: rank 0, or started without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def is_single_rank() -> bool:
    """Return whether the launcher, if any, started one rank only."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def may_be_restart() -> bool:
    """Return whether torchrun may have restarted this job after a rank failed.

    With several machines only the one whose rank failed counts the restart, so every start of a job with restarts
    enabled returns True.
    """
    several_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or (
        several_machines and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    )


def child_environment() -> dict[str, str]:
    """Return the environment for ranks started by this process: the same package, one torch thread each."""
    search = [str(Path(thermocline.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}


def is_first_report(message: str) -> bool:
    """Return True on the first rank of this machine that calls it with `message`, so that errors print once.

    Ranks create a marker file in torchrun's log folder of the job. Without that folder every rank returns True.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return True
    marker = Path(error_file).parent.parent / f"thermocline-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def world_size() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    return _env_int("WORLD_SIZE") or 1


def join_ranks(dist: Dist | None = None) -> Groups:
    """Join the job that torchrun started this process for; without torchrun, a job of one rank.

        with tc.join_ranks() as groups:
            table = tc.ShardedTable(16, tc.Adagrad(lr=0.1), groups=groups)

    Selects the GPU of this rank and binds the process to the GPU's NUMA node.
    """
    dist = Dist() if dist is None else dist
    world = world_size()
    import torch

    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.group_setup import open_store
    from thermocline.distributed.rendezvous import decide_json

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    store, topology, gpu_per_rank = None, Topology.single(), False
    if world > 1:
        rank = _env_int("RANK")
        if rank is None:
            raise ConfigError("RANK is not set, but WORLD_SIZE is: start the ranks with torchrun")
        store = open_store(rank, world, dist.timeout)
        decide = functools.partial(decide_job, topology_file=dist.topology)
        decision = decide_json(store, "job", rank, world, observe(gpus), decide, dist.timeout)
        if "error" in decision:
            raise ConfigError(decision["error"])
        topology, gpu_per_rank = Topology.from_json(decision, rank), decision["gpu"]
    gpu = machine_rank(topology) % gpus if gpus else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if dist.bind:
        bind_to_numa(topology, None if gpu is None else pci_bus_id(torch.cuda.get_device_properties(gpu)))
    return Groups.make(
        topology,
        timeout=dist.timeout,
        busy_timeout=dist.busy_timeout,
        gpu=gpu_per_rank,
        overlap=dist.overlap,
        store=store,
    )


def machine_rank(topology: Topology) -> int:
    """Return the index of this rank on its machine, which may host several nodes of a topology file."""
    return int(os.environ.get("LOCAL_RANK", topology.local_rank))


def machine_world(topology: Topology) -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(topology.nodes[topology.node])))


def _env_int(name: str) -> int | None:
    """Read a number that torchrun sets; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r} in the environment: it must be a number, as torchrun sets it")
    return int(text)


# ---- one decision for all ranks


def observe(gpus: int) -> Facts:
    """Return the facts of this rank: its place on its machine, the number of GPUs, and their links once per machine."""
    try:
        rank, world = _env_int("LOCAL_RANK"), _env_int("LOCAL_WORLD_SIZE")
    except ConfigError as error:
        return {"error": str(error)}
    links = None
    if rank == 0 and world is not None and 1 < world <= gpus:
        pairs = nvlink_pairs(tuple(range(world)))
        links = None if pairs is None else sorted(pairs)
    return {"local_rank": rank, "local_world": world, "gpus": gpus, "gpu_links": links}


def decide_job(facts: list[Facts], topology_file: str | None) -> dict[str, Any]:
    """Return the topology as `Topology.to_json` and whether NCCL carries GPU tensors; or {"error": one line}.

    facts           of all ranks, by rank
    topology_file   `dist.topology` of rank 0: the file of other ranks is not read
    """
    try:
        for rank, fact in enumerate(facts):
            if "error" in fact:
                raise ConfigError(f"rank {rank}: {fact['error']}")
        if topology_file is None:
            topology = Topology(len(facts), 0, tuple(_machines(facts)))
        else:
            topology = Topology.from_file(topology_file, 0)
            if topology.world != len(facts):
                raise ConfigError(
                    f"{topology_file} has {topology.world} ranks, but WORLD_SIZE is {len(facts)}: start "
                    f"{topology.world} ranks"
                )
        own_gpu = [0 < (fact["local_world"] or len(facts)) <= fact["gpus"] for fact in facts]
        decision = topology.to_json() | {"gpu": all(own_gpu)}
        if all(own_gpu) and topology.links is None:
            decision["links"] = _links(topology, facts)
    except ConfigError as error:
        return {"error": str(error)}
    if any(own_gpu) and not all(own_gpu):
        without = [rank for rank, owns in enumerate(own_gpu) if not owns]
        warnings.warn(
            f"ranks {without} have no GPU of their own: all ranks exchange rows through host memory instead of NCCL",
            RuntimeWarning,
            stacklevel=2,
        )
    return decision


def _machines(facts: list[Facts]) -> list[tuple[int, ...]]:
    """Return the ranks of every machine. Machines may have different numbers of ranks."""
    machines, first = [], 0
    while first < len(facts):
        size = facts[first]["local_world"] or len(facts)
        for index, fact in enumerate(facts[first : first + size]):
            local_rank = index if fact["local_rank"] is None else fact["local_rank"]
            if (local_rank, fact["local_world"] or len(facts)) != (index, size) or first + size > len(facts):
                raise ConfigError(
                    f"rank {first + index} has LOCAL_RANK {fact['local_rank']} and LOCAL_WORLD_SIZE "
                    f"{fact['local_world']}, but rank {first} is the first of {size} ranks of a machine: number the "
                    "ranks of each machine consecutively, as torchrun does"
                )
        machines.append(tuple(range(first, first + size)))
        first += size
    return machines


def _links(topology: Topology, facts: list[Facts]) -> list[tuple[int, int]] | None:
    """Return the pairs of ranks of one node whose GPUs have a fast link; pairs of unknown GPUs count as linked."""
    known: dict[tuple[int, int], bool] = {}
    for machine in _machines(facts):
        pairs = facts[machine[0]]["gpu_links"]
        if pairs is not None:
            linked = {(machine[a], machine[b]) for a, b in pairs}
            known |= {(a, b): (a, b) in linked for a in machine for b in machine if a < b}
    if not known:
        return None
    return [(a, b) for node in topology.nodes for a in node for b in node if a < b and known.get((a, b), True)]


# ---- NUMA


def pci_bus_id(properties: Any) -> str:
    """Return the name of a GPU in /sys/bus/pci/devices, from torch's device properties."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def choose_numa(topology: Topology, nodes: dict[int, set[int]], gpu_node: int | None = None) -> int | None:
    """Return this rank's NUMA node: from the topology file, that of its GPU, or the machine's ranks in blocks.

    gpu_node   NUMA node of the GPU; None: there is no GPU, or the system does not state its node
    """
    if topology.numa is not None:
        return topology.numa[topology.rank]
    if len(nodes) < 2:
        return None
    if gpu_node in nodes:
        return gpu_node
    rank, world = machine_rank(topology), machine_world(topology)
    return list(nodes)[rank * len(nodes) // max(world, rank + 1)]


def bind_to_numa(topology: Topology, gpu: str | None = None, sysfs: Path = _SYSFS) -> set[int] | None:
    """Limit CPU affinity to the cores of this rank's NUMA node. Returns them, or None if affinity is unchanged.

    gpu   PCI address of this rank's GPU
    """
    nodes = numa_nodes(sysfs)
    chosen = choose_numa(topology, nodes, None if gpu is None else pci_numa_node(gpu, sysfs))
    if chosen is None or chosen not in nodes:
        return None
    cores = nodes[chosen] & os.sched_getaffinity(0)
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return cores
