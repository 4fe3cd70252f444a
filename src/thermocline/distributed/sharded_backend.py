"""`ShardedBackend`: rows spread over ranks by the hash of their key. Implements `embedding/backend.py`.

Each rank stores and trains the rows it owns through a local backend (DRAM or HBM). For a window:

    exchange   keys of all batches go to their owners                  communicator `groups.ahead`
    pin        each owner pins the rows that any rank uses             no communication
    prepare    plan pooling and sums on rows yet to be received        no communication
    fetch      owners send the values, after the preceding step        communicator `groups.train`, from here on
               (with `dist.overlap` some of them before that: `EarlyRows`)
    reduce     gradients go to the owners, which sum them over ranks

`exchange` never waits for memory, so no rank waits for another rank's memory. Every method marked collective is called
by all ranks, in the same order, with the same number of batches; otherwise the call blocks until the communicator's
timeout and raises `RankError`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, Rows
from thermocline.batch import WorkingSet
from thermocline.distributed.communicator import Groups
from thermocline.distributed.early_rows import EarlyRows
from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.rank_agreement import require_equal
from thermocline.distributed.row_exchange import Route, RowExchange
from thermocline.distributed.row_reduce import LIMBS, RowSum, from_limbs, take_rows, to_limbs
from thermocline.distributed.sharded_horizon import HintedRows, ShardedHorizon
from thermocline.embedding.backend import Select, ShardBackend, ShardPins, TierSet, Unrecorded
from thermocline.embedding.batch_plan import BagInputs, Gradient, ReducedGradients, working_set_of
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.key_hash import KeyPart
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.row_statistics import StatisticsState
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import LookAheadLimits, TableSpec
from thermocline.tiers.ssd import SsdStore


@dataclasses.dataclass(slots=True, eq=False)
class RemoteBatch:
    """The part of a batch plan that concerns other ranks (`plan.remote`)."""

    route: Route
    slots: Any
    """Slots of the keys that this rank owns, in the route's order."""
    step: int | None = None
    """`step_count` when the values arrived; None: not yet."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenBatch:
    """A batch fetched since the last step. It owns pins: any rank may send gradients of its rows."""

    plan: weakref.ref[Any]
    """Dead once nothing on this rank refers to the plan: no batch in the loop, autograd graph or gradient."""
    remote: RemoteBatch
    pins: Any


@dataclasses.dataclass(slots=True, eq=False)
class ShardedWindow:
    """See `RowWindow`."""

    inputs: list[BagInputs]
    working_sets: list[WorkingSet]
    routes: list[Route] = dataclasses.field(default_factory=list)
    owned: ShardPins | None = None
    """Rows of this rank that any rank uses in the window; slots per batch."""
    ahead: bool = False
    """Whether a pipeline made it."""
    plans: Sequence[Any] = ()

    def release(self) -> None:
        owned, self.owned = self.owned, None
        if owned is not None:
            owned.pins.release()


class ShardedBackend(Unrecorded):
    """See `RowBackend`. `local` trains the rows that this rank owns."""

    groups: Groups
    dedups_on_host = True

    def __init__(self, spec: TableSpec, local: ShardBackend, groups: Groups, exchange: RowExchange) -> None:
        self.spec = spec
        self.local = local
        self.groups = groups
        self.traffic = exchange.traffic
        """Bytes sent, by purpose."""
        self.hints: HintedRows | None = None
        """Look-ahead over ranks; None: the table has none."""
        if local.lookahead is not None:
            self.hints = HintedRows(local, groups.hint_lane, groups.topology.world, local.lookahead.bytes)
        self._row_exchange = exchange
        self.exact_exchange = RowExchange(exchange.topology, hops=exchange.hops, threads=spec.threads)
        """For statistics of rows and admission, which no wire format may round."""
        self.early: EarlyRows | None = None
        """Rows exchanged while the network computes. None: not wanted, or a row may change between its batches."""
        if groups.early is not None and local.rates is None and local.tiers.hbm is None:
            self.early = EarlyRows(groups, exchange, local)
        self._open: list[OpenBatch] = []
        """Batches fetched since the last step: their rows stay pinned here for all ranks."""

    @property
    def step_count(self) -> int:
        return self.local.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.local.step_count = count

    def _rows_change(self) -> None:
        """Call before anything but a step changes rows: what was exchanged early is no longer valid."""
        if self.early is not None:
            self.early.invalidate()

    @property
    def statistics(self) -> StatisticsState:
        return self.local.statistics

    @statistics.setter
    def statistics(self, state: StatisticsState) -> None:
        self.local.statistics = state

    @property
    def rates(self) -> StepRates | None:
        return self.local.rates

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def tiers(self) -> TierSet:
        return self.local.tiers

    # ---- ahead of training

    @property
    def lookahead(self) -> LookAheadLimits | None:
        return self.local.lookahead

    def horizon(self, *, training: bool) -> ShardedHorizon:
        assert self.hints is not None
        return self.hints.horizon(training=training)

    def stage(
        self, inputs: Sequence[BagInputs], ahead: Sequence[Any] = (), working_sets: Sequence[WorkingSet] = ()
    ) -> ShardedWindow:
        for batch in ahead:
            batch.release()
        own = list(working_sets) or [working_set_of(batch, self.spec.threads) for batch in inputs]
        return ShardedWindow(list(inputs), own)

    def exchange(self, window: ShardedWindow, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        window.inputs += padding
        window.working_sets += [working_set_of(batch, self.spec.threads) for batch in padding]
        keys = [working_set.keys for working_set in window.working_sets]
        comm = self.groups.ahead if ahead else self.groups.train
        window.ahead = ahead
        if not ahead:
            self._close_unused()
        window.routes = self._row_exchange.plan(comm, keys, self.traffic.keys)

    def pin(self, window: ShardedWindow) -> None:
        window.owned = self.local.pin_keys([route.owned for route in window.routes])

    def prepare(self, window: ShardedWindow) -> Sequence[Any]:
        assert window.owned is not None
        plans = self.local.prepare_remote(window.inputs, window.working_sets, window.owned)
        for plan, route, slots in zip(plans, window.routes, window.owned.slots, strict=True):
            plan.remote = RemoteBatch(route, slots)
        window.plans = plans
        return plans

    def load(self, window: ShardedWindow) -> None:
        assert window.owned is not None
        self.local.load_keys(window.owned)
        for route in window.routes:
            route.move(self.device)
        if self.early is not None and window.ahead:
            self.early.add(window.plans)
        window.plans = ()
        if self.hints is not None and window.ahead:
            self.hints.passed(len(window.routes), training=True)

    # ---- training

    def fetch(self, plan: Any) -> None:
        """See `RowBackend.fetch`. The rows stay pinned until the next step, or until no rank uses the plan."""
        self._close_unused()
        remote: RemoteBatch = plan.remote
        plan.use()
        arrived = None if self.early is None else self.early.take(plan, self.step_count)
        if arrived is None:
            (rows, out), route = self.local.row_buffer(len(remote.route.keys)), remote.route
        else:
            rows, out, route = arrived.rows, arrived.out, arrived.rest
        self.local.catch_up(remote.slots)
        give = functools.partial(self.local.read_weights, remote.slots)
        self._row_exchange.fetch_rows(self.groups.train, route, give, out, self.traffic.rows, self.step_count)
        plan.rows, remote.step = rows, self.step_count
        if not plan.pins.acquire():
            raise RuntimeError(f"table {self.spec.name!r}: fetch of a batch whose rows were released")
        self._open.append(OpenBatch(weakref.ref(plan), remote, plan.pins))
        if self.early is not None:
            self.early.start([batch.remote.slots for batch in self._open], self.step_count)

    def _close_unused(self) -> None:
        """Release batches that no rank uses any more: forward passes without backward. Collective if a batch is open.

        The ranks agree, because each must reduce the same batches.
        """
        if not self._open:
            return
        used_here = np.array([batch.plan() is not None for batch in self._open], np.uint8)
        used = self.groups.train.all_gather(used_here, "agreeing on open batches").max(0).tolist()
        closed = [batch for batch, is_used in zip(self._open, used, strict=True) if not is_used]
        self._open = [batch for batch, is_used in zip(self._open, used, strict=True) if is_used]
        while closed:
            closed.pop().pins.release()

    def is_current(self, plan: Any) -> bool:
        return self.local.is_current(plan)

    def pool(self, plan: Any, bag: Any) -> torch.Tensor:
        remote: RemoteBatch | None = plan.remote
        if remote is not None and remote.step != self.step_count:
            state = "have not been fetched yet" if remote.step is None else "are those before the last step"
            raise RuntimeError(
                f"table {self.spec.name!r}: the rows of this batch {state}: the order is batch, forward, backward, "
                "step, then the next batch"
            )
        return self.local.pool(plan, bag)

    def with_weights(self, plan: Any, bag: Any, weights: torch.Tensor) -> Any:
        return self.local.with_weights(plan, bag, weights)

    def weight_gradient(self, plan: Any, bag: Any, grads: torch.Tensor) -> torch.Tensor:
        """See `RowBackend.weight_gradient`: on the received rows, without communication."""
        return self.local.weight_gradient(plan, bag, grads)

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients:
        """See `RowBackend.reduce`: the sums over all ranks of the keys that this rank owns."""
        if not self._open:
            raise RuntimeError(f"table {self.spec.name!r}: a step without a batch since the last one")
        plans = [batch.plan() for batch in self._open]
        if any(gradient.plan not in plans for gradient in gradients):
            raise RuntimeError(
                f"table {self.spec.name!r}: a gradient of a batch before the last step: the order is batch, forward, "
                "backward, step, then the next batch"
            )
        route = self._row_exchange.merge_routes([batch.remote.route for batch in self._open])
        reduced = self.local.reduce(self._renumbered(gradients) if len(self._open) > 1 else gradients)
        values, present = self._local_sums(reduced, len(route.keys))
        total, has = self._row_exchange.reduce_gradients(
            self.groups.train, route, values, present, self.traffic.gradients, self.step_count
        )
        slots, occurrences = self._owned_slots(), self._sum_occurrences(route, reduced)
        if bool(has.all()):
            return ReducedGradients(slots, total, route.owned, occurrences)
        occurrences = None if occurrences is None else occurrences[has]
        return ReducedGradients(slots[has], total[has], route.owned[has.cpu().numpy()], occurrences)

    def _local_sums(self, reduced: ReducedGradients | None, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's sums, one row per key of the joined route, and which rows exist; None: all."""
        if reduced is None:
            nothing = RowSum(count, self.spec.dim, self.device)
            return nothing.values, nothing.present
        rows = reduced.slots
        if len(rows) == count and torch.equal(rows, torch.arange(count, dtype=rows.dtype, device=rows.device)):
            return reduced.values, None  # the common case: already in the route's order
        sums = RowSum(count, self.spec.dim, self.device)
        sums.add(rows.long(), reduced.values)
        return sums.values, sums.present

    def _sum_occurrences(self, route: Route, reduced: ReducedGradients | None) -> torch.Tensor | None:
        """Return `ReducedGradients.occurrences` over all ranks, for the keys that this rank owns. Collective."""
        if not self.spec.statistics:
            return None
        values = torch.zeros(len(route.keys), 2 * LIMBS, device=self.device)
        if reduced is not None:
            values[reduced.slots.long()] = to_limbs(reduced.occurrences)
        total, _ = self.exact_exchange.reduce_gradients(
            self.groups.train, route, values, None, self.traffic.statistics, self.step_count
        )
        return from_limbs(total)

    def _renumbered(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Replace rows of a batch's own buffer by rows of the joined route: for several batches per step."""
        keys = [batch.remote.route.keys for batch in self._open]
        joined = WorkingSet.of(np.concatenate(keys))
        indices = np.split(joined.inverse, np.cumsum([len(part) for part in keys])[:-1])
        index_of = {id(batch.plan()): index for batch, index in zip(self._open, indices, strict=True)}
        return [
            dataclasses.replace(gradient, bag=self.local.renumber(gradient.bag, index_of[id(gradient.plan)]))
            for gradient in gradients
        ]

    def _owned_slots(self) -> torch.Tensor:
        """Return the slots of the joined route's owned keys."""
        slots = torch.cat([_as_tensor(batch.remote.slots).to(self.device) for batch in self._open])
        if len(self._open) == 1:
            return slots
        unique = WorkingSet.of(np.concatenate([batch.remote.route.owned for batch in self._open]))
        first = unique.order[unique.starts[:-1]].astype(np.int64)
        return slots[torch.from_numpy(first).to(self.device)]

    def norm(self, reduced: ReducedGradients) -> float:
        """See `RowBackend.norm`: of the mean over ranks, equal on all ranks."""
        order = np.argsort(reduced.keys)  # one order, however the keys arrived
        ordered = reduced.values[torch.from_numpy(order).to(self.device)]
        own = self.local.norm(dataclasses.replace(reduced, values=ordered))
        norms = self.groups.train.all_gather(np.array([own]), "computing the gradient norm")
        return math.hypot(*norms[:, 0].tolist()) / self.groups.topology.world

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        """See `RowBackend.apply`: applies the mean over ranks."""
        if len(reduced.slots):
            self.local.apply(reduced, step, lr, scale / self.groups.topology.world)

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        self.apply(self.reduce(gradients), step, lr, scale)

    def end_step(self) -> None:
        while self._open:
            self._open.pop().pins.release()

    def cannot_record(self) -> str:
        return f"rows of table {self.spec.name!r} are exchanged between ranks during the step"

    # ---- evaluation

    def read_initial(self, inputs: BagInputs) -> Any:
        """See `LocalBackend.read_initial`: every rank computes the initial rows of any key."""
        return self.local.read_initial(inputs)

    def read_batch(self, inputs: BagInputs) -> Any:
        working_set = working_set_of(inputs, self.spec.threads)
        weights = torch.empty(len(working_set), self.spec.dim)
        self._read_from_owners(working_set.keys, weights, self._row_exchange)
        if self.hints is not None and self.groups.read.user == threading.get_ident():  # a batch of a pipeline
            self.hints.passed(1, training=False)
        rows, out = self.local.row_buffer(len(working_set))
        out.copy_(weights)
        return self.local.plan_rows(inputs, working_set, rows)

    def read(self, keys: Keys) -> Floats:
        out = torch.empty(len(keys), self.spec.row_floats)
        self._read_from_owners(keys, out, self.exact_exchange if self.spec.statistics else self._row_exchange)
        return out.numpy()

    def _read_from_owners(self, keys: Keys, out: torch.Tensor, exchange: RowExchange) -> None:
        """Fill `out` with the first floats of each key's row."""
        comm = self.groups.read
        comm.require_free()
        (route,) = exchange.plan(comm, [keys], self.traffic.read_keys)
        owned = torch.from_numpy(np.ascontiguousarray(self.local.read(route.owned)[:, : out.shape[1]]))
        give = functools.partial(take_rows, owned)
        exchange.fetch_rows(comm, route, give, out, self.traffic.read_rows, self.step_count)

    # ---- durability and inspection: each rank's own rows

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        return self.local.rows(store, batch_rows)

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        self.local.expect_expiry(store, expiry, step)

    def expire(self, select: Select, store: SsdStore | None, part: KeyPart, *, weights: bool) -> Keys:
        """See `RowBackend.expire`: the rows that this rank owns. Batches are fetched after it, so none is open."""
        if self._open:
            raise RuntimeError(
                f"table {self.spec.name!r}: expire() while the rows of a batch are in use: call it after table.step(), "
                "before the next batch is drawn"
            )
        self._rows_change()
        return self.local.expire(select, store, part, weights=weights)

    def flush(self, store: SsdStore | None = None) -> None:
        self.local.flush(store)

    def write_back(self) -> None:
        self.local.write_back()

    def reopen(self, epoch: int | None = None) -> None:
        self._rows_change()
        self.local.reopen(epoch)

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        self._rows_change()
        self.local.move_store(path, clear=clear)

    def undo_point(self) -> Callable[[], None]:
        undo_local = self.local.undo_point()

        def undo() -> None:
            self._rows_change()
            undo_local()

        return undo

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        self._rows_change()
        self.local.replace_rows(pieces, scale)

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        self._rows_change()
        self.local.import_rows(keys, rows)

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        digest = hashlib.blake2b(rows.tobytes(), key=hashlib.blake2b(keys.tobytes()).digest()).hexdigest()
        settings = {"keys": len(keys), "digest of keys and rows": digest}
        require_equal(self.groups.train, settings, "load_rows must get the same keys and rows on all ranks")
        owned = owner_of(keys, self.groups.topology.world) == self.groups.topology.rank
        self._rows_change()
        self.local.write_rows(keys[owned], np.ascontiguousarray(rows[owned]))

    @property
    def learned_scale(self) -> LearnedScale | None:
        return self.local.learned_scale

    def tier_counts(self) -> Mapping[str, int]:
        return self.local.tier_counts()

    def require_idle(self) -> None:
        self.local.require_idle()

    def close(self) -> None:
        self._rows_change()
        self.local.close()


def _as_tensor(slots: Any) -> torch.Tensor:
    """Slots as int32: torch has few operations on uint32."""
    return slots if isinstance(slots, torch.Tensor) else torch.from_numpy(slots.view(np.int32))
