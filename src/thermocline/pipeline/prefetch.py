"""`tc.prefetch`: pin the rows of a batch where they are trained before the loop reaches it.

    read       iterate over the loader; cut its batches into windows            (thread "read")
               with SSD: rows of many batches are loaded ahead first            (pipeline/lookahead.py)
    collect    deduplicate the keys of a window, or send its ids to the device  (thread "collect")
    exchange   over ranks: send keys to the ranks that own them                 (thread "exchange")
    pull       give every key a slot; read missing rows from SSD                (thread "pull")
    load       plan pooling and gradient sums; bring values to the device       (thread "load")
    train      the caller's loop; `table.step()` changes the rows in place

With tables in HBM and no SSD, collect, pull and load only launch work on the GPU: they run on the caller's thread, and
rows that miss are loaded by a thread "load".

`embedding/backend.py` states what each stage does. Rows are pulled, never copied: a batch pulled early sees what
earlier batches wrote, so the result does not depend on depth or window.

Over several ranks a rank whose loader has ended continues with empty batches until all have ended.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from thermocline.batch import Batch
from thermocline.embedding.backend import RowWindow
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.shared_tiers import Tiers
from thermocline.embedding.table import Table, row_tables
from thermocline.errors import BudgetError
from thermocline.pipeline.executor import Later, Pipeline, StageStats
from thermocline.pipeline.lookahead import AheadItem, LookAhead, LookAheadStats
from thermocline.pipeline.window_sync import WindowSync, window_sync_for
from thermocline.utils.malloc import keep_freed_memory

_FIELDS = [field.name for field in dataclasses.fields(Batch) if field.init]
_INLINE_IDS = 1 << 18
"""Ids of a window up to which its stages may run on the caller's thread: copying them takes a fraction of a step."""


@dataclasses.dataclass(slots=True, eq=False)
class _Window:
    """Batches that share one pull."""

    batches: list[Batch]
    ahead: list[AheadItem] = dataclasses.field(default_factory=list)
    """The batches in the look-ahead."""
    rows: dict[Table, RowWindow] = dataclasses.field(default_factory=dict)
    flags: int = 0
    """The flags of all ranks, combined by or: see `prefetch`."""
    last: bool = False
    """Over several ranks: no rank has more batches; this window is empty."""
    pinned: set[Table] = dataclasses.field(default_factory=set)
    """Tables whose rows are pinned: the pull stage may run again for the others."""
    outstanding: bool = False
    """Pinned and not yet released."""
    loading: list[Future[None]] = dataclasses.field(default_factory=list)
    """Loads that run on a thread of their own, while the stages run on the caller's."""


