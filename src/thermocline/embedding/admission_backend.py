"""`AdmissionBackend`: any backend, with admission, of one process. Only ids that are admitted reach the backend below.

The filter (csrc/admission) decides about every training batch once, when it is planned: in the look-ahead if there is
one, else in `stage`. Batches are planned in the order in which they are trained, by one thread, so decisions depend on
nothing else. A batch counts when its step ends: the filter keeps a log of each batch between its plan and its step,
which it uses to save the counters as of the last step, and to undo batches of a pipeline that was closed.
`distributed/sharded_admission.py` is the layer for tables over ranks.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, Mask, Rows
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.admission import Admission
from thermocline.embedding.admission_plan import (
    AdmittedAhead,
    AdmittedHorizon,
    AdmittedPlan,
    AdmittedRecordedRows,
    AdmittedWindow,
    Decision,
    inner_plan,
)
from thermocline.embedding.admission_split import (
    Refused,
    SplitBag,
    SplitInputs,
    all_ids,
    first_reads,
    split_inputs,
    trained_working_set,
)
from thermocline.embedding.admission_state import State, join_states, load_state, save_state
from thermocline.embedding.backend import LocalBackend, RecordedRows, RowHorizon
from thermocline.embedding.batch_plan import BagInputs, BagSpec, Gradient, ReducedGradients, working_set_of
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.tiers.ssd import SsdStore

_KINDS = {"exact": 0, "sketch": 1, "probability": 2}


class AdmissionBackend:
    """See `RowBackend`. What is not defined here is the inner backend's."""

    plans_on_device = False  # the filter runs on the host: not on the caller's thread

    def __init__(
        self,
        inner: LocalBackend,
        spec: TableSpec,
        admission: Admission,
        stores: Callable[[], Sequence[SsdStore]] | None = None,
    ) -> None:
        """stores: returns the stores that have the rows of this process; default: that of its tiers."""
        self.inner = inner
        self._stores = self._own_stores if stores is None else stores
        self.admission = admission
        self._name = spec.name
        self._threads = spec.threads
        self._filter = core.AdmissionFilter(
            _KINDS[admission.counting],
            admission.count or 1,
            1.0 if admission.probability is None else float(admission.probability),
            admission.memory_bytes,
            spec.seed,
            spec.table_id,
        )
        self._planner: object = None
        """The pipeline that plans training batches; None: none is open."""
        self.may_forget = False
        """Whether rows may be deleted while batches are planned: their ids are kept then, to decide again."""
        self._planned: deque[Decision] = deque()
        """If so: decisions about batches that the training loop has not received."""
        self._lock = threading.Lock()  # held while batches are planned and rows are listed
        self._listed = False
        """Whether the filter knows all keys with a row."""
        self._fetched = 0
        """Number of the last batch that the training loop received."""
        self._reached = 0
        """Batches with a gradient for each bag, among those whose gradients were summed last."""
        self._stored = 0
        """Batches with a gradient for each bag that the present step has applied."""
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def step_count(self) -> int:
        """Steps applied so far."""
        return self.inner.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.inner.step_count = count

    # ---- decisions

    def decide(self, inputs: BagInputs, working_set: WorkingSet | None = None) -> Decision:
        """Plan the next training batch. Thread: the one that plans."""
        self._list_rows()
        with self._lock:
            decision = Decision(inputs, self._count(inputs, working_set), keep=self.may_forget)
            if self.may_forget:
                self._planned.append(decision)
            return decision

    def _count(self, inputs: BagInputs, working_set: WorkingSet | None = None) -> Refused | None:
        """Count the ids of the inputs. With their working set, which changes no decision, only its keys are found."""
        first = first_reads(inputs)
        if working_set is None or first is not None or self.admission.counting == "probability":
            ids = all_ids(inputs)
            refused = np.empty(len(ids), np.uint8)
            self._filter.plan(ids, refused, first)
            return refused.view(np.bool_) if refused.any() else None
        refused = np.empty(len(working_set.inverse), np.uint8)
        arrays = (working_set.keys, working_set.inverse, working_set.starts, working_set.order)
        return refused.view(np.bool_) if self._filter.plan_working_set(*arrays, refused) else None

    def split(self, inputs: BagInputs, decision: Decision) -> SplitInputs:
        """Divide the inputs of a batch by a decision about it."""
        if decision.specs != tuple(inputs):
            raise ThermoclineError(
                f"table {self._name!r} has admission, and its bags have changed while batches were planned: close "
                "tc.prefetch before bags are made, deleted, frozen or unfrozen"
            )
        return split_inputs(inputs, decision.refused, self.admission.otherwise)

    def _list_rows(self) -> None:
        """Tell the filter the keys of the store on which the table was opened, once: they are admitted."""
        with self._lock:
            if self._listed:
                return
            for store in self._stores():
                for keys, _ in store.scan():
                    self._filter.admit(keys)
            self._listed = True

    def _own_stores(self) -> Sequence[SsdStore]:
        store = self.inner.tiers.ssd
        return [] if store is None else [store]

    def begin_planning(self, planner: object) -> None:
        """Declare that `planner` plans all training batches until `end_planning`.

        Raises `ThermoclineError` if another does: counts would depend on how far each of them plans ahead.
        """
        if self._planner is not None:
            raise ThermoclineError(
                f"table {self._name!r} has admission and an open training pipeline: batches that it did not prepare "
                "would be counted at a time that depends on its depth. Train all batches through one tc.prefetch, or "
                "close it first"
            )
        self._planner = planner

    def require_no_planner(self, call: str) -> None:
        """Raise `ThermoclineError` if a training pipeline is open."""
        if self._planner is not None:
            raise ThermoclineError(
                f"table {self._name!r}: {call} while a training pipeline is open: the table has admission, and the "
                "pipeline has counted the ids of coming batches. Close tc.prefetch first"
            )

    def end_planning(self, planner: object) -> None:
        """Undo the decisions about batches that the training loop did not receive: they will not be trained."""
        if self._planner is planner:
            self._filter.roll_back(self._fetched)
            self._planned.clear()
            self._planner = None

    def forget(self, keys: Keys) -> None:
        """Count keys from 0: their rows were deleted. Decide again about the batches that were planned. Between steps.

        Batches that were prepared with another decision are prepared again when the loop receives them.
        """
        with self._lock:
            if self._filter.planned > self._fetched and not self.may_forget:
                raise ThermoclineError(
                    f"table {self._name!r} has admission: rows cannot be deleted while a training pipeline is open, "
                    "unless the table was made with the rules (expiry). Close tc.prefetch first"
                )
            self._filter.roll_back(self._fetched)
            self._filter.forget(keys)
            for decision in self._planned:
                self._decide_again(decision)

    def _decide_again(self, decision: Decision) -> None:
        assert decision.inputs is not None
        refused = self._count(decision.inputs)
        if not _same(refused, decision.refused):
            decision.refused = refused

    # ---- state

    @property
    def stats(self) -> core.AdmissionStats:
        """Counters of trained batches, and memory."""
        return self._filter.stats

    def state(self) -> dict[str, Any]:
        """Return the state as of the last step, for a checkpoint."""
        return save_state(self._filter, self.admission)

    def load_state(self, states: Sequence[State], owns: Callable[[Keys], Mask]) -> None:
        """Continue from the states of the processes that had the rows, after the rows; see `admission_state`."""
        self._fetched = load_state(self._filter, self.admission, join_states(states, owns), self._name)

    # ---- ahead of training

    def horizon(self, *, training: bool) -> RowHorizon:
        horizon = self.inner.horizon(training=training)
        return AdmittedHorizon(horizon, self) if training else horizon

    def stage(self, inputs: Sequence[BagInputs], ahead: Sequence[AdmittedAhead] = ()) -> AdmittedWindow:
        if not ahead:
            return self._stage(inputs)
        for batch in ahead:
            batch.forget()
        split = [self.split(batch, known.decision) for batch, known in zip(inputs, ahead, strict=True)]
        below = [batch.inner for batch in ahead]
        if any(batch.refused is not used.refused for batch, used in zip(ahead, split, strict=False)):
            while below:  # its keys are those of an earlier decision
                below.pop().release()
        return AdmittedWindow(self.inner.stage([batch.trained for batch in split], below), split)

    def _stage(self, inputs: Sequence[BagInputs]) -> AdmittedWindow:
        """Decide about batches that no look-ahead has planned, after their deduplication if the inner backend needs it
        on the host."""
        if not self.inner.dedups_on_host:
            split = [self.split(batch, self.decide(batch)) for batch in inputs]
            return AdmittedWindow(self.inner.stage([batch.trained for batch in split]), split)
        split, working_sets = [], []
        for batch in inputs:
            working_set = working_set_of(batch, self._threads)
            split.append(self.split(batch, self.decide(batch, working_set)))
            working_sets.append(trained_working_set(working_set, split[-1], self._threads))
        return AdmittedWindow(self.inner.stage([batch.trained for batch in split], working_sets=working_sets), split)

    def exchange(self, window: AdmittedWindow, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        self.inner.exchange(window.inner, padding, ahead=ahead)

    def pin(self, window: AdmittedWindow) -> None:
        self.inner.pin(window.inner)

    def launch(self, window: AdmittedWindow) -> None:
        """Nothing: see `plans_on_device`."""

    def prepare(self, window: AdmittedWindow) -> list[Any]:
        plans = self.inner.prepare(window.inner)
        return [self._plan(plan, inputs, window) for plan, inputs in zip(plans, window.inputs, strict=True)]

    def _plan(self, plan: Any, inputs: SplitInputs, window: AdmittedWindow | None = None) -> Any:
        """Add what is not trained to the plan of what is."""
        if not inputs.splits:
            again = self.may_forget and window is not None
            return AdmittedPlan(plan, None, plan.bags, inputs.refused, window) if again else plan
        others = inputs.others
        initial = self.inner.read_initial(others) if others else None
        bags: dict[BagSpec, Any] = {}
        for spec, split in inputs.splits.items():
            weights = inputs.trained[spec].weights
            bags[spec] = SplitBag(
                plan.bags[spec],
                None if initial is None else initial.bags[spec],
                split,
                None if weights is None else torch.from_numpy(weights),
            )
        return AdmittedPlan(plan, initial, bags, inputs.refused, window)

    def _plan_again(self, plan: AdmittedPlan, decision: Decision) -> None:
        """Replace the content of a plan by what another decision gives."""
        assert decision.inputs is not None
        assert plan.window is not None
        split = self.split(decision.inputs, decision)
        window = self.inner.stage([split.trained])
        plan.window.again.append(window)
        self.inner.exchange(window, ahead=False)
        while True:
            try:
                self.inner.pin(window)
                break
            except BudgetError:
                dram = self.inner.tiers.dram
                if dram is None or not dram.drop_hints():
                    raise
        (inner,) = self.inner.prepare(window)
        self.inner.load(window)
        new = self._plan(inner, split, plan.window)
        plan.inner, plan.initial, plan.bags, plan.refused = new.inner, new.initial, new.bags, new.refused

    def load(self, window: AdmittedWindow) -> None:
        self.inner.load(window.inner)

    def loads_nothing(self, window: AdmittedWindow) -> bool:
        return self.inner.loads_nothing(window.inner)

    # ---- training

    def fetch(self, plan: Any) -> None:
        if self.may_forget:
            with self._lock:
                decision = self._planned.popleft()
            if decision.refused is not plan.refused:
                self._plan_again(plan, decision)
        self.inner.fetch(inner_plan(plan))
        self._fetched += 1

    def is_current(self, plan: Any) -> bool:
        return self.inner.is_current(inner_plan(plan))

    def pool(self, plan: Any, bag: Any) -> torch.Tensor:
        if not isinstance(bag, SplitBag):
            return self.inner.pool(inner_plan(plan), bag)
        pooled = self.inner.pool(plan.inner, bag.trained)
        if bag.others is not None:
            others = self.inner.pool(plan.initial, bag.others)
            if pooled.device.type == "cpu":
                core.add_at_places(bag.split.places, others.numpy(), pooled.numpy())
            else:
                pooled[bag.on(pooled.device, "places")] += others
        return pooled if bag.split.sizes is None else pooled / bag.on(pooled.device, "sizes")[:, None]

    def with_weights(self, plan: Any, bag: Any, weights: torch.Tensor) -> Any:
        if not isinstance(bag, SplitBag):
            return self.inner.with_weights(inner_plan(plan), bag, weights)
        refused = bag.on(weights.device, "refused")
        own = weights[~refused]
        trained = self.inner.with_weights(plan.inner, bag.trained, own)
        others = bag.others
        if others is not None:
            others = self.inner.with_weights(plan.initial, others, weights[refused])
        return SplitBag(trained, others, bag.split, own)

    def weight_gradient(self, plan: Any, bag: Any, grads: torch.Tensor) -> torch.Tensor:
        if not isinstance(bag, SplitBag):
            return self.inner.weight_gradient(inner_plan(plan), bag, grads)
        refused = bag.on(grads.device, "refused")
        gradient = torch.zeros(len(refused), device=grads.device)
        gradient[~refused] = self.inner.weight_gradient(plan.inner, bag.trained, grads)
        if bag.others is not None:
            own = grads[bag.on(grads.device, "places")].contiguous()
            gradient[refused] = self.inner.weight_gradient(plan.initial, bag.others, own)
        return gradient if bag.split.id_sizes is None else gradient / bag.on(grads.device, "id_sizes")

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        return self.inner.reduce(self._trained(gradients))

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        self.inner.update(self._trained(gradients), step, lr, scale)
        self._stored = self._reached

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        self.inner.apply(reduced, step, lr, scale)
        self._stored = self._reached

    def _trained(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients of admitted ids, and count the batches that have one for each bag."""
        reached: dict[int, set[int]] = {}
        for gradient in gradients:
            reached.setdefault(id(gradient.plan), set()).add(id(gradient.bag))
        plans = {id(gradient.plan): gradient.plan for gradient in gradients}
        self._reached = sum(len(reached[number]) >= len(plan.bags) for number, plan in plans.items())
        return [self._trained_part(gradient) for gradient in gradients]

    def _trained_part(self, gradient: Gradient) -> Gradient:
        """Return the gradient for the admitted ids of a bag: the coefficient of an id is weight / ids, for mean."""
        bag, values = gradient.bag, gradient.values
        if not isinstance(bag, SplitBag):
            return dataclasses.replace(gradient, plan=inner_plan(gradient.plan))
        trained = bag.trained
        if bag.split.sizes is not None and bag.weights is None:
            values = values * (1 / bag.on(values.device, "sizes"))[:, None]
        elif bag.split.id_sizes is not None and bag.weights is not None:
            sizes = bag.on(bag.weights.device, "id_sizes")[~bag.on(bag.weights.device, "refused")]
            trained = self.inner.with_weights(gradient.plan.inner, trained, bag.weights / sizes)
        return dataclasses.replace(gradient, plan=gradient.plan.inner, bag=trained, values=values)

    def end_step(self) -> None:
        self.inner.end_step()
        self._end_step()

    def _end_step(self) -> None:
        """Count the batches that the loop has received: they are trained, or were given up."""
        before = self._filter.stats.batches
        if self._fetched > before:
            self._train(self._fetched - before)
            self._warn_if_dropped()
        self._stored = 0

    def _train(self, batches: int) -> None:
        self._filter.train(self._fetched, self._stored == batches)

    def _warn_if_dropped(self) -> None:
        if self._warned or not (dropped := self._filter.stats.counters_dropped):
            return
        self._warned = True
        warnings.warn(
            f"table {self._name!r}: {dropped} admission counters were dropped, those with the smallest counts, as they "
            f"exceed memory={self.admission.memory!r}: their keys count from 0 again. Raise it, or use sketch=True",
            stacklevel=6,  # the caller of table.step()
        )

    def cannot_record(self) -> str:
        if self.admission.otherwise != "shared":
            return f'table {self._name!r} has admission with otherwise="{self.admission.otherwise}", not "shared"'
        return self.inner.cannot_record()

    def plan_shape(self, plan: Any) -> Any:
        return self.inner.plan_shape(inner_plan(plan))

    def recorded_rows(self, plan: Any) -> RecordedRows:
        return AdmittedRecordedRows(self.inner.recorded_rows(inner_plan(plan)), self)

    def replayed(self) -> None:
        """Note that a recorded step has trained one batch, with all its bags."""
        self._stored = 1
        self._end_step()

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> Any:
        if self.admission.otherwise == "initial":
            return self.inner.read_batch(inputs)
        self._list_rows()
        ids = all_ids(inputs)
        refused = np.empty(len(ids), np.uint8)
        self._filter.read(ids, refused)
        split = split_inputs(inputs, refused.view(np.bool_) if refused.any() else None, self.admission.otherwise)
        return self._plan(self.inner.read_batch(split.trained), split)

    # ---- other rows: what replaces them decides which keys are admitted

    def require_idle(self) -> None:
        self.inner.require_idle()
        self.require_no_planner("loading rows")

    def reopen(self, epoch: int | None = None) -> None:
        self.require_no_planner("reopen()")
        self.inner.reopen(epoch)
        self.rows_replaced()

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        self.inner.move_store(path, clear=clear)
        self.rows_replaced()

    def rows_replaced(self) -> None:
        """Forget all keys and counts; the rows of the store are listed when they are needed."""
        with self._lock:
            self._filter.clear_admitted()
            self._listed = False
        self._reset_counts()

    def _reset_counts(self) -> None:
        none = np.empty(0, np.uint64)
        self._filter.load(0, 0, none, none.astype(np.uint32), none.astype(np.uint16), none)
        self._fetched = 0
        self._planned.clear()

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        self._filter.clear_admitted()
        self._listed = True
        self._reset_counts()
        self.inner.replace_rows(self._admitting(pieces), scale)

    def _admitting(self, pieces: Iterable[tuple[Keys, Rows]]) -> Iterator[tuple[Keys, Rows]]:
        for keys, rows in pieces:
            self._filter.admit(keys)
            yield keys, rows

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        self.inner.import_rows(keys, rows)
        self._filter.admit(keys)

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        self._end_step()  # batches that were received and not trained are given up: none is open
        self.inner.write_rows(keys, rows)
        self._filter.admit(keys)

    def undo_point(self) -> Callable[[], None]:
        undo, listed = self.inner.undo_point(), self._listed
        state, admitted = self._filter.save(), self._filter.admitted()

        def undo_all() -> None:
            undo()
            self._filter.clear_admitted()
            self._filter.admit(admitted)
            self._filter.load(*state)
            self._listed, self._fetched = listed, state[0]

        return undo_all


def _same(a: Refused | None, b: Refused | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)
