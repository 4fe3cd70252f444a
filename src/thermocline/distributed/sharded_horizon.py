"""`ShardedHorizon`: rows of coming batches, loaded by the ranks that own them. Implements `RowHorizon`.

    collect   a rank collects the ids of its own coming batches            `ShardedHorizon.add`
    send      the unique keys of some batches go to their owners as hints  on the `HintLane`
    load      an owner adds the hints of all ranks to one local horizon, and loads their rows in hash order
    release   after the window of the hint's last batch was pinned or copied, whichever rank uses the rows

All ranks pass batch number n of a pipeline together: `exchange` gives every rank the same number of batches, and only
after the end of its data does a rank get empty ones. So a hint names batches by number, and the owner releases its
rows by its own count of batches; nothing is sent at release.

A hint is never a promise. A row whose hint is late, lost or dropped is read by the pull of its batch. A hint that
arrives twice pins its rows until the same batch. The owner drops hints beyond the look-ahead's bytes.

A rank loads while its own look-ahead requests it. While it has no batch of its own ahead, because its data has ended or
is slow, a thread ("hint-load") loads the rows that other ranks need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from thermocline.arrays import Keys
from thermocline.batch import WorkingSet
from thermocline.distributed.hint_lane import Hint, HintLane
from thermocline.distributed.key_sharding import owner_of
from thermocline.embedding.backend import BatchAhead, KeyHorizon, ReadCounts, ShardBackend
from thermocline.embedding.batch_plan import BagInputs
from thermocline.errors import ThermoclineError

_CHUNK_SHARE = 1 / 16
"""Batches of one hint, as a share of the batches ahead: keys that repeat within a hint are sent once."""
_SEND_SECONDS = 2.0
"""Longest time that a batch waits for its hint to reach the owners."""
_KEY_BYTES = 32
"""Memory of a key in the local horizon, about."""
_PART = 1 / 16
"""Share of a sweep that the thread loads at once."""
_NO_READS = ReadCounts(0, 0, 0.0, 0.0)
_NO_KEYS: Keys = np.empty(0, np.uint64)


@dataclasses.dataclass(slots=True)
class HintStats:
    """Counters of the hints that this rank received."""

    received: int = 0
    keys: int = 0
    dropped: int = 0
    """Hints that arrived after their batches, for another pipeline, or beyond the memory for hints."""


class ShardedBatchAhead:
    """See `BatchAhead`. Keeps the ids: their keys belong to other ranks."""

    def __init__(self, horizon: ShardedHorizon, ids: Keys, number: int) -> None:
        self._horizon = horizon
        self._ids = ids
        self._number = number

    def restore(self) -> Keys:
        return self._ids

    @property
    def to_visit(self) -> float:
        return self._horizon.to_visit(self._number)

    def release(self) -> None:
        self._horizon.forget(self._ids)
        self._ids = _NO_KEYS

    @property
    def bytes(self) -> int:
        return self._ids.nbytes


class ShardedHorizon:
    """See `RowHorizon`. The batches of this rank; the owners' side is `HintedRows`."""

    def __init__(self, rows: HintedRows, pipeline: _Pipeline) -> None:
        self._rows = rows
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._chunk: list[Keys] = []
        """Ids of the batches that no hint was sent for."""
        self._sent = pipeline.collected
        """Number of the first of these batches."""
        self._post = 0
        self._deadline = 0.0
        self._bytes = 0
        self._dropped = False

    def add(self, inputs: BagInputs, *, frozen: bool = False) -> ShardedBatchAhead:
        lists = [source.ids for source in inputs.values()]
        ids = lists[0] if len(lists) == 1 else np.concatenate([_NO_KEYS, *lists])
        with self._lock:
            if not frozen:
                self._pipeline.collected += 1
            number = self._pipeline.collected - 1
            self._chunk.append(ids)
            self._bytes += ids.nbytes
        ahead = number + 1 - self._pipeline.passed_batches
        if self._pipeline.collected - self._sent >= _CHUNK_SHARE * ahead and self._rows.lane.wait_sent(self._post, 0.0):
            self._send()
        return ShardedBatchAhead(self, ids, number)

    def _send(self) -> None:
        """Send the keys of the collected batches to their owners."""
        with self._lock:
            chunk, self._chunk = self._chunk, []
            first, self._sent = self._sent, self._pipeline.collected
            if chunk:
                self._post = self._rows.post(self._pipeline, first, self._sent, np.concatenate(chunk))
                self._deadline = time.monotonic() + _SEND_SECONDS

    def forget(self, ids: Keys) -> None:
        """Count the ids of a batch no longer."""
        with self._lock:
            self._bytes -= ids.nbytes

    def to_visit(self, number: int) -> float:
        """See `BatchAhead.to_visit`: of the rows that this rank owns; a batch whose hint was not sent is unknown."""
        if number >= self._sent or not self._rows.lane.wait_sent(self._post, 0.0):
            return 1.0 if self._rows.sends_in_time else 0.0
        return self._pipeline.to_visit(number)

    @property
    def full(self) -> bool:
        local = self._pipeline.local
        return local is not None and local.full

    def load(self, share: float = 1.0) -> bool:
        rows = self._rows
        if self._chunk:
            self._send()
        patience = self._deadline - time.monotonic() if rows.sends_in_time else 0.0
        rows.sends_in_time = rows.lane.wait_sent(self._post, max(0.0, patience))
        local = self._pipeline.local
        return rows.sends_in_time and local is not None and local.load(share)

    def drop(self) -> bool:
        first, self._dropped = not self._dropped, True
        return first

    @property
    def dropped(self) -> bool:
        return self._dropped

    @property
    def position(self) -> float:
        local = self._pipeline.local
        return 0.0 if local is None else local.position

    @property
    def late_rows(self) -> int:
        return self._pipeline.late_rows

    @property
    def rows_loaded(self) -> int:
        local = self._pipeline.local
        return 0 if local is None else local.rows_loaded

    @property
    def read_counts(self) -> ReadCounts:
        local = self._pipeline.local
        return _NO_READS if local is None else local.read_counts

    @property
    def bytes(self) -> int:
        """See `RowHorizon.bytes`: ids of this rank's batches, and the keys of all ranks' hints."""
        return self._bytes + self._pipeline.bytes


