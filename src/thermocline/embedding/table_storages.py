"""`TableStorages`: which tables of `tc.Tiers` are stored together, and how their budget is divided.

Tables of equal dim, optimizer, precision, statistics and seed have one storage, a `MergedTable`. A table with 64-bit
keys, expiry, admission or a learned quantization scale has a storage of its own, a `tc.Table` of its name: these depend
on all rows of a table, or on all bits of a key. With `ssd`, `tables.json` in its folder records the storage and the
layout of every table.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from thermocline.config import schema
from thermocline.embedding.admission import Admission
from thermocline.embedding.bag_registry import BagRegistry
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.member_keys import ID_BITS, Member, salt_of
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.merged_bags import MergedBags
from thermocline.embedding.merged_table import MergedTable
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec, table_id
from thermocline.errors import FormatError, ThermoclineError
from thermocline.utils import atomic_file
from thermocline.utils.text_format import parse_size

KeyKind = Literal["id", "hash"]
_RECORD = "tables.json"
_FORMAT = 1
_PREFIX = "shared."
_ROW_OVERHEAD = 64
"""Bytes per row of index and metadata in DRAM, at most."""
_LEAST_MEM = 1 << 20


class TableModule(Protocol):
    """A module that declares tables when the first table is used, and applies their gradients in backward."""

    def declare_tables(self) -> None:
        """Declare the tables: `Tiers.table(..., module=self)`."""

    def fill_tables(self) -> None:
        """Load initial rows. Called once all tables are open."""


class TableStorage:
    """Tables that are stored together, or one table alone. See `member_table.Storage`."""

    def __init__(
        self,
        owner: TableStorages,
        spec: TableSpec,
        options: Mapping[str, Any],
        *,
        merged: bool,
        module: TableModule | None,
    ) -> None:
        """
        spec      layout of the rows; its name is that of the storage
        options   further arguments of `tc.Table`
        module    the module that applies the gradients of its tables; None: `Tiers.step` does
        """
        self.name, self.spec, self.merged, self.module = spec.name, spec, merged, module
        self.bags: Any = MergedBags() if merged else BagRegistry()
        self.members: dict[str, MemberTable] = {}
        self.opened: Table | None = None
        self._owner, self._options = owner, options
        self._salts: dict[int, str] = {}
        self._open_members: set[str] = set()

    @property
    def table(self) -> Table:
        """The table that stores the rows. Opens all storages of the owner."""
        if not self._owner.is_ready:
            self._owner.open()
        assert self.opened is not None
        return self.opened

    def fits(self, spec: TableSpec, module: TableModule | None) -> bool:
        """Return whether a table can be stored here too: equal steps and learning rate, and keys of its own."""
        other = self._salts.get(self._salt(spec.name) >> ID_BITS, spec.name)
        return self.module is module and self.spec.optimizer == spec.optimizer and other == spec.name

    def reserve(self, name: str) -> None:
        """Give the keys of a table of the folder to no other table, whether it is declared or not."""
        self._salts[self._salt(name) >> ID_BITS] = name

    def _salt(self, name: str) -> int:
        return salt_of(self.spec.seed, table_id(name), self.spec.table_id)

    def add(self, spec: TableSpec, rows: int | None) -> MemberTable:
        """Declare a table."""
        member = Member(spec.name, self._salt(spec.name) if self.merged else 0, spec.initial)
        self.reserve(spec.name)
        table = self.members[spec.name] = MemberTable(self, member, spec.dim, rows, self.merged)
        table.declared_layout = spec.layout
        return table

    def open(self, **budgets: Any) -> None:
        """Open the table."""
        spec = self.spec
        arguments: dict[str, Any] = {
            "dim": spec.dim, "optimizer": spec.optimizer, "name": spec.name, "seed": spec.seed, "initial": spec.initial,
            "precision": spec.precision, "statistics": spec.statistics, **self._options, **budgets,
        }  # fmt: skip
        if self.merged:
            members = [table.member for table in self.members.values()]
            self.opened = MergedTable(members, self.bags, **arguments)
        else:
            self.opened = Table(**arguments)
            self.opened.use_bags(self.bags)
        self.opened.updated_in_backward = self.module is not None
        self._open_members = set(self.members)

    def close(self) -> None:
        """Close the table, if it is open."""
        self._open_members = set()
        if self.opened is not None:
            self.opened.close()

    def close_member(self, name: str) -> None:
        """Close the table once all of its members are closed."""
        self._open_members.discard(name)
        if not self._open_members:
            self.close()

    def need(self, rows: int) -> int:
        """Return the bytes of all rows of the tables, with their index; `rows`: for a table that declares none."""
        count = sum(rows if table.expected_rows is None else table.expected_rows for table in self.members.values())
        return bytes_of_rows(count, self.spec.row_bytes)


class TableStorages:
    """The storages of one `tc.Tiers`."""

    def __init__(self, tiers: schema.Tiers, options: Mapping[str, Any]) -> None:
        self._tiers, self._options = tiers, dict(options)
        self._storages: dict[str, TableStorage] = {}
        self.tables: dict[str, MemberTable] = {}
        """The declared tables by name."""
        self.is_open = False
        self.is_ready = False
        """Whether the tables are open and have their initial rows."""
        self._modules: list[weakref.ref[TableModule]] = []
        self._unfilled: list[TableModule] = []
        """Modules of open tables whose initial rows are not loaded yet."""
        self._lock = threading.RLock()
        self._phase: Literal["", "opening", "filling"] = ""
        """Phase of `open` in the thread that has the lock."""
        self._recorded: dict[str, Any] | None = None

    # ---- declaration

    def declare(
        self,
        spec: TableSpec,
        *,
        rows: int | None,
        keys: KeyKind,
        expiry: Expiry | None,
        admission: Admission | None,
        module: TableModule | None = None,
    ) -> MemberTable:
        """Declare a table, before the first use of any."""
        name = spec.name
        if name in self.tables:
            raise ValueError(f"table {name!r} is declared twice: names of the tables of tc.Tiers must be unique")
        if name.startswith(_PREFIX):
            raise ValueError(f"name is {name!r}: names that begin with {_PREFIX!r} are those of storages")
        if name == _RECORD:
            raise ValueError(f"name is {name!r}: the folder of tc.Tiers has a file of this name")
        self._require_not_open(f"table {name!r}", "declare all tables before")
        own = keys == "hash" or expiry is not None or admission is not None or spec.precision.scale_lr > 0
        recorded = self._check_record(spec, own=own)
        if own:
            options = {"expiry": expiry, "admission": admission}
            storage = self._storages[name] = TableStorage(self, spec, options, merged=False, module=module)
        else:
            storage = self._shared(spec, recorded, module)
        table = self.tables[name] = storage.add(spec, rows)
        return table

    def add_module(self, module: TableModule) -> None:
        """Let a module declare its tables when the first table is used."""
        self._require_not_open("the tables of a module", "make the module before")
        self._modules.append(weakref.ref(module))

    def _require_not_open(self, subject: str, advice: str) -> None:
        if self.is_open:
            first = next(iter(self.tables), None)
            raise ThermoclineError(f"{subject}: the budgets were divided at the first use of {first!r}: {advice}")

    def _shared(self, spec: TableSpec, recorded: str | None, module: TableModule | None) -> TableStorage:
        """Return the storage of a table: the recorded one, or the first of its layout that fits.

        A table that is not recorded does not take the name of a recorded storage before one of its tables is declared:
        the module and the optimizer of that storage are not known until then.
        """
        taken = {entry["storage"] for entry in (self._recorded or {}).values()}
        layout = {key: value for key, value in spec.layout.items() if key != "initial"}
        digest = hashlib.blake2b(json.dumps(layout, sort_keys=True).encode(), digest_size=4).hexdigest()
        base = f"{_PREFIX}{spec.dim}.{layout['optimizer']['kind'].lower()}.{digest}"
        number = 1
        while True:
            name = recorded or (base if number == 1 else f"{base}.{number}")
            number += 1
            if name not in self._storages:
                if not recorded and name in taken:
                    continue
                merged = _with_name(spec, name)
                self._storages[name] = TableStorage(self, merged, {}, merged=True, module=module)
                for other, entry in (self._recorded or {}).items():
                    if entry["storage"] == name:
                        self._storages[name].reserve(other)
            storage = self._storages[name]
            if storage.fits(spec, module):
                return storage
            if recorded and storage.module is not module:
                raise FormatError(
                    f"table {spec.name!r} is stored in {self._tiers.ssd} with tables {list(storage.members)}, and rows "
                    "that are stored together have one step: declare them in one collection, as before"
                )
            if recorded:
                raise FormatError(
                    f"table {spec.name!r} has {spec.optimizer}, but is stored in {self._tiers.ssd} with tables "
                    f"{list(storage.members)}, which have {storage.spec.optimizer}: use one learning rate"
                )

    # ---- the record of a folder

    def _check_record(self, spec: TableSpec, *, own: bool) -> str | None:
        """Return the recorded storage of a table; None: the folder has no such table. Raises if it differs."""
        if self._recorded is None:
            self._recorded = self._read_record()
        saved = self._recorded.get(spec.name)
        if saved is None:
            self._require_no_other_store(spec.name)
            return None
        layout = json.loads(json.dumps(spec.layout))
        for key, before in saved["layout"].items():
            if layout.get(key) != before:
                raise FormatError(
                    f"table {spec.name!r} of {self._tiers.ssd} has {key} {before}, but is declared with "
                    f"{layout.get(key)}: declare it as before, or under another name"
                )
        if own != (saved["storage"] == spec.name):
            kind = "a storage of its own" if not own else "a storage that it shares with others"
            raise FormatError(
                f"table {spec.name!r} of {self._tiers.ssd} has {kind}: declare it with the keys, expiry and admission "
                "that it had before, or under another name"
            )
        return str(saved["storage"])

    def _require_no_other_store(self, name: str) -> None:
        """Raise if the folder is a store, or has one of this table, that was not made by `tc.Tiers`."""
        for folder in () if self._tiers.ssd is None else (Path(self._tiers.ssd), Path(self._tiers.ssd) / name):
            if (folder / "STORE").exists():
                raise FormatError(
                    f"{folder} is a store that tc.Tiers did not make: its rows would not be read. Use another folder, "
                    f"and copy its rows: table.load_rows of those that tc.Table(..., ssd={str(folder)!r}).rows() yields"
                )

    def _read_record(self) -> dict[str, Any]:
        path = self._record_path
        if path is None or not path.exists():
            return {}
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != _FORMAT:
                raise FormatError(f"{path} has format {record['format']}, this version reads {_FORMAT}")
            tables = dict(record["tables"])
            for entry in tables.values():
                if not isinstance(entry["storage"], str) or not isinstance(entry["layout"], dict):
                    raise TypeError("an entry is not as written")
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}, the record of the tables of this folder, cannot be read: {error}") from None
        return tables

    @property
    def _record_path(self) -> Path | None:
        return None if self._tiers.ssd is None else Path(self._tiers.ssd) / _RECORD

    def _write_record(self) -> None:
        path = self._record_path
        if path is None:
            return
        tables = self._read_record()  # again: another tc.Tiers may have opened the folder meanwhile
        for storage in self._storages.values():
            for name, table in storage.members.items():
                tables[name] = {"storage": storage.name, "layout": table.declared_layout}
        data = json.dumps({"format": _FORMAT, "tables": tables}, indent=1).encode()
        if not path.exists() or path.read_bytes() != data:
            atomic_file.make_folder(path.parent)
            atomic_file.atomic_write(path, data)

    # ---- opening

    def open(self) -> list[Table]:
        """Divide the budgets, open all storages and load initial rows, once. Return their tables.

        A call after an error continues where that error was raised.
        """
        with self._lock:
            if self._phase == "opening":
                raise ThermoclineError(
                    "a table of tc.Tiers is used while all tables of this tc.Tiers are declared and opened: an init_fn "
                    "must not use them"
                )
            if not self.is_ready and not self._phase:
                try:
                    self._phase = "opening"
                    self._declare_and_open()
                    self._phase = "filling"
                    self._fill()
                finally:
                    self._phase = ""
        return [storage.opened for storage in self._storages.values() if storage.opened is not None]

    def _declare_and_open(self) -> None:
        if not self.is_open:
            modules = [module for each in self._modules if (module := each()) is not None]
            for module in modules:
                module.declare_tables()
            self._open()
            self._unfilled = modules

    def _fill(self) -> None:
        """Load the initial rows of modules. Those that are left after an error are loaded by the next use."""
        while self._unfilled:
            self._unfilled[0].fill_tables()
            del self._unfilled[0]
        self.is_ready = True

    def _open(self) -> None:
        if not self.tables:
            raise ThermoclineError("tc.Tiers has no tables: declare them with tiers.table(name, dim, optimizer)")
        tiers, storages = self._tiers, list(self._storages.values())
        if tiers.expected_keys is not None and len(storages) > 1:
            raise ValueError(
                f"expected_keys is {tiers.expected_keys}, but the tables have {len(storages)} stores: leave it out"
            )
        self._write_record()  # first: no row may be in a store without it
        shares = self.shares()
        try:
            for storage in storages:
                storage.open(**{**self._budgets(shares[storage.name]), **self._folder(storage), **self._options})
        except BaseException:
            for storage in storages:
                storage.close()
                storage.opened = None
            raise
        self.is_open = True

    def _folder(self, storage: TableStorage) -> dict[str, Any]:
        return {} if self._tiers.ssd is None else {"ssd": Path(self._tiers.ssd) / storage.name}

    def _budgets(self, share: float) -> dict[str, Any]:
        tiers = self._tiers
        parts: dict[str, Any] = {
            "lookahead": tiers.lookahead, "policy": tiers.policy, "threads": tiers.threads, "device": tiers.device,
            "on_damage": tiers.on_damage, "mem_overcommit": tiers.mem_overcommit, "expected_keys": tiers.expected_keys,
        }  # fmt: skip
        for name in ("hbm", "mem", "ssd_mem"):
            if (total := getattr(tiers, name)) is not None:
                parts[name] = int(share * parse_size(total, name))
        if isinstance(tiers.lookahead, str) and tiers.lookahead != "auto":
            parts["lookahead"] = str(int(share * parse_size(tiers.lookahead, "lookahead")))
        return parts

    def shares(self) -> dict[str, float]:
        """Return the part of every budget that each storage gets: a quarter in equal parts, as far as they are needed,
        and the rest by the bytes of the other rows.

        A table that declares no number of rows counts as the largest of those that do.
        """
        declared = [table.expected_rows for table in self.tables.values() if table.expected_rows is not None]
        total = float(parse_size(self._tiers.mem, "mem"))
        needs = {name: storage.need(max(declared, default=1 << 20)) for name, storage in self._storages.items()}
        least = {name: min(need, total / (4 * len(needs))) for name, need in needs.items()}
        others = sum(needs.values()) - sum(least.values())
        rest = total - sum(least.values())
        parts = {name: (need - least[name]) / others if others else 1 / len(needs) for name, need in needs.items()}
        return {name: (least[name] + rest * part) / total for name, part in parts.items()}

    def close(self) -> None:
        """Close all storages."""
        for storage in self._storages.values():
            storage.close()


def bytes_of_rows(rows: int, row_bytes: int) -> int:
    """Return bytes of DRAM that hold this number of rows, with their index."""
    return max(_LEAST_MEM, int(1.25 * rows * (row_bytes + _ROW_OVERHEAD)))


def layout_spec(
    name: str, dim: int, optimizer: Optimizer, *, initial: Initial, seed: int, precision: Any, statistics: Any
) -> TableSpec:
    """Return a spec without budgets: the layout of a table that is not open yet."""
    return TableSpec(
        name=name, dim=dim, optimizer=optimizer, precision=precision, initial=initial, seed=seed, policy="lru_lfu",
        threads=None, hbm=None, mem=0, ssd=None, lookahead=None, store_options={}, statistics=statistics,
    )  # fmt: skip


def _with_name(spec: TableSpec, name: str) -> TableSpec:
    """Return the layout of a storage: initial rows are those of its members."""
    return layout_spec(
        name, spec.dim, spec.optimizer, initial=Uniform(), seed=spec.seed, precision=spec.precision,
        statistics=spec.statistics,
    )  # fmt: skip
