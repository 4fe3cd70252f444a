"""`PsTable`: a table whose rows lie in the memory of their owners, one shard per rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from mpi4py import MPI

from baselines.mpi_ps.route import Buffer, Route, Router, exchange
from thermocline.arrays import Floats, Slots
from thermocline.batch import Batch, WorkingSet
from thermocline.embedding.batch_plan import BagSpec, Part, Prepared
from thermocline.embedding.optimizers import SGD, Optimizer
from thermocline.embedding.table import Table
from thermocline.tiers.dram import DramTier, Pins
from thermocline.tiers.dram_backend import DramBackend

NOTHING = np.empty(0, np.uint64)


@dataclasses.dataclass(slots=True, eq=False)
class Planned:
    """A rank's share of one step, with everything known that does not depend on the rows' values."""

    batch: Batch | None
    """None: the rank has no examples left, and serves others."""
    collected: tuple[dict[BagSpec, Part], WorkingSet] | None = None
    route: Route | None = None
    pins: Pins | None = None
    """Of the rows this owner gives; none: they are only read."""
    asked: Slots | None = None
    """Per key that was asked for: where its row is pinned."""
    prepared: Prepared | None = None

    @property
    def examples(self) -> int:
        return 0 if self.batch is None else self.batch.examples

    @property
    def total(self) -> int:
        """Examples of all ranks."""
        assert self.route is not None
        return int(self.route.examples.sum())

    @property
    def weight(self) -> float:
        """The share's size over the ranks' mean: a rank's loss is the mean over its own examples."""
        assert self.route is not None
        return self.examples * len(self.route.examples) / self.total

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()


class PsTable(Table):
    """As `tc.Table` to models and bags; `plan`, `fetch` and `push` take the place of `prepare` and `step`.

    All three are collective: every rank calls them equally often. `plan` may run on another thread than the others.
    """

    def __init__(self, comm: MPI.Comm, dim: int, optimizer: Optimizer, *, threads: int, **options: Any) -> None:
        super().__init__(dim, optimizer, threads=threads, device="cpu", **options)
        self._comm = comm
        # Rows that come from owners have no state: the kernels of a tier whose rows have none pool them.
        self._pulled = DramTier(dim, SGD(lr=1), budget="1MB", threads=threads)
        self._rows_in, self._rows_out, self._sums = Buffer(np.float32), Buffer(np.float32), Buffer(np.float32)

    # ---- ahead of the step

    def gather(self, work: Planned) -> Planned:
        """The share's unique keys. Not collective."""
        if work.batch is not None:
            work.collected = self.collect(work.batch)
        return work

    def plan(self, work: Planned, router: Router, *, training: bool) -> Planned:
        """Exchanges keys; owners pin the rows they will be asked for, or only look at them."""
        keys = NOTHING if work.collected is None else work.collected[1].keys
        work.route = route = router.route(keys, work.examples)
        if training:
            work.pins = self.dram.pin(route.asked.keys)
            work.asked = work.pins.slots()[route.asked.inverse]
        if work.collected is not None:
            # Pins of another rank's keys stand for this rank's: its gradients hold them until the push.
            prepared = DramBackend.prepare(self.dram, *work.collected, route.places, work.pins)  # type: ignore[arg-type]
            work.prepared = prepared
        return work

    # ---- the step

    def fetch(self, work: Planned) -> None:
        """The weights of the share's keys, as they are now, from their owners."""
        assert work.route is not None
        route, asked = work.route, len(work.route.asked.inverse)
        if work.asked is not None:
            out = self._rows_out.take(asked, self.dim)
            self.dram.core.pool(work.asked, None, None, False, out)
        else:
            out = self.dram.read(route.asked.keys)[route.asked.inverse, : self.dim]
        rows = self._rows_in.take(len(route.places), self.dim)
        exchange(self._comm, out, route.received, rows, route.sent)
        if work.batch is not None and work.prepared is not None:
            work.batch.prepared[self] = dataclasses.replace(work.prepared, rows=rows)

    def pool(self, prepared: Any, part: Any) -> Floats:
        """float32[bags, dim], of the rows that `fetch` brought."""
        out = np.empty((part.bags, self.dim), np.float32)
        index, offsets = part.id_slots, part.offsets
        self._pulled.core.pool_buffer(prepared.rows, index, offsets, part.weights, part.mean, out)
        return out

    def push(self, work: Planned) -> None:
        """The gradients of the share's keys to their owners, which add them up in rank order and update once."""
        route = work.route
        assert route is not None
        assert work.pins is not None
        sums = self._sums.take(len(route.places), self.dim)
        if work.batch is not None:
            places, found = self._training.sums(self._in_order())
            if len(places) != len(sums):
                raise ValueError(f"{len(sums) - len(places)} keys got no gradient: every bag must be part of the loss")
            sums[places] = found
            if work.weight != 1:
                sums *= np.float32(work.weight)
        self.discard_gradients()
        asked, slots = route.asked, work.pins.slots()
        grads = self._rows_out.take(len(asked.inverse), self.dim)
        exchange(self._comm, sums, route.sent, grads, route.received)
        self.step_count += 1
        step = self.dram.step(self.step_count, self.lr, 1 / self._comm.size)
        self.dram.core.mark_dirty(slots)
        self.dram.core.update(slots, asked.starts, asked.order, None, grads, step)
