"""`tc.RowOptimizer`: tables as a torch optimizer, so that torch's schedulers set their learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.shared_tiers import Tiers
from thermocline.embedding.table import Table, row_tables


class RowOptimizer(torch.optim.Optimizer):
    """Steps of tables with the learning rates of `param_groups`: one group per table, of its name.

    `RowOptimizer(tiers)` has one group for tables of `tc.Tiers` that are stored together, and none for the tables of
    collections of `thermocline.torchrec`, which backward updates.

    `step()` calls `table.step(lr=group["lr"])` of each table, `zero_grad()` drops gradients that no step has applied.
    `state_dict` has the learning rates; the state of rows is in the tables. A group's parameter has no elements.
    """

    def __init__(self, *tables: Table | MemberTable | Tiers) -> None:
        if not tables:
            raise ValueError("RowOptimizer() has no tables: give at least one")
        self.tables = [table for table in row_tables(tables) if not table.updated_in_backward]
        if not self.tables:
            raise ValueError("RowOptimizer() has no tables: backward updates the rows of all tables given")
        groups = [
            {"params": [torch.nn.Parameter(torch.empty(0))], "lr": table.lr, "name": table.name}
            for table in self.tables
        ]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply the gradients of all tables. Collective over ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for table, group in zip(self.tables, self.param_groups, strict=True):
            table.lr = float(group["lr"])
            table.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has applied."""
        for table in self.tables:
            if table.pending_gradients:
                table.discard_gradients()
