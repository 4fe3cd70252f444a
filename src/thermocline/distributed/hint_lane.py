"""`HintLane`: carries look-ahead hints between ranks, on a communicator and a thread of its own.

A hint names keys of coming batches that the receiving rank owns (`sharded_horizon`). Nothing waits for a hint for long,
and no result depends on one, so the lane never delays or reorders the collectives of training.

The thread runs rounds. A round is one all-to-all in which every rank sends the hints posted since the last round, or
none; so ranks may post different numbers of hints, at any time. A rank joins a round as soon as it has a hint, and
otherwise after _INTERVAL. Every message begins with a flag: whether a pipeline is open on that rank. After a round in
which no rank has one, all ranks pause; the next pipeline, which every rank opens, resumes the rounds.

If a rank is lost or closes its groups, the lane ends: later hints are dropped, and training reports the error.

Thread     `post`, `open`, `close_pipeline` and `close` on any thread
Blocks     `close_pipeline` and `close` up to _CLOSE_SECONDS
Raises     nothing
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from thermocline.arrays import Keys
from thermocline.distributed.communicator import Communicator, GroupName
from thermocline.errors import RankError, ThermoclineError

_INTERVAL = 0.01
"""Seconds after which a rank without hints joins the next round."""
_CLOSE_SECONDS = 0.5
_ROUND_KEYS = 1 << 20
"""Most keys that a rank sends in one round: 8 MiB of shared memory. More follow in later rounds."""
_HEADER = 6


class Hint(NamedTuple):
    """Keys of coming batches of one rank, for the rank that owns them."""

    channel: int
    """Number of the table on the lane, the same on all ranks."""
    training: bool
    """False: the rows are only read."""
    pipeline: int
    """Number of the pipeline, the same on all ranks."""
    first: int
    """Number of the first batch in the pipeline."""
    end: int
    """Number of the batch after the last."""
    keys: Keys

    def split(self, keys: int) -> tuple[Hint, Hint]:
        """Return a hint of the first `keys` keys, and one of the others."""
        return self._replace(keys=self.keys[:keys]), self._replace(keys=self.keys[keys:])

    def encode(self) -> list[Keys]:
        """Return arrays whose concatenation is the message."""
        return [np.array([*self[:5], len(self.keys)], np.uint64), self.keys]


def decode(words: Keys) -> Iterator[Hint]:
    """Yield copies of the hints of one rank's message."""
    while len(words):
        count = int(words[_HEADER - 1]) if len(words) >= _HEADER else 0
        if len(words) < _HEADER + count:
            raise RankError("a hint of another rank is longer than its message: ranks run different versions")
        channel, training, pipeline, first, end = words[: _HEADER - 1].tolist()
        yield Hint(channel, bool(training), pipeline, first, end, words[_HEADER : _HEADER + count].copy())
        words = words[_HEADER + count :]


class HintReceiver(Protocol):
    """Receives the hints of one table."""

    def receive(self, hint: Hint) -> None:
        """Take a hint. Thread: the lane's. Blocks on nothing."""

    def begin(self, training: bool, pipeline: int) -> None:
        """Begin to accept hints of a pipeline."""

    def end(self, training: bool) -> None:
        """Drop all hints of the pipeline."""


