"""Set-up of a job's process groups and shared memory: which are needed, and whether the open files suffice.

Collective: all ranks call the functions in the same order, with the same arguments.

Thread     the thread that calls `Groups.make`
Blocks     until every rank has made the same call, at most the timeout
Raises     `RankError` if a rank is missing; `ConfigError` on every rank if one may open too few files
"""

from __future__ import annotations

import datetime
import os
import resource
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from thermocline.distributed.heartbeat import Heartbeat
from thermocline.distributed.rendezvous import decide_json, gather_json, joining_errors, scoped_store
from thermocline.distributed.shm_transport import ShmTransport, make_transports
from thermocline.distributed.topology import Topology
from thermocline.distributed.torch_group import TorchGroup
from thermocline.errors import ConfigError

_SPARE_FILES = 64
"""Open files of a rank beside connections and stores (`store_files`): data, logs. Of torchrun: connections of its other
machines."""
_STORE_CONNECTIONS = 2
"""Connections of a rank to the rendezvous store: its own and that of its heartbeat."""


class Channels(NamedTuple):
    """Transports of one communicator; see `Communicator` for the groups that are None."""

    world: TorchGroup | None
    node: TorchGroup | None
    peers: TorchGroup | None
    shm: ShmTransport | None


def open_store(rank: int, world: int, timeout: float) -> Any:
    """Return the store of this restart attempt: torch's default store, or the one of torchrun's environment.

    Collective. Raises `RankError` if a rank is missing, `ConfigError` on every rank if the store's process may open too
    few files.
    """
    problem = _allow_store_connections(world) if rank == 0 else None
    with joining_errors(rank):
        if dist.is_initialized():
            base = dist.distributed_c10d._get_default_store()
        else:
            base, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))  # type: ignore[attr-defined]
        store = scoped_store(base, rank, world, timeout)
    problem = decide_json(store, "files of the store", rank, world, None, lambda _: problem, timeout)
    if problem is not None:
        raise ConfigError(problem)
    return store


def _allow_store_connections(world: int) -> str | None:
    """Raise the soft limit of open files of the process that hosts the rendezvous store, up to its hard limit.

    Only for rank 0, before ranks open their second connections: the store is in its parent, torchrun, or in rank 0
    itself. Returns the problem if the connections alone exceed the hard limit. Between that number and `needed` the job
    may run: some connections may be open and counted already, or the store may be in another process.
    """
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.getppid() if by_torchrun else os.getpid()
    try:
        needed = len(os.listdir(f"/proc/{host}/fd")) + _STORE_CONNECTIONS * world + _SPARE_FILES
        hard = _raise_file_limit(host, needed)
    except (OSError, ValueError):  # a process of another user or container: its limit stays as it is
        return None
    if hard is None or _STORE_CONNECTIONS * world <= hard:
        return None
    name = "torchrun" if by_torchrun else "rank 0"
    return (
        f"{name} (process {host}) hosts the rendezvous store and needs up to {needed} open files for {world} ranks, "
        f"its limit is {hard}: raise the limit of open files (ulimit -n {needed}) before it starts"
    )


def _raise_file_limit(process: int, needed: int) -> int | None:
    """Raise the soft limit of open files of a process to `needed`. Returns the hard limit if that is lower."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    resource.prlimit(process, resource.RLIMIT_NOFILE, (needed if enough else hard, hard))
    return None if enough else hard


def initialize_torch(topology: Topology, store: Any, timeout: float, gpu: bool) -> None:
    """Initialize torch.distributed. `store` is the result of `open_store`, or None for a job of one rank."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a pair of ranks connects when it first communicates
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        store=dist.HashStore() if store is None else store,  # type: ignore[attr-defined]
        rank=topology.rank,
        world_size=topology.world,
    )


def make_channels(
    topology: Topology,
    store: Any,
    heartbeat: Heartbeat,
    names: Sequence[str],
    nccl: str | None,
    *,
    shared: bool,
    owns_torch: bool,
) -> list[Channels]:
    """Create the channels of the named communicators. The first one also serves nodes that relay messages.

    nccl         name of the communicator that carries GPU tensors
    shared       whether ranks of a node use shared memory for CPU tensors, where the system supports it
    owns_torch   whether torch's default group may be used
    """
    every_node = set(range(len(topology.nodes)))
    transports: list[ShmTransport] | None = None
    without_shm = every_node
    if shared and topology.world > 1:
        transports, causes = make_transports(store, topology, len(names), heartbeat)
        without_shm = {node for node, cause in enumerate(causes) if cause is not None}
    over_torch = dict.fromkeys(names, without_shm)
    over_torch[names[0]] = without_shm | topology.relaying_nodes
    if nccl is not None:
        over_torch[nccl] = every_node
    plans = {name: _needed_groups(topology, nodes) for name, nodes in over_torch.items()}
    if topology.world > 1:
        _require_files(topology, store, heartbeat.timeout, plans.values())
    channels = []
    for number, (name, needed) in enumerate(plans.items()):
        made: dict[tuple[int, ...], TorchGroup] = {}
        for ranks in needed:
            if owns_torch and number == 0 and len(ranks) == topology.world:
                process_group: Any = dist.group.WORLD
            else:
                process_group = dist.new_group(
                    list(ranks),
                    timeout=datetime.timedelta(seconds=heartbeat.timeout),
                    backend="cpu:gloo,cuda:nccl" if name == nccl else "gloo",
                )
            if topology.rank in ranks:
                made[ranks] = TorchGroup(process_group, heartbeat)
        shm = transports[number] if transports else None
        if shm is not None and topology.node in over_torch[name]:
            shm.close()
            shm = None
        world, node = tuple(range(topology.world)), topology.nodes[topology.node]
        channels.append(Channels(made.get(world), made.get(node), made.get(topology.peers), shm))
    return channels


def _needed_groups(topology: Topology, over_torch: set[int]) -> list[tuple[int, ...]]:
    """Return the ranks of the process groups that a communicator needs, the same on all ranks.

    over_torch   nodes whose ranks send messages to each other through torch
    """
    nodes = topology.nodes
    needed = []
    if over_torch or len(nodes) > 1:
        needed.append(tuple(range(topology.world)))
    if topology.is_uniform and len(nodes) > 1:
        needed += [tuple(ranks[i] for ranks in nodes) for i in range(len(nodes[0]))]
    needed += [nodes[number] for number in sorted(over_torch)]
    return [ranks for ranks in dict.fromkeys(needed) if len(ranks) > 1]


def _require_files(topology: Topology, store: Any, timeout: float, plans: Iterable[list[tuple[int, ...]]]) -> None:
    """Raise `ConfigError` on every rank if the open files of one are limited to less than all its connections need.

    Raises this process's soft limit first, up to its hard limit.
    """
    connections = sum(len(ranks) - 1 for plan in plans for ranks in plan if topology.rank in ranks)
    needed = len(os.listdir("/proc/self/fd")) + connections + _SPARE_FILES
    hard = _raise_file_limit(os.getpid(), needed)
    problem = None
    if hard is not None:
        problem = (
            f"rank {topology.rank} of {topology.world} needs up to {needed} open files, its limit is {hard}: "
            f"raise the limit of open files (ulimit -n {needed})"
        )
    problems = gather_json(store, "open files", topology.rank, topology.world, problem, timeout)
    for problem in problems:
        if problem is not None:
            raise ConfigError(problem)
