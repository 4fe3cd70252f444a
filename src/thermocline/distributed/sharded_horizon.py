"""`ShardedHorizon`: rows of coming batches, loaded by the ranks that own them. Implements `RowHorizon`.

    collect   a rank collects the keys of its own coming batches            `ShardedHorizon.add`
    send      the unique keys of a group go to their owners as hints        `seal`, on the `HintLane`
    load      an owner merges the hints that it has, loads their rows in hash order and pins them
              (thread "hint-load" of `HintedRows`)
    release   after the window with a row's last use was pinned or copied, whichever rank uses the row

All ranks pass batch number n of a pipeline together: `exchange` gives every rank the same number of batches, and only
after the end of its data does a rank get empty ones. So a hint gives the number of the batch of each key's last use,
and the owner releases the row by its own count of batches; nothing is sent at release.

A hint is never a promise. A row whose hint is late, lost or dropped is read by the pull of its batch. A hint that
arrives twice pins its rows twice, until the same batch. The owner keeps hints within the look-ahead's bytes, and drops
those beyond.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

import numpy as np

from thermocline.arrays import Keys, Slots
from thermocline.distributed.hint_lane import Hint, HintLane
from thermocline.embedding.backend import KeyHorizon, ShardBackend
from thermocline.embedding.batch_plan import BagInputs
from thermocline.errors import BudgetError, ThermoclineError

_MERGE_SECONDS = 0.05
"""Longest time that hints of one rank wait for those of the others: rows of one page are then read together."""
_SEND_SECONDS = 2.0
"""Longest time that a group waits for its hints to reach their owners."""
_WAIT_SECONDS = 0.05
_ROWS_SHARE = 3 / 4
"""Share of the DRAM tier that hints loaded together may pin: see `DramHorizon`."""


@dataclasses.dataclass(slots=True)
class HintStats:
    """Counters of the hints that this rank received."""

    received: int = 0
    keys: int = 0
    dropped: int = 0
    """Hints that arrived after their batches, for another pipeline, or beyond the memory for hints."""
    merged: int = 0
    """Hints that were loaded together with another rank's."""


class ShardedHorizon:
    """See `RowHorizon`. One group of this rank's batches; the owners' side is `HintedRows`."""

    def __init__(self, rows: HintedRows, pipeline: _Pipeline, collector: KeyHorizon) -> None:
        self._rows = rows
        self._pipeline = pipeline
        self._collector = collector
        self._first = pipeline.collected
        self._post: int | None = None
        self._deadline = 0.0

    def add(self, inputs: BagInputs) -> list[Slots]:
        numbers = self._collector.add(inputs)
        self._pipeline.collected += 1
        return numbers

    @property
    def full(self) -> bool:
        return self._collector.full

    def seal(self) -> None:
        self._collector.seal()
        world = self._rows.world
        keys, counts = self._collector.keys_by_owner(world)
        by_owner = counts.reshape(world, -1)
        ends = np.cumsum(by_owner.sum(1, dtype=np.int64))
        parts = np.split(keys, ends[:-1])
        self._post = self._rows.post(self._pipeline, self._first, by_owner, parts)
        self._deadline = time.monotonic() + _SEND_SECONDS

    def ids_of(self, numbers: Slots) -> Keys:
        return self._collector.ids_of(numbers)

    def load(self) -> bool:
        """See `RowHorizon.load`: waits until this rank has loaded the hints it received, or cannot yet."""
        assert self._post is not None
        patient = self._rows.sends_in_time
        if not self._rows.lane.wait_sent(self._post, _WAIT_SECONDS if patient else 0.0):
            self._rows.sends_in_time = patient and time.monotonic() < self._deadline
            return self._rows.sends_in_time
        self._rows.sends_in_time = True
        return not self._pipeline.wait_settled(_WAIT_SECONDS)

    def release(self, batch: int) -> None:
        """Nothing: `HintedRows.passed` releases rows, for batches of all ranks."""

    def drop(self) -> bool:
        return self._collector.drop()

    @property
    def bytes(self) -> int:
        """Memory of the keys, twice: as many keys arrive here as hints, if ranks have equal budgets."""
        return 2 * self._collector.bytes