class HintLane:
    """The lane of one rank. Every rank creates it in the same collective call."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._group: GroupName = "node" if len(comm.topology.nodes) == 1 else "world"
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._receivers: weakref.WeakValueDictionary[int, HintReceiver] = weakref.WeakValueDictionary()
        self._channels = 0
        self._pipelines = {True: 0, False: 0}  # opened so far, by training
        self._open: set[bool] = set()
        self._outbox: collections.deque[tuple[int, Hint | int]] = collections.deque()
        """(rank, hint), and (-1, number) after the hints of a post."""
        self._posted = self._sent = 0  # numbers of posts
        self._paused = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="thermocline-hints", daemon=True)
        self._thread.start()

    # ---- tables and pipelines

    def subscribe(self, receiver: HintReceiver) -> int:
        """Return the channel of a table. All ranks create their tables in the same order."""
        with self._lock:
            self._channels += 1
            self._receivers[self._channels] = receiver
            return self._channels

    def open_pipeline(self, training: bool) -> None:
        """Accept hints for a new pipeline. All ranks open the same pipelines in the same order."""
        with self._lock:
            self._pipelines[training] += 1
            number, receivers = self._pipelines[training], list(self._receivers.values())
        for receiver in receivers:
            receiver.begin(training, number)
        with self._lock:
            self._open.add(training)
            self._changed.notify_all()

    def close_pipeline(self, training: bool) -> None:
        """Drop all hints of the pipeline. Waits shortly for the lane to pause if no other pipeline is open."""
        with self._lock:
            self._open.discard(training)
            self._outbox = collections.deque(
                item for item in self._outbox if isinstance(item[1], int) or item[1].training != training
            )
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.end(training)
        end = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            while not self._open and not self._paused and not self._ended and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())

    # ---- hints

    def post(self, hints: Sequence[Hint]) -> int:
        """Send one hint to each rank, by rank. Return the number for `wait_sent`."""
        with self._lock:
            if not self._ended:
                self._outbox.extend((rank, hint) for rank, hint in enumerate(hints) if len(hint.keys))
                self._posted += 1
                self._outbox.append((-1, self._posted))
                self._changed.notify_all()
            return self._posted

    def wait_sent(self, number: int, seconds: float) -> bool:
        """Wait until the hints of a post have reached their owners, or never will. Return whether that is so."""
        with self._lock:
            end = time.monotonic() + seconds
            while self._sent < number and not self._ended and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._sent >= number or self._ended

    def close(self) -> None:
        """End the thread; its communicator must be closed too."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    # ---- thread

    def _run(self) -> None:
        try:
            # A communicator that was closed, or a rank that has exited: training reports it.
            with contextlib.suppress(RankError):
                while self._wait_for_round():
                    self._round()
        finally:
            if self._comm.shm is not None:
                self._comm.shm.close()  # the other ranks' lanes end too
            with self._lock:
                self._ended = True
                self._outbox.clear()
                self._changed.notify_all()

    def _wait_for_round(self) -> bool:
        """Return whether another round follows."""
        with self._lock:
            while self._paused and not self._open and not self._ended:
                self._changed.wait()
            if not self._paused and not self._outbox and not self._ended:
                self._changed.wait(_INTERVAL)
            self._paused = False
            return not self._ended

    def _round(self) -> None:
        hints, sent, is_open = self._take()
        words: list[list[Keys]] = [[np.array([is_open], np.uint64)] for _ in range(self._comm.topology.world)]
        for rank, hint in hints:
            words[rank] += hint.encode()
        sizes = [8 * sum(map(len, parts)) for parts in words]
        message = self._comm.send_buffer(self._group, sum(sizes), torch.device("cpu"))
        np.concatenate([part for parts in words for part in parts], out=message.numpy().view(np.uint64))
        received = self._comm.all_to_all(self._group, message, sizes, None, "sending look-ahead hints")
        any_open = False
        for piece in received:
            content = piece.numpy().view(np.uint64)
            any_open |= bool(content[0])
            for hint in decode(content[1:]):
                self._deliver(hint)
        with self._lock:
            self._sent = max(self._sent, sent)
            self._paused = not any_open
            self._changed.notify_all()

    def _take(self) -> tuple[list[tuple[int, Hint]], int, bool]:
        """Remove the hints of the next round from the outbox. Return them, the last post completed, and the flag."""
        hints: list[tuple[int, Hint]] = []
        sent, left = 0, _ROUND_KEYS
        with self._lock:
            is_open = bool(self._open)
            while self._outbox and left > 0:
                rank, hint = self._outbox.popleft()
                if isinstance(hint, int):
                    sent = hint
                    continue
                if len(hint.keys) > left:
                    hint, rest = hint.split(left)
                    self._outbox.appendleft((rank, rest))
                hints.append((rank, hint))
                left -= len(hint.keys)
        return hints, sent, is_open

    def _deliver(self, hint: Hint) -> None:
        receiver = self._receivers.get(hint.channel)
        if receiver is not None:
            with contextlib.suppress(ThermoclineError):  # the table is being closed or reopened
                receiver.receive(hint)
