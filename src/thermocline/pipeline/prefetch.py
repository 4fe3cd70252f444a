"""`tc.prefetch`: the four stages of a batch. Rows are in memory, pinned, before the loop asks for their batch.

    read    the loader's own work; then dedup to the working set          (thread "read")
    pull    rows that memory lacks come from SSD; everything is pinned    (thread "pull")
    load    slots and gradient plans per bag                              (thread "load")
    train   the caller's loop; `table.step()` writes the rows in place

Rows are pulled, never copied: a batch pulled early sees what earlier batches wrote, so the result does not depend on
depth or window. Plans are made in batch order by one thread.

With an HBM tier `pull` plans on the GPU who hits, who misses and who leaves; `load` moves the rows, through memory.

Over several ranks a stage `ask` before `pull` sends keys to their owners, who pin them, window by window on every rank;
a rank that runs out of batches goes on with empty ones until all have. Rows come when the loop asks for their batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thermocline.arrays import Keys, Slots
from thermocline.batch import Batch, WorkingSet
from thermocline.embedding.table import Table
from thermocline.errors import BudgetError
from thermocline.pipeline.executor import Pipeline, StageStats
from thermocline.pipeline.window_sync import WindowSync, window_sync_for
from thermocline.tiers.dram import DramTier, Pins
from thermocline.utils.malloc import keep_freed_memory

if TYPE_CHECKING:
    from thermocline.distributed.sharded_backend import Planned
    from thermocline.tiers.hbm import HbmPins, StagedIds

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Window:
    """Batches that share one pull."""

    batches: list[Batch]
    collected: dict[Table, list[Any]] = dataclasses.field(default_factory=dict)
    """Per table and batch: what `Table.collect` gave."""
    pinned: dict[Table, tuple[DramTier, Pins, Slots | None]] = dataclasses.field(default_factory=dict)
    """Per table: the pins of the window's unique keys and whose they are; and the places of each batch's keys among
    them, joined; none: of a single batch, in order."""
    staged: dict[Table, StagedIds] = dataclasses.field(default_factory=dict)
    """Per table with an HBM tier: the window's ids."""
    on_gpu: dict[Table, HbmPins] = dataclasses.field(default_factory=dict)
    """Per table with an HBM tier: the pins of the window's slots there."""
    between: dict[Table, Planned] = dataclasses.field(default_factory=dict)
    """Per table over several ranks: who asks whom."""
    flags: int = 0
    """What the ranks said with it, together: see `prefetch`."""
    last: bool = False
    """Over several ranks: none of them has more; this window is empty."""
    outstanding: bool = False


