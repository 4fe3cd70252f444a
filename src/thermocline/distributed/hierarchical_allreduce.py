"""The mean over all ranks of one buffer: in one fixed order of sums if asked to, and with the bytes it sent counted.

Where nodes have several ranks, equally many, a buffer is first reduced inside the node, so that every rank holds the
node's sum of one slice; slices are reduced between the ranks of equal index; then handed round inside the node. So only
1/L of the buffer crosses the slow link per rank. Elsewhere one reduction over all ranks.

A reduction is torch's (reduce-scatter, all-reduce), or, if `exact` or through shared memory, all-to-all, sums in index
order, all-gather: the ranks of a node first, then the nodes, left to right in the buffer's precision. Both send as many
bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thermocline.distributed.communicator import Groups, Over

# torch 2.13 has new names for them, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_DOING = "averaged dense parameters"


@dataclasses.dataclass(slots=True)
class Sent:
    """Bytes this rank has sent, as its collectives need them: to ranks of its own node, and to other nodes."""

    within: int = 0
    between: int = 0


class Mean:
    """Averages buffers over all ranks, in place. All ranks call it with buffers of the same length, in one order."""

    def __init__(self, groups: Groups, *, exact: bool) -> None:
        self.topology, self.exact, self.sent = groups.topology, exact, Sent()
        self._comm = groups.train
        nodes = self.topology.nodes
        self._two_levels = self.topology.even and len(nodes) > 1 and len(nodes[0]) > 1

    @property
    def world(self) -> int:
        return self.topology.world

    def padded(self, length: int) -> int:
        """The next length that can be averaged: a multiple of the number of ranks."""
        return -(-length // self.world) * self.world

    def __call__(self, buffer: torch.Tensor) -> None:
        if self.world == 1:
            return
        if buffer.ndim != 1 or not buffer.is_contiguous() or len(buffer) % self.world:
            raise ValueError(f"a buffer to average is flat and a multiple of {self.world} long, not {buffer.shape}")
        with self._comm.translate_errors(_DOING), self._carried(buffer) as carried:
            self._average(carried)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Rank 0's to all, in place."""
        with self._comm.translate_errors("took over rank 0's dense parameters"), self._carried(buffer) as carried:
            dist.broadcast(carried, 0, group=self._comm.world)

    @contextlib.contextmanager
    def _carried(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """The buffer, or a copy in host memory for as long as collectives that carry no GPU tensors need one."""
        if buffer.is_cpu or self._comm.gpu:
            yield buffer
        else:
            host = buffer.cpu()
            yield host
            buffer.copy_(host)

    def _average(self, buffer: torch.Tensor) -> None:
        topology = self.topology
        if self._two_levels:
            mine, peers = topology.nodes[topology.node], topology.peers
            part = self._scattered_sum(buffer, mine, "node")
            self._sum(part, peers, "peers", [[n] for n in range(len(peers))])
            part *= 1 / self.world
            self._gather(buffer, part, mine, "node")
        else:
            over: Over = "node" if len(topology.nodes) == 1 else "world"
            self._sum(buffer, range(self.world), over, topology.nodes)
            buffer *= 1 / self.world

    def _ordered(self, over: Over) -> bool:
        """Through shared memory the exact way is also the short one."""
        return self.exact or self._comm.shares(over)

    def _sum(self, buffer: torch.Tensor, ranks: Sequence[int], over: Over, tree: Sequence[Sequence[int]]) -> None:
        """In place; `tree` says which positions of the group are added first."""
        if self._ordered(over):
            part = self._ordered_sum(buffer, ranks, over, tree)
            self._gather(buffer, part, ranks, over)
        else:
            dist.all_reduce(buffer, group=getattr(self._comm, over))
            self._count(ranks, 2 * buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=True)

    def _scattered_sum(self, buffer: torch.Tensor, ranks: Sequence[int], over: Over) -> torch.Tensor:
        """This rank's slice of the group's sum."""
        if self._ordered(over):
            return self._ordered_sum(buffer, ranks, over, [range(len(ranks))])
        part = buffer.new_empty(len(buffer) // len(ranks))
        _reduce_scatter(part, buffer, group=getattr(self._comm, over))
        self._count(ranks, buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=True)
        return part

    def _ordered_sum(
        self, buffer: torch.Tensor, ranks: Sequence[int], over: Over, tree: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """This rank's slice of the group's sum, added in the order of `tree`."""
        sizes = [buffer.nbytes // len(ranks)] * len(ranks)
        pieces = self._comm.all_to_all(over, buffer.view(torch.uint8), sizes, sizes, _DOING)
        self._count(ranks, buffer.nbytes * (len(ranks) - 1) // len(ranks), ring=False)
        return tree_sum([piece.view(buffer.dtype) for piece in pieces], tree)

    def _gather(self, buffer: torch.Tensor, part: torch.Tensor, ranks: Sequence[int], over: Over) -> None:
        if self._comm.shares(over):
            pieces = self._comm.all_gather_bytes(part.view(torch.uint8), _DOING)
            for own, piece in zip(torch.split(buffer, len(part)), pieces, strict=True):
                own.copy_(piece.view(buffer.dtype))
        else:
            _all_gather(buffer, part, group=getattr(self._comm, over))
        self._count(ranks, part.nbytes * (len(ranks) - 1), ring=True)

    def _count(self, ranks: Sequence[int], sent: int, *, ring: bool) -> None:
        """`sent` bytes went to the next of the ranks (ring) or to all others alike."""
        mine = self.topology.nodes[self.topology.node]
        if ring:
            others = [ranks[(ranks.index(self.topology.rank) + 1) % len(ranks)]]
        else:
            others = [rank for rank in ranks if rank != self.topology.rank]
        within = sent * sum(rank in mine for rank in others) // len(others)
        self.sent.within += within
        self.sent.between += sent - within


def tree_sum(rows: torch.Tensor | Sequence[torch.Tensor], tree: Sequence[Sequence[int]]) -> torch.Tensor:
    """The rows of every node added left to right, then the nodes' sums left to right: the one order of this project."""
    total: torch.Tensor | None = None
    for node in tree:
        partial = rows[node[0]].clone()
        for n in node[1:]:
            partial += rows[n]
        total = partial if total is None else total.add_(partial)
    assert total is not None
    return total


class Flat:
    """Tensors of given lengths as one contiguous buffer, for one device. Views begin where the one before ends."""

    def __init__(self, likes: Sequence[torch.Tensor], mean: Mean, *, extra: int = 0) -> None:
        """`extra` elements lie in front. The buffer is float32, or float64 if any tensor is."""
        devices = {like.device for like in likes}
        if len(devices) != 1:
            raise ValueError(f"dense parameters lie on {sorted(map(str, devices))}: they must be on one device")
        dtype = torch.float64 if any(like.dtype == torch.float64 for like in likes) else torch.float32
        sizes = [like.numel() for like in likes]
        length = mean.padded(extra + sum(sizes))
        self.buffer = torch.zeros(length, dtype=dtype, device=likes[0].device)
        self.extra = self.buffer[:extra]
        flat = torch.split(self.buffer[extra : extra + sum(sizes)], sizes)
        self.views = [view.view(like.shape) for view, like in zip(flat, likes, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.views, list(tensors))

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(tensors), self.views)
