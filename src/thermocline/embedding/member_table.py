"""`MemberTable`: one of the tables of `tc.Tiers`, used as a `tc.Table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsIndex, cast

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.embedding.bag_registry import BagRegistry
from thermocline.embedding.batch_plan import BagSpec
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.member_keys import Member, member_keys
from thermocline.embedding.merged_table import MergedTable
from thermocline.embedding.open_table import OpenTable
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Precision
from thermocline.embedding.row_arguments import split_rows
from thermocline.embedding.row_version import RowVersion
from thermocline.embedding.step_rates import RateRuns
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec, describe_initial
from thermocline.errors import ThermoclineError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from thermocline.embedding.backend import RowBackend
    from thermocline.tiers.dram import DramTier
    from thermocline.tiers.hbm import HbmTier
    from thermocline.tiers.ssd import SsdStore


class Storage(Protocol):
    """Where the rows of a table of `tc.Tiers` are, opened by the first use."""

    bags: BagRegistry
    spec: TableSpec
    """Layout of the rows."""

    @property
    def table(self) -> Table:
        """The table that stores the rows. Opens all storages."""

    def close_member(self, name: str) -> None:
        """Close the storage once all of its tables are closed."""


class MemberTable:
    """A table of `tc.Tiers`. Made by `tiers.table(name, dim, optimizer)`; used as a `tc.Table`.

    Tables of equal layout are stored together: they are trained by one step, `tiers.step()`, with one learning rate,
    and committed together. Rows are read and loaded by id.
    """

    def __init__(self, storage: Storage, member: Member, dim: int, rows: int | None, merged: bool) -> None:
        self._storage, self._dim, self._merged = storage, dim, merged
        self.member = member
        """Salt and initial rows."""
        self.declared_layout: dict[str, Any] = {}
        """`layout`, known before the table is opened."""
        self.expected_rows = rows
        """Declared number of rows; None: unknown."""

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.member.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._dim

    @property
    def storage(self) -> Table:
        """The table that stores the rows, of this table and perhaps others. Opens it."""
        return self._storage.table

    @property
    def row_tables(self) -> list[Table]:
        """`storage`, as a list."""
        return [self.storage]

    # ---- bags

    def salts(self, fields: int) -> tuple[int, ...]:
        """Return `BagSpec.salts` of a bag of this table."""
        return (self.member.salt,) * fields if self._merged else ()

    def register(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads. Does not open the storage."""
        self._storage.bags.add(bag, specs)

    @property
    def bags(self) -> list[Any]:
        """The bags that read this table."""
        return [bag for bag in self._storage.bags.bags if bag.table is self]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the bags of this table that exist now."""
        for bag in self.bags:
            bag.requires_grad_(requires_grad)
        return self

    # ---- rows by id: the methods of `Table`, which a `MergedTable` refuses to callers that do not know its salts

    def _keys(self, ids: Any) -> Keys:
        keys = as_keys(ids)
        return member_keys(keys, self.member.salt, f"table {self.name!r}") if self._merged else keys

    def load_rows(self, ids: Any, rows: Any, state: Any = None) -> None:
        """Insert or replace rows, between steps: see `Table.load_rows`."""
        table, keys = self.storage, self._keys(ids)
        if isinstance(table, MergedTable):
            table.write_member(keys, rows, state)
        else:
            table.load_rows(keys, rows, state)

    def read(self, ids: Any) -> Floats:
        """Return float32[n, dim + state]; an id never trained gives its initial row."""
        return Table.read(self.storage, self._keys(ids))

    def read_rows(self, ids: Any) -> tuple[Floats, Floats]:
        """Return weights, float32[n, dim], and optimizer state, float32[n, state]."""
        return split_rows(self.spec, self.read(ids))

    def read_statistics(self, ids: Any) -> dict[str, npt.NDArray[Any]]:
        """Return statistics of rows by name: see `Table.read_statistics`."""
        return Table.read_statistics(self.storage, self._keys(ids))

    def rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Floats]]:
        """Iterate over every trained row of this table: see `Table.rows`. Reads those of the other tables too."""
        for keys, rows in Table.rows(self.storage, batch_rows):
            own = self.own_rows(keys)
            if own.any():
                yield self.ids_of(keys[own]), rows[own]

    def in_store(self, ids: Any) -> npt.NDArray[np.bool_]:
        """Return which ids have a row in the SSD store; all False without one."""
        keys, store = self._keys(ids), self.store
        return np.zeros(len(keys), np.bool_) if store is None else store.get(keys)[0]

    def own_rows(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of the keys in the tiers are of this table."""
        return self.member.owns(keys) if self._merged else np.ones(len(keys), np.bool_)

    def ids_of(self, keys: Keys) -> Keys:
        """Return the ids of keys of this table in the tiers."""
        return keys ^ np.uint64(self.member.salt) if self._merged else keys

    def expire(self, expiry: Expiry) -> int:
        """Delete rows of this table by the rules of `expiry` now, between steps: see `Table.expire`.

        Reads the rows of the tables that are stored with it too. The newest event time is that of all of them.
        """
        table = self.storage
        return table.expire_member(self.member, expiry) if isinstance(table, MergedTable) else table.expire(expiry)

    def __len__(self) -> int:
        """Return the number of trained rows. Reads all rows."""
        return sum(len(keys) for keys, _ in self.rows())

    def __bool__(self) -> bool:
        return True

    # ---- the storage

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the rows."""
        return self._storage.spec.optimizer

    @property
    def precision(self) -> Precision:
        """The stored precision of weights."""
        return self._storage.spec.precision

    @property
    def spec(self) -> TableSpec:
        """Layout of this table's rows, and the budgets of its storage."""
        return dataclasses.replace(self.storage.spec, name=self.name, initial=self.member.initial, members=())

    @property
    def layout(self) -> dict[str, Any]:
        """See `TableSpec.layout`."""
        return {**self.spec.layout, "initial": describe_initial(self.member.initial)}

    @property
    def backend(self) -> RowBackend:
        """The backend of the storage."""
        return self.storage.backend

    @property
    def device(self) -> torch.device:
        """Device of the bags' outputs."""
        return self.storage.device

    @property
    def dram(self) -> DramTier:
        """The DRAM tier of the storage."""
        return self.storage.dram

    @property
    def hbm(self) -> HbmTier | None:
        """The HBM tier of the storage."""
        return self.storage.hbm

    @property
    def store(self) -> SsdStore | None:
        """The SSD store of the storage."""
        return self.storage.store

    @property
    def checkpoint_store(self) -> SsdStore | None:
        """The store where `tc.Checkpoints` saves the storage, if it has no `ssd`."""
        return self.storage.checkpoint_store

    @property
    def store_root(self) -> Path | None:
        """Folder of the storage's store."""
        return self.storage.store_root

    @property
    def groups(self) -> None:
        """None: the rows are in this process."""
        return

    @property
    def version(self) -> RowVersion:
        """Identity of the rows of the storage as they are now."""
        return self.storage.version

    @property
    def step_count(self) -> int:
        """Steps applied so far."""
        return self.storage.step_count

    @property
    def pending_gradients(self) -> int:
        """Backward passes through bags of the storage that no step has applied yet."""
        return self.storage.pending_gradients

    @property
    def lr(self) -> float:
        """Learning rate of the next steps of the storage."""
        return self.storage.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        table = self.storage
        if isinstance(table, MergedTable) and len(table.spec.members) > 1 and rate != table.lr:
            names = [member.name for member in table.spec.members]
            raise ThermoclineError(
                f"tables {names} are stored together and have one learning rate: call tiers.set_lr() for all tables, "
                "or set table.storage.lr for these"
            )
        table.lr = rate

    @property
    def rate_runs(self) -> RateRuns | None:
        """Rates of the last steps: see `Table.rate_runs`."""
        return self.storage.rate_runs

    @property
    def accumulate(self) -> int:
        """Batches per step: see `Table.accumulate`."""
        return self.storage.accumulate

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        self.storage.accumulate = batches

    @property
    def on_expired(self) -> list[Callable[[Keys], None]]:
        """Called with the keys that an expiry has deleted."""
        return self.storage.on_expired

    def step(self, **arguments: Any) -> float | None:
        """Raise if other tables are stored with this one: `tiers.step()` is the step of all."""
        self._require_alone("step()", "which applies the gradients of all tables")
        return self.storage.step(**arguments)

    def gradient_norm(self) -> float:
        """Raise if other tables are stored with this one: `tiers.gradient_norm()` is the joint norm of all."""
        self._require_alone("gradient_norm()", "the joint norm of the gradients of all tables")
        return self.storage.gradient_norm()

    def discard_gradients(self) -> None:
        """Raise if other tables are stored with this one: `tiers.discard_gradients()` drops those of all."""
        self._require_alone("discard_gradients()", "which drops the gradients of all tables")
        self.storage.discard_gradients()

    def _require_alone(self, method: str, meaning: str) -> None:
        members = self.storage.spec.members
        if others := [member.name for member in members if member.name != self.name]:
            raise ThermoclineError(
                f"table {self.name!r} is stored with tables {others}, and their gradients are collected together: call "
                f"tiers.{method}, {meaning}"
            )

    def tier_counts(self) -> Mapping[str, int]:
        """Return rows of training batches of the storage so far, by tier: see `Table.tier_counts`."""
        return self.storage.tier_counts()

    def commit(self, note: bytes = b"") -> int:
        """Make everything up to the last step durable, of all tables of the storage: see `Table.commit`."""
        return self.storage.commit(note)

    def close(self) -> None:
        """Close the storage once all of its tables are closed. What was not committed is lost."""
        self._storage.close_member(self.name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return OpenTable.__reduce_ex__(cast(Any, self), protocol)

    def __repr__(self) -> str:
        return f"<table {self.name!r} of tc.Tiers: dim {self.dim}, {self.optimizer}>"
