"""The stores of a run's tables, as its checkpoints name them: which epoch of which folder; of one process or of ranks.

Every rank of a job has a store per table, in a folder that says which rank of how many it is of. Another number of
ranks reads all stores of a checkpoint, and each takes what is its own into a new folder: the old ones stay until no
manifest names them, so that a run cut short in between loses nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thermocline.checkpoint.manifest import Json
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.key_sharding import owner_of, rank_folder
from thermocline.distributed.shard_reader import JoinedTable
from thermocline.embedding.precision import FP32, current_layout
from thermocline.embedding.table import Table
from thermocline.errors import FormatError, NotFoundError, ThermoclineError
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStore
from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import failpoint

if TYPE_CHECKING:
    from thermocline.distributed.sharded_table import ShardedTable

Manifest = dict[str, Json]
_RANK_FOLDER = re.compile(r"rank-(\d{5})-of-(\d{5})(?:\.\d+)?(\.gone)?")
_IDENTITY = "STORE"
_STORE_FILE = re.compile(r"LOCK|MANIFEST-\d+|(?:log|base)-\d+\.tc|.*\.tmp")


class _Source(NamedTuple):
    """Where rows of a checkpoint lie."""

    path: Path
    epoch: int
    note: str


class Stores:
    """Of all tables: their own, or, of those without ssd, in the run's folder."""

    def __init__(
        self, run_dir: Path, tables: Mapping[str, Table], collective: CollectiveRunner, *, read_only: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._tables = tables
        self._rank, self._world = collective.rank, collective.world
        self.sharded = any(table.ranks is not None for table in tables.values())
        """Whether the tables are over ranks, even if there is one."""
        self._folders = {name: rank_folder(self._rank, self._world) for name in tables}
        """Per table over several ranks: where this rank's rows are."""
        self._read_only = read_only

    # ---- places

    def _root(self, table: Table) -> Path:
        """The folder of a table's rows; over several ranks, of all their folders."""
        if isinstance(table, JoinedTable) and table.root is not None:
            return table.root
        if table.store is None:
            return self._run_dir / "stores" / table.name
        return Path(table.store.path).parent if table.ranks is not None else Path(table.store.path)

    def _path(self, table: Table) -> Path:
        root = self._root(table)
        return root / self._folders[table.name] if table.ranks is not None else root

    def _open(self, table: Table, *, create: bool = False, epoch: int | None = None) -> SsdStore:
        """Of a table without ssd. Nobody looks rows up in it, so a filter would be wasted."""
        path = self._path(table)
        if create:
            atomic_file.make_folder(path.parent)
        elif not path.is_dir():
            raise NotFoundError(f"{path} is missing: it has the rows of table {table.name!r}")
        return table.open_store(path, create=create, epoch=epoch, filter_bits=0, read_only=self._read_only)

    # ---- save

    def require_unused(self) -> None:
        """That no other run's rows are in the tables' own stores."""
        for table in self._tables.values():
            if table.store is not None:
                self._require_unused(table, table.store)
            if table.ranks is not None and (root := self._root(table) / _IDENTITY).exists():
                raise ThermoclineError(
                    f"table {table.name!r}: {root.parent} is the store of one process, but {self._run_dir} has no "
                    f"checkpoint that names it. Resume the run it belongs to, or begin with an empty folder"
                )

    def create(self) -> None:
        """Stores for tables that have none."""
        for table in self._tables.values():
            if table.store is None:
                table.checkpoint_store = self._open(table, create=True)
                self._require_unused(table, table.checkpoint_store)

    def _require_unused(self, table: Table, store: SsdStore) -> None:
        if store.epoch == 0:
            return
        if store.note.startswith(b'{"thermocline": "begin"') and next(store.scan(1), None) is None:
            return  # a run that died while it began
        raise ThermoclineError(
            f"table {table.name!r}: the store at {store.path} already has commits, but {self._run_dir} has no "
            f"checkpoint that names them. Resume the run they belong to, or begin with an empty folder"
        )

    def commit(self, note: str) -> dict[str, Json]:
        """Every table's rows as they are, durable; returns which epoch of which folder that is."""
        return {name: self._commit(table, note) for name, table in self._tables.items()}

    def _commit(self, table: Table, note: str) -> Json:
        store = store_of(table)
        table.write_back()
        table.dram.flush(store)
        failpoint("run.flushed")
        noted = table.commit_note(note.encode())
        epoch = store.commit(noted)
        failpoint("run.committed")
        place = {"folder": self._folders[table.name]} if table.ranks is not None else {}
        return {**place, "epoch": epoch, "note": noted.decode()}

    def described(self, committed: dict[str, Json]) -> dict[str, Json]:
        """The tables themselves, for a manifest; `committed` is what rank 0 did."""
        return {
            name: {
                "layout": table.layout,
                "ssd": table.store is not None,
                "epoch": committed[name]["epoch"],
                "note": committed[name]["note"],
                "step_count": table.step_count,
                "lr": table.lr,
            }
            for name, table in self._tables.items()
        }

    def sweep(self, manifests: Sequence[Manifest]) -> None:
        """Releases every commit, and removes every rank's folder, that no manifest names."""
        for table in self._tables.values():
            store, mine = store_of(table), self._path(table)
            named = {source.epoch for m in manifests for source in self._sources(table, m) if source.path == mine}
            for epoch in store.epochs[:-1]:  # the newest stays until the next save
                if epoch not in named:
                    store.release(epoch)
                    failpoint("run.epoch_released")
            if table.ranks is not None:
                root = self._root(table)
                keep = {source.path for m in manifests for source in self._sources(table, m)} | {mine}
                self._remove_folders(root, keep)
                if self._rank == 0 and root not in keep:
                    _remove_store(root)

    def _remove_folders(self, root: Path, keep: set[Path]) -> None:
        """Each rank those of its own number, and of ranks that are no more."""
        for path in root.iterdir():
            found = _RANK_FOLDER.fullmatch(path.name)
            if found and int(found[1]) % self._world == self._rank and path not in keep:
                if not found[3]:
                    atomic_file.remove_folder(path)
                elif path.exists():  # a removal that was cut short
                    shutil.rmtree(path)

    # ---- restore

    def _sources(self, table: Table, manifest: Manifest) -> list[_Source]:
        """By rank: all that a checkpoint has of a table."""
        root = self._root(table)
        if "ranks" not in manifest:
            entry = manifest["tables"][table.name]
            return [_Source(root, entry["epoch"], entry["note"])]
        entries = [rank["stores"][table.name] for rank in manifest["ranks"]]
        return [_Source(root / entry["folder"], entry["epoch"], entry["note"]) for entry in entries]

    def _same_ranks(self, manifest: Manifest) -> bool:
        return ("ranks" in manifest) == self.sharded and len(manifest.get("ranks", [None])) == self._world

    def check(self, manifest: Manifest, path: str) -> None:
        """Everything that can be wrong with the tables and their stores, before any of them changes."""
        entries = manifest["tables"]
        if set(entries) != set(self._tables):
            raise FormatError(f"{path} is of tables {sorted(entries)}, these are {sorted(self._tables)}")
        for name, table in self._tables.items():
            if "ranks" in manifest and not self.sharded and not isinstance(table, JoinedTable):
                ranks = len(manifest["ranks"])
                raise FormatError(f"{path} was saved by {ranks} ranks: open it with tables over ranks (ShardedTable)")
            entry = entries[name]
            saved = {"precision": FP32.layout, **entry["layout"]}  # older saves do not say: theirs is fp32
            saved["precision"] = current_layout(saved["precision"])
            for key, was in saved.items():
                now = table.layout.get(key)
                if now != was:
                    raise FormatError(f"{path}: table {name!r} was saved with {key} {was}, but this one has {now}")
            ssd = table.root if isinstance(table, JoinedTable) else table.store
            if entry["ssd"] != (ssd is not None):
                was = "with" if entry["ssd"] else "without"
                raise FormatError(f"{path}: table {name!r} was saved {was} an ssd folder: open it {was} one")
            if pinned := table.dram.stats().pinned:
                raise ThermoclineError(f"table {name!r} has {pinned} rows pinned: close the pipeline before restore()")
            if table.hbm is not None and (windows := table.hbm.stats().windows):
                raise ThermoclineError(
                    f"table {name!r} has {windows} windows pinned: close the pipeline before restore()"
                )
            what = f"{path}: table {name!r}"
            if not self._same_ranks(manifest):
                for source in self._sources(table, manifest):
                    with self._read_source(table, source) as store:
                        _check_note(store, source, what)
                continue
            source = self._sources(table, manifest)[self._rank]
            if table.ranks is not None:
                self._move(table, source.path.name)
            if table.store is None and table.checkpoint_store is None:
                table.checkpoint_store = self._open(table)
            self._check_epoch(table, source, what)

    def _check_epoch(self, table: Table, source: _Source, what: str) -> None:
        """That the table's store has the epoch, and that it is the one this checkpoint made: its note says so."""
        store = store_of(table)
        if source.epoch not in store.epochs and not self._read_only:  # a writer may have committed it meanwhile
            have = ", ".join(map(str, store.epochs)) or "none"
            raise NotFoundError(f"{what} needs epoch {source.epoch}, but {store.path} has {have}: is it another store?")
        if store.epoch == source.epoch:
            _check_note(store, source, what)
        else:  # opened on a newer commit, of a save that never ended
            with self._read_source(table, source) as old:
                _check_note(old, source, what)

    @staticmethod
    def _read_source(table: Table, source: _Source) -> SsdStore:
        return table.open_store(source.path, epoch=source.epoch, read_only=True)

    def _move(self, table: Any, folder: str) -> None:
        """From now on this rank's rows of the table are in that folder."""
        if self._folders[table.name] == folder:
            return
        self._folders[table.name] = folder
        if table.store is not None:
            table.use_folder(folder)
        elif table.checkpoint_store is not None:
            table.checkpoint_store.close()
            table.checkpoint_store = None

    def restore(self, manifest: Manifest, manifests: Sequence[Manifest]) -> None:
        """Every table as the checkpoint has it."""
        if self._same_ranks(manifest):
            self._restore_own(manifest)
        else:
            for table in self._tables.values():
                if isinstance(table, JoinedTable):
                    table.open_ranks([(source.path, source.epoch) for source in self._sources(table, manifest)])
                else:
                    self._reshard(table, manifest, manifests)  # type: ignore[arg-type]
        for name, table in self._tables.items():
            table.step_count = manifest["tables"][name]["step_count"]
            table.lr = manifest["tables"][name]["lr"]

    def _restore_own(self, manifest: Manifest) -> None:
        epochs = {name: self._sources(table, manifest)[self._rank].epoch for name, table in self._tables.items()}
        before: list[tuple[Table, DramTier]] = []
        try:
            for name, table in self._tables.items():
                if table.checkpoint_store is not None:  # these first: they read all rows, and may yet meet damage
                    table.write_back()  # if this fails, the old rows are in the old tier
                    before.append((table, table.dram))
                    table.checkpoint_store.close()
                    table.checkpoint_store = self._open(table, epoch=epochs[name])
                    table.reopen()
                    table.restore_scale(table.checkpoint_store)
                    for keys, rows in table.checkpoint_store.scan():
                        table.dram.push_stored(keys, rows.view(np.float32), dirty=False)
        except BaseException:
            for table, tier in before:
                table.dram = tier
            raise
        for name, table in self._tables.items():
            if table.store is not None:
                table.reopen(epochs[name])

    def _reshard(self, table: ShardedTable, manifest: Manifest, manifests: Sequence[Manifest]) -> None:
        """Of all ranks that saved it, the rows that are this rank's now."""
        sources = self._sources(table, manifest)
        named = {source.path.name for m in manifests for source in self._sources(table, m)}
        again = 0
        while (folder := rank_folder(self._rank, self._world, again)) in named:
            again += 1
        table.discard_gradients()
        self._folders[table.name] = folder
        path = self._path(table)
        if table.store is not None:
            table.clear_folder(folder)
        else:
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()
            if path.exists():
                atomic_file.remove_folder(path)  # of an attempt that ended before its first save
            table.checkpoint_store = self._open(table, create=True)
            table.reopen()
        for source in sources:
            with self._read_source(table, source) as store:
                for keys, rows in store.scan():
                    mine = owner_of(keys, self._world) == self._rank
                    if table.store is not None:
                        table.store.put(keys[mine], rows[mine])
                    else:
                        table.dram.push_stored(keys[mine], rows[mine].view(np.float32), unique=True)

    def close(self) -> None:
        """Those of tables without ssd."""
        for table in self._tables.values():
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()


def store_of(table: Table) -> SsdStore:
    """Where its rows are saved."""
    store = table.store or table.checkpoint_store
    assert store is not None
    return store


def _remove_store(root: Path) -> None:
    """Of the one process that trained the table before ranks did: its files lie beside their folders."""
    identity = root / _IDENTITY
    if identity.exists():
        for path in root.iterdir():
            if _STORE_FILE.fullmatch(path.name):
                path.unlink()
        identity.unlink()  # last: cut short, the next sweep goes on


def _check_note(store: SsdStore, source: _Source, what: str) -> None:
    if store.note.decode(errors="replace") != source.note:
        raise FormatError(
            f"{what} was not saved in the store at {store.path}: its epoch {source.epoch} is of another run"
        )
