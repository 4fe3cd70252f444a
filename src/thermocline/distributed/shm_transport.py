"""`ShmTransport`: all-to-all between the ranks of one machine through shared memory, without a copy on the read side.

Every rank owns two segments and uses them in turn. In exchange n a rank writes its messages for all readers into
segment n % 2, publishes the sequence number n, and reads the others' segments once their sequence numbers have reached
n. A rank that has published n has finished reading exchange n - 1, so segment n % 2, last read in exchange n - 2, is
free again.

An interrupted exchange (exception, Ctrl-C) poisons the transport: other ranks may still read the segment, so every
later `exchange` raises.

The segments are memfds: unnamed, freed with the processes, however these end. An exited rank is detected by its pidfd.

Thread     one thread at a time; `close` may be called from another
Blocks     `exchange` waits for all ranks, at most `timeout` seconds
Raises     RuntimeError, which `Communicator.translate_errors` re-raises as `RankError`
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import secrets
import select
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from thermocline.core import _core
from thermocline.distributed.messages import all_gather_message, decode, encode

Bytes = npt.NDArray[np.uint8]

_CLOSED_BIT = 1 << 63  # added to the sequence number of a segment whose rank has closed the transport
_LIVENESS_SECONDS = 0.1  # between two checks that the awaited process is alive
_GROWTH = 1 << 20
_INTERRUPTED = "an earlier exchange was interrupted: this transport cannot be used again"
_CLOSED = "the communicator is closed on this rank"


class ShmSegment:
    """A shared memory segment: sequence number, random id, begin and end of each reader's message, payload."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """Map an open descriptor. Raises OSError and closes it if the file is too small for a segment."""
        self._descriptor = descriptor
        self.header_bytes = _header_bytes(ranks)
        try:
            if os.fstat(descriptor).st_size < self.header_bytes:
                raise OSError("not a shared memory segment: the file is too small")
            self._map()
        except OSError:
            self.close()
            raise

    @classmethod
    def create(cls, ranks: int) -> Self:
        descriptor = os.memfd_create("thermocline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _header_bytes(ranks))
        segment = cls(descriptor, ranks)
        segment.header[1] = secrets.randbits(64)
        return segment

    @classmethod
    def attach(cls, address: tuple[int, int, int], ranks: int) -> Self:
        """Map another process's segment. Raises OSError if it does not exist or has another id.

        The id differs if the process number belongs to another process, as in another container or machine.
        """
        process, descriptor, segment_id = address
        segment = cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), ranks)
        if int(segment.header[1]) != segment_id:
            segment.close()
            raise OSError("segment id mismatch: the descriptor belongs to another process")
        return segment

    def _map(self) -> None:
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)
        self.header = self.memory[: self.header_bytes].view(np.uint64)
        self.sequence = self.header[:1]
        self.spans = self.header[2:].view(np.int64)

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and id: the argument of `attach`."""
        return os.getpid(), self._descriptor, int(self.header[1])

    def payload(self, size: int) -> Bytes:
        """Return `size` writable bytes; grows the segment if needed. Only the owner calls it."""
        end = self.header_bytes + size
        if end > len(self.memory):
            os.ftruncate(self._descriptor, -(-(end + end // 4) // _GROWTH) * _GROWTH)
            self._map()
        return self.memory[self.header_bytes : end]

    def message(self, reader: int) -> Bytes:
        """Return the message for one reader, without a copy."""
        begin, end = self.spans[2 * reader : 2 * reader + 2].tolist()
        if self.header_bytes + end > len(self.memory):
            self._map()
        return self.memory[self.header_bytes + begin : self.header_bytes + end]

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped until the last view of it is dropped."""
        descriptor, self._descriptor = self._descriptor, -1  # the number may be reused for another file
        os.close(descriptor)


