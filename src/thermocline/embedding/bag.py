"""`tc.EmbeddingBag`: the nn.Module that pools rows of a table. Autograd sees only the pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BagSpec, BatchPlan, Pooling
from thermocline.embedding.table import Table


class EmbeddingBag(torch.nn.Module):
    """Pools the rows of each field: Batch -> float32[examples, fields, dim].

    fields    number of fields of the batch, from the first; or a sequence of field numbers
    pooling   "sum" or "mean" (divided by the number of ids), for all fields or per field; or "none", for one field:
              one vector per id

    In training mode the batch's rows are pinned and backward leaves their gradients with the table, which applies them
    in `table.step()`. In eval mode rows are copied: keys never trained give their initial row, nothing is inserted.

    Weights per id that require grad, in the batch or given to `forward`, receive their gradient in backward.
    """

    def __init__(
        self, table: Table, fields: int | Sequence[int], *, pooling: Pooling | Sequence[Pooling] = "sum"
    ) -> None:
        super().__init__()
        self.table = table
        self.requires_grad = True
        """Whether the bag is trained; False: frozen. Set by `requires_grad_`."""
        self.fields = tuple(range(fields)) if isinstance(fields, int) else tuple(fields)
        kinds = (pooling,) * len(self.fields) if isinstance(pooling, str) else tuple(pooling)
        if not self.fields or len(kinds) != len(self.fields):
            raise ValueError(
                f"{len(self.fields)} fields with {len(kinds)} poolings: give one pooling, or one per field"
            )
        for kind in kinds:
            if kind not in ("sum", "mean", "none"):
                raise ValueError(f"pooling is {kind!r}: it must be one of sum, mean, none")
        if "none" in kinds and len(self.fields) > 1:
            raise ValueError("pooling 'none' gives a vector per id: use a separate bag for each such field")
        specs = []
        for kind in dict.fromkeys(kinds):
            positions = tuple(i for i, k in enumerate(kinds) if k == kind)
            specs.append(BagSpec(tuple(self.fields[i] for i in positions), kind, positions))
        self.specs = tuple(specs)
        table.register(self, self.specs)
        # Makes autograd call backward. Not a parameter, so that no dense optimizer receives it.
        self._anchor = torch.zeros((), requires_grad=True)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the bag (False) or unfreeze it, between steps.

        A frozen bag reads rows as in evaluation, also in training mode: its passes change and insert nothing, and
        autograd passes through it only to weights that require grad. Other bags of the table are trained as before. The
        call counts for the forward passes after it; batches in flight need not be drawn again. `requires_grad_` of an
        enclosing module does not reach the bag, because rows are not parameters.
        """
        self.table.check_freezable()
        super().requires_grad_(requires_grad)  # parameters of a subclass
        self.requires_grad = requires_grad
        return self

    def forward(self, batch: Batch, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32[examples, fields, dim]; with pooling "none" float32[ids, dim].

        weights   one weight per id of the batch, used instead of `batch.weights`
        """
        learned = batch.learned_weights if weights is None else weights
        if learned is not None and learned.shape != batch.ids.shape:
            raise ValueError(f"weights have shape {tuple(learned.shape)}: expected ({len(batch.ids)},), one per id")
        trained = self.table.trains(self)
        training = trained and self.training and torch.is_grad_enabled()
        if training:
            self.table.warn_if_step_is_missing(batch)
        plan = _find_plan(self.table, batch, self.specs, training)
        if plan is None:
            plan = self.table.prepare_forward(batch) if training else self.table.prepare_read(batch, self.specs)
        anchor = self._anchor if trained else None
        outputs = [
            _Pool.apply(anchor, learned, self.table, batch, plan, spec, training)  # type: ignore[no-untyped-call]
            for spec in self.specs
        ]
        if self.specs[0].pooling == "none":
            return outputs[0]  # type: ignore[no-any-return]
        shaped = [out.view(-1, len(spec.fields), self.table.dim) for out, spec in zip(outputs, self.specs, strict=True)]
        if len(shaped) == 1:
            return shaped[0]  # type: ignore[no-any-return]
        order = [position for spec in self.specs for position in spec.positions]
        return torch.cat(shaped, 1)[:, torch.tensor(order, device=shaped[0].device).argsort()]

    def extra_repr(self) -> str:
        return f"table={self.table.name!r}, fields={len(self.fields)}, dim={self.table.dim}"


def _find_plan(table: Table, batch: Batch, specs: Sequence[BagSpec], training: bool) -> BatchPlan | None:
    """Return a plan of the batch with these inputs, current rows and, for training, pins; None: there is none."""
    forward = batch.prepared.get(("forward", table))
    candidates = [batch.prepared.get(table), None if forward is None else forward()]
    if not training and ("frozen", table) in batch.prepared:
        step, plan = batch.prepared["frozen", table]
        candidates.append(plan if step == table.step_count else None)  # else a later step has changed rows
    for plan in candidates:
        if plan is None or not plan.bags.keys() >= set(specs) or not table.backend.is_current(plan):
            continue
        if _pinned(plan) or (plan.pins is None and not training):
            return plan  # type: ignore[no-any-return]
    return None


def _pinned(plan: BatchPlan) -> bool:
    """Return whether some owner has pins of the plan."""
    if plan.pins is None or not plan.pins.acquire():
        return False
    plan.pins.release()
    return True


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        weights: torch.Tensor | None,
        table: Table,
        batch: Batch,
        plan: BatchPlan,
        spec: BagSpec,
        training: bool,
    ) -> torch.Tensor:
        bag = plan.bags[spec]
        ctx.positions = None
        if weights is not None:
            ctx.positions = batch.positions(spec.fields)
            ctx.repeated = len(set(spec.fields)) < len(spec.fields)
            chosen = weights if ctx.positions is None else weights[torch.from_numpy(ctx.positions).to(weights.device)]
            # A copy: an optimizer may change the weights before the table's step.
            bag = table.backend.with_weights(plan, bag, chosen.to(torch.float32, copy=True).contiguous())
            ctx.options = {"dtype": weights.dtype, "device": weights.device}
        ctx.table, ctx.batch, ctx.plan, ctx.bag, ctx.training = table, batch, plan, bag, training
        ctx.trained, ctx.step = anchor is not None, table.step_count
        ctx.order = table.next_forward()
        return table.backend.pool(plan, bag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.trained and not ctx.training:
            raise RuntimeError("backward through rows read for evaluation: call model.train() before the forward pass")
        values = grad.detach().to(torch.float32).contiguous()
        weight_gradient = _weight_gradient(ctx, values) if ctx.needs_input_grad[1] else None
        if ctx.training:
            version = grad._version
            ctx.table.add_gradient(ctx.order, ctx.batch, ctx.plan, ctx.bag, values, lambda: grad._version == version)
        return None, weight_gradient, None, None, None, None, None


def _weight_gradient(ctx: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the gradient of all weights of the batch."""
    own = ctx.table.weight_gradient(ctx.plan, ctx.bag, values, ctx.step)
    if ctx.positions is None:
        return own.to(**ctx.options)  # type: ignore[no-any-return]
    gradient = torch.zeros(len(ctx.batch.ids), device=own.device)
    if ctx.repeated:  # a field that the bag reads twice: one after the other, on the host
        gradient = gradient.cpu()
        np.add.at(gradient.numpy(), ctx.positions, own.cpu().numpy())
    else:
        gradient[torch.from_numpy(ctx.positions).to(own.device)] = own
    return gradient.to(**ctx.options)
