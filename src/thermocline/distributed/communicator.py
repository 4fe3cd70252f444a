"""`Groups`: the process groups of a job. `Communicator`: the process groups of one thread, with error translation.

Collectives of two threads must not interleave on one process group, so `Groups` has three communicators:

    train   training thread: rows, gradients, dense parameters, checkpoints, metrics
    ahead   exchange thread of a training pipeline: keys of later batches, number of remaining batches
    read    pull thread of an evaluation pipeline, or the caller of `ShardedTable.read` while none is open

Each communicator spans three groups: "world" (all ranks), "node" (the ranks of one node) and "peers" (the ranks of
equal local rank, one per node). Gloo carries CPU tensors between nodes, shared memory carries them within a node, and
NCCL carries GPU tensors of the train communicator if every rank has its own GPU.

Blocks     every collective waits for the other ranks of its group, at most `timeout` seconds
Raises     `RankError` if another rank exited or timed out
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from thermocline.distributed import messages
from thermocline.distributed.link_relay import relayed_all_to_all
from thermocline.distributed.messages import Buffer
from thermocline.distributed.rendezvous import scoped_store
from thermocline.distributed.shm_transport import ShmTransport
from thermocline.distributed.topology import Topology
from thermocline.errors import RankError

Group = Any  # torch.distributed.ProcessGroup
GroupName = Literal["world", "node", "peers"]


@dataclasses.dataclass(slots=True)
class Communicator:
    """The process groups of one thread.

    `doing` names a collective for error messages, as a participle: "exchanging keys".
    """

    name: str
    topology: Topology
    timeout: float
    world: Group
    node: Group
    peers: Group
    gpu: bool
    """Whether the groups carry GPU tensors; otherwise these are copied through host memory."""
    relays: bool = False
    """Whether some pairs of the node have no fast link and send through a third rank (`link_relay`)."""
    shm: ShmTransport | None = None
    """Shared memory of the node group; None: it uses Gloo or NCCL like the other groups."""
    relayed_bytes: int = 0
    """Bytes that this rank has forwarded for other pairs."""
    user: int | None = None
    """Ident of the pipeline thread that uses it, -1 if a pipeline has claimed it and is idle, None if it is free."""

    def claim(self) -> None:
        """Reserve it for one pipeline: two pipelines would interleave their collectives."""
        if self.user is not None:
            raise RuntimeError(
                "another pipeline over these ranks is still open: close it first, or use it in a `with` statement"
            )
        self.user = -1

    def require_free(self) -> None:
        """Raise RuntimeError if a pipeline of another thread has claimed it."""
        if self.user not in (None, threading.get_ident()):
            raise RuntimeError(
                "an evaluation pipeline over these ranks is open: close it before reading rows outside of it"
            )

    def uses_shm(self, group: GroupName) -> bool:
        """Return whether the ranks of a group communicate through shared memory."""
        return group == "node" and self.shm is not None

    def send_buffer(self, group: GroupName, size: int, device: torch.device) -> torch.Tensor:
        """Return uint8[size] that the next `all_to_all` of the group sends without a further copy."""
        if self.uses_shm(group) and device.type == "cpu":
            assert self.shm is not None
            return self.shm.send_buffer(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def all_to_all(
        self, group: GroupName, message: torch.Tensor, send: list[int], receive: list[int] | None, doing: str
    ) -> list[torch.Tensor]:
        """Return the message of every rank of the group for this one, in group order. Valid until the next call.

        message   uint8: the messages for all ranks, concatenated
        send      bytes for each rank
        receive   bytes from each rank; None: the sizes are exchanged first
        """
        if len(send) == 1:
            return [message]
        device = message.device
        if not self.gpu:
            message = message.cpu()
        with self.translate_errors(doing):
            if self.uses_shm(group):
                ends = np.cumsum(send).tolist()
                spans = [(end - size, end) for end, size in zip(ends, send, strict=True)]
                pieces = self._shm_exchange(message, spans)
                if receive is not None:
                    _check_sizes(pieces, receive)
            else:
                pieces = self._torch_all_to_all(group, message, send, receive)
        return [piece.to(device) for piece in pieces]

    def all_gather_bytes(self, message: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """Return the uint8 messages of all ranks of the node, through shared memory. Valid until the next call.

        All ranks must send the same number of bytes.
        """
        ranks = len(self.topology.nodes[self.topology.node])
        with self.translate_errors(doing):
            pieces = self._shm_exchange(message, [(0, len(message))] * ranks)
            _check_sizes(pieces, [len(message)] * ranks)
        return pieces

    def _shm_exchange(self, message: torch.Tensor, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        assert self.shm is not None
        buffer = self.shm.send_buffer(len(message))
        if buffer.data_ptr() != message.data_ptr():
            buffer.copy_(message)
        return self.shm.exchange(len(message), spans, self.timeout)

    def _torch_all_to_all(
        self, group: GroupName, message: torch.Tensor, send: list[int], receive: list[int] | None
    ) -> list[torch.Tensor]:
        process_group = getattr(self, group)

        def exchange(values: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
            received = values.new_empty((sum(receives), *values.shape[1:]))
            dist.all_to_all_single(received, values.contiguous(), receives, sends, group=process_group)
            return received

        if receive is None:
            ones = [1] * len(send)
            receive = exchange(torch.tensor(send, device=message.device), ones, ones).tolist()
        if group == "node" and self.relays:
            sizes = torch.tensor(send)
            pairs = [torch.empty_like(sizes) for _ in send]
            dist.all_gather(pairs, sizes, group=process_group)
            received, forwarded = relayed_all_to_all(self.topology, message, [row.tolist() for row in pairs], exchange)
            self.relayed_bytes += forwarded
        else:
            received = exchange(message, send, receive)
        return list(torch.split(received, receive))

    def all_gather(self, values: np.ndarray[Any, Any], doing: str) -> np.ndarray[Any, Any]:
        """Return [world, ...]: a small array of every rank. All ranks pass the same shape."""
        if self.topology.world == 1:
            return values[None]
        local = torch.from_numpy(np.ascontiguousarray(values))
        if self.shm is not None and len(self.topology.nodes) == 1:
            pieces = self.all_gather_bytes(local.reshape(-1).view(torch.uint8), doing)
            return torch.stack(pieces).view(local.dtype).view(len(pieces), *local.shape).numpy()
        gathered = local.new_empty((self.topology.world, *local.shape))
        with self.translate_errors(doing):
            dist.all_gather(list(gathered.unbind()), local, group=self.world)
        return gathered.numpy()

    def all_gather_message(self, message: Buffer, doing: str) -> list[Buffer]:
        """Return the messages of all ranks, by rank: `messages.encode` makes them, `messages.decode` reads them."""
        if self.topology.world == 1:
            return [message]
        with self.translate_errors(doing):
            return [*messages.all_gather_message(self.world, message)]

    def gather_message(self, message: Buffer, doing: str) -> list[Buffer]:
        """Return the messages of all ranks on rank 0, by rank; the other ranks send theirs and return []."""
        if self.topology.world == 1:
            return [message]
        with self.translate_errors(doing):
            return [*messages.gather_message(self.world, message)]

    def broadcast_message(self, message: Buffer | None, doing: str) -> Buffer:
        """Return rank 0's message on every rank; the other ranks pass None. A rank receives it once."""
        if self.topology.world == 1:
            assert message is not None
            return message
        with self.translate_errors(doing):
            return messages.broadcast_message(self.world, message)

    def barrier(self, doing: str) -> None:
        """Wait until every rank has called it."""
        self.all_gather(np.zeros(1, np.int64), doing)

    @contextlib.contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Re-raise RuntimeErrors of torch.distributed, which name a socket, as `RankError`."""
        try:
            yield
        except RuntimeError as error:
            t = self.topology
            raise RankError(
                f"rank {t.rank} of {t.world} (node {t.node}) cannot continue: another rank exited or did not answer "
                f"within {self.timeout:g} s (dist.timeout) while {doing}. See the error of the rank that exited first; "
                f"a restart resumes from the last checkpoint. Cause: {str(error).splitlines()[0]}"
            ) from error


def _check_sizes(pieces: list[torch.Tensor], expected: list[int]) -> None:
    sizes = [len(piece) for piece in pieces]
    if sizes != expected:
        raise RuntimeError(f"size mismatch: got {sizes} bytes, expected {expected}; ranks called different collectives")


class Groups:
    """All communicators of a job. Every rank creates it at the same time.

    `world`, `node` and `peers` are the process groups of the train communicator.
    """

    def __init__(
        self, topology: Topology, communicators: dict[str, Communicator], timeout: float, owns_torch: bool
    ) -> None:
        self.topology = topology
        self.timeout = timeout
        self.train, self.ahead, self.read = (communicators[name] for name in ("train", "ahead", "read"))
        self.world, self.node, self.peers = self.train.world, self.train.node, self.train.peers
        self._owns_torch = owns_torch

    @classmethod
    def make(cls, topology: Topology, *, timeout: float = 300.0, gpu: bool = False, shared: bool = True) -> Self:
        """Create all process groups. Collective: all ranks call it once.

        Initializes torch.distributed from torchrun's environment if it is not initialized; `close` then destroys it.

        timeout   seconds that any collective waits for other ranks
        gpu       whether every rank has its own GPU, so that NCCL can carry rows
        shared    whether ranks of a node use shared memory for CPU tensors, where the system supports it
        """
        owns_torch = not dist.is_initialized()
        try:
            if owns_torch:
                _initialize_torch(topology, timeout, gpu)
            return cls._make(topology, timeout, gpu, shared, owns_torch)
        except BaseException:
            if owns_torch and dist.is_initialized():
                dist.destroy_process_group()
            raise

    @classmethod
    def _make(cls, topology: Topology, timeout: float, gpu: bool, shared: bool, owns_torch: bool) -> Self:
        if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.world):
            raise RankError(
                f"rank mismatch: torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}, the topology "
                f"has rank {topology.rank} of {topology.world}"
            )
        world, node = tuple(range(topology.world)), topology.nodes[topology.node]
        largest = max(len(ranks) for ranks in topology.nodes)
        all_peers = [tuple(ranks[i] for ranks in topology.nodes if i < len(ranks)) for i in range(largest)]
        communicators = {}
        for name in ("train", "ahead", "read"):
            nccl, relays = gpu and name == "train", name == "train" and topology.needs_relay
            process_groups: dict[tuple[int, ...], Group] = {}
            for ranks in (world, *topology.nodes, *all_peers):
                if ranks not in process_groups:
                    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
                    wait = datetime.timedelta(seconds=timeout)
                    process_groups[ranks] = dist.new_group(list(ranks), timeout=wait, backend=backend)
            shm = None
            if shared and len(node) > 1 and not nccl and not relays:
                shm = ShmTransport.make(process_groups[node], node, topology.rank)
            communicators[name] = Communicator(
                name,
                topology,
                timeout,
                process_groups[world],
                process_groups[node],
                process_groups[topology.peers],
                nccl,
                relays,
                shm,
            )
        return cls(topology, communicators, timeout, owns_torch)

    def close(self, *, failed: bool = False) -> None:
        """Close shared memory, and destroy torch.distributed if `make` initialized it.

        failed   aborts NCCL instead of waiting for collectives that other ranks may never join
        """
        for comm in (self.train, self.ahead, self.read):
            if comm.shm is not None:
                comm.shm.close()  # it stays set: a pipeline that still has the communicator raises instead of waiting
        if self._owns_torch and dist.is_initialized():
            self._owns_torch = False
            if failed and self.train.gpu:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def _initialize_torch(topology: Topology, timeout: float, gpu: bool) -> None:
    wait = datetime.timedelta(seconds=timeout)
    if topology.world == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        base, _, _ = next(dist.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
        store = scoped_store(base, topology.rank, topology.world, timeout)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, timeout=wait, store=store, rank=topology.rank, world_size=topology.world)
