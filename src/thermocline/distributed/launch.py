"""Set-up of one rank from torchrun's environment: topology, NUMA binding, GPU, process groups. `tc.join_ranks`.

Called on the main thread at start-up. Only `join_ranks` blocks: until all ranks have joined, at most `dist.timeout`
seconds, then it raises `RankError`. The module loads torch only in `join_ranks`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import thermocline
from thermocline.config.distributed import Dist
from thermocline.distributed.topology import Topology, nvlink_pairs

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

_NUMA_NODES = Path("/sys/devices/system/node")


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


def load_topology(dist: Dist) -> Topology:
    """Read the topology from the file of the config, or from torchrun's environment."""
    return Topology.from_env() if dist.topology is None else Topology.from_file(dist.topology)


def join_ranks(dist: Dist | None = None) -> Groups:
    """Join the job that torchrun started this process for; without torchrun, a job of one rank.

        with tc.join_ranks() as groups:
            table = tc.ShardedTable(16, tc.Adagrad(lr=0.1), groups=groups)

    Binds the process to its NUMA node and selects its GPU.
    """
    dist = Dist() if dist is None else dist
    topology = load_topology(dist)
    import torch

    from thermocline.distributed.communicator import Groups

    if dist.bind:
        bind_to_numa(topology)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(machine_rank(topology) % gpus)
    gpu_per_rank = 0 < machine_world(topology) <= gpus and topology.world > 1
    if gpu_per_rank and topology.links is None:
        topology = dataclasses.replace(topology, links=nvlink_pairs(topology.nodes[topology.node]))
    return Groups.make(topology, timeout=dist.timeout, gpu=gpu_per_rank)


def machine_rank(topology: Topology) -> int:
    """Return the index of this rank on its machine, which may host several nodes of a topology file."""
    return int(os.environ.get("LOCAL_RANK", topology.local_rank))


def machine_world(topology: Topology) -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(topology.nodes[topology.node])))


# ---- NUMA


def numa_nodes(folder: Path = _NUMA_NODES) -> dict[int, set[int]]:
    """Return the cores of each NUMA node of this machine; nodes without cores are left out."""
    nodes = {}
    for path in folder.glob("node[0-9]*"):
        try:
            cores = _parse_cores((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            nodes[int(path.name.removeprefix("node"))] = cores
    return dict(sorted(nodes.items()))


def _parse_cores(text: str) -> set[int]:
    """Parse a list of ranges: "0-3,8" is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def choose_numa(topology: Topology, nodes: dict[int, set[int]]) -> int | None:
    """Return this rank's NUMA node: from the topology file, or the machine's ranks divided into blocks."""
    if topology.numa is not None:
        return topology.numa[topology.rank]
    if len(nodes) < 2:
        return None
    rank, world = machine_rank(topology), machine_world(topology)
    return list(nodes)[rank * len(nodes) // max(world, rank + 1)]


def bind_to_numa(topology: Topology, folder: Path = _NUMA_NODES) -> set[int] | None:
    """Limit CPU affinity to the cores of this rank's NUMA node. Returns them, or None if affinity is unchanged."""
    nodes = numa_nodes(folder)
    chosen = choose_numa(topology, nodes)
    if chosen is None or chosen not in nodes:
        return None
    cores = nodes[chosen] & os.sched_getaffinity(0)
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return cores