class HintedRows:
    """The hints of one table on one rank: sends those of its own batches, loads the rows of those it receives."""

    def __init__(self, local: ShardBackend, lane: HintLane, world: int, max_bytes: int) -> None:
        self.lane = lane
        self.world = world
        self.stats = HintStats()
        self.sends_in_time = True
        """False after a batch waited for the lane in vain: the next ones do not wait."""
        self.with_row: Callable[[Keys], Keys] | None = None
        """Returns those keys of a hint that may have a row, on the thread of the lane; None: all of them."""
        self._local = local
        self._max_bytes = max_bytes
        self._pipelines: dict[bool, _Pipeline] = {}
        self._lock = threading.Lock()
        self._begun = {True: 0, False: 0}  # number of the last pipeline, by training
        self._early: list[Hint] = []  # for a pipeline that this rank has not opened yet
        self._channel = lane.subscribe(self)

    def horizon(self, *, training: bool) -> ShardedHorizon:
        """Begin to collect coming batches."""
        return ShardedHorizon(self, self._pipelines[training])

    def post(self, pipeline: _Pipeline, first: int, end: int, ids: Keys) -> int:
        """Send the keys of batches to their owners."""
        keys = WorkingSet.of(ids).keys
        owners = owner_of(keys, self.world).astype(np.uint16)
        ordered = keys[np.argsort(owners, kind="stable")]  # radix sort
        parts = np.split(ordered, np.cumsum(np.bincount(owners, minlength=self.world))[:-1])
        return self.lane.post(
            [Hint(self._channel, pipeline.training, pipeline.number, first, end, part) for part in parts]
        )

    def passed(self, batches: int, *, training: bool) -> None:
        """Release rows: this many further batches of all ranks are pinned or copied."""
        pipeline = self._pipelines.get(training)
        if pipeline is not None:
            pipeline.passed(batches)

    # ---- HintReceiver

    def begin(self, training: bool, pipeline: int) -> None:
        made = _Pipeline(self._local, training, pipeline, self._max_bytes)
        with self._lock:
            before = self._pipelines.get(training)
            self._pipelines[training], self._begun[training] = made, pipeline
            early, self._early = self._early, []
        if before is not None:
            before.close()
        for hint in early:
            self.receive(hint)

    def end(self, training: bool) -> None:
        with self._lock:
            pipeline = self._pipelines.pop(training, None)
        if pipeline is not None:
            pipeline.close()

    def receive(self, hint: Hint) -> None:
        self.stats.received += 1
        self.stats.keys += len(hint.keys)
        if self.with_row is not None:
            hint = hint._replace(keys=self.with_row(hint.keys))
        with self._lock:
            pipeline = self._pipelines.get(hint.training)
            held = sum(other.keys.nbytes for other in self._early)
            if hint.pipeline > self._begun[hint.training] and held < self._max_bytes:
                self._early.append(hint)
                return
        if pipeline is None or pipeline.number != hint.pipeline or not pipeline.receive(hint):
            self.stats.dropped += 1


