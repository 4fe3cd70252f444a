"""`PsTable`: a table sharded over the DRAM of the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from mpi4py import MPI

from baselines.mpi_ps.route import Buffer, Route, Router, exchange
from thermocline.batch import Batch, Floats, Slots, WorkingSet
from thermocline.embedding.batch_plan import BagSpec, Part, Prepared
from thermocline.embedding.optimizers import SGD, Optimizer
from thermocline.embedding.table import Table
from thermocline.tiers.dram import DramTier, Pins
from thermocline.tiers.dram_backend import DramBackend

NO_KEYS = np.empty(0, np.uint64)


@dataclasses.dataclass(slots=True, eq=False)
class StepPlan:
    """One step of this rank: everything that does not depend on the values of rows."""

    batch: Batch | None
    """None: the rank has no examples left and only serves other ranks."""
    collected: tuple[dict[BagSpec, Part], WorkingSet] | None = None
    route: Route | None = None
    pins: Pins | None = None
    """Pins of the requested rows of this owner; None in evaluation."""
    requested_slots: Slots | None = None
    """Per requested key: slot of its row."""
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
        """Examples of this rank / mean over ranks: the loss of a rank is the mean over its examples."""
        assert self.route is not None
        return self.examples * len(self.route.examples) / self.total

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()


class PsTable(Table):
    """A `tc.Table` for models and bags, with `plan`, `pull` and `push` instead of `prepare` and `step`.

    These three are collective: every rank calls them equally often. `plan` may run on another thread than the others.
    """

    def __init__(self, comm: MPI.Comm, dim: int, optimizer: Optimizer, *, threads: int, **options: Any) -> None:
        super().__init__(dim, optimizer, threads=threads, device="cpu", **options)
        self._comm = comm
        # Received rows have no optimizer state: kernels of a tier without state pool them.
        self._pulled = DramTier(dim, SGD(lr=1), budget="1MB", threads=threads)
        self._rows_in, self._rows_out, self._sums = Buffer(np.float32), Buffer(np.float32), Buffer(np.float32)

    # ---- ahead of the step

    def deduplicate(self, work: StepPlan) -> StepPlan:
        """Collect the unique keys of the batch. Not collective."""
        if work.batch is not None:
            work.collected = self.collect(work.batch)
        return work

    def plan(self, work: StepPlan, router: Router, *, training: bool) -> StepPlan:
        """Exchange keys; in training, pin the rows requested from this owner."""
        keys = NO_KEYS if work.collected is None else work.collected[1].keys
        work.route = route = router.route(keys, work.examples)
        if training:
            work.pins = self.dram.pin(route.requested.keys)
            work.requested_slots = work.pins.slots()[route.requested.inverse]
        if work.collected is not None:
            # The pins of requested keys stand for those of this rank's keys: gradients hold them until the push.
            prepared = DramBackend.prepare(self.dram, *work.collected, route.reply_index, work.pins)  # type: ignore[arg-type]
            work.prepared = prepared
        return work

    # ---- the step

    def pull(self, work: StepPlan) -> None:
        """Receive the current weights of this rank's keys from their owners."""
        assert work.route is not None
        route, requested = work.route, work.route.requested
        if work.requested_slots is not None:
            reply = self._rows_out.take(len(requested.inverse), self.dim)
            self.dram.core.pool(work.requested_slots, None, None, False, reply)
        else:
            reply = self.dram.read(requested.keys)[requested.inverse, : self.dim]
        rows = self._rows_in.take(len(route.reply_index), self.dim)
        exchange(self._comm, reply, route.recv_counts, rows, route.send_counts)
        if work.batch is not None and work.prepared is not None:
            work.batch.prepared[self] = dataclasses.replace(work.prepared, rows=rows)

    def pool(self, prepared: Any, part: Any) -> Floats:
        """float32[bags, dim]: pooled rows of the last `pull`."""
        out = np.empty((part.bags, self.dim), np.float32)
        index, offsets = part.id_slots, part.offsets
        self._pulled.core.pool_buffer(prepared.rows, index, offsets, part.weights, part.mean, out)
        return out

    def push(self, work: StepPlan) -> None:
        """Send the gradients of this rank's keys to their owners, which add them in rank order and update once."""
        route = work.route
        assert route is not None
        assert work.pins is not None
        sums = self._sums.take(len(route.reply_index), self.dim)
        if work.batch is not None:
            index, key_sums = self._training.sums(self._in_order())
            if len(index) != len(sums):
                raise ValueError(f"{len(sums) - len(index)} keys have no gradient: every bag must be part of the loss")
            sums[index] = key_sums
            if work.weight != 1:
                sums *= np.float32(work.weight)
        self.discard_gradients()
        requested, slots = route.requested, work.pins.slots()
        grads = self._rows_out.take(len(requested.inverse), self.dim)
        exchange(self._comm, sums, route.send_counts, grads, route.recv_counts)
        self.step_count += 1
        step = self.dram.step(self.step_count, self.lr, 1 / self._comm.size)
        self.dram.core.mark_dirty(slots)
        self.dram.core.update(slots, requested.starts, requested.order, None, grads, step)
