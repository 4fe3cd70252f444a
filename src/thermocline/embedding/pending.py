"""`PendingBatches`: what forward and backward passes hold until the next step, and warnings when it is too much."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Iterator

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BatchPlan, Gradient
from thermocline.errors import BudgetError
from thermocline.utils.text_format import plural

_order = operator.attrgetter("order")
_UNDECLARED_BATCHES = 2
"""Batches without a step that are normal: some loops apply a step one batch late."""


class PendingBatches:
    """The gradients of one table that no step has applied, and the plans that forward passes made themselves.

    A gradient owns the pins of its rows until the step. A plan that `tc.prefetch` did not make is referred to by the
    autograd graph of its forward pass and by its gradients only: its pins end with the last of them, or at the step.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self.gradients: list[Gradient] = []
        self.accumulate = 1
        """Batches per step that the user has declared."""
        self._plans: list[weakref.ref[BatchPlan]] = []
        self._added = 0
        """Gradients added so far, applied ones included."""
        self._passes: dict[tuple[int, int], tuple[int, int]] = {}
        """By bag and batch: passes that a backward has followed since the last step, and `_added` at the last pass."""
        self._last_batch = 0
        self._warned = False

    def hold(self, plan: BatchPlan) -> None:
        """Release the pins of this plan at the next step, if they still exist then."""
        self._plans = [*(ref for ref in self._plans if ref() is not None), weakref.ref(plan)]

    def add(self, gradient: Gradient) -> None:
        """Keep a gradient, which owns a reference to its pins, until the step."""
        self.gradients.append(gradient)
        self._added += 1

    def ordered(self) -> list[Gradient]:
        """Return the gradients in the order of their forward passes."""
        if not all(gradient.unchanged() for gradient in self.gradients):
            raise RuntimeError(
                f"table {self._table!r}: a gradient was changed in place between backward and step, perhaps as that of "
                "a dense parameter that shares its memory: call table.step() before dense gradients are clipped or "
                "zeroed"
            )
        return sorted(self.gradients, key=_order) if len(self.gradients) > 1 else self.gradients.copy()

    def clear(self) -> None:
        """Drop the gradients and release all pins."""
        self._passes.clear()
        while self.gradients:
            self.gradients.pop().pins.release()
        while self._plans:
            plan = self._plans.pop()()
            if plan is not None and plan.pins is not None:
                plan.pins.release()

    def warn_if_step_is_missing(self, batch: Batch, bag: object) -> None:
        """Warn, once, if more batches than declared wait for a step and a pass of `bag` over `batch` is another one.

        Two passes of a bag over one batch are normal: a batch may have two losses. More are a batch that a loop uses
        again.
        """
        if self._warned:
            return
        if not self.gradients and not self._passes:  # the first pass after a step
            self._passes[id(bag), id(batch)] = 0, self._added
            return
        waiting = {id(gradient.batch) for gradient in self.gradients}
        repeated = self._count_passes(waiting, batch, bag)
        limit = max(self.accumulate, _UNDECLARED_BATCHES)
        if id(batch) in waiting:
            if repeated <= limit:
                return
            found, another = f"{repeated} passes over one batch", "pass"
        else:
            if len(waiting) < limit:
                return
            found, another = f"{len(waiting)} batches", "batch"
        self._warned = True
        warnings.warn(
            f"table {self._table!r}: the gradients of {found} wait for table.step(), and another {another} is being "
            "trained; they are summed until then. Call table.step() after each batch, or set "
            f"table.accumulate to the batches per step (it is {self.accumulate})",
            stacklevel=8,  # the caller of the bag: _begin, _forward, forward and Module.__call__ are in between
        )

    def _count_passes(self, waiting: set[int], batch: Batch, bag: object) -> int:
        """Return the passes of this bag over this batch that a backward has followed since the last step."""
        key = id(bag), id(batch)
        count, added = self._passes.get(key, (0, self._added))
        count += self._added > added
        if self._last_batch != id(batch):  # ids of batches are valid while their gradients exist
            self._last_batch = id(batch)
            self._passes = {k: v for k, v in self._passes.items() if k[1] in waiting or k[1] == id(batch)}
        self._passes[key] = count, self._added
        return count

    def explain(self, error: BudgetError) -> str | None:
        """Return a message that names the passes which hold rows, if they are the cause; else None."""
        causes = " and ".join(self._causes())
        facts, _, advice = str(error).rpartition(". ")
        if not causes or advice.startswith("It needs"):  # the working set alone exceeds the budget
            return None
        return f"table {self._table!r}: {causes}. {facts}"

    def _causes(self) -> Iterator[str]:
        # Called from pipeline threads as well: copies of lists, which other threads may change.
        waiting = {id(gradient.plan) for gradient in tuple(self.gradients)}
        plans = [plan for plan in (ref() for ref in tuple(self._plans)) if plan is not None]
        if graphs := sum(id(plan) not in waiting for plan in plans):
            yield (
                f"the rows of {plural(graphs, 'batch', 'batches')} are pinned by autograd graphs of forward passes in "
                "training mode without backward: evaluate under torch.no_grad() or after bag.eval(), or drop the "
                "outputs and losses of those passes"
            )
        if waiting:
            yield (
                f"the rows of {plural(len(waiting), 'batch', 'batches')} are pinned by gradients that wait for "
                "table.step(): call it after fewer batches, or raise the budget"
            )
