"""`tc.Tiers`: one budget of HBM, DRAM and SSD for any number of tables of any dims."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thermocline.config import schema
from thermocline.errors import require, require_type, whole_number

if TYPE_CHECKING:
    from thermocline.embedding.admission import Admission
    from thermocline.embedding.expiry import Expiry
    from thermocline.embedding.initializers import Initial
    from thermocline.embedding.member_table import MemberTable
    from thermocline.embedding.optimizers import Optimizer
    from thermocline.embedding.precision import Kind, Precision
    from thermocline.embedding.row_statistics import RowStatistics, Statistic
    from thermocline.embedding.table import Table
    from thermocline.embedding.table_storages import KeyKind, TableModule, TableStorages

_FIELDS = frozenset(field.name for field in dataclasses.fields(schema.Tiers))
_PER_TABLE = ("name", "dim", "optimizer", "seed", "initial", "precision", "statistics", "expiry", "admission")
"""Arguments of `tc.Table` that `Tiers.table` has."""


class Tiers(schema.Tiers):
    """Budgets for the rows of all tables made by `table`, or the section [tiers] of `tc.Config`.

        tiers = tc.Tiers(mem="8GB", ssd="rows")
        users = tiers.table("user", 64, tc.Adagrad(lr=0.1))
        items = tiers.table("item", 32, tc.Adagrad(lr=0.1))
        bags = tc.EmbeddingBag(users, ["user"]), tc.EmbeddingBag(items, ["item", "clicked"])
        for batch in tc.prefetch(data, tiers):
            ...
            tiers.step()

    Tables of equal dim, optimizer, precision, statistics and seed are stored together and cost as one table: one plan,
    one pull and one update per batch. Rows are bit for bit those of separate tables. The first use of a table divides
    the budgets among the groups of tables that are stored together, and opens them: declare all tables before.
    """

    # Of an unpickled config too, which has the fields only. Any: config errors resolve the types of all attributes.
    _options: Any = None
    _made: Any = None

    def __init__(self, *, table_options: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """
        hbm, mem, ssd_mem   bytes for all tables together: see `tc.Table`. Without `hbm` rows are trained in DRAM
        ssd                 folder of the stores, one per group of tables
        settings            the other fields of [tiers]
        table_options       further arguments of `tc.Table`, for each group of tables; not those of `table`
        """
        super().__init__(**settings)
        if declared := [name for name in _PER_TABLE if name in (table_options or {})]:
            raise ValueError(f"table_options has {declared}: pass these to tiers.table(name, dim, optimizer, ...)")
        self._options = table_options

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, schema.Tiers):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    __hash__ = schema.Tiers.__hash__

    @property
    def _storages(self) -> TableStorages:
        if self._made is None:
            from thermocline.embedding.table_storages import TableStorages  # loads torch, which a config need not

            self._made = TableStorages(self, self._options or {})
        return self._made  # type: ignore[no-any-return]

    # ---- tables

    def table(
        self,
        name: str,
        dim: int,
        optimizer: Optimizer,
        *,
        rows: int | None = None,
        initial: Initial | None = None,
        seed: int = 0,
        precision: Precision | Kind = "fp32",
        statistics: Sequence[Statistic] | RowStatistics = (),
        keys: KeyKind = "id",
        expiry: Expiry | None = None,
        admission: Admission | None = None,
        module: TableModule | None = None,
    ) -> MemberTable:
        """Declare a table, which is used as a `tc.Table`. It is opened by the first use of any table.

        rows     expected number of rows: decides the part of the budgets of this table's group. None: as the largest of
                 the other tables
        keys     "id": whole numbers below 2^48. "hash": any 64 bits, such as keys of `tc.Reader`; the table is then
                 stored alone, as are tables with `expiry`, `admission` or a learned quantization scale
        module   of `add_module`: it applies the gradients of the table, which is stored with its other tables only
        Other arguments: see `tc.Table`.
        """
        from thermocline.embedding.initializers import Uniform
        from thermocline.embedding.optimizers import NAMES, Optimizer
        from thermocline.embedding.precision import Precision
        from thermocline.embedding.row_statistics import RowStatistics
        from thermocline.embedding.table import require_table_name
        from thermocline.embedding.table_storages import layout_spec

        require_table_name(name)
        require_type(optimizer, Optimizer, "optimizer", f"{NAMES}, such as Adagrad(lr=0.1)")
        require(whole_number(dim, "dim") >= 1, "dim", dim, "at least 1")
        require(rows is None or whole_number(rows, "rows") >= 1, "rows", rows, "at least 1, or None")
        require(keys in ("id", "hash"), "keys", keys, "id or hash")
        spec = layout_spec(
            name, dim, optimizer, initial=Uniform() if initial is None else initial, seed=whole_number(seed, "seed"),
            precision=Precision.of(precision), statistics=RowStatistics.of(statistics),
        )  # fmt: skip
        return self._storages.declare(spec, rows=rows, keys=keys, expiry=expiry, admission=admission, module=module)

    def add_module(self, module: TableModule) -> None:
        """Let a module, such as a collection of `thermocline.torchrec`, declare its tables when the first is used."""
        self._storages.add_module(module)

    @property
    def tables(self) -> dict[str, MemberTable]:
        """The tables by name, in the order of their declaration."""
        return dict(self._storages.tables)

    def __getitem__(self, name: str) -> MemberTable:
        """Return a table by name."""
        tables = self._storages.tables
        if name not in tables:
            raise KeyError(f"there is no table {name!r}: tables are {list(tables)}")
        return tables[name]

    @property
    def row_tables(self) -> list[Table]:
        """The tables that store the rows of all tables. Opens them."""
        return self._storages.open()

    # ---- training

    @property
    def pending_gradients(self) -> int:
        """Backward passes that no step has applied yet, over all groups of tables."""
        return sum(table.pending_gradients for table in self.row_tables)

    def gradient_norm(self) -> float:
        """Return the joint norm of the gradients of all tables since the last step: see `Table.gradient_norm`."""
        return math.hypot(*(table.gradient_norm() for table in self.row_tables))

    def step(self, *, lr: float | None = None, scale: float = 1.0, max_norm: float | None = None) -> float | None:
        """Apply the gradients of all tables but those of modules, which do so in backward: see `Table.step`.

        max_norm   scale all gradients down if the joint norm over all tables is larger; returns the norm before
        """
        norm = None
        if max_norm is not None:
            norm = abs(scale) * self.gradient_norm()
            scale *= max_norm / norm if norm > max_norm else 1.0
        for table in self.row_tables:
            if not table.updated_in_backward:
                table.step(lr=lr, scale=scale)
        return norm

    def discard_gradients(self) -> None:
        """Drop the collected gradients of all tables."""
        for table in self.row_tables:
            table.discard_gradients()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps of all tables."""
        for table in self.row_tables:
            table.lr = lr

    # ---- durability

    def commit(self, note: bytes = b"") -> None:
        """Make everything up to the last step durable, store by store. `tc.Checkpoints` commits them together."""
        for table in self.row_tables:
            table.commit(note)

    def close(self) -> None:
        """Close all tables. What was not committed is lost."""
        if self._made is not None:
            self._made.close()