class Prefetch:
    """An iterator over prepared batches, made by `tc.prefetch`.

    A `for` loop over it may be left in any way. If its name outlives the loop, close it or use a `with` statement.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        tables: Sequence[Table],
        depth: int,
        pull_window: int,
        training: bool,
        flags_fn: Callable[[], int] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        if pull_window < 1:
            raise ValueError(f"pull_window is {pull_window}: it must be at least 1 batch")
        sync = window_sync_for(tables, training, flags_fn or (lambda: 0))
        in_flight = 1 if depth == 1 else depth * pull_window
        # The stages do not refer to this object, so that it can be dropped while they run.
        stages = _Stages(tables, sync, getattr(loader, "stop_waiting", None))
        if depth == 1 and hasattr(loader, "while_waiting"):  # it waits on the caller's thread
            loader.while_waiting = idle
        with contextlib.ExitStack() as on_error:
            if training:
                on_error.callback(stages.end_planning)
                stages.begin_planning()
            ahead = LookAhead.over(loader, list(dict.fromkeys(tables)), depth=in_flight, training=training)
            stages.ahead = ahead
            self.lookahead: LookAheadStats | None = None if ahead is None else ahead.stats
            """Counters of the look-ahead; None: it is not used."""
            self._training = training
            self._tables = list(dict.fromkeys(tables))
            for table in self._tables if training else ():
                table.pipelines.add(self)
            self._checked_tables = tables if training and flags_fn is None else ()
            """Tables whose damage stops the loop here; a caller with `flags_fn` stops all ranks at the same batch."""
            self.flags = 0
            """The ranks' combined flags when the last batch was the first of its window, else 0. After the end: those
            that came with the last agreement."""
            launching = all(table.backend.plans_on_device for table in tables)
            self._pipeline: Pipeline[_Window] = Pipeline(
                _windows(loader, pull_window, sync) if ahead is None else _windows_ahead(ahead, pull_window, sync),
                stages.training if training else [("pull", stages.read)],
                depth=depth,
                finish=stages.finish,
                on_stop=stages.stop,
                on_closed=stages.closed,
                idle=idle,
                inline=stages.choose_inline if training and sync is None and ahead is None and launching else None,
            )
            on_error.pop_all()
        self._ready: Iterator[Batch] = iter(())

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Batch:
        for table in self._checked_tables:
            table.require_undamaged()
        self.flags = 0
        for batch in self._ready:
            return self._fetched(batch)
        window = next(self._pipeline)
        self.flags = window.flags
        while window.loading:
            window.loading[0].result()
            window.loading.pop(0)
        if window.last:
            self.close()
            raise StopIteration
        self._ready = iter(window.batches)
        return self._fetched(next(self._ready))

    def _fetched(self, batch: Batch) -> Batch:
        if self._training:
            for table in self._tables:
                table.backend.fetch(batch.prepared[table])
                if table.groups is not None:  # now, because every rank draws the batch but may not run the model on it
                    table.read_frozen(batch)
        return batch

    def close(self) -> None:
        """Stop the stages, wait for the window each is working on, and unpin all prepared windows."""
        self._ready = iter(())
        self._pipeline.close()
        for table in self._tables:
            table.pipelines.discard(self)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> list[StageStats]:
        """Time, waiting and queue fill of each stage; items are windows."""
        return self._pipeline.stats


class _Stages:
    """The stages of a window. Each runs on one thread, in window order."""

    def __init__(
        self, tables: Sequence[Table], sync: WindowSync | None, stop_loader: Callable[[], None] | None
    ) -> None:
        self._stop_loader = stop_loader
        self._tables = list(dict.fromkeys(tables))
        self._sync = sync
        self.ahead: LookAhead | None = None
        self._lock = threading.Lock()  # plain, on the caller's thread: Ctrl-C could leave a Condition's lock taken
        self._changed = threading.Condition(self._lock)
        self._outstanding = 0  # windows pinned and not yet released
        self._stopping = False
        self._inline = False  # stages run on the caller's thread
        self._loader: ThreadPoolExecutor | None = None

    def choose_inline(self, window: _Window) -> bool:
        """Return whether the stages shall run on the caller's thread: they launch work on a GPU and copy few ids."""
        ids = sum(len(batch.ids) for batch in window.batches)
        self._inline = ids <= _INLINE_IDS
        return self._inline

    def begin_planning(self) -> None:
        """Declare to all tables that these stages plan their training batches."""
        for table in self._tables:
            table.begin_planning(self)

    def end_planning(self) -> None:
        """Undo what was planned for batches that the loop did not receive."""
        for table in self._tables:
            table.end_planning(self)

    @property
    def training(self) -> list[tuple[str, Callable[[_Window], _Window]]]:
        exchange = [] if self._sync is None else [("exchange", functools.partial(self.exchange, self._sync))]
        return [("collect", self.collect), *exchange, ("pull", self.pull), ("load", self.load)]

    def collect(self, window: _Window) -> _Window:
        for table in self._tables:
            rows = window.rows[table] = table.stage(window.batches, [item.take(table) for item in window.ahead])
            if self._inline:
                table.backend.launch(rows)  # the device plans while the caller trains: `pull` is in the next call
        return window

    def exchange(self, sync: WindowSync, window: _Window) -> _Window:
        """Send keys to their owners. A separate stage that never waits for memory: no rank waits for another's."""
        with sync.collective():
            padding = self._agree(window, sync)
            if not window.last:
                for table, rows in window.rows.items():
                    table.backend.exchange(rows, [table.inputs(batch) for batch in padding])
        return window

    @staticmethod
    def _agree(window: _Window, sync: WindowSync) -> list[Batch]:
        """Give every rank the same number of batches. Return the empty batches added here."""
        most, window.flags = sync.agree(len(window.batches))
        window.last = most == 0
        padding = [sync.empty_batch() for _ in range(most - len(window.batches))]
        window.batches += padding
        return padding

    def pull(self, window: _Window) -> _Window:
        if window.last:
            return window
        for table, rows in window.rows.items():
            if table not in window.pinned:
                self._retry_when_released(functools.partial(table.pin, rows))
                window.pinned.add(table)
        with self._lock:
            self._outstanding += 1
            window.outstanding = True
        return window

    def _retry_when_released(self, pin: Callable[[], None]) -> None:
        """Pin; if a tier cannot hold all queued windows, try again whenever an earlier one was released."""
        while True:
            with self._lock:
                before = self._outstanding
            try:
                return pin()
            except BudgetError:
                if before == 0 and any(table.drop_lookahead() for table in self._tables):
                    continue
                if before > 0 and self._inline:
                    raise Later from None
                with self._lock:
                    if before == 0 or self._stopping:
                        raise
                    while self._outstanding == before and not self._stopping:
                        self._changed.wait()

    def load(self, window: _Window) -> _Window:
        if window.last:
            return window
        for table, rows in window.rows.items():
            for batch, plan in zip(window.batches, table.backend.prepare(rows), strict=True):
                batch.prepared[table] = plan
            if self._inline and not table.backend.loads_nothing(rows):
                if self._loader is None:
                    self._loader = ThreadPoolExecutor(1, "thermocline-load")
                window.loading.append(self._loader.submit(table.backend.load, rows))
            else:
                table.backend.load(rows)
            if table.frozen and table.groups is None:
                for batch in window.batches:
                    table.read_frozen(batch)
        if self.ahead is not None:
            self.ahead.notify()
        return window

    def read(self, window: _Window) -> _Window:
        """Copy rows for evaluation: its only stage."""
        with contextlib.nullcontext() if self._sync is None else self._sync.collective():
            if self._sync is not None:
                self._agree(window, self._sync)
            for batch in window.batches:
                for table in self._tables:
                    batch.prepared[table] = table.prepare_read(batch)
        self._release_ahead(window)
        return window

    def _release_ahead(self, window: _Window) -> None:
        """Release what no stage has taken."""
        for item in window.ahead:
            assert self.ahead is not None
            self.ahead.release(item)

    def finish(self, window: _Window) -> None:
        """Release what the window holds, at whatever stage it is."""
        for batch in window.batches:
            batch.prepared = {}
        while window.rows:
            window.rows.popitem()[1].release()
        self._release_ahead(window)
        with self._lock:
            if window.outstanding:
                window.outstanding = False
                self._outstanding -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake the pull stage, and a loader that waits for data: the pipeline is closing."""
        if self._stop_loader is not None:
            self._stop_loader()
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        if self.ahead is not None:
            self.ahead.stop()

    def closed(self, windows: int) -> None:
        """End what other threads and ranks may still wait for."""
        if self._loader is not None:
            self._loader.shutdown()
        if self.ahead is not None:
            self.ahead.close()
        try:
            if self._sync is not None:
                self._sync.drain(windows)  # it plans windows, too
        finally:
            self.end_planning()


def _copy(batch: Batch) -> Batch:
    """Copy a batch, without what was prepared for it."""
    if type(batch) is not Batch:
        other = copy.copy(batch)
    else:  # in a fraction of the time of copy.copy
        other = object.__new__(Batch)
        for name in _FIELDS:
            setattr(other, name, getattr(batch, name))
        other.set_handle()
    other.prepared = {}
    return other


def _windows(loader: Iterable[Batch], size: int, sync: WindowSync | None) -> Iterator[_Window]:
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        # Copies: a loader may yield the same batch again while this one is in flight.
        copies = [_copy(batch) for batch in window]
        if sync is not None:
            sync.template = copies[-1]
        yield _Window(copies)
    while sync is not None:  # other ranks may have more
        yield _Window([])


def _windows_ahead(ahead: LookAhead, size: int, sync: WindowSync | None) -> Iterator[_Window]:
    items = iter(ahead)
    while window := list(itertools.islice(items, size)):
        if sync is not None:
            sync.template = window[-1].batch
        yield _Window([item.batch for item in window], window)
    while sync is not None:  # other ranks may have more
        yield _Window([])


def prefetch(
    loader: Iterable[Batch],
    *tables: Table | MemberTable | Tiers,
    depth: int = 4,
    pull_window: int = 1,
    training: bool = True,
    flags_fn: Callable[[], int] | None = None,
    idle: Callable[[], None] | None = None,
) -> Prefetch:
    """Iterate over `loader` with the rows of `tables` pulled ahead; use it in a for loop.

    tables        `tc.Table`s, or `tc.Tiers`, which stands for all of its tables
    depth         windows in flight, including the one being trained; 1: no overlap
    pull_window   batches that share one pull from SSD
    training      False: rows are only read, for evaluation
    flags_fn      over several ranks: called once per window; the ranks' flags, combined by or, are in `.flags` when the
                  window's first batch is returned, equal on every rank

    idle          called on the caller's thread about every 0.2 s while it waits for a batch; may raise. At depth 1 only
                  while a loader with the attribute `while_waiting` waits

    A loader with a method `stop_waiting` that blocks until data arrives must return soon after it is called: it is when
    the pipeline closes.

    Raises in the loop what any stage raised. `BudgetError`: a single window does not fit a tier. `CorruptionError`,
    without `flags_fn`: a merge found a damaged page of a table whose `on_damage` is "stop".
    """
    if not tables:
        raise ValueError("prefetch() needs at least one table whose rows to pull")
    if training:
        keep_freed_memory()
    return Prefetch(loader, row_tables(tables), depth, pull_window, training, flags_fn, idle)
