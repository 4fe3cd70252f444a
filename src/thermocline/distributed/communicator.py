"""Process groups, made once: all ranks, those of a node, those of equal number; a set of them per thread.

Collectives of two threads must not mix on one group, so each thread that talks to other ranks has a comm: training,
planning ahead of it, reading for evaluation. Gloo carries CPU tensors between nodes, shared memory within one; NCCL
those of GPUs, where every rank has one of its own. Whoever waits for a rank that is gone gets `RankError`, at once or
after `timeout`.
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

from thermocline.distributed.relay import relayed
from thermocline.distributed.rendezvous import meet
from thermocline.distributed.shm_transport import ShmTransport
from thermocline.distributed.topology import Topology
from thermocline.errors import RankError

Group = Any  # torch.distributed.ProcessGroup
Over = Literal["world", "node", "peers"]


@dataclasses.dataclass(slots=True)
class Communicator:
    """The groups of one thread."""

    name: str
    topology: Topology
    timeout: float
    world: Group
    node: Group
    peers: Group
    gpu: bool
    """Whether its groups carry GPU tensors; otherwise they go through host memory."""
    relays: bool = False
    """Whether some pairs of the node have no fast link: what they send each other goes through a third."""
    box: ShmTransport | None = None
    """Where the ranks of the node share memory: what they send each other there."""
    carried: int = 0
    """Bytes that this rank has passed on for such pairs."""
    user: int | None = None
    """The thread of a pipeline that is using it; -1: one has it, and is not using it now; none: it is free."""

    def claim(self) -> None:
        """For a pipeline: two at once would mix up what they send."""
        if self.user is not None:
            raise RuntimeError(
                "another pipeline over these ranks is still open: close it first, or use it in a `with` statement"
            )
        self.user = -1

    def require_free(self) -> None:
        """That no pipeline has it but the one whose thread this is."""
        if self.user not in (None, threading.get_ident()):
            raise RuntimeError("a pipeline that evaluates over these ranks is open: rows cannot be read beside it")

    def shares(self, over: Over) -> bool:
        """Whether the ranks of a group talk through shared memory."""
        return self._box_of(over) is not None

    def _box_of(self, over: Over) -> ShmTransport | None:
        return self.box if over == "node" else None

    def send_buffer(self, over: Over, size: int, device: torch.device) -> torch.Tensor:
        """uint8[size]: a message for `swap` to be put together in, without a further copy."""
        box = self._box_of(over)
        if box is not None and device.type == "cpu":
            return box.room(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def all_to_all(
        self, over: Over, message: torch.Tensor, send: list[int], receive: list[int] | None, what: str
    ) -> list[torch.Tensor]:
        """What every rank of a group has for this one, in their order: to be read before the next call.

        message   uint8: what each rank is to get, one after the other
        send      bytes for each
        receive   bytes from each, if they are known
        """
        if len(send) == 1:
            return [message]
        device = message.device
        if not self.gpu:
            message = message.cpu()
        with self.translate_errors(what):
            if self.shares(over):
                ends = np.cumsum(send).tolist()
                found = self._through_box(message, [(end - size, end) for end, size in zip(ends, send, strict=True)])
                if receive is not None:
                    _require_sizes(found, receive)
            else:
                found = self._all_to_all(over, message, send, receive)
        return [piece.to(device) for piece in found]

    def all_gather_bytes(self, message: torch.Tensor, what: str) -> list[torch.Tensor]:
        """uint8: every rank's message, equally large everywhere, to all of its node, through shared memory.

        To be read before the next call.
        """
        ranks = len(self.topology.nodes[self.topology.node])
        with self.translate_errors(what):
            found = self._through_box(message, [(0, len(message))] * ranks)
            _require_sizes(found, [len(message)] * ranks)
        return found

    def _through_box(self, message: torch.Tensor, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        assert self.box is not None
        room = self.box.room(len(message))
        if room.data_ptr() != message.data_ptr():
            room.copy_(message)
        return self.box.swap(len(message), spans, self.timeout)

    def _all_to_all(
        self, over: Over, message: torch.Tensor, send: list[int], receive: list[int] | None
    ) -> list[torch.Tensor]:
        group = getattr(self, over)

        def exchange(out: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
            found = out.new_empty((sum(receives), *out.shape[1:]))
            dist.all_to_all_single(found, out.contiguous(), receives, sends, group=group)
            return found

        if receive is None:
            ones = [1] * len(send)
            receive = exchange(torch.tensor(send, device=message.device), ones, ones).tolist()
        if over == "node" and self.relays:
            sizes = torch.tensor(send)
            pairs = [torch.empty_like(sizes) for _ in send]
            dist.all_gather(pairs, sizes, group=group)
            found, carried = relayed(self.topology, message, [row.tolist() for row in pairs], exchange)
            self.carried += carried
        else:
            found = exchange(message, send, receive)
        return list(torch.split(found, receive))

    def all_gather(self, values: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
        """[world, ...]: a small array of every rank, equally large everywhere."""
        if self.topology.world == 1:
            return values[None]
        mine = torch.from_numpy(np.ascontiguousarray(values))
        if self.box is not None and len(self.topology.nodes) == 1:
            pieces = self.all_gather_bytes(mine.reshape(-1).view(torch.uint8), what)
            return torch.stack(pieces).view(mine.dtype).view(len(pieces), *mine.shape).numpy()
        found = mine.new_empty((self.topology.world, *mine.shape))
        with self.translate_errors(what):
            dist.all_gather(list(found.unbind()), mine, group=self.world)
        return found.numpy()

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Anything that can be pickled, of every rank."""
        if self.topology.world == 1:
            return [value]
        found: list[Any] = [None] * self.topology.world
        with self.translate_errors(what):
            dist.all_gather_object(found, value, group=self.world)
        return found

    def barrier(self, what: str) -> None:
        """Returns once every rank has come here."""
        self.all_gather(np.zeros(1, np.int64), what)

    @contextlib.contextmanager
    def translate_errors(self, what: str) -> Iterator[None]:
        """Says in plain words that a rank is gone: what torch raises names a socket."""
        try:
            yield
        except RuntimeError as error:
            t = self.topology
            raise RankError(
                f"rank {t.rank} of {t.world} (node {t.node}) cannot go on: while it {what}, another rank was lost, or "
                f"did not answer within {self.timeout:g} s (dist.timeout). The first rank that ended says why; "
                f"a restart resumes from the last checkpoint. Cause: {str(error).splitlines()[0]}"
            ) from error


