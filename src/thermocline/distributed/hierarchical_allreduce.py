"""`HierarchicalAllReduce`: the mean of a buffer over all ranks, in a fixed order of additions unless `exact` is False.

If all nodes have the same number L > 1 of ranks: reduce-scatter within the node, all-reduce of each slice between
peers, all-gather within the node. Each rank then sends 1/L of the buffer between nodes. Otherwise one all-reduce over
all ranks.

A reduction is an all-to-all, additions in rank order and an all-gather: ranks of a node first, then nodes, left to
right in the buffer's dtype. Without `exact`, torch's collectives (reduce-scatter, all-reduce) add between nodes, and
within a node if NCCL carries its tensors. Both send the same number of bytes. The order never depends on whether shared
memory or Gloo carries a node's messages.

Thread     the training thread (`Groups.train`)
Blocks     until all ranks have called it, at most `dist.timeout` seconds
Raises     `RankError`
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from thermocline.distributed.communicator import GroupName, Groups

_AVERAGING = "averaging dense parameters"
Level = Literal["world", "node", "nodes"]


@dataclasses.dataclass(slots=True)
class DenseTraffic:
    """Bytes of dense parameters that this rank has sent, computed from the collectives' algorithms."""

    within: int = 0
    """To ranks of the same node."""
    between: int = 0
    """To other nodes."""


