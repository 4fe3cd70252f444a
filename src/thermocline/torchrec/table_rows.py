"""`TableRows`: one table of a collection, as a module with the parameter `weight`, opened on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.shared_tiers import Tiers
from thermocline.embedding.table_storages import TableModule
from thermocline.torchrec.configs import feature_names, filled_rows, initial_of, precision_of
from thermocline.torchrec.in_backward import RowParameter, attached_optimizer

_FILL_LIMIT = 1 << 30
"""Bytes that an `init_fn` may fill."""


class TableRows(torch.nn.Module):
    """Rows of one config. `weight` has no rows: it stands for them in `named_parameters`, `state_dict` and optimizers.

    `state_dict` has an empty `weight` and, once the table is open, the description of its rows (`tc.EmbeddingBag`).
    Loading accepts such a `weight`, or the float tensor [num_embeddings, embedding_dim] of TorchRec, whose rows are
    loaded.
    """

    def __init__(
        self, config: Any, pooling: Pooling, open_all: Callable[[], None], optimizer: Optimizer | None, device: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.features = feature_names(config)
        self._pooling: Pooling = pooling
        self._open_all, self._optimizer = open_all, optimizer
        self.weight = RowParameter(torch.empty(0, config.embedding_dim, device=device))
        self.weight.table = config.name
        self.bags = torch.nn.ModuleList()
        self._table: MemberTable | None = None
        self._filled: torch.Tensor | None = None
        """Initial rows that are no function of the id, until they are loaded."""
        self._loading = False
        """Whether loading them has begun."""
        self._attached = 0
        """Optimizers that the parameter had when the table was opened."""

    @property
    def table(self) -> MemberTable:
        """The table. The first use declares and opens all tables of the collection."""
        if self._table is None:
            self._open_all()
        assert self._table is not None
        return self._table

    @property
    def is_declared(self) -> bool:
        """Whether the table has been declared."""
        return self._table is not None

    def chosen_optimizer(self) -> Optimizer:
        """Return the optimizer of the rows. Raises if the parameter is on meta, or has none."""
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
        return optimizer

    def declare(self, tiers: Tiers, optimizer: Optimizer, module: TableModule) -> None:
        """Declare the table, and make its bags."""
        config = self.config
        initial, filled = initial_of(config)
        self._filled = filled_rows(config, _FILL_LIMIT) if filled else None
        self._table = tiers.table(
            config.name, config.embedding_dim, optimizer, rows=config.num_embeddings, initial=initial,
            precision=precision_of(config), module=module,
        )  # fmt: skip
        self._attached = len(getattr(self.weight, "_optimizer_classes", []))
        lists = [[feature] for feature in self.features] if self._pooling == "none" else [self.features]
        self.bags.extend(EmbeddingBag(self._table, features, pooling=self._pooling) for features in lists)

    def fill(self) -> None:
        """Load the initial rows if they are no function of the id."""
        if self._filled is None:
            return
        # A folder with rows of this table keeps them. After an error, row 0 may be one of those that were loaded.
        self._loading = self._loading or not self.table.in_store([0]).any()
        if self._loading:
            self.table.load_rows(torch.arange(len(self._filled)), self._filled)
        self._filled = None

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
            self._open_all()  # so that the keys do not depend on the first use
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
            self._open_all()
        super()._load_from_state_dict(state_dict, prefix, *more)
