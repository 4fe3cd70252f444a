"""`TableRows`: one table of a collection, as a module with the parameter `weight`, opened on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.torchrec.configs import feature_names, filled_rows, initial_of, precision_of
from thermocline.torchrec.in_backward import RowParameter, attached_optimizer, learning_rate, note_step

_FILL_LIMIT = 1 << 30
"""Bytes that an `init_fn` may fill."""

OpenTable = Callable[..., Table]
"""(config, optimizer, **arguments of `tc.Table`) -> table."""


class TableRows(torch.nn.Module):
    """Rows of one config. `weight` has no rows: it stands for them in `named_parameters`, `state_dict` and optimizers.

    `state_dict` has an empty `weight` and, once the table is open, the description of its rows (`tc.EmbeddingBag`).
    Loading accepts such a `weight`, or the float tensor [num_embeddings, embedding_dim] of TorchRec, whose rows are
    loaded.
    """

    def __init__(
        self, config: Any, pooling: Pooling, open_table: OpenTable, optimizer: Optimizer | None, device: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.features = feature_names(config)
        self._pooling: Pooling = pooling
        self._open_table, self._optimizer = open_table, optimizer
        self.weight = RowParameter(torch.empty(0, config.embedding_dim, device=device))
        self.weight.table = config.name
        self.bags = torch.nn.ModuleList()
        self._table: Table | None = None
        self._attached = 0
        """Optimizers that the parameter had when the table was opened."""

    @property
    def table(self) -> Table:
        """The table, which is opened by the first use."""
        if self._table is None:
            self._open()
        assert self._table is not None
        return self._table

    def _open(self) -> None:
        name = self.config.name
        if self.weight.is_meta:
            raise RuntimeError(
                f"table {name!r} is on device meta, which has no rows: call to_empty(device=...) on the model first"
            )
        optimizer = attached_optimizer(self.weight) or self._optimizer
        if optimizer is None:
            raise RuntimeError(
                f"table {name!r} has no optimizer, and an optimizer over model.parameters() does not reach its rows: "
                "call apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {'lr': 0.1}) before the first "
                "use, or make the collection with optimizer=tc.SGD(lr=0.1)"
            )
        initial, filled = initial_of(self.config)
        rows = filled_rows(self.config, _FILL_LIMIT) if filled else None
        table = self._open_table(
            self.config, optimizer, name=name, initial=initial, precision=precision_of(self.config)
        )
        if rows is not None and table.version.history == "":  # not a store with trained rows
            table.load_rows(torch.arange(len(rows)), rows)
        self._table, self._attached = table, len(getattr(self.weight, "_optimizer_classes", []))
        lists = [[feature] for feature in self.features] if self._pooling == "none" else [self.features]
        self.bags.extend(EmbeddingBag(table, features, pooling=self._pooling) for features in lists)

    def ready_bags(self) -> list[EmbeddingBag]:
        """Return the bags, frozen or not as the parameter is. Opens the table."""
        table = self.table
        if len(getattr(self.weight, "_optimizer_classes", [])) != self._attached:
            raise RuntimeError(
                f"table {table.name!r}: apply_optimizer_in_backward was called after the first use, when the layout of "
                "its rows was fixed: call it before"
            )
        bags: list[Any] = list(self.bags)
        for bag in bags:
            if bag.requires_grad != self.weight.requires_grad:
                bag.requires_grad_(self.weight.requires_grad)
        return bags

    def step(self) -> None:
        """Apply the gradients of the backward pass, if there are any."""
        if self._table is not None and self._table.pending_gradients:
            rate = learning_rate(self.weight)
            if rate is not None:
                self._table.lr = rate
            self._table.step()
            note_step(self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if fn(torch.empty(0, device=self.weight.device)).dtype != torch.float32:
            raise TypeError(
                f"table {self.config.name!r} cannot change its dtype: outputs are float32. Convert the dense modules "
                "alone, use torch.autocast, or set data_type of the config for rows of fewer bits"
            )
        before = self.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight is not before:  # to_empty makes a plain parameter
            moved = RowParameter(self.weight.detach(), requires_grad=before.requires_grad)
            moved.__dict__.update(before.__dict__)
            self.weight = moved
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._table is None and not self.weight.is_meta and (attached_optimizer(self.weight) or self._optimizer):
            self._open()  # so that the keys do not depend on the first use
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if given is not None and tuple(given.shape) == (self.config.num_embeddings, self.config.embedding_dim):
            self.table.load_rows(torch.arange(len(given)), given.detach().float().cpu().contiguous())
            state_dict[key] = self.weight.detach()
            for i, bag in enumerate(self.bags):
                state_dict[f"{prefix}bags.{i}._extra_state"] = bag.get_extra_state()
        elif self._table is None and any(name.startswith(f"{prefix}bags.") for name in state_dict):
            self._open()
        super()._load_from_state_dict(state_dict, prefix, *more)
