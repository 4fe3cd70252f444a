"""`ShmTransport`: all-to-all between the ranks of one machine through shared memory, without a copy on the read side.

Every rank owns two segments and uses them in turn. In exchange n a rank writes its messages for all readers into
segment n % 2, publishes the sequence number n, and reads the others' segments once their sequence numbers have reached
n. A rank that has published n has finished reading exchange n - 1, so segment n % 2, last read in exchange n - 2, is
free again.

An interrupted exchange (exception, Ctrl-C) poisons the transport: other ranks may still read the segment, so every
later `exchange` raises.

The segments are memfds: unnamed, freed with the processes, however these end. A segment has a fixed large size of
virtual memory, of which only written pages use memory, so that it is mapped once: a reader opens it through /proc, maps
it and closes the descriptor, and can read the last message of a rank that has exited. A rank keeps the descriptors of
its own two segments only. An exited rank is detected by its entry in /proc.

Thread     one thread at a time; `close` may be called from another
Blocks     `exchange` waits for all ranks, at most the timeout of its heartbeat
Raises     RuntimeError, which `Communicator.translate_errors` re-raises as `RankError`
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from thermocline.core import _core
from thermocline.distributed.heartbeat import CLOSED, Deadline, Heartbeat
from thermocline.distributed.rendezvous import gather_json
from thermocline.distributed.topology import Topology

Bytes = npt.NDArray[np.uint8]

Address = tuple[int, int, int]
"""Process, descriptor and random id of a segment."""

_CLOSED_BIT = 1 << 63  # added to the sequence number of a segment whose rank has closed the transport
_LIVENESS_SECONDS = 0.1  # between two checks that the awaited process is alive
_MAX_SEGMENT = 1 << 36
_MAX_MAPPED = 1 << 45  # virtual memory of all segments that one rank maps, of 2^47 bytes that a process has
_INTERRUPTED = "an earlier exchange was interrupted: this transport cannot be used again"


class ShmSegment:
    """A mapped segment of another rank: sequence number, random id, begin and end of each reader's message, payload."""

    def __init__(self, address: Address, ranks: int) -> None:
        """Map another process's segment. Raises OSError if it does not exist or has another id.

        The id differs if the process number belongs to another process, as in another container or machine.
        """
        self.address = address
        self.header_bytes = _header_bytes(ranks)
        process, number, segment_id = address
        path = f"/proc/{process}/fd/{number}"
        if os.stat(path).st_size != segment_bytes(ranks):
            raise OSError(f"not a shared memory segment: {path} has another size")
        try:
            # Python's mmap would keep a duplicate of the descriptor.
            tensor = torch.from_file(path, shared=True, size=segment_bytes(ranks), dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from None
        self.memory: Bytes = tensor.numpy()
        self.header = self.memory[: self.header_bytes].view(np.uint64)
        self.sequence = self.header[:1]
        self.spans = self.header[2:].view(np.int64)
        if int(self.header[1]) != segment_id:
            raise OSError(f"segment id mismatch: {path} belongs to another process")

    def message(self, reader: int) -> Bytes:
        """Return the message for one reader, without a copy."""
        begin, end = self.spans[2 * reader : 2 * reader + 2].tolist()
        return self.memory[self.header_bytes + begin : self.header_bytes + end]


class OwnSegment(ShmSegment):
    """A segment of this rank. It keeps its descriptor, for the other ranks to open."""

    def __init__(self, ranks: int) -> None:
        """Create it. Raises OSError, or AttributeError if this Python has no memfd_create."""
        self._descriptor = os.memfd_create("thermocline", os.MFD_CLOEXEC)
        try:
            segment_id = secrets.randbits(64)
            os.pwrite(self._descriptor, segment_id.to_bytes(8, "little"), 8)
            os.ftruncate(self._descriptor, segment_bytes(ranks))
            super().__init__((os.getpid(), self._descriptor, segment_id), ranks)
        except OSError:
            os.close(self._descriptor)
            raise

    def payload(self, size: int) -> Bytes:
        """Return `size` writable bytes."""
        end = self.header_bytes + size
        if end > len(self.memory):
            most = len(self.memory) - self.header_bytes
            raise RuntimeError(f"a message to ranks of the node has {size} bytes: it must have at most {most}")
        return self.memory[self.header_bytes : end]

    def close(self) -> None:
        """Mark it as closed and close the descriptor. The memory stays mapped until the last view of it is dropped."""
        _core.publish_sequence(self.sequence, _CLOSED_BIT + int(self.sequence[0]))
        descriptor, self._descriptor = self._descriptor, -1  # the number may be reused for another file
        os.close(descriptor)


def _header_bytes(ranks: int) -> int:
    """Two words and two offsets per reader, rounded up to pages."""
    return -(-(16 + 16 * ranks) // 4096) * 4096


def segment_bytes(ranks: int) -> int:
    """Return the size of a segment: two for each of `ranks` and each of four communicators are mapped."""
    return min(_MAX_SEGMENT, _MAX_MAPPED // (8 * ranks) // 4096 * 4096)


def start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has exited. Raises OSError otherwise."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


# ---- transports of all communicators


def make_transports(
    store: Any, topology: Topology, count: int, heartbeat: Heartbeat, *, name: str = "shm"
) -> tuple[list[ShmTransport] | None, list[str | None]]:
    """Create `count` transports between the ranks of this node. Collective: all ranks call it, once per `name`.

    Returns None on every rank of a node on which any rank cannot create or map a segment, and for every node the cause,
    or None where all succeeded. The first rank of such a node warns.
    """
    node, index = topology.nodes[topology.node], topology.local_rank
    own: list[OwnSegment] = []
    made: list[ShmTransport] = []
    cause: str | None = None
    try:
        for _ in range(2 * count if len(node) > 1 else 0):
            own.append(OwnSegment(len(node)))
    except (OSError, AttributeError) as error:  # AttributeError: a Python built without memfd_create
        cause = f"rank {topology.rank} cannot create a segment: {error}"
    addresses = [segment.address for segment in own]
    gathered = gather_json(store, name, topology.rank, topology.world, [cause, addresses], heartbeat.timeout)
    if not any(gathered[rank][0] for rank in node):
        try:
            for begin in range(0, len(own), 2):
                of_ranks = [[tuple(address) for address in gathered[rank][1][begin : begin + 2]] for rank in node]
                made.append(ShmTransport.attach((own[begin], own[begin + 1]), of_ranks, index, node, heartbeat))
        except OSError as error:
            cause = f"rank {topology.rank} cannot map the segments of the other ranks: {error}"
    attached = gather_json(store, f"{name} attached", topology.rank, topology.world, cause, heartbeat.timeout)
    causes = [next((attached[rank] for rank in ranks if attached[rank]), None) for ranks in topology.nodes]
    cause = causes[topology.node]
    if cause is None:
        return made, causes
    for segment in own:
        segment.close()
    if index == 0:
        warnings.warn(
            f"node {topology.node} has no shared memory between its ranks ({cause}): they use sockets, which are "
            "slower; results have the same bits",
            RuntimeWarning,
            stacklevel=2,
        )
    return None, causes


@dataclasses.dataclass(slots=True, eq=False)
class ShmTransport:
    """The segments of a group of ranks on one machine. `make_transports` creates it."""

    segments: list[tuple[ShmSegment, ShmSegment]]
    """Two per rank of the group."""
    _own: tuple[OwnSegment, OwnSegment]
    _index: int
    """Index of this rank in the group."""
    _started: list[int | None]
    """Start time of each rank's process: another process may get its number after it has exited."""
    _ranks: Sequence[int]
    _heartbeat: Heartbeat
    _sequence: int = 0
    """Number of exchanges so far."""
    _unusable: str | None = None
    """Error message of later exchanges; None while the transport is usable."""

    @classmethod
    def attach(
        cls,
        own: tuple[OwnSegment, OwnSegment],
        addresses: Sequence[Sequence[Any]],
        index: int,
        ranks: Sequence[int],
        heartbeat: Heartbeat,
    ) -> Self:
        """Map the segments of the other ranks. Raises OSError."""
        size = len(ranks)
        segments = [
            own if other == index else (ShmSegment(first, size), ShmSegment(second, size))
            for other, (first, second) in enumerate(addresses)
        ]
        started = [start_time(first[0]) for first, _ in addresses]
        return cls(segments, own, index, started, tuple(ranks), heartbeat)

    def send_buffer(self, size: int) -> torch.Tensor:
        """Return uint8[size]: the payload that the next `exchange` sends."""
        if self._unusable is not None:
            return torch.empty(size, dtype=torch.uint8)  # `exchange` raises
        return torch.from_numpy(self._own[(self._sequence + 1) % 2].payload(size))

    def exchange(self, size: int, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Send the send buffer and return every rank's message for this one, in group order. All ranks call it.

        The results are views of shared memory, valid until the next call.

        size    bytes of the send buffer
        spans   begin and end of each reader's message in it
        Raises RuntimeError if a rank exited, closed its transport or did not answer in time, if an earlier exchange was
        interrupted, or if this transport is closed.
        """
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        self._unusable = _INTERRUPTED
        self._sequence += 1
        local = self._own[self._sequence % 2]
        assert all(0 <= begin <= end <= size for begin, end in spans)
        local.spans[: 2 * len(spans)] = np.asarray(spans, np.int64).reshape(-1)
        _core.publish_sequence(local.sequence, self._sequence)
        start = time.monotonic()
        messages = []
        for other, pair in enumerate(self.segments):
            segment = pair[self._sequence % 2]
            if other != self._index:
                self._wait(other, segment, start)
            messages.append(torch.from_numpy(segment.message(self._index)))
        self._unusable = None if self.segments else CLOSED
        return messages

    def _wait(self, other: int, segment: ShmSegment, start: float) -> None:
        if not _core.wait_sequence(segment.sequence, self._sequence, _LIVENESS_SECONDS):
            with self._heartbeat.waiting(start) as deadline:
                self._wait_long(other, segment, deadline)
        if int(segment.sequence[0]) % _CLOSED_BIT < self._sequence:
            raise RuntimeError(f"rank {self._ranks[other]} closed its communicator")

    def _wait_long(self, other: int, segment: ShmSegment, deadline: Deadline) -> None:
        while not _core.wait_sequence(segment.sequence, self._sequence, _LIVENESS_SECONDS):
            if not self.segments:
                raise RuntimeError(CLOSED)  # closed by another thread while this one waited
            if self._has_exited(other, segment.address[0]):
                if _core.wait_sequence(segment.sequence, self._sequence, 0):
                    return  # it published before it exited
                raise RuntimeError(f"the process of rank {self._ranks[other]} exited")
            deadline.check(f"rank {self._ranks[other]}")

    def _has_exited(self, other: int, process: int) -> bool:
        try:
            return start_time(process) != self._started[other]
        except OSError:  # no descriptor left, for example: the deadline ends the wait
            return False

    def close(self) -> None:
        """Close this rank's segments. Ranks that wait for this one raise."""
        if self.segments:
            for segment in self._own:
                segment.close()
        self.segments, self._unusable = [], CLOSED