class Prefetch:
    """An iterator over prepared batches; `tc.prefetch` makes it.

    A `for` loop over it may be left in any way. If its name outlives the loop, close it or use a `with` statement.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        tables: Sequence[Table],
        depth: int,
        pull_window: int,
        training: bool,
        flags_fn: Callable[[], int],
    ) -> None:
        if pull_window < 1:
            raise ValueError(f"pull_window is {pull_window}: at least 1 batch per pull")
        sync = window_sync_for(tables, training, flags_fn)
        # Apart from this object, which can then be dropped while the stages run.
        stages = _Stages(tables, sync)
        self._training = training
        self.flags = 0
        """What the ranks said, together, with the window that the last batch is the first of; else 0. At the end: what
        they said with their last word that there are no more."""
        self._pipeline: Pipeline[_Window] = Pipeline(
            _windows(loader, pull_window, sync),
            stages.training if training else [("pull", stages.read)],
            depth=depth,
            finish=stages.finish,
            on_stop=stages.give_up,
            on_closed=sync.drain if sync is not None else lambda items: None,
        )
        self._ready: Iterator[Batch] = iter(())

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Batch:
        self.flags = 0
        for batch in self._ready:
            return self._delivered(batch)
        window = next(self._pipeline)
        self.flags = window.flags
        if window.last:
            self.close()
            raise StopIteration
        self._ready = iter(window.batches)
        return self._delivered(next(self._ready))

    def _delivered(self, batch: Batch) -> Batch:
        if self._training:
            for table, prepared in batch.prepared.items():
                if table.ranks is not None:
                    table.fetch(prepared)
        return batch

    def close(self) -> None:
        """Stops the stages, waits for the batch each is at, and unpins what they had ready."""
        self._ready = iter(())
        self._pipeline.close()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> list[StageStats]:
        """Time, waiting and queue fill of each stage; items are windows."""
        return self._pipeline.stats


class _Stages:
    """What happens to a window on its way. Each stage runs on one thread, in order."""

    def __init__(self, tables: Sequence[Table], sync: WindowSync | None) -> None:
        self._tables = list(dict.fromkeys(tables))
        self._sync = sync
        self._lock = threading.Lock()  # by itself on the caller's thread: a Condition's could stay taken on Ctrl-C
        self._changed = threading.Condition(self._lock)
        self._outstanding = 0  # windows pulled and not yet trained
        self._stopping = False

    @property
    def training(self) -> list[tuple[str, Callable[[_Window], _Window]]]:
        asking = [] if self._sync is None else [("ask", functools.partial(self.ask, self._sync))]
        return [("collect", self.collect), *asking, ("pull", self.pull), ("load", self.load)]

    def collect(self, window: _Window) -> _Window:
        for table in self._tables:
            if table.gpu is not None and table.ranks is None:
                window.collected[table] = [table.parts(batch) for batch in window.batches]
                window.staged[table] = table.gpu.stage(window.collected[table])
            else:
                window.collected[table] = [table.collect(batch) for batch in window.batches]
        return window

    def ask(self, sync: WindowSync, window: _Window) -> _Window:
        """Keys to their owners. A stage of its own: it never waits for room, so no rank waits for another's room."""
        with sync.together():
            if self._meet(window, sync):
                for table, collected in window.collected.items():
                    assert table.ranks is not None
                    window.between[table] = table.ranks.plan(collected)
        return window

    def pull(self, window: _Window) -> _Window:
        if window.last:
            return window
        for table, collected in window.collected.items():
            if table.ranks is not None:
                self._when_there_is_room(functools.partial(table.ranks.pin, window.between[table]))
                continue
            if table.gpu is not None:
                staged = window.staged.pop(table)
                window.on_gpu[table] = planned = self._when_there_is_room(functools.partial(table.gpu.pin, staged))
                for batch, one in zip(window.batches, table.gpu.prepare(collected, planned), strict=True):
                    batch.prepared[table] = one
                continue
            keys = [working_set.keys for _, working_set in collected]
            if len(keys) == 1:
                window.pinned[table] = *self._pin(table, keys[0]), None
            else:
                union = WorkingSet.of(np.concatenate(keys))
                window.pinned[table] = *self._pin(table, union.keys), union.inverse
        with self._lock:
            self._outstanding += 1
            window.outstanding = True
        return window

    @staticmethod
    def _meet(window: _Window, sync: WindowSync) -> bool:
        """As many batches on each rank, empty ones where there are fewer. False: none has any."""
        most, window.flags = sync.agree(len(window.batches))
        window.last = most == 0
        for _ in range(most - len(window.batches)):
            empty = sync.empty_batch()
            window.batches.append(empty)
            for table, collected in window.collected.items():
                collected.append(table.collect(empty))
        return not window.last

    def _pin(self, table: Table, keys: Keys) -> tuple[DramTier, Pins]:
        def pin() -> tuple[DramTier, Pins]:
            tier = table.dram
            return tier, tier.pin(keys)

        return self._when_there_is_room(pin)

    def _when_there_is_room(self, pin: Callable[[], T]) -> T:
        """Waits for earlier windows to leave when a tier is too small for all that are queued."""
        while True:
            with self._lock:
                before = self._outstanding
            try:
                return pin()
            except BudgetError:
                with self._lock:
                    if before == 0 or self._stopping:
                        raise
                    while self._outstanding == before and not self._stopping:
                        self._changed.wait()

    def load(self, window: _Window) -> _Window:
        if window.last:
            return window
        for table, collected in window.collected.items():
            if table.ranks is not None:
                planned = window.between[table]
                for batch, prepared in zip(window.batches, table.ranks.prepare(planned), strict=True):
                    batch.prepared[table] = prepared
                table.ranks.load(planned)
                continue
            if table.gpu is not None:
                table.gpu.load(window.on_gpu[table])
                continue
            tier, pins, places = window.pinned[table]
            slots, first = pins.slots(), 0
            for batch, (parts, working_set) in zip(window.batches, collected, strict=True):
                own = slots if places is None else slots[places[first : first + len(working_set)]]
                first += len(working_set)
                batch.prepared[table] = table.bind(tier, parts, working_set, own, pins)
        return window

    def read(self, window: _Window) -> _Window:
        """The only stage of evaluation."""
        with contextlib.nullcontext() if self._sync is None else self._sync.together():
            if self._sync is not None and not self._meet(window, self._sync):
                return window
            for batch in window.batches:
                for table in self._tables:
                    batch.prepared[table] = table.prepare_read(batch)
        return window

    def finish(self, window: _Window) -> None:
        """Gives back what the window holds, however far it came."""
        for batch in window.batches:
            batch.prepared = {}
        while window.pinned:
            window.pinned.popitem()[1][1].release()
        while window.between:
            window.between.popitem()[1].release()
        while window.on_gpu:
            window.on_gpu.popitem()[1].release()
        with self._lock:
            if window.outstanding:
                window.outstanding = False
                self._outstanding -= 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """The pipeline stops: nobody may wait any longer."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()


def _windows(loader: Iterable[Batch], size: int, sync: WindowSync | None) -> Iterator[_Window]:
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        # Copies: a loader may give the same batch again while this one is still in flight.
        copies = [copy.copy(batch) for batch in window]
        for batch in copies:
            batch.prepared = {}
        if sync is not None:
            sync.seen(copies[-1])
        yield _Window(copies)
    while sync is not None:  # other ranks may have more
        yield _Window([])


def prefetch(
    loader: Iterable[Batch],
    *tables: Table,
    depth: int = 4,
    pull_window: int = 1,
    training: bool = True,
    flags_fn: Callable[[], int] = lambda: 0,
) -> Prefetch:
    """Iterates over `loader` with the rows of `tables` pulled ahead; use it in a for loop.

    depth         pulls in flight, the one being trained included; 1: everything one after the other
    pull_window   batches that share one pull from SSD
    training      False: rows are only read, for evaluation
    say           over several ranks: asked for a number when a window is pulled; the ranks' numbers, or-ed, are in
                  `said` when the window's first batch comes: the same on every rank

    Raises in the loop what any stage raised. `BudgetError`: a single window does not fit the memory tier.
    """
    if not tables:
        raise ValueError("prefetch needs the tables whose rows it is to pull")
    if training:
        keep_freed_memory()
    return Prefetch(loader, tables, depth, pull_window, training, flags_fn)