class _Hinted(NamedTuple):
    """A hint in the local horizon."""

    first: int
    end: int
    rows: BatchAhead


class _Pipeline:
    """The hints that one rank has for one table and pipeline."""

    def __init__(self, local: ShardBackend, training: bool, number: int, max_bytes: int) -> None:
        self.training = training
        self.number = number
        self.collected = 0
        """Batches that this rank has added to its horizon."""
        self.passed_batches = 0
        """Batches of all ranks that were pinned or copied."""
        self.local: KeyHorizon | None = None
        """The keys of all ranks' hints; None: there was none yet."""
        self._backend = local
        self._max_bytes = max_bytes
        self._late_before = _late_rows(local, training)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._hints: list[_Hinted] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    # ---- lane and stages

    def receive(self, hint: Hint) -> bool:
        """Add a hint. Return False if it is of no use any more or there is no memory for it."""
        with self._lock:
            fits = not self._hints or self.bytes + _KEY_BYTES * len(hint.keys) <= self._max_bytes
            if self._closed or hint.end <= self.passed_batches or not fits:
                return False
            if self.local is None or self.local.dropped:
                self._release(self._hints)
                self.local = self._backend.horizon(training=self.training)
            self._hints.append(_Hinted(hint.first, hint.end, self.local.add_keys(hint.keys)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thermocline-hint-load", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def passed(self, batches: int) -> None:
        """Count batches that all ranks have passed, and release the rows of their hints."""
        with self._lock:
            self.passed_batches += batches
            self._release([hint for hint in self._hints if hint.end <= self.passed_batches])
            self._changed.notify_all()

    def _release(self, hints: Sequence[_Hinted]) -> None:
        for hint in hints:
            hint.rows.release()
        self._hints = [hint for hint in self._hints if hint not in hints]

    def to_visit(self, number: int) -> float:
        """The part of a sweep that is left until the rows of all hints up to batch `number` were visited."""
        with self._lock:
            return max((hint.rows.to_visit for hint in self._hints if hint.first <= number), default=0.0)

    @property
    def bytes(self) -> int:
        return 0 if self.local is None else self.local.bytes

    @property
    def late_rows(self) -> int:
        return _late_rows(self._backend, self.training) - self._late_before

    def close(self) -> None:
        """Drop all hints, unpin their rows and join the thread."""
        with self._lock:
            self._closed = True
            local, hints = self.local, self._hints
            self._changed.notify_all()
        if local is not None:
            local.drop()
        if self._thread is not None:
            self._thread.join()
        self._release(hints)

    # ---- thread

    def _run(self) -> None:
        while (local := self._next()) is not None:
            before, position, loading = self.passed_batches, local.position, False
            # An error is raised again by the pull of the batch, unless the table was reopened meanwhile.
            with contextlib.suppress(ThermoclineError):
                loading = local.load(_PART)  # its last parts may still be loading: the position may be the same
            with self._lock:
                idle = not loading and local.position == position
                if idle and self.passed_batches == before and not self._closed:
                    self._changed.wait()  # no memory, or nothing to load

    def _next(self) -> KeyHorizon | None:
        """Wait until rows have to be loaded by this thread. None: closed."""
        with self._lock:
            while not self._closed and not (self.collected <= self.passed_batches and self._is_due()):
                self._changed.wait()
            return None if self._closed else self.local

    def _is_due(self) -> bool:
        """Whether the sweep has to go on, so that the next batch is loaded in time: as `LookAhead` decides."""
        left = [hint for hint in self._hints if hint.rows.to_visit > 0]
        if not left:
            return False
        next_hint = min(left, key=lambda hint: (hint.first, hint.end))  # ranks send hints for the same batches
        ahead = max(hint.end for hint in self._hints) - self.passed_batches
        return next_hint.first - self.passed_batches <= (0.75 * next_hint.rows.to_visit + 0.25) * ahead


def _late_rows(local: ShardBackend, training: bool) -> int:
    """Rows that a pull had to read or create itself, or that evaluation has read from the store, so far."""
    tiers = local.tiers
    if not training:
        return 0 if tiers.dram is None else tiers.dram.read_from_store
    if tiers.hbm is not None:
        return tiers.hbm.stats().from_ssd
    if tiers.dram is None:
        return 0
    stats = tiers.dram.stats()
    return stats.misses - stats.loaded_ahead
