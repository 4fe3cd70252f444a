"""A rank finds its place: its nodes, its NUMA node, its GPU, its groups; as torchrun has started it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import thermocline
from thermocline.config.distributed import Dist
from thermocline.distributed.topology import Topology

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

_NUMA_NODES = Path("/sys/devices/system/node")


def leads() -> bool:
    """Whether this process is the one of its job that prints; before anything else is known."""
    return os.environ.get("RANK", "0") == "0"


def alone() -> bool:
    """Whether no launcher says that there are other ranks."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def restarted() -> bool:
    """Whether torchrun has started this job again after a rank was lost, as far as a rank can tell.

    With several machines only the one that lost the rank counts it, so any start of a job that may be restarted counts.
    """
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or (
        several and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    )


def child_environment() -> dict[str, str]:
    """For ranks that this process starts here: they import the same package, and have one torch thread each."""
    search = [str(Path(thermocline.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}


def first_to_say(words: str) -> bool:
    """Whether no other rank of this machine has said it yet: errors that all ranks have are told once.

    Ranks that torchrun started leave a mark in its folder of the job. Where it keeps none, everybody speaks.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return True
    mark = Path(place).parent.parent / f"thermocline-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def topology_of(dist: Dist) -> Topology:
    """As torchrun or the file of the config says."""
    return Topology.of_env() if dist.topology is None else Topology.of_file(dist.topology)


def join_ranks(dist: Dist | None = None) -> Groups:
    """The groups of the job that this process is a rank of: what torchrun has started; of one rank without it.

        with tc.join_ranks() as groups:
            table = tc.ShardedTable(16, tc.Adagrad(lr=0.1), groups=groups)

    The process gets its NUMA node and its GPU.
    """
    dist = Dist() if dist is None else dist
    topology = topology_of(dist)
    import torch

    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.relay import driver_links

    if dist.bind:
        bind_to_numa(topology)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(local_rank(topology) % gpus)
    own = 0 < local_world(topology) <= gpus and topology.world > 1
    if own and topology.links is None:
        topology = dataclasses.replace(topology, links=driver_links(topology.nodes[topology.node]))
    return Groups.make(topology, timeout=dist.timeout, gpu=own)


def local_rank(topology: Topology) -> int:
    """The number of this rank on its machine, which in a topology file may play several nodes."""
    return int(os.environ.get("LOCAL_RANK", topology.local))


def local_world(topology: Topology) -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(topology.nodes[topology.node])))


# ---- NUMA


def numa_nodes(folder: Path = _NUMA_NODES) -> dict[int, set[int]]:
    """The cores of each NUMA node of this machine that has any."""
    found = {}
    for path in folder.glob("node[0-9]*"):
        try:
            cores = _cores((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found[int(path.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def _cores(text: str) -> set[int]:
    """Of "0-3,8": 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def choose_numa(topology: Topology, nodes: dict[int, set[int]]) -> int | None:
    """Which NUMA node this rank runs on: the topology file's, or the ranks of a machine are dealt out in blocks."""
    if topology.numa is not None:
        return topology.numa[topology.rank]
    if len(nodes) < 2:
        return None
    local, world = local_rank(topology), local_world(topology)
    return list(nodes)[local * len(nodes) // max(world, local + 1)]


def bind_to_numa(topology: Topology, folder: Path = _NUMA_NODES) -> set[int] | None:
    """Runs this process on the cores of its NUMA node only, as far as it may use them; returns them, or none."""
    nodes = numa_nodes(folder)
    chosen = choose_numa(topology, nodes)
    if chosen is None or chosen not in nodes:
        return None
    cores = nodes[chosen] & os.sched_getaffinity(0)
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return cores