class HintedRows:
    """The hints of one table on one rank: sends those of its own batches, loads the rows of those it receives."""

    def __init__(self, local: ShardBackend, lane: HintLane, world: int, max_bytes: int) -> None:
        self.lane = lane
        self.world = world
        self.stats = HintStats()
        self.sends_in_time = True
        """False after a group waited for the lane in vain: the next ones do not wait."""
        self._local = local
        self._max_bytes = max_bytes // 2  # the other half is for own batches: see `ShardedHorizon.bytes`
        self._pipelines: dict[bool, _Pipeline] = {}
        self._lock = threading.Lock()
        self._begun = {True: 0, False: 0}  # number of the last pipeline, by training
        self._early: list[tuple[int, Hint]] = []  # for a pipeline that this rank has not opened yet
        self._channel = lane.subscribe(self)

    def horizon(self, *, training: bool) -> ShardedHorizon:
        """Begin to collect a group of coming batches."""
        return ShardedHorizon(self, self._pipelines[training], self._local.horizon(training=training))

    def post(self, pipeline: _Pipeline, first: int, counts: Slots, keys: Sequence[Keys]) -> int:
        """Send the keys of a group to their owners. Both sequences are by owner."""
        hints = [
            Hint(self._channel, pipeline.training, pipeline.number, first, counts[rank], keys[rank])
            for rank in range(self.world)
        ]
        return self.lane.post(hints)

    def passed(self, batches: int, *, training: bool) -> None:
        """Release rows: this many further batches of all ranks are pinned or copied."""
        pipeline = self._pipelines.get(training)
        if pipeline is not None:
            pipeline.passed(batches)

    # ---- HintReceiver

    def begin(self, training: bool, pipeline: int) -> None:
        made = _Pipeline(self._local, training, pipeline, self.world, self._max_bytes, self.stats)
        with self._lock:
            before = self._pipelines.get(training)
            self._pipelines[training], self._begun[training] = made, pipeline
            early, self._early = self._early, []
        if before is not None:
            before.close()
        for rank, hint in early:
            self.receive(rank, hint)

    def end(self, training: bool) -> None:
        with self._lock:
            pipeline = self._pipelines.pop(training, None)
        if pipeline is not None:
            pipeline.close()

    def receive(self, rank: int, hint: Hint) -> None:
        self.stats.received += 1
        self.stats.keys += len(hint.keys)
        with self._lock:
            pipeline = self._pipelines.get(hint.training)
            held = sum(8 * len(other.keys) for _, other in self._early)
            if hint.pipeline > self._begun[hint.training] and held < self._max_bytes:
                self._early.append((rank, hint))
                return
        if pipeline is None or pipeline.number != hint.pipeline or not pipeline.receive(rank, hint):
            self.stats.dropped += 1


@dataclasses.dataclass(slots=True, eq=False)
class _Loaded:
    """Hints whose rows are loaded together."""

    horizon: KeyHorizon
    first: int
    """Number of the first batch in the pipeline."""
    end: int
    loading: bool = True

    def release(self, passed: int) -> None:
        """Unpin the rows whose last use was before batch `passed`. Not while rows are loaded: it would end that."""
        if not self.loading and passed > self.first:
            self.horizon.release(passed - 1 - self.first)


