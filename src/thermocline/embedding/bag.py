"""`tc.EmbeddingBag`: the nn.Module that pools rows of a table. Autograd sees only the pooled vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BagSpec, BatchPlan, Pooling
from thermocline.embedding.graph_op import call_in_graph, in_graph, register_module
from thermocline.embedding.table import Table
from thermocline.embedding.table_state import decode, describe, encode, require_same_rows
from thermocline.errors import FormatError

if TYPE_CHECKING:
    from thermocline.embedding.member_table import MemberTable


class EmbeddingBag(torch.nn.Module):
    """Pools the rows of each field: Batch -> float32[examples, fields, dim].

    fields    names of fields, which are read by name, whatever their order in a batch; or the number of fields of the
              batch, from the first; or a sequence of field numbers
    pooling   "sum" or "mean" (divided by the number of ids), for all fields or per field; or "none", for one field:
              one vector per id

    In training mode the batch's rows are pinned and backward leaves their gradients with the table, which applies them
    in `table.step()`. In eval mode rows are copied: keys never trained give their initial row, nothing is inserted.

    Weights per id that require grad, in the batch or given to `forward`, receive their gradient in backward.

    `state_dict()` has no rows. It names table, commit and step (`_extra_state`): `load_state_dict` raises unless the
    table has the rows of that step. `tc.state_dict(model, rows=True)` and `tc.Checkpoints` save rows.
    """

    def __init__(
        self,
        table: Table | MemberTable,
        fields: int | Sequence[int] | Sequence[str],
        *,
        pooling: Pooling | Sequence[Pooling] = "sum",
    ) -> None:
        super().__init__()
        self.table = table
        self.requires_grad = True
        """Whether the bag is trained; False: frozen. Set by `requires_grad_`."""
        self.fields = _as_fields(fields)
        self.field_names: tuple[str, ...] | None = None
        """Names of the fields: as given, or those of the first batch with names, which later batches must have too."""
        if self.fields and isinstance(self.fields[0], str):
            self.field_names = self.fields
        self._batch_names: tuple[str, ...] | None = None
        """Names of the last batch: these were checked."""
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
            fields_of_kind: Any = tuple(self.fields[i] for i in positions)
            specs.append(BagSpec(fields_of_kind, kind, positions, table.salts(len(positions))))
        self.specs = tuple(specs)
        table.register(self, self.specs)
        # Makes autograd call backward. Not a parameter, so that no dense optimizer receives it.
        self._anchor = torch.zeros((), requires_grad=True)
        self.pooled = self.specs[0].pooling != "none"
        """Whether there is one vector per field; else one per id."""
        self.graph_number = register_module(self)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the bag (False) or unfreeze it, between steps.

        A frozen bag reads rows as in evaluation, also in training mode: its passes change and insert nothing, and
        autograd passes through it only to weights that require grad. Other bags of the table are trained as before. The
        call counts for the forward passes after it; batches in flight need not be drawn again. `requires_grad_` of an
        enclosing module does not reach the bag, because rows are not parameters.
        """
        self.table.storage.check_freezable()
        super().requires_grad_(requires_grad)  # parameters of a subclass
        self.requires_grad = requires_grad
        return self

    def forward(self, batch: Batch, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32[examples, fields, dim]; with pooling "none" float32[ids, dim].

        weights   one weight per id, used instead of `batch.weights`: in the order of `batch.ids` or, for a batch of
                  `Batch.from_jagged`, of its values

        In a model that torch.compile compiles, the bag is one op of the graph (`graph_op.py`). The graph ends before it
        if the batch has weights that require grad, and with pooling "none" for one of several fields.
        """
        if torch.compiler.is_compiling():
            if in_graph(batch) and (self.pooled or batch.fields == 1):
                _, examples, ids = batch.handle  # type: ignore[misc]
                shape = (examples, len(self.fields), self.table.dim) if self.pooled else (ids, self.table.dim)
                return call_in_graph(self, batch, None, weights, shape)
            return _forward_outside_graph(self, batch, weights)
        return self._forward(batch, weights)

    def call_outside_graph(self, batch: Any, offsets: Any, weights: torch.Tensor | None) -> torch.Tensor:
        """Run the op of a graph."""
        return self._forward(batch, weights)

    @property
    def anchors(self) -> list[torch.Tensor]:
        """The tensors of which an output may depend in its autograd graph, so that backward is called."""
        pooled = self.table.storage.pooled
        return [self._anchor] if pooled is None else [self._anchor, pooled.anchor]

    def _forward(self, batch: Batch, weights: torch.Tensor | None) -> torch.Tensor:
        table, training = self._begin(batch, weights)
        given = batch.learned_weights if weights is None else weights
        version = None if given is None or given.is_inference() else given._version
        mode = training, table.trains(self), torch.is_grad_enabled(), table.step_count, version
        if table.pooled is not None:
            part = table.pooled.take(batch, given, mode, self.specs[0])
            if part is not None:
                return part
        learned, plan = _in_order(batch, weights), _make_plan(table, batch, self.specs, training)
        anchor = self._anchor if table.trains(self) else None
        whole = table.covering(plan, self.specs[0])
        if table.pooled is not None and whole is not None and whole.parts:
            anchor = None if anchor is None else table.pooled.anchor
            parts = _PoolParts.apply(anchor, learned, table, batch, plan, whole, training)  # type: ignore[no-untyped-call]
            table.pooled.put(batch, given, mode, dict(zip(whole.parts, parts, strict=True)))
            return table.pooled.take(batch, given, mode, self.specs[0])  # type: ignore[return-value]
        outputs = [
            _Pool.apply(anchor, learned, table, batch, plan, spec, training)  # type: ignore[no-untyped-call]
            for spec in self.specs
        ]
        if len(outputs) == 1:
            return outputs[0]  # type: ignore[no-any-return]
        order = [position for spec in self.specs for position in spec.positions]
        return torch.cat(outputs, 1)[:, torch.tensor(order, device=outputs[0].device).argsort()]

    def _begin(self, batch: Batch, weights: torch.Tensor | None) -> tuple[Table, bool]:
        """Check a pass over a batch; return the table that stores the rows, and whether the pass trains."""
        learned = batch.learned_weights if weights is None else weights
        if learned is not None and learned.shape != batch.ids.shape:
            raise ValueError(f"weights have shape {tuple(learned.shape)}: expected ({len(batch.ids)},), one per id")
        table = self.table.storage
        training = table.trains(self) and self.training and torch.is_grad_enabled()
        if training:
            if table.groups is None:
                self._require_one_rank()
            table.warn_if_step_is_missing(batch, self)
        if batch.names is not self._batch_names:
            self._check_names(batch)
        return table, training

    def _require_one_rank(self) -> None:
        """Raise if several ranks train: each would change its own rows only. Checked here, as ranks may join late."""
        if (
            dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1
            and not self.table.storage.per_rank
        ):
            raise RuntimeError(
                f"table {self.table.name!r} is trained by {dist.get_world_size()} ranks of torch.distributed, but its "
                "rows are not shared: they would differ between ranks. Use tc.ShardedTable(..., "
                "groups=tc.join_ranks()), or, if each rank shall have rows of its own, tc.Table(..., per_rank=True) or "
                'tc.Tiers(table_options={"per_rank": True})'
            )

    def _check_names(self, batch: Batch) -> None:
        """Raise if a bag with field numbers gets other names at its positions than in earlier batches."""
        names = batch.names
        if isinstance(self.fields[0], str) or names is None or batch.examples == 0 or names == self._batch_names:
            return  # a named bag reads by name: `Batch.select` has checked them
        read = tuple(names[field] for field in self.fields if 0 <= field < len(names))
        if self.field_names is None:
            self.field_names = read
        elif self.field_names != read:
            raise ValueError(
                f"the bag reads fields {list(self.fields)} by number: they are {list(read)} in this batch, but were "
                f"{list(self.field_names)} before. Make it with names: tc.EmbeddingBag(table, {list(self.field_names)})"
            )
        self._batch_names = names

    # ---- state_dict

    def get_extra_state(self) -> torch.Tensor:
        """Return table, commit, step and field names, for `state_dict`: uint8, the text of a JSON object."""
        fields = None if self.field_names is None else list(self.field_names)
        return encode({**describe(self.table), "fields": fields})

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Raise `FormatError` unless the table has the rows, and the bag the fields, that `state` names."""
        saved = decode(state)
        require_same_rows(saved, self.table)
        self.require_fields(saved.get("fields"))

    def require_fields(self, saved: Sequence[str] | None) -> None:
        """Raise `FormatError` unless the bag reads the fields with these names. Batches must then have them too."""
        if saved is None:
            return
        if self.field_names is None:
            self.field_names = tuple(saved)
        elif list(self.field_names) != list(saved):
            raise FormatError(
                f"the saved bag on table {self.table.name!r} reads fields {list(saved)}, but this one reads "
                f"{list(self.field_names)}: make it with the saved names, in this order"
            )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        key = f"{prefix}_extra_state"
        if key in missing:
            missing[missing.index(key)] = _MissingDescription(key)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Raise on `half()`, `double()` and alike; a change of the device has no effect on the bag."""
        if fn(torch.empty(0)).dtype != torch.float32:
            raise TypeError(
                f"a bag of table {self.table.name!r} cannot change its dtype: it returns float32. Convert the dense "
                "modules alone, use torch.autocast, or set the table's precision for rows of fewer bits"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.table.register(self, self.specs)  # a copy that shares the table
        self.graph_number = register_module(self)

    def extra_repr(self) -> str:
        return f"table={self.table.name!r}, fields={len(self.fields)}, dim={self.table.dim}"


def _in_order(batch: Batch, weights: torch.Tensor | None) -> torch.Tensor | None:
    """Return weights per id that require grad, or were given to a bag, in the order of the batch's ids."""
    if weights is None:
        return batch.learned_weights  # type: ignore[no-any-return]
    return weights if batch.order is None else weights[torch.from_numpy(batch.order).to(weights.device)]


def _make_plan(table: Table, batch: Batch, specs: Sequence[BagSpec], training: bool) -> BatchPlan:
    """Find the plan of a pass, or prepare one."""
    plan = _find_plan(table, batch, specs, training)
    if plan is not None:
        return plan
    return table.prepare_forward(batch, specs) if training else table.prepare_read(batch, specs)


# Not torch.compiler.disable, which imports torch._dynamo at once: more than a second.
_forward_outside_graph = _disable_dynamo(EmbeddingBag._forward)


def _find_plan(table: Table, batch: Batch, specs: Sequence[BagSpec], training: bool) -> BatchPlan | None:
    """Return a plan of the batch with these inputs, current rows and, for training, pins; None: there is none."""
    forward = batch.prepared.get(("forward", table))
    candidates = [batch.prepared.get(table), None if forward is None else forward()]
    if not training and ("frozen", table) in batch.prepared:
        step, plan = batch.prepared["frozen", table]
        candidates.append(plan if step == table.step_count else None)  # else a later step has changed rows
    for plan in candidates:
        if plan is None or not table.backend.is_current(plan):
            continue
        if any(table.covering(plan, spec) is None for spec in specs):
            continue
        if not training and plan.pins is not None and table.backend.rates is not None:
            continue  # a pass through a training plan would catch up its rows in place
        if _pinned(plan) or (plan.pins is None and not training):
            return plan  # type: ignore[no-any-return]
    return None


def _pinned(plan: BatchPlan) -> bool:
    """Return whether some owner has pins of the plan."""
    if plan.pins is None or not plan.pins.acquire():
        return False
    plan.pins.release()
    return True


class _MissingDescription(str):
    """A missing key, which torch formats into its error message under strict=True."""

    def __format__(self, spec: str) -> str:
        return (
            f"{self!s}: this state_dict does not record which rows of the table belong to it, and has no rows itself; "
            "if the table has its rows, load it with strict=False"
        )


def _as_fields(fields: int | Sequence[int] | Sequence[str]) -> tuple[int, ...] | tuple[str, ...]:
    if isinstance(fields, int):
        return tuple(range(fields))
    if isinstance(fields, str):
        raise TypeError(f"fields is {fields!r}: it must be a number of fields, or a list of names such as [{fields!r}]")
    chosen: tuple[Any, ...] = tuple(fields)
    if len({isinstance(field, str) for field in chosen}) > 1:
        raise TypeError(f"fields is {list(chosen)!r}: it must have only names or only numbers")
    return chosen


class _Pool(torch.autograd.Function):
    """Pools one input of a plan."""

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
        ctx.spec = spec
        ctx.trained, ctx.step = anchor is not None, table.step_count
        ctx.order = table.next_forward()
        pooled = table.backend.pool(plan, bag)
        if spec.pooling == "none":
            return pooled
        # Not a view, which autograd would record, and which a model may not change in place.
        fields = len(spec.fields)
        return pooled.resize_(len(pooled) // fields, fields, pooled.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: torch then raises if the result is differentiated
            return _backward_once(ctx, grad)
        return _Pool._backward(ctx, grad)

    @staticmethod
    def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _require_training(ctx)
        values = grad.detach() if grad.requires_grad else grad
        if values.dtype != torch.float32 or not values.is_contiguous():
            values = values.to(torch.float32).contiguous()
        values = values.view(-1, values.shape[-1])
        weight_gradient = _weight_gradient(ctx, values) if ctx.needs_input_grad[1] else None
        if ctx.training:
            version = grad._version
            ctx.table.add_gradient(
                ctx.order, ctx.batch, ctx.plan, ctx.bag, values, lambda: grad._version == version, ctx.spec
            )
        return None, weight_gradient, None, None, None, None, None


_backward_once = once_differentiable(_Pool._backward)


def _require_training(ctx: Any) -> None:
    """Raise if rows that are trained were read for evaluation: they have no plan for gradients."""
    if ctx.trained and not ctx.training:
        raise RuntimeError("backward through rows read for evaluation: call model.train() before the forward pass")


class _PoolParts(torch.autograd.Function):
    """Pools the joined input of several tables: returns a tensor per part (`merged_bags.py`)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        pooled, weights = _Pool.forward(ctx, *arguments), arguments[1]
        ctx.weights = None if weights is None else weights.detach()
        pooled = pooled.view(-1, len(ctx.spec.fields), pooled.shape[-1])
        parts, first = [], 0
        for spec in ctx.spec.parts:
            shape, start = (len(pooled), len(spec.fields), pooled.shape[2]), first * pooled.shape[2]
            # Not a view of `pooled`, as autograd refuses to change one of several views in place.
            part: Any = pooled.new_empty(0)
            parts.append(part.set_(pooled.untyped_storage(), start, shape, pooled.stride()))
            first += len(spec.fields)
        ctx.shape = pooled.shape
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _require_training(ctx)
        complete = all(grad is not None for grad in grads)
        weight_gradient = None
        if complete or ctx.needs_input_grad[1]:
            values, unchanged = _joined(grads, ctx.spec.parts, ctx.shape)
            weight_gradient = _weight_gradient(ctx, values) if ctx.needs_input_grad[1] else None
        if ctx.training and complete:
            ctx.table.add_gradient(ctx.order, ctx.batch, ctx.plan, ctx.bag, values, unchanged, ctx.spec)
        elif ctx.training:
            ctx.table.add_partial_gradients(ctx.order, ctx.batch, ctx.spec, ctx.weights, grads)
        return None, weight_gradient, None, None, None, None, None


def _joined(
    grads: Sequence[torch.Tensor | None], parts: Sequence[BagSpec], shape: torch.Size
) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Return the gradients of all parts as float32[bags, dim], and a function that returns whether they are unchanged.

    Those of a part without a gradient are 0. Gradients that lie side by side in memory, as those of vectors that a
    model has joined by torch.cat in the order of the parts, are not copied.
    """
    examples, fields, dim = shape
    given = next(grad for grad in grads if grad is not None)
    address, offset, version = given.data_ptr(), 0, given._version
    together = given.dtype == torch.float32
    for grad, spec in zip(grads, parts, strict=True):
        together = (
            together
            and grad is not None
            and grad.data_ptr() == address + 4 * offset * dim
            and grad.stride() == (fields * dim, dim, 1)
            and grad.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        )
        offset += len(spec.fields)
    if together and examples:
        return given.detach().as_strided((examples * fields, dim), (dim, 1)), lambda: given._version == version
    filled = [
        given.new_zeros(examples, len(spec.fields), dim) if grad is None else grad.detach()
        for grad, spec in zip(grads, parts, strict=True)
    ]
    return torch.cat(filled, 1).to(torch.float32).view(-1, dim), lambda: True


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