def _require_sizes(pieces: list[torch.Tensor], sizes: list[int]) -> None:
    if [len(piece) for piece in pieces] != sizes:
        raise RuntimeError(
            f"{[len(piece) for piece in pieces]} bytes came instead of {sizes}: ranks are at different things"
        )


class Groups:
    """Every group of a job, made by all ranks at once; `world`, `node` and `peers` are the training comm's."""

    def __init__(self, topology: Topology, comms: dict[str, Communicator], timeout: float, owns: bool) -> None:
        self.topology = topology
        self.timeout = timeout
        self.train, self.ahead, self.read = comms["train"], comms["ahead"], comms["read"]
        self.world, self.node, self.peers = self.train.world, self.train.node, self.train.peers
        self._owns = owns

    @classmethod
    def make(cls, topology: Topology, *, timeout: float = 300.0, gpu: bool = False, shared: bool = True) -> Self:
        """All ranks call it, once. torch.distributed is set up if it is not yet: by torchrun's environment.

        timeout   seconds that any collective waits for other ranks
        gpu       whether every rank has a GPU of its own, so that NCCL can carry rows
        shared    whether ranks of a node send each other CPU tensors through shared memory, where the system lets them
        """
        owns = not dist.is_initialized()
        try:
            return cls._make(topology, timeout, gpu, shared, owns)
        except BaseException:
            if owns and dist.is_initialized():
                dist.destroy_process_group()
            raise

    @classmethod
    def _make(cls, topology: Topology, timeout: float, gpu: bool, shared: bool, owns: bool) -> Self:
        wait = datetime.timedelta(seconds=timeout)
        if owns:
            if topology.world == 1:
                store = dist.HashStore()  # type: ignore[attr-defined]
            else:
                found, _, _ = next(dist.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
                store = meet(found, topology.rank, topology.world, timeout)
            backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
            dist.init_process_group(backend, timeout=wait, store=store, rank=topology.rank, world_size=topology.world)
        if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.world):
            raise RankError(
                f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, the topology rank "
                f"{topology.rank} of {topology.world}"
            )
        most = max(len(node) for node in topology.nodes)
        peers = [tuple(node[i] for node in topology.nodes if i < len(node)) for i in range(most)]
        comms = {}
        for name in ("train", "ahead", "read"):
            backend = "cpu:gloo,cuda:nccl" if gpu and name == "train" else "gloo"
            made: dict[tuple[int, ...], Group] = {}
            for ranks in (tuple(range(topology.world)), *topology.nodes, *peers):
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks), timeout=wait, backend=backend)
            mine = topology.nodes[topology.node]
            carries, relays = gpu and name == "train", name == "train" and topology.relays
            box = None
            if shared and len(mine) > 1 and not carries and not relays:
                box = ShmTransport.make(made[mine], mine, topology.rank)
            comms[name] = Communicator(
                name,
                topology,
                timeout,
                made[tuple(range(topology.world))],
                made[mine],
                made[topology.peers],
                carries,
                relays,
                box,
            )
        return cls(topology, comms, timeout, owns)

    def close(self, *, failed: bool = False) -> None:
        """Ends torch.distributed, if it was set up here. `failed`: without waiting for what others may never send."""
        for comm in (self.train, self.ahead, self.read):
            if comm.box is not None:
                comm.box.close()  # and stays: who still has the comm, a pipeline, hears so instead of waiting for ever
        if self._owns and dist.is_initialized():
            self._owns = False
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