class _Pipeline:
    """The hints that one rank has for one table and pipeline, and the thread that loads them."""

    def __init__(
        self, local: ShardBackend, training: bool, number: int, world: int, max_bytes: int, stats: HintStats
    ) -> None:
        self.training = training
        self.number = number
        self.collected = 0
        """Batches that this rank has added to its groups."""
        self._local = local
        self._max_bytes = max_bytes
        self._stats = stats
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: list[tuple[int, Hint]] = []
        self._arrived = 0.0  # time of the oldest pending hint
        self._covered = [0] * world  # per rank: end of the batches that its hints cover
        self._live: list[_Loaded] = []
        self._passed = 0
        self._loading = self._blocked = self._closed = False
        self._thread: threading.Thread | None = None

    # ---- lane and stages

    def receive(self, rank: int, hint: Hint) -> bool:
        """Queue a hint. Return False if it is of no use any more or there is no memory for it."""
        with self._lock:
            held = sum(8 * len(other.keys) for _, other in self._pending)
            held += sum(loaded.horizon.bytes for loaded in self._live)
            if self._closed or hint.end <= self._passed or held + 8 * len(hint.keys) > self._max_bytes:
                return False
            if not self._pending:
                self._arrived = time.monotonic()
            self._pending.append((rank, hint))
            if not hint.more:
                self._covered[rank] = max(self._covered[rank], hint.end)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thermocline-hint-load", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def passed(self, batches: int) -> None:
        """Count batches that all ranks have passed, and release their rows."""
        with self._lock:
            self._passed += batches
            passed, live = self._passed, list(self._live)
            self._changed.notify_all()
        for loaded in live:
            loaded.release(passed)
        self._remove_ended()

    def wait_settled(self, seconds: float) -> bool:
        """Wait until all hints are loaded, or none can be loaded before a batch passes. Return whether that is so."""
        with self._lock:
            if not self._settled:
                self._changed.wait(seconds)
            return self._settled

    @property
    def _settled(self) -> bool:
        return self._closed or self._blocked or not (self._pending or self._loading)

    def close(self) -> None:
        """Drop all hints, unpin their rows and join the thread."""
        with self._lock:
            self._closed = True
            live, self._live, self._pending = self._live, [], []
            self._changed.notify_all()
        for loaded in live:
            loaded.horizon.drop()  # ends a load in progress
        if self._thread is not None:
            self._thread.join()

    # ---- thread

    def _run(self) -> None:
        while (hints := self._next_hints()) is not None:
            try:
                loaded = self._merge(hints)
                if loaded is not None:
                    self._load(loaded)
            except ThermoclineError:  # raised again by the pull of the batch, unless the table was reopened meanwhile
                pass
            with self._lock:
                self._loading = False
                self._changed.notify_all()
            self._remove_ended()

    def _next_hints(self) -> list[Hint] | None:
        """Wait for hints and remove those to be loaded together, as many as fit. None: closed."""
        with self._lock:
            while not self._closed and not self._is_ready():
                self._changed.wait(_MERGE_SECONDS if self._pending else None)
            if self._closed:
                return None
            self._loading = True
            self._pending.sort(key=lambda item: item[1].first)
            ranks: set[int] = set()
            taken: list[Hint] = []
            room = self._rows_at_once()
            while self._pending and (not taken or len(self._pending[0][1].keys) <= room):
                rank, hint = self._pending.pop(0)
                room -= len(hint.keys)
                ranks.add(rank)
                taken.append(hint)
            self._stats.merged += len(taken) if len(ranks) > 1 else 0
            return taken

    def _is_ready(self) -> bool:
        """Whether every rank has sent its hints for the pending batches, or has had the time to."""
        if not self._pending:
            return False
        end = max(hint.end for _, hint in self._pending)
        return min(self._covered) >= end or time.monotonic() - self._arrived >= _MERGE_SECONDS

    def _rows_at_once(self) -> int:
        dram = self._local.tiers.dram
        return 0 if dram is None else int(_ROWS_SHARE * dram.capacity)

    def _merge(self, hints: list[Hint]) -> _Loaded | None:
        """Collect the keys of hints, by last use. None: all batches have passed."""
        first = max(min(hint.first for hint in hints), self._passed)
        end = max(hint.end for hint in hints)
        if first >= end:
            return None
        horizon = self._local.horizon(training=self.training)
        parts = [(hint, np.split(hint.keys, np.cumsum(hint.counts, dtype=np.int64)[:-1])) for hint in hints]
        for batch in range(first, end):
            keys = [keys[batch - hint.first] for hint, keys in parts if hint.first <= batch < hint.end]
            horizon.add_keys(np.concatenate([_NO_KEYS, *keys]))
        horizon.seal()
        loaded = _Loaded(horizon, first, end)
        with self._lock:
            if self._closed:
                return None
            self._live.append(loaded)
        return loaded

    def _load(self, loaded: _Loaded) -> None:
        """Load the rows part by part, as earlier hints release theirs."""
        try:
            while not self._closed:
                before = self._passed
                try:
                    if not loaded.horizon.load():
                        return
                except BudgetError:
                    if not self._wait_for_memory(loaded, before):
                        return
        finally:
            with self._lock:
                loaded.loading = False
                passed = self._passed
            loaded.release(passed)

    def _wait_for_memory(self, loaded: _Loaded, before: int) -> bool:
        """Wait until a batch passes. False: only these rows are left, and some of their batches have passed."""
        with self._lock:
            self._blocked = True
            self._changed.notify_all()
            while self._passed == before and not self._closed:
                self._changed.wait()
            self._blocked = False
            return not self._closed and (len(self._live) > 1 or self._passed <= loaded.first)

    def _remove_ended(self) -> None:
        with self._lock:
            ended = [loaded for loaded in self._live if not loaded.loading and loaded.end <= self._passed]
            self._live = [loaded for loaded in self._live if loaded not in ended]
        for loaded in ended:
            loaded.horizon.drop()


_NO_KEYS: Keys = np.empty(0, np.uint64)
