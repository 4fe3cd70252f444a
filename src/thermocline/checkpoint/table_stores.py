"""Commits, restores and removes the table stores that checkpoints name.

A table without `ssd` has its store in the run folder. Over several ranks each rank has a store per table, in a folder
named after the rank and the number of ranks. With a different number of ranks, each rank reads the stores that contain
rows it owns now, and writes these rows to a new folder. Old folders stay until no manifest names them, so that an
interruption at any point loses nothing.
"""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from thermocline.checkpoint.manifest import Json
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.key_sharding import overlapping_ranks, owner_of, rank_folder
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.precision import FP32, current_layout, parse_precision
from thermocline.embedding.row_statistics import parse_statistics
from thermocline.embedding.row_version import RowVersion, rates_of_commit
from thermocline.embedding.table import Table
from thermocline.errors import FormatError, NotFoundError, ThermoclineError
from thermocline.tiers.ssd import SsdStore
from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import failpoint
from thermocline.utils.untrusted_files import confined_path

Manifest = dict[str, Json]
_RANK_FOLDER = re.compile(r"rank-(\d{5})-of-(\d{5})(?:\.\d+)?(\.gone)?")
_IDENTITY = "STORE"
_STORE_FILE = re.compile(r"LOCK|MANIFEST-\d+|(?:log|base)-\d+\.tc|.*\.tmp")


class _SavedStore(NamedTuple):
    """One rank's rows of one table, as a manifest names them."""

    path: Path
    epoch: int
    note: str
    writer: str
    """Who wrote it, for messages: "rank 1 of 4 on host a"."""


