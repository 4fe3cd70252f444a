"""Messages between the ranks of one machine, through memory that they share: written once, read where they lie.

Every rank has two boxes, used in turn. It writes what it has for the others into one, says so by a number, and reads
the others' boxes once their numbers say the same. A rank that is at its next message has read the last one, so when all
are there a box can be written again: two boxes and one number each are enough.

That holds as long as every message is waited for: whoever is cut short in the middle of one (an error, Ctrl-C) sends
no other, since the others may still be reading.

The memory has no name and goes with the processes, however they end. A rank that has ended is noticed by its process.
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
import torch.distributed as dist

from thermocline.core import _core

Bytes = npt.NDArray[np.uint8]

_GONE = 1 << 63  # added to the number of a box whose rank has left
_SLICE = 0.1  # seconds between two looks at the others' processes
_GROWTH = 1 << 20
_CUT_SHORT = "an earlier message was cut short: what ranks send no longer fits together"
_CLOSED = "the groups are closed here"


class ShmSegment:
    """One rank's memory: a number, a word to know it by, where each rank's message begins and ends; then messages."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """OSError: the descriptor is of something else; it is closed then."""
        self._descriptor = descriptor
        self.head = _head(ranks)
        try:
            if os.fstat(descriptor).st_size < self.head:
                raise OSError("not a box")
            self._map()
        except OSError:
            self.close()
            raise

    @classmethod
    def empty(cls, ranks: int) -> Self:
        descriptor = os.memfd_create("thermocline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _head(ranks))
        box = cls(descriptor, ranks)
        box.words[1] = secrets.randbits(64)
        return box

    def _map(self) -> None:
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)
        self.words = self.memory[: self.head].view(np.uint64)
        self.spans = self.words[2:].view(np.int64)

    @property
    def address(self) -> tuple[int, int, int]:
        """How another process of this machine finds it: process, descriptor, word."""
        return os.getpid(), self._descriptor, int(self.words[1])

    @classmethod
    def at(cls, address: tuple[int, int, int], ranks: int) -> Self:
        """OSError: it is not there, or not what was meant: another machine has processes of the same number."""
        process, descriptor, word = address
        box = cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), ranks)
        if int(box.words[1]) != word:
            box.close()
            raise OSError("the memory of another process")
        return box

    def room(self, size: int) -> Bytes:
        """Of messages: so many bytes, for its owner to write."""
        end = self.head + size
        if end > len(self.memory):
            os.ftruncate(self._descriptor, -(-(end + end // 4) // _GROWTH) * _GROWTH)
            self._map()
        return self.memory[self.head : end]

    def message(self, reader: int) -> Bytes:
        """For one rank."""
        begin, end = self.spans[2 * reader : 2 * reader + 2].tolist()
        if self.head + end > len(self.memory):
            self._map()
        return self.memory[self.head + begin : self.head + end]

    def close(self) -> None:
        """The memory itself stays for as long as anybody looks at it."""
        descriptor, self._descriptor = self._descriptor, -1  # which is nobody's: the number may be another file's soon
        os.close(descriptor)


def _head(ranks: int) -> int:
    """Bytes before the messages, in pages."""
    return -(-(16 + 16 * ranks) // 4096) * 4096


def _own(ranks: int) -> list[ShmSegment]:
    """Two; none where the system has no such memory."""
    boxes: list[ShmSegment] = []
    try:
        for _ in range(2):
            boxes.append(ShmSegment.empty(ranks))
    except (OSError, AttributeError):
        for box in boxes:
            box.close()
        return []
    return boxes


@dataclasses.dataclass(slots=True, eq=False)
class ShmTransport:
    """The boxes of a group of ranks, as one of them uses them; `make` makes it. One thread at a time."""

    _boxes: list[list[ShmSegment]]
    """Of every rank of the group, two each."""
    _me: int
    _processes: dict[int, int]
    """Of the others: what tells that the process has ended."""
    _ranks: Sequence[int]
    _round: int = 0
    _refusal: str | None = None
    """Why it sends no more; none: it does."""

    @classmethod
    def make(cls, group: Any, ranks: Sequence[int], rank: int) -> Self | None:
        """All ranks of the group call it. None: they do not share memory, or the system does not let them."""
        me, size = list(ranks).index(rank), len(ranks)
        mine = _own(size)
        addresses: list[Any] = [None] * size
        dist.all_gather_object(addresses, [box.address for box in mine], group=group)
        box = cls([mine if other == me else [] for other in range(size)], me, {}, tuple(ranks))
        good = all(addresses)
        try:
            for other, pair in enumerate(addresses if good else []):
                if other != me:
                    box._processes[other] = os.pidfd_open(pair[0][0])
                    for address in pair:
                        box._boxes[other].append(ShmSegment.at(address, size))
        except (OSError, AttributeError):  # the latter: a Python that does not know of pidfd_open
            good = False
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, good, group=group)
        if all(everybody):
            return box
        box.close()
        return None

    @property
    def _next(self) -> int:
        return (self._round + 1) % 2

    def room(self, size: int) -> torch.Tensor:
        """uint8[size]: where the next message is put together; its own until then."""
        if self._refusal is not None:
            return torch.empty(size, dtype=torch.uint8)  # `swap` will say so
        return torch.from_numpy(self._boxes[self._me][self._next].room(size))

    def swap(self, size: int, spans: Sequence[tuple[int, int]], timeout: float) -> list[torch.Tensor]:
        """What every rank has for this one, in their order: to be read before the next call. All ranks call it.

        size    of the room that was filled
        spans   of it: what each rank is to read, from where to where
        RuntimeError: a rank has ended, or has not come within so many seconds; an earlier call was cut short, or it is
        closed.
        """
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        self._refusal = _CUT_SHORT
        mine = self._boxes[self._me][self._next]
        assert all(0 <= begin <= end <= size for begin, end in spans)
        mine.spans[: 2 * len(spans)] = np.asarray(spans, np.int64).reshape(-1)
        self._round += 1
        _core.publish_sequence(mine.words[:1], self._round)
        limit = time.monotonic() + timeout
        found = []
        for other, pair in enumerate(self._boxes):
            box = pair[self._round % 2]
            if other != self._me:
                self._wait(other, box, limit, timeout)
            found.append(torch.from_numpy(box.message(self._me)))
        self._refusal = None if self._boxes else _CLOSED
        return found

    def _wait(self, other: int, box: ShmSegment, limit: float, timeout: float) -> None:
        while not _core.wait_sequence(box.words[:1], self._round, _SLICE):
            if self._has_ended(other):
                if _core.wait_sequence(box.words[:1], self._round, 0):
                    break  # the last thing it did
                raise RuntimeError(f"rank {self._ranks[other]} has ended")
            if time.monotonic() > limit:
                raise RuntimeError(f"rank {self._ranks[other]} has not answered for {timeout:g} s")
        if int(box.words[0]) % _GONE < self._round:
            raise RuntimeError(f"rank {self._ranks[other]} has left")

    def _has_ended(self, other: int) -> bool:
        if other not in self._processes:
            raise RuntimeError(_CLOSED)  # by another thread, meanwhile
        look = select.poll()  # select() knows no descriptors from 1024 on
        look.register(self._processes[other], select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        """Whoever waits for this rank hears that it has left."""
        for n, pair in enumerate(self._boxes):
            for box in pair:
                if n == self._me:
                    _core.publish_sequence(box.words[:1], _GONE + int(box.words[0]))
                box.close()
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._boxes, self._processes, self._refusal = [], {}, _CLOSED
