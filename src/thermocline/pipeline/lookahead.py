"""Look-ahead: load the rows of many coming batches into DRAM together, before the stages of `prefetch` need them.

A batch alone needs a few rows from each of many pages of the store. The batches of a group, taken together in hash
order, need many rows of each page: the store is read in large requests, and each row once. A group is

    collected   its batches are read, and their unique keys collected                  (thread "read")
    loaded      rows that are not in DRAM are read from SSD, in hash order, and pinned (thread "look-ahead")
    consumed    its batches pass the stages of `prefetch`; a row is unpinned after the last batch that uses it

While one group is consumed the next one is collected and loaded, as memory is released. Groups grow from one batch, so
that the first step is not delayed, until a limit (`LookAheadLimits`) is reached or larger groups save nothing.

A group is a hint. Rows that it does not load are read by the pull of their batch, so results do not depend on it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from thermocline.arrays import Keys, Offsets, Slots
from thermocline.batch import Batch
from thermocline.embedding.backend import RowHorizon
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.pipeline.executor import Pipeline

_GROUPS = 2
"""Groups in flight: one is consumed; the other is collected and loaded."""
_LEAST_GAIN = 0.05
"""A group is doubled only if the last doubling lowered the cost of reads per batch by this share."""
_REQUEST_BYTES = 16384
"""Cost of a read request without its bytes. An SSD reads about this much more in the time of one more request."""
_TRY_AGAIN = 16
"""Groups after which a larger group is tried again."""


@dataclasses.dataclass(slots=True)
class LookAheadStats:
    """Counters of a look-ahead. Each field has one writer thread; other threads may read it at any time."""

    groups: int = 0
    """Groups loaded."""
    group_batches: int = 0
    """Batches of the last group."""
    collected: int = 0
    """Batches collected."""
    consumed: int = 0
    """Batches that the stages of `prefetch` have received."""
    bytes: int = 0
    """Bytes of the groups in flight."""
    most_bytes: int = 0
    rows_loaded: int = 0
    """Rows loaded ahead from SSD, or initialised."""
    late_rows: int = 0
    """Rows that were not loaded when their batch needed them."""
    bytes_read: int = 0
    """Bytes that the stores read during loads."""
    load_seconds: float = 0.0
    """Time of loads."""
    budget: int = 0
    """The limit of `bytes`."""
    loads_cut_short: int = 0
    """Groups that were not loaded completely, because their rows did not fit or the pipeline closed."""

    @property
    def batches_ahead(self) -> int:
        """Batches whose rows are loaded or being loaded, not yet consumed."""
        return self.collected - self.consumed


class Group:
    """Batches whose rows are loaded together. One thread at a time; `release` and `drop` on any thread."""

    def __init__(self, horizons: dict[Table, RowHorizon]) -> None:
        self._horizons = horizons
        self._held: list[_Held] = []
        self._offsets: Offsets | None = None
        self._batch_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, batch: Batch) -> None:
        """Collect the keys of a batch and keep it. Where one bag reads all ids, keeps 4 bytes per id."""
        numbers: list[Slots] = []
        single = len(self._horizons) == 1
        for table, horizon in self._horizons.items():
            inputs = table.inputs(batch)
            numbers = horizon.add(inputs)
            single = single and len(inputs) == 1 and next(iter(inputs.values())).ids is batch.ids
        kept = copy.copy(batch)  # a loader may yield the same batch again while this one is in flight
        kept.prepared = {}
        if self._offsets is not None and np.array_equal(kept.offsets, self._offsets):
            kept.offsets = self._offsets  # batches of one id per bag share their offsets
        else:
            self._offsets = kept.offsets
            self._batch_bytes += kept.offsets.nbytes
        if single:
            kept.ids = _NO_IDS
        own = numbers[0] if single else None
        arrays = (kept.ids, own, kept.weights, kept.dense, kept.label)
        held = _Held(kept, own, sum(int(getattr(array, "nbytes", 0)) for array in arrays))
        self._held.append(held)
        self._batch_bytes += held.bytes

    def seal(self) -> None:
        """End the collection of batches."""
        for horizon in self.horizons:
            horizon.seal()

    @property
    def full(self) -> bool:
        """Whether the rows reach the share of a tier that a group may pin."""
        return any(horizon.full for horizon in self._horizons.values())

    @property
    def bytes(self) -> int:
        """Bytes of the batches and their keys, without the rows."""
        return self._batch_bytes + sum(horizon.bytes for horizon in self._horizons.values())

    @property
    def horizons(self) -> list[RowHorizon]:
        return list(self._horizons.values())

    def take(self) -> Iterator[Batch]:
        """Yield the batches, complete again."""
        for i, held in enumerate(self._held):
            batch = held.batch
            if held.numbers is not None:
                batch.ids = self.horizons[0].ids_of(held.numbers)
            self._held[i] = _TAKEN
            self._batch_bytes -= held.bytes
            yield batch

    def release(self, batch: int) -> bool:
        """Unpin the rows whose last use was in this batch. Return whether it was the last batch."""
        last = batch == len(self._held) - 1
        for horizon in self.horizons:
            horizon.release(batch)
            if last:
                horizon.drop()  # the rows of a batch that could not be added for all tables
        return last

    def drop(self) -> None:
        """Unpin all rows; load no more."""
        for horizon in self.horizons:
            horizon.drop()


class _Held(NamedTuple):
    batch: Batch
    numbers: Slots | None
    """Per id: the number of its key in the horizon. None: the batch has its ids."""
    bytes: int


_NO_IDS: Keys = np.empty(0, np.uint64)
_TAKEN = _Held(Batch(_NO_IDS, np.zeros(1, np.int64), 1), None, 0)


class LookAhead:
    """An iterator over the batches of `loader`, whose rows are loaded ahead.

    Yields (batch, group, number of the batch in the group). The consumer calls `release` when the rows of a batch are
    pinned elsewhere or copied. Thread safety: one thread iterates; `release` and `stop` may be called from others.
    """

    def __init__(
        self, loader: Iterable[Batch], tables: Sequence[Table], limits: LookAheadLimits, *, window: int,
        overlap: bool, training: bool,
    ) -> None:  # fmt: skip
        """
        window    batches that the consumer collects before it releases any
        overlap   False: groups are collected and loaded on the consumer's thread
        training  False: the consumer only reads rows
        """
        self._tables = tables
        self._limits = limits
        self._window = window
        self._overlap = overlap
        self._training = training
        self.stats = LookAheadStats(budget=limits.bytes)
        self._rows_before = self._rows()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self._waiting = False  # the consumer waits for a group
        self._collected = 0  # groups
        self._delivered = 0
        self._released = 0  # batches
        self._live: list[Group] = []  # groups with pinned rows, oldest first
        self._in_flight: list[Group] = []
        self._size = _GroupSize(limits.batches)
        self._pipeline: Pipeline[Group] | None = Pipeline(
            self._groups(iter(loader)), [("look-ahead", self._load)], depth=_GROUPS if overlap else 1
        )

    @classmethod
    def over(
        cls, loader: Iterable[Batch], tables: Sequence[Table], *, window: int, overlap: bool, training: bool
    ) -> LookAhead | None:
        """Make a look-ahead with the limits of the tables. None: no table has rows to load ahead, or it is disabled."""
        limits = [spec for table in tables if (spec := table.backend.lookahead) is not None]
        if not limits or len(limits) < len(tables):
            return None
        batches = [limit.batches for limit in limits if limit.batches is not None]
        total = sum(limit.bytes for limit in limits)
        total_limits = LookAheadLimits(min(batches, default=None), total)
        return cls(loader, tables, total_limits, window=window, overlap=overlap, training=training)

    # ---- consumer

    def __iter__(self) -> Iterator[tuple[Batch, Group, int]]:
        while True:
            with self._lock:
                self._waiting = True
                self._changed.notify_all()
            group = None if self._pipeline is None else next(self._pipeline, None)
            self._waiting = False
            if group is None:
                return
            self._delivered += 1
            for i, batch in enumerate(group.take()):
                self.stats.consumed += 1
                yield batch, group, i

    def release(self, group: Group, batch: int) -> None:
        """Unpin the rows of a group whose last use was in this batch."""
        ended = group.release(batch)
        with self._lock:
            self._released += 1
            if ended:
                self._remove(group)
            self._changed.notify_all()

    def stop(self) -> None:
        """End collecting and loading soon."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, join the threads and unpin all rows. No other thread may be iterating."""
        self.stop()
        if self._pipeline is not None:
            self._pipeline.close()
            # The pipeline refers to this object: without the cycle, tables and loader are freed at once.
            self._pipeline = None
        with self._lock:
            self._in_flight = []
            groups, self._live = self._live, []
        for group in groups:
            group.drop()

    # ---- stages

    def _groups(self, batches: Iterator[Batch]) -> Iterator[Group]:
        error: Exception | None = None
        while not self._stopping and error is None:
            group = Group({table: table.backend.horizon(training=self._training) for table in self._tables})
            try:
                for batch in itertools.islice(batches, self._size.next()):
                    group.add(batch)
                    self.stats.collected += 1
                    if self._is_complete(group):
                        break
            except Exception as failure:  # raised after the batches before it
                error = failure
            if len(group) > 0:
                group.seal()
                self._collected += 1
                self._count_bytes(group)
                yield group
            elif error is None:
                return
        if error is not None:
            raise error

    def _is_complete(self, group: Group) -> bool:
        """Whether a group of fewer batches than planned is collected: it is as large as allowed, or awaited."""
        awaited = self._overlap and self._waiting and self._collected == self._delivered
        with self._lock:
            others = sum(other.bytes for other in self._in_flight)
        own = group.bytes
        return (
            awaited
            or self._stopping
            or group.full
            or own * _GROUPS >= self._limits.bytes
            or own + others >= self._limits.bytes
        )

    def _count_bytes(self, group: Group) -> None:
        with self._lock:
            self._in_flight.append(group)
            self.stats.bytes = sum(group.bytes for group in self._in_flight)
            self.stats.most_bytes = max(self.stats.most_bytes, self.stats.bytes)

    def _load(self, group: Group) -> Group:
        """Load the rows of a group, part by part as the group before it releases its own."""
        with self._lock:
            self._live.append(group)
        cost, read, start = self._read_cost(), self._bytes_read(), time.perf_counter()
        complete = self._load_rows(group)
        self.stats.load_seconds += time.perf_counter() - start
        self.stats.bytes_read += self._bytes_read() - read
        self._count_rows()
        self.stats.groups += 1
        self.stats.group_batches = len(group)
        self.stats.loads_cut_short += not complete
        self._size.loaded(len(group), self._read_cost() - cost)
        return group

    def _load_rows(self, group: Group) -> bool:
        """Return whether all rows were loaded."""
        left = group.horizons
        while left and not self._stopping:
            before = self._released
            try:
                if not left[0].load():
                    left.pop(0)
            except BudgetError:
                if not self._wait_for_release(before):
                    return False
            except ThermoclineError:  # raised again by the pull of the batch, unless the table was reopened meanwhile
                return False
        return not left

    def _wait_for_release(self, before: int) -> bool:
        """Wait until batches of the group before have released rows. False: none will, the rest is loaded late."""
        with self._lock:
            while self._overlap and self._released == before and len(self._live) > 1 and not self._stopping:
                # A window may begin in the group before and end in this one: its batches are released only after both
                # were delivered.
                in_window = self.stats.consumed % self._window
                if self._waiting and self.stats.consumed - self._released == in_window:
                    return False
                self._changed.wait()
            return self._released != before

    def _remove(self, group: Group) -> None:
        if group in self._live:
            self._live.remove(group)
        if group in self._in_flight:
            self._in_flight.remove(group)

    def _count_rows(self) -> None:
        self.stats.rows_loaded, self.stats.late_rows = (
            max(0, now - before) for now, before in zip(self._rows(), self._rows_before, strict=True)
        )

    def _rows(self) -> tuple[int, int]:
        """Rows loaded ahead so far, and rows that a pull had to load."""
        tiers = [table.dram.stats() for table in self._tables]
        return sum(t.loaded_ahead + t.read_ahead for t in tiers), sum(t.misses - t.loaded_ahead for t in tiers)

    def _bytes_read(self) -> int:
        size = 0
        for store in [table.store for table in self._tables]:
            with contextlib.suppress(ThermoclineError):  # closed: the table is being reopened
                size += 0 if store is None else store.stats().bytes_read
        return size

    def _read_cost(self) -> float:
        """Cost of all reads of the stores so far, in bytes: a request costs as much as _REQUEST_BYTES more."""
        cost = 0.0
        for store in [table.store for table in self._tables]:
            with contextlib.suppress(ThermoclineError):  # closed: the table is being reopened
                if store is not None:
                    stats = store.stats()
                    cost += stats.bytes_read + _REQUEST_BYTES * stats.reads
        return cost


class _GroupSize:
    """The number of batches of the next group: doubles while that makes reads cheaper."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._size = 1
        self._costs: dict[int, float] = {}  # per batch, by number of batches
        self._held = 0  # groups since the last attempt to grow

    def next(self) -> int:
        return self._size

    def loaded(self, batches: int, cost: float) -> None:
        """Record the cost of the reads of a group."""
        self._costs[batches] = cost / batches
        if batches < self._size:
            return  # cut short: by a limit, or because the consumer waited
        before = self._costs.get(batches // 2)
        if before is not None and self._costs[batches] > (1 - _LEAST_GAIN) * before and self._held < _TRY_AGAIN:
            self._held += 1
            return
        self._held = 0
        self._size = 2 * self._size if self._most is None else min(2 * self._size, self._most)
