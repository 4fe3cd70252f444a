"""`PsTable`: a table sharded over the DRAM of the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from baselines.mpi_ps.route import Buffer, Route, Router, exchange
from thermocline.arrays import Keys, Slots
from thermocline.batch import Batch, WorkingSet
from thermocline.embedding.batch_plan import BagInputs
from thermocline.embedding.optimizers import SGD, Optimizer
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec
from thermocline.tiers.dram import DramTier, Pins
from thermocline.tiers.dram_backend import DramBackend, DramBag, DramBatchPlan

NO_KEYS = np.empty(0, np.uint64)


@dataclasses.dataclass(slots=True, eq=False)
class StepPlan:
    """One step of this rank: everything that does not depend on the values of rows."""

    batch: Batch | None
    """None: the rank has no examples left and only serves other ranks."""
    inputs: BagInputs | None = None
    working_set: WorkingSet | None = None
    route: Route | None = None
    pins: Pins | None = None
    """Pins of the requested rows of this owner; None in evaluation."""
    requested_slots: Slots | None = None
    """Per requested key: slot of its row."""
    prepared: DramBatchPlan | None = None

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


class PsBackend(DramBackend):
    """Pools rows that `PsTable.pull` has received."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        # Received rows have no optimizer state: kernels of a tier without state pool them.
        self._stateless = DramTier(spec.dim, SGD(lr=1), budget="1MB", threads=spec.threads)

    def pool(self, plan: DramBatchPlan, bag: DramBag) -> torch.Tensor:
        """See `RowBackend.pool`."""
        source, out = bag.source, np.empty((bag.bags, self.spec.dim), np.float32)
        assert plan.rows is not None
        assert bag.slots is not None
        self._stateless.core.pool_buffer(plan.rows, bag.slots, source.offsets, source.weights, source.mean, out)
        return torch.from_numpy(out)


class PsTable(Table):
    """A `tc.Table` for models and bags, with `plan`, `pull` and `push` instead of `prepare` and `step`.

    These three are collective: every rank calls them equally often. `plan` may run on another thread than the others.
    """

    backend: PsBackend

    def __init__(self, comm: MPI.Comm, dim: int, optimizer: Optimizer, *, threads: int, **options: Any) -> None:
        super().__init__(
            dim, optimizer, threads=threads, make_backend=lambda spec, device, epoch: PsBackend(spec), **options
        )
        self._comm = comm
        self._rows_in, self._rows_out, self._sums = Buffer(np.float32), Buffer(np.float32), Buffer(np.float32)

    def create(self, keys: Keys, router: Router) -> None:
        """Create the initial rows of the keys of all ranks, each at its owner. Collective."""
        own = router.route(keys, 0).requested.keys
        self.dram.push(own, self.dram.initial_rows(own), unique=True)

    # ---- ahead of the step

    def deduplicate(self, work: StepPlan) -> StepPlan:
        """Collect the unique keys of the batch. Not collective."""
        if work.batch is not None:
            window = self.backend.stage([self.inputs(work.batch)])
            work.inputs, work.working_set = window.inputs[0], window.working_sets[0]
        return work

    def plan(self, work: StepPlan, router: Router, *, training: bool) -> StepPlan:
        """Exchange keys; in training, pin the rows requested from this owner."""
        keys = NO_KEYS if work.working_set is None else work.working_set.keys
        work.route = route = router.route(keys, work.examples)
        if training:
            work.pins = self.dram.pin(route.requested.keys)
            work.requested_slots = work.pins.slots()[route.requested.inverse]
        if work.inputs is not None and work.working_set is not None:
            # The pins of requested keys stand for those of this rank's keys: gradients hold them until the push.
            work.prepared = self.backend.plan_batch(work.inputs, work.working_set, route.reply_index, work.pins)
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

    def push(self, work: StepPlan) -> None:
        """Send the gradients of this rank's keys to their owners, which add them in rank order and update once."""
        route = work.route
        assert route is not None
        assert work.pins is not None
        sums = self._sums.take(len(route.reply_index), self.dim)
        if work.batch is not None:
            self.reduce_gradients()
            assert self._reduced is not None
            index, key_sums = self._reduced.slots.numpy(), self._reduced.values.numpy()
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
