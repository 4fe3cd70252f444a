"""`EarlyRows`: exchanges rows of the next batch while the network computes on the current one (`dist.overlap`).

A step changes the rows of its own batches only. So a row of the next batch that no rank uses in the open batches has
its final value already, and its owner can send it on another thread and communicator. The other rows follow after the
step, on the training thread, as all rows do without overlap. The owner decides by the slots of its rows: it knows the
keys of all ranks. Every rank receives the same values as without overlap, so the bits are the same.

The ranks agree once per batch whether all of them have prepared the next one; if not, it is exchanged after the step.
What arrived early is discarded, and the whole batch exchanged again, if not exactly one step followed, or if rows were
changed by anything else (`invalidate`): every rank calls the same methods in the same order, so all discard or none.

Thread     `add` on the load thread of a pipeline; all other methods on the training thread
Blocks     `start` and `take`, until all ranks have made the same call
Raises     `RankError`
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import numpy as np
import torch

from thermocline.batch import WorkingSet
from thermocline.distributed.communicator import Communicator, Groups
from thermocline.distributed.row_exchange import Route, RowExchange


class RowReader(Protocol):
    """The rows that this rank owns, see `ShardBackend`."""

    def row_buffer(self, count: int) -> tuple[Any, torch.Tensor]: ...

    def read_weights(self, slots: Any, index: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Rows of a batch, of which some have arrived."""

    rows: Any
    """See `ShardBackend.row_buffer`."""
    out: torch.Tensor
    rest: Route
    """Keys whose rows have not arrived."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """An exchange on the early thread."""

    plan: weakref.ref[Any]
    step: int
    """`step_count` for which the rows are valid."""
    version: int
    done: Future[Arrived]


class EarlyRows:
    """Early exchange of the rows of one table."""

    def __init__(self, groups: Groups, exchange: RowExchange, local: RowReader) -> None:
        self._groups = groups
        self._exchange = exchange
        self._local = local
        self._lock = threading.Lock()
        self._coming: deque[weakref.ref[Any]] = deque()
        """Plans of a pipeline, in the order of their batches. Protected by `_lock`."""
        self._current: _Exchange | None = None
        self._version = 0
        self.rows_early = self.rows_late = self.discarded = 0
        """Rows that this rank received before and after a step; batches whose early rows were discarded."""

    def add(self, plans: Iterable[Any]) -> None:
        """Append plans that a pipeline has loaded."""
        with self._lock:
            self._coming.extend([weakref.ref(plan) for plan in plans])

    def invalidate(self) -> None:
        """Declare that rows will be changed by anything but a step. Waits until none are being read."""
        self._version += 1
        if self._current is not None:
            wait([self._current.done])

    def take(self, plan: Any, step: int) -> Arrived | None:
        """Return the rows of a batch that have arrived; None: exchange all of them."""
        with self._lock:
            if any(coming() is plan for coming in self._coming):
                while self._coming.popleft()() is not plan:
                    pass
        current, self._current = self._current, None
        if current is None:
            return None
        arrived = current.done.result()
        if current.plan() is not plan or (current.step, current.version) != (step, self._version):
            self.discarded += 1
            return None
        late = sum(arrived.rest.hops[0].send)
        self.rows_early += len(arrived.rest.keys) - late
        self.rows_late += late
        return arrived

    def start(self, opened: Sequence[Any], step: int) -> None:
        """Begin to exchange rows of the next batch, if all ranks have prepared it.

        opened   slots of the rows that this rank owns in each open batch
        step     `step_count` of the open batches
        """
        with self._lock:
            plan = self._coming[0]() if self._coming else None
        pinned = plan is not None and plan.pins.acquire()
        ready = self._groups.train.all_gather(np.array([pinned], np.uint8), "preparing the next batch").all()
        if plan is None or not pinned:
            return
        if not ready:
            plan.pins.release()
            return
        comm = self._groups.early
        assert comm is not None
        run = functools.partial(
            self._run, comm, plan.remote.route, plan.remote.slots, list(opened), plan.pins, step + 1
        )
        self._current = _Exchange(weakref.ref(plan), step + 1, self._version, self._groups.early_thread.submit(run))

    def _run(self, comm: Communicator, route: Route, slots: Any, opened: list[Any], pins: Any, step: int) -> Arrived:
        """Runs on the early thread. Reads no row that an open batch may change."""
        try:
            traffic = self._exchange.traffic.early_rows
            chosen = torch.from_numpy(~_among(slots, np.concatenate(opened)))
            early, rest = self._exchange.split_route(comm, route, chosen, traffic)
            rows, out = self._local.row_buffer(len(route.keys))
            give = functools.partial(self._local.read_weights, slots)
            self._exchange.fetch_rows(comm, early, give, out, traffic, step)
            return Arrived(rows, out, rest)
        finally:
            pins.release()


def _among(slots: Any, others: Any) -> Any:
    """Return bool: which of the unique `slots` are among `others`."""
    both = WorkingSet.of(np.concatenate([others, slots]).astype(np.uint64))
    numbers = int(both.inverse[: len(others)].max(initial=0)) + 1 if len(others) else 0
    return both.inverse[len(others) :] < numbers  # slots are numbered by their first occurrence
