"""`tc.EmbeddingBag`: the nn.Module that pools rows of a table. Autograd sees only the pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
    """

    def __init__(
        self, table: Table, fields: int | Sequence[int], *, pooling: Pooling | Sequence[Pooling] = "sum"
    ) -> None:
        super().__init__()
        self.table = table
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

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return float32[examples, fields, dim]; with pooling "none" float32[ids, dim]."""
        training = self.training and torch.is_grad_enabled()
        plan = batch.prepared.get(self.table)
        if plan is None or not self.table.usable(plan, self.specs, training):
            plan = self._prepare_now(batch, training)
        outputs = [
            _Pool.apply(self._anchor, self.table, plan, plan.bags[spec], training)  # type: ignore[no-untyped-call]
            for spec in self.specs
        ]
        if self.specs[0].pooling == "none":
            return outputs[0]  # type: ignore[no-any-return]
        shaped = [out.view(-1, len(spec.fields), self.table.dim) for out, spec in zip(outputs, self.specs, strict=True)]
        if len(shaped) == 1:
            return shaped[0]  # type: ignore[no-any-return]
        order = [position for spec in self.specs for position in spec.positions]
        return torch.cat(shaped, 1)[:, torch.tensor(order, device=shaped[0].device).argsort()]

    def _prepare_now(self, batch: Batch, training: bool) -> BatchPlan:
        """Prepare a batch that no pipeline has prepared, or not for this bag."""
        if not training:
            return self.table.prepare_read(batch, self.specs)
        plan = self.table.prepare(batch)

        def release() -> None:  # no pipeline releases this plan
            if batch.prepared.get(self.table) is plan:
                del batch.prepared[self.table]
            assert plan.pins is not None
            plan.pins.release()

        self.table.on_step(release)
        batch.prepared[self.table] = plan
        return plan

    def extra_repr(self) -> str:
        return f"table={self.table.name!r}, fields={len(self.fields)}, dim={self.table.dim}"


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, table: Table, plan: BatchPlan, bag: Any, training: bool
    ) -> torch.Tensor:
        ctx.table, ctx.plan, ctx.bag, ctx.training = table, plan, bag, training
        ctx.order = table.next_forward()
        return table.backend.pool(plan, bag)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        if not ctx.training:
            raise RuntimeError("backward through rows read for evaluation: call model.train() before the forward pass")
        values = grad.detach().to(torch.float32).contiguous()
        version = grad._version
        ctx.table.add_gradient(ctx.order, ctx.plan, ctx.bag, values, lambda: grad._version == version)
        return None, None, None, None, None
