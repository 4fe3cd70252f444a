"""Look-ahead: load the rows of many coming batches into DRAM, before the stages of `prefetch` need them.

A batch alone needs a few rows from each of many pages of the store. Hundreds of batches, taken together in hash order,
need many rows of each page: the store is read in large requests, and each row once. The horizon is the window of the
batches that are

    collected   read, and their unique keys added to the horizon      (thread "read")
    swept       the rows of new keys loaded and pinned, in hash order (thread "look-ahead")
    consumed    passed to the stages of `prefetch`. A row is unpinned when no batch of the horizon uses it any more

Sweeps follow each other. A batch is loaded when a whole sweep has passed since it was collected. Sweeps are as slow as
the consumer allows, because a slow sweep meets more new keys: each reads the store once, for as many batches as were
collected meanwhile. The horizon grows from one batch, so that the first step is not delayed, until a limit
(`LookAheadLimits`) is reached or longer ones make reads dearer.

A horizon is a hint. Rows that it does not load are read by the pull of their batch, so results do not depend on it.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np

from thermocline.arrays import Keys, Offsets
from thermocline.batch import Batch
from thermocline.embedding.backend import BatchAhead, ReadCounts, RowHorizon
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.pipeline.executor import Pipeline
from thermocline.pipeline.horizon_length import HorizonLength, SweepReads

_MOST_BATCHES = 1 << 14
_SWEEP_SHARE = 3 / 4
"""Batches of one sweep, as a share of the horizon; the rest is the distance between the sweep and the consumer."""
_LEAST_PART = 1 / 32
"""Least share of a sweep that is visited at once."""
_PAGE = 4096
_NO_IDS: Keys = np.empty(0, np.uint64)


@dataclasses.dataclass(slots=True)
class LookAheadStats:
    """Counters of a look-ahead. Each field has one writer thread; other threads may read it at any time."""

    sweeps: int = 0
    """Sweeps completed: each has visited all keys once."""
    sweep_batches: int = 0
    """Batches that the last sweep has loaded."""
    length: int = 1
    """Batches that the horizon may have now."""
    collected: int = 0
    """Batches collected."""
    consumed: int = 0
    """Batches that the stages of `prefetch` have received."""
    rows_loaded: int = 0
    """Rows loaded ahead from SSD, or initialised."""
    late_rows: int = 0
    """Rows that were not loaded when their batch needed them."""
    reads: int = 0
    """Read requests of the stores; late rows are read by the stages of `prefetch`, and count too."""
    bytes_read: int = 0
    """Bytes of these reads."""
    collect_seconds: float = 0.0
    """Time of adding keys to the horizon."""
    load_seconds: float = 0.0
    """Time of loads."""
    bytes: int = 0
    """Memory of the horizon and its batches."""
    most_bytes: int = 0
    """The largest value of `bytes`."""
    budget: int = 0
    """The limit of `bytes`."""
    loads_cut_short: int = 0
    """Batches that were consumed before all their rows were loaded: the rows did not fit, or a read failed."""

    @property
    def batches_ahead(self) -> int:
        """Batches collected and not yet consumed."""
        return self.collected - self.consumed


class AheadItem:
    """A batch of the horizon. `release` may be called on any thread."""

    def __init__(self, batch: Batch, horizons: dict[Table, RowHorizon], *, training: bool) -> None:
        self.horizons = horizons
        self._ahead: dict[Table, BatchAhead] = {}
        self._frozen: list[BatchAhead] = []
        single = len(horizons) == 1
        for table, horizon in horizons.items():
            inputs, frozen = table.inputs_ahead(batch, training=training)
            self._ahead[table] = horizon.add(inputs)
            if frozen:
                self._frozen.append(horizon.add(frozen, frozen=True))
            single = single and len(inputs) == 1 and next(iter(inputs.values())).ids is batch.ids
        self.batch = copy.copy(batch)  # a loader may yield the same batch again while this one is in flight
        self.batch.prepared = {}
        if single:
            self.batch.ids = _NO_IDS
        self._single = single
        arrays = (self.batch.ids, batch.weights, batch.dense, batch.label, batch.time)
        self.bytes = sum(int(getattr(array, "nbytes", 0)) for array in arrays)

    def share_offsets(self, offsets: Offsets | None) -> Offsets:
        """Replace offsets by equal ones; otherwise count them."""
        if offsets is not None and np.array_equal(self.batch.offsets, offsets):
            self.batch.offsets = offsets
        else:
            self.bytes += self.batch.offsets.nbytes
        return self.batch.offsets

    def restore(self) -> Batch:
        """Return the batch, complete again."""
        for ahead in self._ahead.values():
            ids = ahead.restore()
            if self._single:
                self.batch.ids = ids
        return self.batch

    @property
    def to_visit(self) -> float:
        """The part of a sweep that is left until its rows are loaded."""
        return max((ahead.to_visit for ahead in (*self._ahead.values(), *self._frozen)), default=0.0)

    def take(self, table: Table) -> BatchAhead:
        """Return the keys of a table. The caller releases them."""
        return self._ahead.pop(table)

    def release(self) -> None:
        """Release all that was not taken."""
        while self._ahead:
            self._ahead.popitem()[1].release()
        while self._frozen:
            self._frozen.pop().release()


class LookAhead:
    """An iterator over the batches of `loader`, whose rows are loaded ahead.

    The consumer calls `release` for every item when it has finished with it, or has taken its keys. Thread safety: one
    thread iterates; `release`, `notify` and `stop` may be called from others.
    """

    def __init__(
        self, loader: Iterable[Batch], tables: Sequence[Table], limits: LookAheadLimits, *, depth: int, training: bool
    ) -> None:
        """
        depth     batches that the consumer has in flight; 1: batches are collected and loaded on its thread
        training  False: the consumer only reads rows
        """
        self._tables = tables
        self._limits = limits
        self._depth = depth
        self._training = training
        self._length = HorizonLength(limits.batches)
        self.stats = LookAheadStats(budget=limits.bytes)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self._held_bytes = 0  # of batches that are not released, without their keys
        self._most_ids = 0  # of a batch
        self._growth = 0  # largest growth of memory by one batch
        self._horizons: dict[Table, RowHorizon] = {}
        self._offsets: Offsets | None = None
        self._loaded = 0  # batches that the look-ahead has passed on
        self._releases = 0
        self._rows_before = 0  # that horizons of the tables had loaded when they were last counted
        self._counts: dict[RowHorizon, ReadCounts] = {}  # when they were last counted: loads may go on between calls
        self._sweep = 0  # number of the present sweep
        self._begun = 0  # batches collected when it began
        self._reads = [0] * len(tables)  # of each table in it
        self._pages = 0.0  # read in it
        self._source: Iterator[Batch] = iter(loader)
        self._pipeline: Pipeline[AheadItem] | None = None
        if depth > 1:
            stages: list[tuple[str, Callable[[AheadItem], AheadItem]]] = [("look-ahead", self._load)]
            self._pipeline = Pipeline(self._collect(), stages, depth=_MOST_BATCHES, on_stop=self.stop)

    @classmethod
    def over(cls, loader: Iterable[Batch], tables: Sequence[Table], *, depth: int, training: bool) -> LookAhead | None:
        """Make a look-ahead with the limits of the tables. None: no table has rows to load ahead, or it is disabled."""
        limits = [spec for table in tables if (spec := table.backend.lookahead) is not None]
        if not limits or len(limits) < len(tables):
            return None
        batches = [limit.batches for limit in limits if limit.batches is not None]
        total = sum(limit.bytes for limit in limits)
        total_limits = LookAheadLimits(min(batches, default=None), total)
        return cls(loader, tables, total_limits, depth=depth, training=training)

    # ---- consumer

    def __iter__(self) -> Iterator[AheadItem]:
        items = self._serial() if self._depth == 1 else self._pipeline
        for item in items or ():
            with self._lock:
                self.stats.consumed += 1
                self._changed.notify_all()
            self.stats.late_rows = sum(horizon.late_rows for horizon in item.horizons.values())
            item.restore()
            yield item

    def release(self, item: AheadItem) -> None:
        """Release all of an item that was not taken, and stop counting its memory. May be called twice."""
        item.release()
        with self._lock:
            self._held_bytes -= item.bytes
            item.bytes = 0
            self._releases += 1
            self._changed.notify_all()

    def notify(self) -> None:
        """Continue threads that wait: rows were unpinned."""
        with self._lock:
            self._releases += 1
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
        self._source = iter(())
        horizons, self._horizons = self._horizons, {}
        for horizon in horizons.values():
            horizon.drop()

    # ---- collect

    def _collect(self) -> Iterator[AheadItem]:
        while self._wait_for_room():
            batch = next(self._source, None)
            if batch is None:
                return
            yield self._add(batch)

    def _serial(self) -> Iterator[AheadItem]:
        """Collect and load as many batches as fit, then pass them on."""
        error: Exception | None = None
        while error is None:
            items: list[AheadItem] = []
            try:
                while self._has_room() and (batch := next(self._source, None)) is not None:
                    items.append(self._add(batch))
            except Exception as failure:  # raised after the batches before it
                error = failure
            yield from [self._load(item) for item in items]
            if not items and error is None:
                return
        raise error

    def _add(self, batch: Batch) -> AheadItem:
        if any(horizon.dropped for horizon in self._horizons.values()) or not self._horizons:
            self._horizons = {table: table.backend.horizon(training=self._training) for table in self._tables}
            self._rows_before = sum(horizon.rows_loaded for horizon in self._horizons.values())
            self._counts = {horizon: horizon.read_counts for horizon in self._horizons.values()}
        before, start = self._bytes(), time.perf_counter()
        self._most_ids = max(self._most_ids, len(batch.ids))
        item = AheadItem(batch, self._horizons, training=self._training)
        self._offsets = item.share_offsets(self._offsets)
        with self._lock:
            self._held_bytes += item.bytes
            self.stats.collected += 1
            self.stats.bytes = self._bytes()
            self.stats.most_bytes = max(self.stats.most_bytes, self.stats.bytes)
            self._changed.notify_all()
        self._growth = max(self._growth, self.stats.bytes - before)
        self.stats.collect_seconds += time.perf_counter() - start
        return item

    def _bytes(self) -> int:
        """Return the memory of the horizon, with the ids of restored batches."""
        keys = sum(horizon.bytes for horizon in self._horizons.values())
        return keys + self._held_bytes + 8 * self._most_ids * self._depth

    def _has_room(self) -> bool:
        """Return whether another batch may be added. The consumer gets at least one."""
        ahead = self.stats.batches_ahead
        return ahead == 0 or (
            ahead < min(self._length.batches, _MOST_BATCHES)
            and self._bytes() + self._growth <= self._limits.bytes
            and not any(horizon.full for horizon in self._horizons.values())
        )

    def _wait_for_room(self) -> bool:
        """Return False if the look-ahead stops."""
        with self._lock:
            while not self._stopping and not self._has_room():
                self._changed.wait()
            return not self._stopping

    # ---- load

    def _load(self, item: AheadItem) -> AheadItem:
        """Sweep until the rows of an item are loaded, or the consumer cannot wait for them."""
        while not self._stopping and (left := item.to_visit) > 0:
            if (share := self._due(left)) == 0:
                with self._lock:
                    if not self._stopping and self._due(left) == 0:
                        self._changed.wait()
            elif not self._load_part(item, share):
                self.stats.loads_cut_short += 1
                break
        self._loaded += 1
        return item

    def _due(self, left: float) -> float:
        """Return the share of the sweep to visit now, so that the next batch, which needs `left`, is loaded in time."""
        if self._depth == 1:
            return left
        distance = (self._loaded - self.stats.consumed) / max(1, self.stats.batches_ahead)
        later = max(0.0, distance - (1 - _SWEEP_SHARE)) / _SWEEP_SHARE
        return max(left - later, _LEAST_PART) if left >= later else 0.0

    def _load_part(self, item: AheadItem, share: float) -> bool:
        """Load the next rows of the sweep. False: no further ones can be loaded for this item."""
        releases, start = self._releases, time.perf_counter()
        horizons = list(item.horizons.values())
        try:
            visited = [horizon.load(share) for horizon in horizons]
        except BudgetError:
            return self._wait_for_release(releases)
        except ThermoclineError:  # raised again by the pull of the batch, unless the table was reopened meanwhile
            return False
        finally:
            self.stats.load_seconds += time.perf_counter() - start
        rows, self._rows_before = self._rows_before, sum(horizon.rows_loaded for horizon in horizons)
        self.stats.rows_loaded += max(0, self._rows_before - rows)
        self._count_reads(horizons)
        return any(visited)

    def _wait_for_release(self, releases: int) -> bool:
        """Wait until rows were unpinned. False: the consumer needs the next batch now."""
        with self._lock:
            while self._releases == releases and not self._stopping:
                if self._depth == 1 or self._loaded <= self.stats.consumed:
                    return False
                self._changed.wait()
        return True

    def _count_reads(self, horizons: Sequence[RowHorizon]) -> None:
        """Add the reads since the last call; after a whole sweep, change the length of the horizon."""
        stats, counts = self.stats, self._counts
        current = [horizon.read_counts for horizon in horizons]
        for table, (horizon, now) in enumerate(zip(horizons, current, strict=True)):
            earlier = counts.get(horizon, now)
            if horizon in counts:
                counts[horizon] = now
            reads, size = max(0, now.reads - earlier.reads), max(0, now.bytes - earlier.bytes)
            self._reads[table] += reads
            self._pages += size / _PAGE
            stats.reads += reads
            stats.bytes_read += size
        sweep = int(min(horizon.position for horizon in horizons))
        if sweep != self._sweep and stats.collected > self._begun:
            batches, self._begun = stats.collected - self._begun, stats.collected
            read = SweepReads(sum(self._reads), self._pages)
            self._length.swept(batches, read, _mean_cost(current, self._reads))
            self._sweep, self._reads, self._pages = sweep, [0] * len(self._tables), 0.0
            stats.sweeps += 1
            stats.sweep_batches, stats.length = batches, self._length.batches
            self.notify()


def _mean_cost(costs: Sequence[ReadCounts], reads: Sequence[int]) -> SweepReads:
    """Return the mean costs of a read and a page over stores, weighted by their `reads`; equally if there were none."""
    weights = reads if any(reads) else None
    return SweepReads(
        fmean([cost.read_cost for cost in costs], weights), fmean([cost.page_cost for cost in costs], weights)
    )
