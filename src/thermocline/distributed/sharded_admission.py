"""`ShardedAdmissionBackend`: admission of a table over ranks. The owner of a key counts it and decides about it.

    collect    unique keys of a batch and their occurrences                    no communication
    exchange   keys and occurrences to their owners, added over all ranks;     communicator `groups.ahead`
               the owner decides, and sends one decision per key back;
               then the admitted keys go to their owners, as without admission
    fetch      after an expiry: decisions that it has changed, once more       communicator `groups.train`

The batches number n of all ranks are one batch to the filter: a key is admitted in it, on all ranks, if its occurrences
on all ranks reach the count. Owners count in the order of keys, so decisions do not depend on `hops`, depth or window.
Every rank plans the same batches in the same order, also empty ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from thermocline.arrays import Keys, Mask
from thermocline.batch import WorkingSet
from thermocline.distributed.communicator import Communicator
from thermocline.distributed.row_exchange import Route, TrafficCounter
from thermocline.distributed.row_reduce import from_limbs, take_rows, to_limbs
from thermocline.distributed.sharded_backend import ShardedBackend
from thermocline.distributed.sharded_horizon import ShardedHorizon
from thermocline.embedding.admission import Admission
from thermocline.embedding.admission_backend import AdmissionBackend
from thermocline.embedding.admission_plan import AdmittedPlan, AdmittedWindow, Decision, inner_plan
from thermocline.embedding.admission_split import (
    Refused,
    SplitInputs,
    first_reads,
    split_inputs,
    trained_working_set,
)
from thermocline.embedding.backend import LocalBackend, RowWindow
from thermocline.embedding.batch_plan import BagInputs, Gradient, ReducedGradients, working_set_of
from thermocline.embedding.table_spec import TableSpec
from thermocline.tiers.ssd import SsdStore

Counts = npt.NDArray[np.uint32]
_ALL_SHIFT = 32
"""All occurrences of a key and those that count are sent as one integer: its upper and its lower half."""


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    """The keys of one batch of this rank, for which it needs decisions."""

    inputs: BagInputs
    working_set: WorkingSet
    first: npt.NDArray[np.uint8] | None
    """See `first_reads`."""


class RankDecision(Decision):
    """The decisions about one batch: of all owners for the ids of this rank, and of this rank for the keys it owns."""

    __slots__ = ("all", "counted", "inverse", "keys", "order", "owned", "route", "sent")

    def __init__(self, asked: _Asked, route: Route, sums: npt.NDArray[np.int64], *, keep: bool) -> None:
        super().__init__(asked.inputs, None, keep=keep)
        self.route = route
        self.inverse = asked.working_set.inverse
        self.order = np.argsort(route.owned)
        self.keys = route.owned[self.order]
        """Keys that this rank owns, ascending."""
        self.counted: Counts = (sums[self.order] & 0xFFFFFFFF).astype(np.uint32)
        self.all: Counts = (sums[self.order] >> _ALL_SHIFT).astype(np.uint32)
        self.owned = self.sent = np.empty(0, np.uint8)
        """Per key of `keys`: whether it is not admitted, as of now and as other ranks have received it."""


@dataclasses.dataclass(slots=True, eq=False)
class ShardedAdmittedWindow(AdmittedWindow):
    """See `RowWindow`. `inner` and `inputs` are empty until `exchange`."""

    asked: list[_Asked] = dataclasses.field(default_factory=list)


class ShardedAdmissionBackend(AdmissionBackend):
    """See `RowBackend`: `AdmissionBackend` above a sharded backend."""

    def __init__(
        self,
        inner: ShardedBackend,
        spec: TableSpec,
        admission: Admission,
        stores: Callable[[], Sequence[SsdStore]] | None = None,
    ) -> None:
        super().__init__(cast(LocalBackend, inner), spec, admission, stores)
        self._sharded = inner
        self._decided_again = 0
        """Largest number of a batch that any owner had planned at the last expiry."""
        self._trained_keys: list[Keys] = []
        """Keys that the present step has applied gradients to, of this rank."""
        if inner.hints is not None:
            inner.hints.with_row = self._with_row

    # ---- decisions

    def stage(self, inputs: Sequence[BagInputs], ahead: Sequence[Any] = ()) -> ShardedAdmittedWindow:
        for batch in ahead:
            batch.release()
        empty: RowWindow = self._sharded.stage([])
        return ShardedAdmittedWindow(empty, [], asked=[self._ask(batch) for batch in inputs])

    def _ask(self, inputs: BagInputs) -> _Asked:
        return _Asked(inputs, working_set_of(inputs, self._threads), first_reads(inputs))

    def exchange(self, window: AdmittedWindow, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        assert isinstance(window, ShardedAdmittedWindow)
        asked = window.asked + [self._ask(batch) for batch in padding]
        window.asked = []
        groups = self._sharded.groups
        if not self._listed:
            with groups.busy():
                self._list_rows()
        decisions = self._decide(asked, groups.ahead if ahead else groups.train)
        window.inputs = [self.split(batch.inputs, made) for batch, made in zip(asked, decisions, strict=True)]
        working_sets = [
            trained_working_set(batch.working_set, split, self._threads)
            for batch, split in zip(asked, window.inputs, strict=True)
        ]
        inner = self._sharded.stage([split.trained for split in window.inputs], working_sets=working_sets)
        window.inner = inner
        self._sharded.exchange(inner, ahead=ahead)

    def _decide(self, asked: Sequence[_Asked], comm: Communicator) -> list[RankDecision]:
        """Plan the next training batches. Collective."""
        counter = self._sharded.traffic.admission
        routes = self._sharded.exact_exchange.plan(comm, [batch.working_set.keys for batch in asked], counter)
        positions = self._first_positions(asked, comm)
        decisions = []
        for batch, route, first in zip(asked, routes, positions, strict=True):
            sums = self._sum(comm, route, self._occurrences(batch, first), counter)
            decision = RankDecision(batch, route, sums, keep=self.may_forget)
            with self._lock:
                decision.owned = decision.sent = sent = self._count_owned(decision)
                if self.may_forget:
                    self._planned.append(decision)
            decision.refused = self._received(comm, decision, sent, counter)
            decisions.append(decision)
        return decisions

    def _occurrences(self, batch: _Asked, first_positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the occurrences of each unique key of this rank: `counted` + (`all` << 32)."""
        working_set = batch.working_set
        every: npt.NDArray[np.int64] = np.diff(working_set.starts).astype(np.int64)
        counts, chosen = every, batch.first
        if self.admission.counting == "probability":
            with self._lock:  # another thread may decide again about planned batches
                number = self._filter.planned + 1
            drawn = np.empty(len(working_set.inverse), np.uint8)
            for source, position in zip(batch.inputs.values(), first_positions, strict=True):
                self._filter.draw(source.ids, number, position, drawn[source.id_range])
            chosen = drawn if chosen is None else drawn & chosen
        if chosen is not None:
            counts = np.bincount(working_set.inverse[chosen != 0], minlength=len(working_set)).astype(np.int64)
        packed: npt.NDArray[np.int64] = counts + (every << _ALL_SHIFT)
        return packed

    def _first_positions(self, asked: Sequence[_Asked], comm: Communicator) -> list[list[int]]:
        """Return, per batch and input, the position of its first id among the ids of all ranks, as if the examples of
        all ranks, in order, were one batch. Collective for admission by probability, which depends on it."""
        if self.admission.counting != "probability":
            return [[] for _ in asked]
        own = [[len(source.ids) for source in batch.inputs.values()] for batch in asked]
        inputs = len(own[0]) if own else 0
        sizes = comm.all_gather(np.array(own, np.int64).reshape(len(own), inputs), "numbering the ids of a batch")
        before = np.cumsum(sizes, 0)[self._sharded.groups.topology.rank] - np.array(own, np.int64).reshape(-1, inputs)
        starts = np.cumsum(sizes.sum(0), 1) - sizes.sum(0)
        positions: list[list[int]] = (starts + before).tolist()
        return positions

    def _sum(
        self, comm: Communicator, route: Route, counts: npt.NDArray[np.int64], counter: TrafficCounter
    ) -> npt.NDArray[np.int64]:
        """Return the occurrences on all ranks of the keys that this rank owns. Collective."""
        values = to_limbs(torch.from_numpy(counts)[:, None])
        total, _ = self._sharded.exact_exchange.reduce_gradients(comm, route, values, None, counter)
        sums: npt.NDArray[np.int64] = from_limbs(total)[:, 0].numpy()
        return sums

    def _count_owned(self, decision: RankDecision) -> npt.NDArray[np.uint8]:
        refused = np.empty(len(decision.keys), np.uint8)
        self._filter.plan_keys(decision.keys, decision.counted, decision.all, refused)
        return refused

    def _received(
        self, comm: Communicator, decision: RankDecision, owned: npt.NDArray[np.uint8], counter: TrafficCounter
    ) -> Refused | None:
        """Send decisions about owned keys; return those about the ids of this rank's batch. Collective."""
        flags = np.empty(len(owned), np.uint8)
        flags[decision.order] = owned
        refused: Refused = self._flags_of(comm, decision.route, flags, counter)[decision.inverse]
        return refused if refused.any() else None

    def _flags_of(
        self, comm: Communicator, route: Route, owned: npt.NDArray[np.uint8], counter: TrafficCounter
    ) -> Mask:
        """Send one flag per owned key of a route; return those of the route's keys. Collective."""
        values = torch.from_numpy(owned.astype(np.float32))[:, None]
        out = torch.empty(len(route.keys), 1)
        self._sharded.exact_exchange.fetch_rows(comm, route, functools.partial(take_rows, values), out, counter)
        flags: Mask = out[:, 0].numpy() != 0
        return flags

    # ---- after an expiry

    def forget(self, keys: Keys) -> None:
        """See `AdmissionBackend.forget`: keys that this rank owns. Collective."""
        super().forget(keys)
        with self._lock:
            planned = np.array([self._filter.planned])
        self._decided_again = int(self._sharded.groups.train.all_gather(planned, "expiring rows").max())

    def _decide_again(self, decision: Decision) -> None:
        assert isinstance(decision, RankDecision)
        decision.owned = self._count_owned(decision)

    def fetch(self, plan: Any) -> None:
        if self.may_forget:
            with self._lock:
                decision = self._planned.popleft()
            if self._fetched < self._decided_again:
                assert isinstance(decision, RankDecision)
                self._renew(plan, decision)
        self._sharded.fetch(inner_plan(plan))
        self._fetched += 1

    def _renew(self, plan: AdmittedPlan, decision: RankDecision) -> None:
        """Plan a batch again if an owner has changed its decisions since it sent them. Collective."""
        comm = self._sharded.groups.train
        changed = np.array([not np.array_equal(decision.owned, decision.sent)])
        if comm.all_gather(changed, "renewing admission").any():
            decision.refused = self._received(comm, decision, decision.owned, self._sharded.traffic.admission)
            self._plan_again(plan, decision)

    # ---- ahead of training

    def horizon(self, *, training: bool) -> ShardedHorizon:
        """See `RowBackend.horizon`: hints have all keys; the owner loads those that are admitted (`_with_row`)."""
        return self._sharded.horizon(training=training)

    def _with_row(self, keys: Keys) -> Keys:
        self._list_rows()
        refused = np.empty(len(keys), np.uint8)
        self._filter.peek(keys, refused)
        admitted: Keys = keys[refused == 0]
        return admitted

    # ---- training

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        self.apply(self._sharded.reduce(self._trained(gradients)), step, lr, scale)

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        self._sharded.apply(reduced, step, lr, scale)
        self._trained_keys.append(reduced.keys)

    def _train(self, batches: int) -> None:
        """See `AdmissionBackend`: any rank may have trained a key that this one owns; its gradients tell which."""
        self._filter.train(self._fetched, False)
        while self._trained_keys:
            self._filter.set_stored(self._trained_keys.pop())

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> Any:
        if self.admission.otherwise == "initial":
            return self._sharded.read_batch(inputs)
        comm, traffic = self._sharded.groups.read, self._sharded.traffic
        comm.require_free()
        if not self._listed:
            with comm.busy():
                self._list_rows()
        working_set = working_set_of(inputs, self._threads)
        (route,) = self._sharded.exact_exchange.plan(comm, [working_set.keys], traffic.read_admission)
        owned = np.empty(len(route.owned), np.uint8)
        self._filter.read(route.owned, owned)
        refused = self._flags_of(comm, route, owned, traffic.read_admission)[working_set.inverse]
        split: SplitInputs = split_inputs(inputs, refused if refused.any() else None, self.admission.otherwise)
        return self._plan(self._sharded.read_batch(split.trained), split)

    # ---- other rows

    def write_rows(self, keys: Keys, rows: Any) -> None:
        self._end_step()
        self._sharded.write_rows(keys, rows)
        self._filter.admit(keys)  # also those of other ranks, which this filter is never asked about