def _header_bytes(ranks: int) -> int:
    """Two words and two offsets per reader, rounded up to pages."""
    return -(-(16 + 16 * ranks) // 4096) * 4096


def _create_segments(ranks: int) -> list[ShmSegment]:
    """Create this rank's two segments; return an empty list if the system has no memfds."""
    segments: list[ShmSegment] = []
    try:
        for _ in range(2):
            segments.append(ShmSegment.create(ranks))
    except (OSError, AttributeError):
        for segment in segments:
            segment.close()
        return []
    return segments


def _all_gather(group: Any, value: Any) -> list[Any]:
    """Return the values of all ranks of a group, in group order."""
    return [decode(message) for message in all_gather_message(group, encode(value))]


@dataclasses.dataclass(slots=True, eq=False)
class ShmTransport:
    """The segments of a group of ranks on one machine. `make` creates it."""

    segments: list[list[ShmSegment]]
    """Two per rank of the group."""
    _index: int
    """Index of this rank in the group."""
    _pidfds: dict[int, int]
    """pidfds of the other ranks, by index."""
    _ranks: Sequence[int]
    _sequence: int = 0
    """Number of exchanges so far."""
    _unusable: str | None = None
    """Error message of later exchanges; None while the transport is usable."""

    @classmethod
    def make(cls, group: Any, ranks: Sequence[int], rank: int) -> Self | None:
        """Create and attach all segments. Collective: all ranks of the group call it.

        Returns None on every rank if any rank lacks memfds or pidfds or cannot attach the others' segments.
        """
        index, size = list(ranks).index(rank), len(ranks)
        local = _create_segments(size)
        addresses = _all_gather(group, [segment.address for segment in local])
        transport = cls([local if other == index else [] for other in range(size)], index, {}, tuple(ranks))
        attached = all(addresses)
        try:
            for other, pair in enumerate(addresses if attached else []):
                if other != index:
                    transport._pidfds[other] = os.pidfd_open(pair[0][0])
                    for address in pair:
                        transport.segments[other].append(ShmSegment.attach(address, size))
        except (OSError, AttributeError):  # AttributeError: a Python built without pidfd_open
            attached = False
        if all(_all_gather(group, attached)):
            return transport
        transport.close()
        return None

    def send_buffer(self, size: int) -> torch.Tensor:
        """Return uint8[size]: the payload that the next `exchange` sends."""
        if self._unusable is not None:
            return torch.empty(size, dtype=torch.uint8)  # `exchange` raises
        return torch.from_numpy(self.segments[self._index][(self._sequence + 1) % 2].payload(size))

    def exchange(self, size: int, spans: Sequence[tuple[int, int]], timeout: float) -> list[torch.Tensor]:
        """Send the send buffer and return every rank's message for this one, in group order. All ranks call it.

        The results are views of shared memory, valid until the next call.

        size    bytes of the send buffer
        spans   begin and end of each reader's message in it
        Raises RuntimeError if a rank exited, closed its transport or did not answer within `timeout` seconds, if an
        earlier exchange was interrupted, or if this transport is closed.
        """
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        self._unusable = _INTERRUPTED
        self._sequence += 1
        local = self.segments[self._index][self._sequence % 2]
        assert all(0 <= begin <= end <= size for begin, end in spans)
        local.spans[: 2 * len(spans)] = np.asarray(spans, np.int64).reshape(-1)
        _core.publish_sequence(local.sequence, self._sequence)
        deadline = time.monotonic() + timeout
        messages = []
        for other, pair in enumerate(self.segments):
            segment = pair[self._sequence % 2]
            if other != self._index:
                self._wait(other, segment, deadline, timeout)
            messages.append(torch.from_numpy(segment.message(self._index)))
        self._unusable = None if self.segments else _CLOSED
        return messages

    def _wait(self, other: int, segment: ShmSegment, deadline: float, timeout: float) -> None:
        while not _core.wait_sequence(segment.sequence, self._sequence, _LIVENESS_SECONDS):
            if self._has_exited(other):
                if _core.wait_sequence(segment.sequence, self._sequence, 0):
                    break  # it published before it exited
                raise RuntimeError(f"the process of rank {self._ranks[other]} exited")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self._ranks[other]} did not answer for {timeout:g} s")
        if int(segment.sequence[0]) % _CLOSED_BIT < self._sequence:
            raise RuntimeError(f"rank {self._ranks[other]} closed its communicator")

    def _has_exited(self, other: int) -> bool:
        if other not in self._pidfds:
            raise RuntimeError(_CLOSED)  # closed by another thread while this one waited
        poll = select.poll()  # select() is limited to descriptors below 1024
        poll.register(self._pidfds[other], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close all segments. Ranks that wait for this one raise."""
        for index, pair in enumerate(self.segments):
            for segment in pair:
                if index == self._index:
                    _core.publish_sequence(segment.sequence, _CLOSED_BIT + int(segment.sequence[0]))
                segment.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self.segments, self._pidfds, self._unusable = [], {}, _CLOSED
