"""`Groups`: the process groups of a job. `Communicator`: the process groups of one thread, with error translation.

Collectives of two threads must not interleave on one process group, so `Groups` has several communicators:

    train   training thread: rows, gradients, dense parameters, checkpoints, metrics
    ahead   exchange thread of a training pipeline: keys of later batches, number of remaining batches
    read    pull thread of an evaluation pipeline, or the caller of `ShardedTable.read` while none is open
    hints   thread of the `HintLane`: keys of batches that are far ahead
    early   thread of `Groups.early_thread`, only with `dist.overlap`: rows of the next batch

Each communicator spans three groups: "world" (all ranks), "node" (the ranks of one node) and "peers" (the ranks of
equal local rank, one per node). Gloo carries CPU tensors between nodes, shared memory carries them within a node, and
NCCL carries GPU tensors of the train communicator if every rank has its own GPU.

A group is created only where it is used: node groups only on nodes without shared memory, groups between nodes only in
a job of several.

Blocks     every collective waits for the other ranks of its group until `timeout` seconds have passed in silence
           (`heartbeat`)
Raises     `RankError` if another rank exited or timed out
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from thermocline.distributed import messages
from thermocline.distributed.group_setup import Channels, initialize_torch, make_channels, open_store
from thermocline.distributed.heartbeat import Heartbeat
from thermocline.distributed.link_relay import relayed_all_to_all
from thermocline.distributed.messages import Buffer
from thermocline.distributed.shm_transport import ShmTransport
from thermocline.distributed.topology import Topology
from thermocline.distributed.torch_group import TorchGroup
from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.hint_lane import HintLane

GroupName = Literal["world", "node", "peers"]

_NAMES = ("train", "ahead", "read", "hints")
_EARLY = "early"


@dataclasses.dataclass(slots=True)
class Communicator:
    """The process groups of one thread.

    `doing` names a collective for error messages, as a participle: "exchanging keys".
    """

    name: str
    topology: Topology
    heartbeat: Heartbeat
    world: TorchGroup | None
    """None if shared memory carries everything between all ranks."""
    node: TorchGroup | None
    """None if shared memory carries everything between the ranks of the node."""
    peers: TorchGroup | None
    """None in a job of one node, or with a different number of ranks per node."""
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

    def group(self, name: GroupName) -> TorchGroup:
        """Return a process group that carries messages."""
        group: TorchGroup | None = getattr(self, name)
        assert group is not None, f"the {self.name} communicator has no process group {name!r}"
        return group

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
        return [message] if len(send) == 1 else self._exchange(group, message, send, receive, doing)

    def _exchange(
        self, group: GroupName, message: torch.Tensor, send: list[int], receive: list[int] | None, doing: str
    ) -> list[torch.Tensor]:
        """`all_to_all` of any number of ranks."""
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
        return self.shm.exchange(len(message), spans)

    def _torch_all_to_all(
        self, group: GroupName, message: torch.Tensor, send: list[int], receive: list[int] | None
    ) -> list[torch.Tensor]:
        process_group = self.group(group)

        def exchange(values: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
            received = values.new_empty((sum(receives), *values.shape[1:]))
            process_group.all_to_all(received, values.contiguous(), receives, sends)
            return received

        if receive is None:
            ones = [1] * len(send)
            receive = exchange(torch.tensor(send, device=message.device), ones, ones).tolist()
        if group == "node" and self.relays:
            sizes = torch.tensor(send)
            pairs = [torch.empty_like(sizes) for _ in send]
            process_group.all_gather(pairs, sizes)
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
        if self._shm_of_job is not None:
            pieces = self.all_gather_bytes(local.reshape(-1).view(torch.uint8), doing)
            return torch.stack(pieces).view(local.dtype).view(len(pieces), *local.shape).numpy()
        gathered = local.new_empty((self.topology.world, *local.shape))
        with self.translate_errors(doing):
            self.group("world").all_gather(gathered.unbind(), local)
        return gathered.numpy()

    def all_gather_message(self, message: Buffer, doing: str) -> list[Buffer]:
        """Return the messages of all ranks, by rank: `messages.encode` makes them, `messages.decode` reads them."""
        if self.topology.world == 1:
            return [message]
        with self.translate_errors(doing):
            if self._shm_of_job is not None:
                return self._shm_messages(message, [True] * self.topology.world)
            return [*messages.all_gather_message(self.group("world"), message)]

    def gather_message(self, message: Buffer, doing: str) -> list[Buffer]:
        """Return the messages of all ranks on rank 0, by rank; the other ranks send theirs and return []."""
        if self.topology.world == 1:
            return [message]
        with self.translate_errors(doing):
            if self._shm_of_job is not None:
                received = self._shm_messages(message, [rank == 0 for rank in range(self.topology.world)])
                return received if self.topology.rank == 0 else []
            return [*messages.gather_message(self.group("world"), message)]

    def broadcast_message(self, message: Buffer | None, doing: str) -> Buffer:
        """Return rank 0's message on every rank; the other ranks pass None. A rank receives it once."""
        if self.topology.world == 1:
            assert message is not None
            return message
        with self.translate_errors(doing):
            if self._shm_of_job is not None:
                sent = b"" if message is None else message
                return self._shm_messages(sent, [message is not None] * self.topology.world)[0]
            return messages.broadcast_message(self.group("world"), message)

    @property
    def _shm_of_job(self) -> ShmTransport | None:
        """Shared memory, if it reaches all ranks."""
        return self.shm if len(self.topology.nodes) == 1 else None

    def _shm_messages(self, message: Buffer, readers: list[bool]) -> list[Buffer]:
        """Send the message to the ranks marked in `readers`. Returns copies of the messages of all ranks."""
        local = messages.as_tensor(message)
        pieces = self._shm_exchange(local, [(0, len(local) if reads else 0) for reads in readers])
        return [piece.clone().numpy().data for piece in pieces]

    def broadcast(self, values: torch.Tensor, doing: str) -> None:
        """Replace the tensor by rank 0's."""
        with self.translate_errors(doing):
            if values.is_cpu and self._shm_of_job is not None:
                message = values.reshape(-1).view(torch.uint8)
                spans = [(0, len(message) if self.topology.rank == 0 else 0)] * self.topology.world
                values.copy_(self._shm_exchange(message, spans)[0].view(values.dtype).view(values.shape))
            else:
                self.group("world").broadcast(values)

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for local work that may take longer than the timeout: other ranks wait for it."""
        return self.heartbeat.busy()

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
                f"within {self.heartbeat.timeout:g} s (dist.timeout) while {doing}. See the error of the rank that "
                f"exited first; a restart resumes from the last checkpoint. Cause: {str(error).splitlines()[0]}"
            ) from error


def _check_sizes(pieces: list[torch.Tensor], expected: list[int]) -> None:
    sizes = [len(piece) for piece in pieces]
    if sizes != expected:
        raise RuntimeError(f"size mismatch: got {sizes} bytes, expected {expected}; ranks called different collectives")


class Groups:
    """All communicators of a job. Every rank creates it at the same time."""

    def __init__(
        self,
        topology: Topology,
        channels: Sequence[Channels],
        heartbeat: Heartbeat,
        gpu: bool,
        owns_torch: bool,
        store: Any = None,
    ) -> None:
        self.topology = topology
        self.store = store
        """Rendezvous store of the job, of this attempt; a thread uses its own `clone()`. None: one rank."""
        self.heartbeat = heartbeat
        self._owns_torch = owns_torch
        self._lane: HintLane | None = None
        self._early_thread: ThreadPoolExecutor | None = None
        self.early: Communicator | None = None
        """None: rows are exchanged between two steps, see `EarlyRows`."""
        self.train, self.ahead, self.read, self._hints, *early = (
            Communicator(
                name,
                topology,
                heartbeat,
                channel.world,
                channel.node,
                channel.peers,
                gpu=gpu and name == "train",
                relays=name == "train" and topology.node in topology.relaying_nodes,
                shm=channel.shm,
            )
            for name, channel in zip((*_NAMES, _EARLY), channels, strict=False)
        )
        if early:
            (self.early,) = early

    @classmethod
    def make(
        cls,
        topology: Topology,
        *,
        timeout: float = 300.0,
        busy_timeout: float = 3600.0,
        gpu: bool = False,
        shared: bool = True,
        overlap: bool = False,
        store: Any = None,
    ) -> Self:
        """Create all process groups. Collective: all ranks call it once, with the same arguments.

        Initializes torch.distributed from torchrun's environment if it is not initialized; `close` then destroys it.

        timeout        seconds of silence after which a collective fails
        busy_timeout   seconds that declared local work of a rank (a commit, a load) may take
        gpu            whether every rank has its own GPU, so that NCCL can carry rows
        shared         whether ranks of a node use shared memory for CPU tensors, where the system supports it
        overlap        whether rows of the next batch are exchanged while the network computes (`EarlyRows`)
        store          result of `open_store`; None: it is opened here
        """
        owns_torch = not dist.is_initialized()
        heartbeat: Heartbeat | None = None
        try:
            if store is None and topology.world > 1:
                store = open_store(topology.rank, topology.world, timeout)
            if owns_torch:
                initialize_torch(topology, store, timeout, gpu)
            if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.world):
                raise RankError(
                    f"rank mismatch: torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}, the "
                    f"topology has rank {topology.rank} of {topology.world}"
                )
            # A clone has its own connection: a call of another thread that blocks does not stop the heartbeat.
            heartbeat = Heartbeat(None if store is None else store.clone(), timeout, busy_timeout)
            names = (*_NAMES, _EARLY) if overlap else _NAMES
            channels = make_channels(
                topology, store, heartbeat, names, "train" if gpu else None, shared=shared, owns_torch=owns_torch
            )
            return cls(topology, channels, heartbeat, gpu, owns_torch, store)
        except BaseException:
            if heartbeat is not None:
                heartbeat.close()
            if owns_torch and dist.is_initialized():
                dist.destroy_process_group()
            raise

    @property
    def connections(self) -> int:
        """Most connections of this rank over all groups. Those of lazy groups are opened when they are first used."""
        comms = (self.train, self.ahead, self.read, self._hints, *([] if self.early is None else [self.early]))
        found = {id(g.process_group): g for comm in comms for g in (comm.world, comm.node, comm.peers) if g is not None}
        return sum(group.size - 1 for group in found.values())

    @property
    def timeout(self) -> float:
        """Seconds of silence after which a collective fails."""
        return self.heartbeat.timeout

    # ---- pipelines and their look-ahead

    @property
    def hint_lane(self) -> HintLane:
        """The lane of look-ahead hints. Every rank requests it before it opens a pipeline, or none does."""
        if self._lane is None:
            from thermocline.distributed.hint_lane import HintLane

            self._lane = HintLane(self._hints)
        return self._lane

    @property
    def early_thread(self) -> ThreadPoolExecutor:
        """The thread that uses the communicator `early`, for all tables: every rank submits the same calls in order."""
        if self._early_thread is None:
            self._early_thread = ThreadPoolExecutor(1, "thermocline-early-rows")
        return self._early_thread

    def open_pipeline(self, training: bool) -> Communicator:
        """Reserve the communicator of a training or evaluation pipeline. All ranks open the same ones in order."""
        comm = self.ahead if training else self.read
        comm.claim()
        if self._lane is not None:
            self._lane.open_pipeline(training)
        return comm

    def close_pipeline(self, training: bool) -> None:
        """Drop the hints of the pipeline and free its communicator."""
        if self._lane is not None:
            self._lane.close_pipeline(training)
        (self.ahead if training else self.read).user = None

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for local work of this rank that may take longer than the timeout.

            with groups.busy():
                upload(snapshot)

        Other ranks wait for it, at most `busy_timeout` seconds.
        """
        return self.heartbeat.busy()

    def close(self, *, failed: bool = False) -> None:
        """Close shared memory and heartbeat, and destroy torch.distributed if `make` initialized it.

        failed   aborts NCCL instead of waiting for collectives that other ranks may never join
        """
        self.heartbeat.close()
        if self._lane is not None:
            self._lane.close()
        for comm in (self.train, self.ahead, self.read, self._hints, self.early):
            if comm is not None and comm.shm is not None:
                comm.shm.close()  # it stays set: a pipeline that still has the communicator raises instead of waiting
        if self._early_thread is not None:
            self._early_thread.shutdown()
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
