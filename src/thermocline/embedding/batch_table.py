"""`BatchTable`: the bags of a table, the plans of their batches, and the gradients that wait for a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from thermocline.batch import Batch
from thermocline.embedding.backend import BatchAhead, RowWindow
from thermocline.embedding.bag_registry import BagRegistry
from thermocline.embedding.batch_plan import (
    BagInputs,
    BagSpec,
    BatchPlan,
    Gradient,
    Pins,
    ReducedGradients,
    select_inputs,
)
from thermocline.embedding.open_table import OpenTable
from thermocline.embedding.pending import PendingBatches
from thermocline.errors import BudgetError, ThermoclineError, require, whole_number
from thermocline.utils.malloc import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from thermocline.embedding.admission_backend import AdmissionBackend
    from thermocline.embedding.bag import EmbeddingBag
    from thermocline.embedding.merged_bags import PooledParts


class BatchTable(OpenTable):
    """An open table whose bags make forward and backward passes over batches; `tc.Table` adds steps."""

    pipelines: weakref.WeakSet[Any]
    """Open pipelines that train the table."""
    _bags: BagRegistry
    _pending: PendingBatches
    _admission: AdmissionBackend | None
    _reduced: ReducedGradients | None
    """Sums of the pending gradients, once `reduce_gradients` has computed them."""
    _forwards: int

    # ---- gradients

    @property
    def pending_gradients(self) -> int:
        """Number of backward passes through a bag that no step has applied yet."""
        return len(self._pending.gradients)

    @property
    def accumulate(self) -> int:
        """Batches per step. It changes no result: with more batches than this and without a step, a bag warns once."""
        return self._pending.accumulate

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        require(whole_number(batches, "accumulate") >= 1, "accumulate", batches, "at least 1 batch per step")
        self._pending.accumulate = batches

    def _require_no_gradients(self, doing: str) -> None:
        if self.pending_gradients:
            raise ThermoclineError(
                f"table {self.name!r}: {doing} with gradients that no step has applied: call table.step() or "
                "table.discard_gradients() first"
            )

    # ---- bags

    pooled: PooledParts | None = None
    """Vectors that bags of tables which are stored together have not taken yet; None: one table."""

    def salts(self, fields: int) -> tuple[int, ...]:
        """Return `BagSpec.salts`: none, as keys are ids."""
        return ()

    def joined(self, spec: BagSpec) -> BagSpec | None:
        """Return the spec to which the one of a bag is joined (`merged_bags.py`); None: to none."""
        return None

    def covering(self, plan: BatchPlan, spec: BagSpec) -> BagSpec | None:
        """Return the spec of a plan that has the inputs of `spec`; None: the plan has none."""
        return spec if spec in plan.bags else None

    def use_bags(self, bags: BagRegistry) -> None:
        """Use bags that were registered before the table was opened."""
        self._bags = bags

    def register(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads, so that batches can be prepared before its forward pass."""
        self._bags.add(bag, specs)

    def trains(self, bag: Any) -> bool:
        """Return whether neither the table nor the bag is frozen."""
        return self._bags.trains(bag)

    @property
    def frozen(self) -> bool:
        """Whether no step can change a row: the table is frozen, or each of its bags is."""
        return self._bags.frozen

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all bags of the table (False), or unfreeze those that are not frozen themselves.

        See `EmbeddingBag.requires_grad_`.
        """
        self.check_freezable()
        self._bags.table_frozen = not requires_grad
        return self

    def check_freezable(self) -> None:
        """Raise `ThermoclineError` if a bag cannot be frozen or unfrozen now."""
        self._require_no_gradients("requires_grad_()")
        if self.groups is not None and len(self.pipelines):
            raise ThermoclineError(
                f"table {self.name!r}: requires_grad_() while a pipeline over ranks is open: all ranks must plan the "
                "same bags for each batch. Close tc.prefetch first"
            )
        if self._admission is not None:
            self._admission.require_no_planner("requires_grad_()")

    @property
    def bags(self) -> list[EmbeddingBag]:
        """The bags that read the table, in the order in which they were made."""
        return self._bags.bags

    @property
    def registered(self) -> list[BagSpec]:
        """Specs of all bags, each once, in an order that does not depend on memory addresses."""
        return self._bags.specs()

    # ---- batches

    def inputs(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BagInputs:
        """Select the inputs of the bags that are trained, or of `specs`. Touches no rows."""
        return select_inputs(batch, self._bags.specs(trained=True, batch=batch) if specs is None else specs)

    def stage(self, batches: Sequence[Batch], ahead: Sequence[BatchAhead] = ()) -> RowWindow:
        """Begin a window of batches: the first stage of `tc.prefetch`. `ahead`: see `RowBackend.stage`."""
        return self.backend.stage([self.inputs(batch) for batch in batches], ahead)

    def inputs_ahead(self, batch: Batch, *, training: bool) -> tuple[BagInputs, BagInputs]:
        """Select the inputs whose rows a look-ahead loads: those of the bags that are trained, or of all bags for
        evaluation; and those of frozen bags."""
        if training:
            return self.inputs(batch), self.inputs(batch, self._bags.specs(trained=False, batch=batch))
        return self.inputs(batch, self._bags.specs(batch=batch)), {}

    def prepare(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BatchPlan:
        """Pull and pin the rows of one batch now: all stages of `tc.prefetch` in order. Release its pins when done.

        specs   plan these only; None: the bags that are trained

        Collective over ranks.
        """
        self.begin_planning(batch)
        try:
            return self._prepare(batch, specs)
        finally:
            self.end_planning(batch)

    def _prepare(self, batch: Batch, specs: Sequence[BagSpec] | None) -> BatchPlan:
        backend = self.backend
        window = backend.stage([self.inputs(batch, specs)])
        backend.exchange(window, ahead=False)
        self._pin_now(window)
        (plan,) = backend.prepare(window)
        backend.load(window)
        backend.fetch(plan)
        return plan

    def begin_planning(self, planner: object) -> None:
        """Declare the object that plans training batches until `end_planning`: with admission there is only one."""
        if self._admission is not None:
            self._admission.begin_planning(planner)

    def end_planning(self, planner: object) -> None:
        """Undo what was planned and not trained: `planner` is closed."""
        if self._admission is not None:
            self._admission.end_planning(planner)

    # ---- passes

    def pin(self, window: RowWindow) -> None:
        """See `RowBackend.pin`. The error names passes of the training loop that hold rows, if there are any."""
        try:
            self.backend.pin(window)
        except BudgetError as error:
            cause = self._pending.explain(error)  # no local exception: its traceback would keep the window alive
            if cause is None:
                raise
            raise BudgetError(cause) from error

    def _pin_now(self, window: RowWindow) -> None:
        """Pin; rows that look-aheads hold are unpinned if the memory is needed."""
        while True:
            try:
                return self.pin(window)
            except BudgetError:
                if not self.drop_lookahead():
                    raise

    def drop_lookahead(self) -> bool:
        """Unpin all rows loaded ahead: a batch needs the memory. Return whether there may have been any. Any thread."""
        dram = self.backend.tiers.dram
        return dram is not None and dram.drop_hints()

    def prepare_forward(self, batch: Batch, specs: Sequence[BagSpec] = ()) -> BatchPlan:
        """Prepare a batch for a forward pass, in training mode, that no pipeline has prepared. Collective over ranks.

        The rows stay pinned until the next step, or until nothing refers to the plan.

        specs   those of the bag that makes the pass; the plan has the inputs of all bags that are trained
        """
        keep_freed_memory()  # as `tc.prefetch` does
        plan = self.prepare(batch, self._with_others(batch, specs, trained=True))
        self._pending.hold(plan)
        prepared, key = batch.prepared, ("forward", self)

        def forget(ended: weakref.ref[BatchPlan]) -> None:
            if prepared.get(key) is ended:
                del prepared[key]

        prepared[key] = weakref.ref(plan, forget)
        return plan

    def _with_others(self, batch: Batch, specs: Sequence[BagSpec] | None, *, trained: bool) -> Sequence[BagSpec] | None:
        """Return what is planned for a pass of a bag: its specs and those of others, which will be used too."""
        return None if trained else specs

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BatchPlan:
        """Copy the rows of one batch for evaluation, of all bags or of `specs`. Inserts nothing. Collective over
        ranks."""
        wanted = self._bags.specs(batch=batch) if specs is None else self._with_others(batch, specs, trained=False)
        return self.backend.read_batch(self.inputs(batch, wanted))

    def read_frozen(self, batch: Batch) -> None:
        """Copy the rows that frozen bags read, for their forward passes before the next step. Collective over ranks."""
        if specs := self._bags.specs(trained=False, batch=batch):
            step = self.step_count
            batch.prepared["frozen", self] = step, self.prepare_read(batch, specs)

    def next_forward(self) -> int:
        """Number the forward passes: gradients are summed in this order, whatever the order of backward."""
        self._forwards += 1
        return self._forwards

    def warn_if_step_is_missing(self, batch: Batch, bag: object) -> None:
        """Warn, once, if a training pass of `bag` over `batch` begins while too many others wait for a step."""
        self._pending.warn_if_step_is_missing(batch, bag)

    def add_gradient(
        self,
        order: int,
        batch: Batch,
        plan: BatchPlan,
        bag: Any,
        values: torch.Tensor,
        unchanged: Callable[[], bool],
        spec: BagSpec,
    ) -> None:
        """Keep the gradient of one pooled bag until the step. Called by backward; `values` are used in place."""
        pins = plan.pins
        if pins is None:
            raise RuntimeError(f"backward through rows of table {self.name!r} that were read for evaluation")
        self._acquire(plan, pins)
        self._reduced = None
        self._pending.add(Gradient(order, batch, plan, pins, bag, values, unchanged, spec))

    def weight_gradient(self, plan: BatchPlan, bag: Any, values: torch.Tensor, step: int) -> torch.Tensor:
        """Return float32[ids]: the gradient of the bag's weights, given that of its pooled vectors. Called by backward.

        step   `step_count` at the forward pass: a later step has changed pinned rows
        """
        pins = plan.pins
        if pins is None:
            return self.backend.weight_gradient(plan, bag, values)
        if step != self.step_count:
            raise RuntimeError(
                f"table {self.name!r}: backward to weights per id after table.step(), which has changed the rows of "
                "the forward pass: call backward before the step"
            )
        self._acquire(plan, pins)
        try:
            return self.backend.weight_gradient(plan, bag, values)
        finally:
            pins.release()

    def _acquire(self, plan: BatchPlan, pins: Pins) -> None:
        """Add an owner of the plan's pins, for backward."""
        if not self.backend.is_current(plan) or not pins.acquire():
            raise RuntimeError(
                f"backward through rows of table {self.name!r} that were released: call it before the loop requests "
                "the next batch"
            )