class HierarchicalAllReduce:
    """Averages buffers over all ranks in place. All ranks pass buffers of the same length, in the same order.

    level   "world": over all ranks. "node": over the ranks of this node. "nodes": over the nodes, whose ranks have
            equal buffers; each rank sends its slice to its peers, then the node gathers all slices. The last two
            require nodes of the same number of ranks
    """

    def __init__(self, groups: Groups, *, exact: bool, level: Level = "world") -> None:
        self.topology, self.exact, self.traffic = groups.topology, exact, DenseTraffic()
        self.level = level
        node = self.topology.nodes[self.topology.node]
        self.members = {"world": self.topology.world, "node": len(node), "nodes": len(self.topology.nodes)}[level]
        """Number of buffers in a mean."""
        self._comm = groups.train
        nodes = self.topology.nodes
        self._two_levels = self.topology.is_uniform and len(nodes) > 1 and len(nodes[0]) > 1

    @property
    def world(self) -> int:
        return self.topology.world

    def padded_length(self, length: int) -> int:
        """Round up to a multiple of the number of ranks, as `average` requires."""
        return -(-length // self.world) * self.world

    def average(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by its mean over all ranks, the node, or the nodes."""
        if self.members == 1:
            return
        if buffer.ndim != 1 or not buffer.is_contiguous() or len(buffer) % self.world:
            raise ValueError(
                f"buffer has shape {tuple(buffer.shape)}: it must be 1-D, contiguous and a multiple of "
                f"{self.world} ranks long"
            )
        with self._comm.translate_errors(_AVERAGING), self._staged(buffer) as staged:
            self._average(staged)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by rank 0's."""
        with self._staged(buffer) as staged:
            self._comm.broadcast(staged, "broadcasting dense parameters")

    @contextlib.contextmanager
    def _staged(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the buffer, or a host copy, written back afterwards, if the collectives cannot carry GPU tensors."""
        if buffer.is_cpu or self._comm.gpu:
            yield buffer
        else:
            host = buffer.cpu()
            yield host
            buffer.copy_(host)

    def _average(self, buffer: torch.Tensor) -> None:
        topology = self.topology
        node, peers = topology.nodes[topology.node], topology.peers
        if self.level == "node":
            self._all_reduce(buffer, node, "node", [range(len(node))])
            buffer *= 1 / len(node)
        elif self.level == "nodes":
            part = buffer.view(len(node), -1)[topology.local_rank].clone()
            self._all_reduce(part, peers, "peers", [[n] for n in range(len(peers))])
            part *= 1 / len(peers)
            if len(node) == 1:
                buffer.copy_(part)
            else:
                self._all_gather(buffer, part, node, "node")
        elif self._two_levels:
            part = self._reduce_scatter(buffer, node, "node")
            self._all_reduce(part, peers, "peers", [[n] for n in range(len(peers))])
            part *= 1 / self.world
            self._all_gather(buffer, part, node, "node")
        else:
            group: GroupName = "node" if len(topology.nodes) == 1 else "world"
            self._all_reduce(buffer, range(self.world), group, topology.nodes)
            buffer *= 1 / self.world

    def _is_ordered(self, group: GroupName) -> bool:
        """Return whether sums use the fixed order. Within a node, except with NCCL, it is also the fastest."""
        return self.exact or (group == "node" and not self._comm.gpu)

    def _all_reduce(
        self, buffer: torch.Tensor, ranks: Sequence[int], group: GroupName, tree: Sequence[Sequence[int]]
    ) -> None:
        """Sum in place. `tree` lists the positions in the group that are added first."""
        if self._is_ordered(group):
            part = self._ordered_reduce_scatter(buffer, ranks, group, tree)
            self._all_gather(buffer, part, ranks, group)
        else:
            self._comm.group(group).all_reduce(buffer)
            self._count(ranks, 2 * buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=True)

    def _reduce_scatter(self, buffer: torch.Tensor, ranks: Sequence[int], group: GroupName) -> torch.Tensor:
        """Return this rank's slice of the group's sum."""
        if self._is_ordered(group):
            return self._ordered_reduce_scatter(buffer, ranks, group, [range(len(ranks))])
        part = buffer.new_empty(len(buffer) // len(ranks))
        self._comm.group(group).reduce_scatter_single(part, buffer)
        self._count(ranks, buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=True)
        return part

    def _ordered_reduce_scatter(
        self, buffer: torch.Tensor, ranks: Sequence[int], group: GroupName, tree: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Return this rank's slice of the group's sum, added in the order of `tree`."""
        sizes = [buffer.nbytes // len(ranks)] * len(ranks)
        pieces = self._comm.all_to_all(group, buffer.view(torch.uint8), sizes, sizes, _AVERAGING)
        self._count(ranks, buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=False)
        return tree_sum([piece.view(buffer.dtype) for piece in pieces], tree)

    def _all_gather(self, buffer: torch.Tensor, part: torch.Tensor, ranks: Sequence[int], group: GroupName) -> None:
        if self._comm.uses_shm(group):
            pieces = self._comm.all_gather_bytes(part.view(torch.uint8), _AVERAGING)
            for target, piece in zip(torch.split(buffer, len(part)), pieces, strict=True):
                target.copy_(piece.view(buffer.dtype))
        else:
            self._comm.group(group).all_gather_single(buffer, part)
        self._count(ranks, part.nbytes * (len(ranks) - 1), ring=True)

    def _count(self, ranks: Sequence[int], sent: int, *, ring: bool) -> None:
        """Add `sent` bytes: all to the next rank (ring), or the same share to every other rank."""
        node = self.topology.nodes[self.topology.node]
        if ring:
            receivers = [ranks[(ranks.index(self.topology.rank) + 1) % len(ranks)]]
        else:
            receivers = [rank for rank in ranks if rank != self.topology.rank]
        within = sent * sum(rank in node for rank in receivers) // len(receivers)
        self.traffic.within += within
        self.traffic.between += sent - within


def tree_sum(rows: torch.Tensor | Sequence[torch.Tensor], tree: Sequence[Sequence[int]]) -> torch.Tensor:
    """Add the rows of each node left to right, then the nodes' sums left to right.

    Every sum over ranks uses this order, so that results equal those of one process bit for bit.
    """
    total: torch.Tensor | None = None
    for node in tree:
        partial = rows[node[0]].clone()
        for n in node[1:]:
            partial += rows[n]
        total = partial if total is None else total.add_(partial)
    assert total is not None
    return total


class FlatBuffer:
    """One contiguous buffer with a view for each of several tensors of one device."""

    def __init__(self, tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce, *, extra: int = 0) -> None:
        """Allocate `extra` elements, then the views. The dtype is float32, or float64 if any tensor's is."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"dense parameters are on {sorted(map(str, devices))}: they must be on one device")
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        sizes = [tensor.numel() for tensor in tensors]
        length = allreduce.padded_length(extra + sum(sizes))
        self.buffer = torch.zeros(length, dtype=dtype, device=tensors[0].device)
        self.extra = self.buffer[:extra]
        flat = torch.split(self.buffer[extra : extra + sum(sizes)], sizes)
        self.views = [view.view(tensor.shape) for view, tensor in zip(flat, tensors, strict=True)]

    def copy_from(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.views, list(tensors))

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(tensors), self.views)
