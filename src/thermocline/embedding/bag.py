"""`tc.EmbeddingBag`: the nn.Module between a table and a model. Autograd only sees the pooled vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BagSpec, Pooling, Prepared
from thermocline.embedding.table import Table

if TYPE_CHECKING:
    from thermocline.tiers.hbm_backend import HbmPrepared


class EmbeddingBag(torch.nn.Module):
    """Pools the rows of each field: Batch -> float32[examples, fields, dim].

    fields    how many fields of the batch, from the first; or which
    pooling   "sum", "mean" (over the number of ids), one of them per field; or "none", for one field: a vector per id

    In training mode the batch's rows are pinned and backward leaves their gradients with the table, which applies them
    in `table.step()`. In eval mode rows are only read: unseen keys give their initial row, nothing is inserted.
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
                raise ValueError(f"pooling is {kind!r}: it is one of sum, mean, none")
        if "none" in kinds and len(self.fields) > 1:
            raise ValueError("pooling 'none' gives a vector per id: use a bag of its own for each such field")
        specs = []
        for kind in dict.fromkeys(kinds):
            places = tuple(i for i, k in enumerate(kinds) if k == kind)
            specs.append(BagSpec(tuple(self.fields[i] for i in places), kind, places))
        self.specs = tuple(specs)
        table.register(self, self.specs)
        # What makes autograd call backward: not a parameter, so no dense optimizer meets it.
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        """float32[examples, fields, dim]; with pooling "none" float32[ids, dim]."""
        trains = self.training and torch.is_grad_enabled()
        prepared = batch.prepared.get(self.table)
        if prepared is None or not self._serves(prepared, trains):
            prepared = self._prepare_now(batch, trains)
        outputs = [
            _Pool.apply(self._anchor, self.table, prepared, prepared.parts[spec], trains)  # type: ignore[no-untyped-call]
            for spec in self.specs
        ]
        if self.specs[0].pooling == "none":
            return outputs[0]  # type: ignore[no-any-return]
        shaped = [out.view(-1, len(spec.fields), self.table.dim) for out, spec in zip(outputs, self.specs, strict=True)]
        if len(shaped) == 1:
            return shaped[0]  # type: ignore[no-any-return]
        order = [place for spec in self.specs for place in spec.places]
        return torch.cat(shaped, 1)[:, torch.tensor(order, device=shaped[0].device).argsort()]

    def _serves(self, prepared: Prepared | HbmPrepared, trains: bool) -> bool:
        """Whether this bag can use it: it may be for evaluation, older than the bag, or of a tier since replaced."""
        here = prepared.tier is self.table.dram and not (trains and prepared.pins is None)
        return here and prepared.parts.keys() >= set(self.specs)

    def _prepare_now(self, batch: Batch, trains: bool) -> Prepared | HbmPrepared:
        """For batches that no pipeline has prepared, or not for this bag."""
        if not trains:
            return self.table.prepare_read(batch, self.specs)
        prepared = self.table.prepare(batch)

        def done() -> None:  # nobody else says when the loop is done with this batch
            if batch.prepared.get(self.table) is prepared:
                del batch.prepared[self.table]
            assert prepared.pins is not None
            prepared.pins.release()

        self.table.on_step(done)
        batch.prepared[self.table] = prepared
        return prepared

    def extra_repr(self) -> str:
        return f"table={self.table.name!r}, fields={len(self.fields)}, dim={self.table.dim}"


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, table: Table, prepared: Any, part: Any, trains: bool) -> torch.Tensor:
        ctx.table, ctx.prepared, ctx.part, ctx.trains = table, prepared, part, trains
        ctx.order = table.next_forward()
        pooled = table.pool(prepared, part)
        return pooled if isinstance(pooled, torch.Tensor) else torch.from_numpy(pooled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        if not ctx.trains:
            raise RuntimeError("backward through rows that were only read: call model.train() before the forward pass")
        values = grad.detach().to(torch.float32).contiguous()
        version = grad._version
        kept = values.numpy() if isinstance(ctx.prepared, Prepared) else values
        ctx.table.add_gradient(ctx.order, ctx.prepared, ctx.part, kept, lambda: grad._version == version)
        return None, None, None, None, None