class TableStores:
    """The stores of all tables of a run. Every method is called by all ranks, each for its own stores."""

    def __init__(
        self, run_dir: Path, tables: Mapping[str, Table], collective: CollectiveRunner, *, read_only: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._tables = tables
        self._rank, self._world = collective.rank, collective.world
        self.sharded = any(table.groups is not None for table in tables.values())
        """Whether the tables are shared by ranks, even if there is only one rank."""
        self._readers = any(isinstance(table, ShardReaderTable) for table in tables.values())
        folder = rank_folder(self._rank, self._world) if self.sharded else ""
        self._folders = dict.fromkeys(tables, folder)
        """Per table: the folder of this rank's store inside the table's root; "": the root itself."""
        self._read_only = read_only

    def _root(self, table: Table) -> Path:
        """Return the folder that contains the stores of all ranks."""
        return table.store_root or self._run_dir / "stores" / table.name

    def _path(self, table: Table) -> Path:
        return self._root(table) / self._folders[table.name]

    def _open_checkpoint_store(self, table: Table, *, create: bool = False, epoch: int | None = None) -> SsdStore:
        """Open the store of a table without `ssd`. It needs no filter: no key is looked up in it."""
        path = self._path(table)
        if create:
            atomic_file.make_folder(path.parent)
        elif not path.is_dir():
            raise NotFoundError(f"{path} is missing: it has the rows of table {table.name!r}")
        return table.open_store(path, create=create, epoch=epoch, filter_bits=0, read_only=self._read_only)

    # ---- save

    def require_unused(self) -> None:
        """Raise unless the tables' own stores are empty: they must not contain rows of another run."""
        for table in self._tables.values():
            if table.store is not None:
                self._require_unused(table, table.store)
            if self.sharded and (identity := self._root(table) / _IDENTITY).exists():
                raise ThermoclineError(
                    f"table {table.name!r}: {identity.parent} is the store of one process, but {self._run_dir} has no "
                    f"checkpoint that names it. Resume the run it belongs to, or use an empty folder"
                )

    def create(self) -> None:
        """Create stores for the tables without `ssd`. Rank 0 has made the folder of the checkpoints before."""
        if self.sharded and not (self._run_dir / "checkpoints").is_dir():
            raise NotFoundError(
                f"{self._run_dir} on host {socket.gethostname()} is not the folder that rank 0 uses: rank {self._rank} "
                "does not see its checkpoints. Put the run folder on a file system that all ranks see"
            )
        for table in self._tables.values():
            if table.store is None:
                table.checkpoint_store = self._open_checkpoint_store(table, create=True)
                self._require_unused(table, table.checkpoint_store)

    def _require_unused(self, table: Table, store: SsdStore) -> None:
        if store.epoch == 0:
            return
        if store.note.startswith(b'{"thermocline": "begin"') and next(store.scan(1), None) is None:
            return  # the first save of a run was interrupted
        raise ThermoclineError(
            f"table {table.name!r}: the store at {store.path} already has commits, but {self._run_dir} has no "
            f"checkpoint that names them. Resume the run they belong to, or use an empty folder"
        )

    def commit(self, note: str) -> dict[str, Json]:
        """Make every table's rows durable; return folder and epoch per table, for the manifest."""
        return {name: self._commit(table, note) for name, table in self._tables.items()}

    def _commit(self, table: Table, note: str) -> Json:
        store = saving_store(table)
        table.backend.flush(store)
        failpoint("run.flushed")
        full_note = table.commit_note(note.encode())
        epoch = store.commit(full_note)
        failpoint("run.committed")
        folder = {"folder": self._folders[table.name], "host": socket.gethostname()} if self.sharded else {}
        return {**folder, "epoch": epoch, "note": full_note.decode()}

    def described(self, committed: dict[str, Json]) -> dict[str, Json]:
        """Describe the tables for a manifest; `committed` is the result of `commit` on rank 0."""
        return {
            name: {
                "layout": table.layout,
                "ssd": table.store is not None,
                "epoch": committed[name]["epoch"],
                "note": committed[name]["note"],
                "step_count": table.step_count,
                "lr": table.lr,
                "fields": [None if bag.field_names is None else list(bag.field_names) for bag in table.bags],
            }
            for name, table in self._tables.items()
        }

    def sweep(self, manifests: Sequence[Manifest]) -> None:
        """Release every commit, and remove every rank's folder, that no manifest names."""
        for table in self._tables.values():
            store, path = saving_store(table), self._path(table)
            saved = [source for manifest in manifests for source in self._saved(table, manifest)]
            named = {source.epoch for source in saved if source.path == path}
            for epoch in store.epochs[:-1]:  # the newest stays until the next save
                if epoch not in named:
                    store.release(epoch)
                    failpoint("run.epoch_released")
            if self.sharded:
                root, keep = self._root(table), {source.path for source in saved} | {path}
                self._remove_rank_folders(root, keep)
                if self._rank == 0 and root not in keep:
                    _remove_store(root)

    def _remove_rank_folders(self, root: Path, keep: set[Path]) -> None:
        """Remove folders of this rank's number, and of higher numbers that no rank has now, modulo the ranks."""
        for path in root.iterdir():
            match = _RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) % self._world == self._rank and path not in keep:
                if not match[3]:
                    atomic_file.remove_folder(path)
                elif path.exists():  # an interrupted removal
                    shutil.rmtree(path)

    # ---- restore

    def _saved(self, table: Table, manifest: Manifest) -> list[_SavedStore]:
        """Return all stores that a checkpoint names for a table, by rank."""
        root = self._root(table)
        if "ranks" not in manifest:
            entry = manifest["tables"][table.name]
            return [_SavedStore(root, entry["epoch"], entry["note"], "one process")]
        entries = [rank["stores"][table.name] for rank in manifest["ranks"]]
        return [
            _SavedStore(root / entry["folder"], entry["epoch"], entry["note"], _writer(rank, len(entries), entry))
            for rank, entry in enumerate(entries)
        ]

    def _needed(self, table: Table, manifest: Manifest) -> list[_SavedStore]:
        """Return the stores of another number of ranks that contain rows which this rank owns now."""
        saved = self._saved(table, manifest)
        return [saved[rank] for rank in overlapping_ranks(self._rank, self._world, len(saved))]

    def _same_ranks(self, manifest: Manifest) -> bool:
        """Whether each rank continues with its own store. A reader opens the stores of any number of ranks."""
        if self._readers:
            return False
        return ("ranks" in manifest) == self.sharded and len(manifest.get("ranks", [None])) == self._world

    def check(self, manifest: Manifest, path: str) -> None:
        """Raise if the tables or their stores do not fit the checkpoint. Changes no row."""
        entries = manifest["tables"]
        if set(entries) != set(self._tables):
            raise FormatError(f"{path} is of tables {sorted(entries)}, these are {sorted(self._tables)}")
        for name, table in self._tables.items():
            if "ranks" in manifest and not self.sharded and not isinstance(table, ShardReaderTable):
                ranks = len(manifest["ranks"])
                raise FormatError(f"{path} was saved by {ranks} ranks: open it with tables over ranks (ShardedTable)")
            self._check_layout(table, entries[name], path)
            table.backend.require_idle()
            self._check_stores(table, manifest, f"{path}: table {name!r}")
            self._check_fields(table, entries[name])

    def _check_layout(self, table: Table, entry: Json, path: str) -> None:
        # Older checkpoints have neither: fp32, no statistics.
        saved = {"precision": FP32.layout, "statistics": [], **entry["layout"]}
        saved["precision"] = current_layout(saved["precision"])
        for key, before in saved.items():
            now = table.layout.get(key)
            if now != before:
                raise FormatError(f"{path}: table {table.name!r} was saved with {key} {before}, but this one has {now}")
        if entry["ssd"] != (table.store_root is not None):
            before = "with" if entry["ssd"] else "without"
            raise FormatError(f"{path}: table {table.name!r} was saved {before} an ssd folder: open it {before} one")

    @staticmethod
    def _check_fields(table: Table, entry: Json) -> None:
        saved = entry.get("fields", [])  # older checkpoints have no names
        if len(saved) == len(table.bags):  # else the bags cannot be identified
            for bag, names in zip(table.bags, saved, strict=True):
                bag.require_fields(names)

    def _check_stores(self, table: Table, manifest: Manifest, subject: str) -> None:
        if "ranks" in manifest:
            for source in self._saved(table, manifest):
                confined_path(self._root(table), source.path.name, subject)
        if not self._same_ranks(manifest):
            needed = self._needed(table, manifest)
            for source in needed:
                self._require_visible(source, subject)
            for source in needed:
                with self._open_saved(table, source) as store:
                    _check_note(store, source, subject)
            return
        source = self._saved(table, manifest)[self._rank]
        if self.sharded:
            self._require_visible(source, subject)
        self._use_folder(table, source.path.name if self.sharded else "")
        if table.store is None and table.checkpoint_store is None:
            table.checkpoint_store = self._open_checkpoint_store(table)
        self._check_epoch(table, source, subject)

    def _require_visible(self, source: _SavedStore, subject: str) -> None:
        if not (source.path / _IDENTITY).exists():
            reader = "this process" if self._world == 1 else f"rank {self._rank} of {self._world}"
            raise NotFoundError(
                f"{subject} needs {source.path}, written by {source.writer}, but {reader} on host "
                f"{socket.gethostname()} has no store there: keep the stores on a file system that all ranks see, or "
                "copy the folder to this host"
            )

    def _check_epoch(self, table: Table, source: _SavedStore, subject: str) -> None:
        """Raise unless the table's store has the epoch and its note proves that this checkpoint made it."""
        store = saving_store(table)
        if source.epoch not in store.epochs and not self._read_only:  # a writer may commit it while others read
            have = ", ".join(map(str, store.epochs)) or "none"
            host = f" here, on host {socket.gethostname()}" if self.sharded else ""
            raise NotFoundError(
                f"{subject} needs epoch {source.epoch} of {source.writer}, but {store.path} has {have}{host}: wrong "
                "store?"
            )
        if store.epoch == source.epoch:
            _check_note(store, source, subject)
        else:  # open on a newer commit, of an interrupted save
            with self._open_saved(table, source) as old:
                _check_note(old, source, subject)

    @staticmethod
    def _open_saved(table: Table, source: _SavedStore) -> SsdStore:
        """Open a store to read its note or all rows. It needs no filter: no key is looked up in it."""
        return table.open_store(source.path, epoch=source.epoch, read_only=True, filter_bits=0)

    def _use_folder(self, table: Table, folder: str) -> None:
        """Use another folder for this rank's rows of the table."""
        if self._folders[table.name] == folder:
            return
        self._folders[table.name] = folder
        if table.store is not None:
            table.backend.move_store(self._path(table))
        elif table.checkpoint_store is not None:
            table.checkpoint_store.close()
            table.checkpoint_store = None

    def restore(self, manifest: Manifest, manifests: Sequence[Manifest]) -> None:
        """Bring every table to the state of the checkpoint."""
        if self._same_ranks(manifest):
            self._restore_own(manifest)
        else:
            for table in self._tables.values():
                saved = self._saved(table, manifest)
                if isinstance(table, ShardReaderTable):
                    table.open_stores([(source.path, source.epoch) for source in saved])
                else:
                    self._reshard(table, self._needed(table, manifest), manifests)
        for name, table in self._tables.items():
            saved_by_rank0 = self._saved(table, manifest)[0]
            version = RowVersion.of_commit(saved_by_rank0.note.encode(), saved_by_rank0.epoch)
            rates = rates_of_commit(saved_by_rank0.note.encode())
            table.set_version(version._replace(step=manifest["tables"][name]["step_count"]), rates)
            table.backend.statistics.load(parse_statistics(saved_by_rank0.note.encode()))
            table.lr = manifest["tables"][name]["lr"]

    def _restore_own(self, manifest: Manifest) -> None:
        """Restore from stores of the same ranks."""
        epochs = {name: self._saved(table, manifest)[self._rank].epoch for name, table in self._tables.items()}
        undo = []
        try:
            for name, table in self._tables.items():
                if table.checkpoint_store is not None:  # first: these read all rows and may find damage
                    table.discard_gradients()
                    undo.append(table.backend.undo_point())
                    table.checkpoint_store.close()
                    table.checkpoint_store = store = self._open_checkpoint_store(table, epoch=epochs[name])
                    scale = parse_precision(store.note)[1] if store.epoch else None
                    table.backend.replace_rows(store.scan(), scale)
        except BaseException:
            for restore_rows in undo:
                restore_rows()
            raise
        for name, table in self._tables.items():
            if table.store is not None:
                table.reopen(epochs[name])

    def _reshard(self, table: Table, needed: Sequence[_SavedStore], manifests: Sequence[Manifest]) -> None:
        """Import the rows that this rank owns now from the stores of another number of ranks.

        A store is in the order of other bits of the hash than the owner's, so it is read whole, piece by piece.
        """
        named = {source.path.name for manifest in manifests for source in self._saved(table, manifest)}
        attempt = 0
        while (folder := rank_folder(self._rank, self._world, attempt)) in named:
            attempt += 1
        table.discard_gradients()
        self._folders[table.name] = folder
        path = self._path(table)
        if table.store is not None:
            table.backend.move_store(path, clear=True)
        else:
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()
            if path.exists():
                atomic_file.remove_folder(path)  # left by an attempt that ended before its first save
            table.checkpoint_store = self._open_checkpoint_store(table, create=True)
            table.reopen()
        for source in needed:
            with self._open_saved(table, source) as store:
                for keys, rows in store.scan():
                    owned = owner_of(keys, self._world) == self._rank
                    table.backend.import_rows(keys[owned], rows[owned])

    def close(self) -> None:
        """Close the stores of tables without `ssd`."""
        for table in self._tables.values():
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()


def _writer(rank: int, world: int, entry: Json) -> str:
    host = f" on host {entry['host']}" if "host" in entry else ""  # earlier builds do not record it
    return f"rank {rank} of {world}{host}"


def saving_store(table: Table) -> SsdStore:
    """Return the store that a checkpoint of the table commits."""
    store = table.store or table.checkpoint_store
    assert store is not None
    return store


def _remove_store(root: Path) -> None:
    """Remove the store of an earlier single process, whose files are in `root` next to the folders of the ranks."""
    identity = root / _IDENTITY
    if identity.exists():
        for path in root.iterdir():
            if _STORE_FILE.fullmatch(path.name):
                path.unlink()
        identity.unlink()  # last: after an interruption the next sweep continues


def _check_note(store: SsdStore, source: _SavedStore, subject: str) -> None:
    if store.note.decode(errors="replace") != source.note:
        raise FormatError(
            f"{subject} was not saved in the store at {store.path}: its epoch {source.epoch} is of another run"
        )
