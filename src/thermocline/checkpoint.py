"""What survives: `tc.Checkpoints` keeps a run's tables, dense model, reader position and random numbers together.

    run_dir/checkpoints/00000012.json           manifest of save 12: names all of the below; its appearance is the save
    run_dir/checkpoints/00000012.safetensors    dense model, dense optimizers, random numbers
    run_dir/stores/<table>/                     rows of tables that have no ssd of their own
    each table's store                          one epoch per manifest

A save commits the stores, publishes the dense file, then the manifest; then it removes what no kept manifest names: old
manifests first, then epochs, then files. So a manifest always names things that exist, wherever the process dies, and
what nobody names is removed by the next save or restore.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline import __version__, published, snapshot
from thermocline.errors import CorruptionError, FormatError, NotFoundError, ThermoclineError
from thermocline.published import Json, reached
from thermocline.tables.mem import MemTier
from thermocline.tables.ssd import SsdStore
from thermocline.tables.table import Table

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved point of a run."""

    step: int
    position: Any
    """Of the last trained batch: `Batch.position`."""
    extra: Any
    """As given to `save`."""
    tag: str | None
    path: Path
    """Its manifest."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

        checkpoints = tc.Checkpoints("runs/a", tables=[table], model=model, dense_optimizer=optimizer)
        saved = checkpoints.restore()             # None: a new run
        ...
        checkpoints.save(step, batch.position)    # between steps; costs what changed since the last one

    Make it before training begins: it notes what the tables hold, so that a run that dies before its first save begins
    anew from there. A folder that already has checkpoints takes no `save` before a `restore`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tables: Sequence[Table],
        model: torch.nn.Module | None = None,
        dense_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        keep: int = 2,
        read_only: bool = False,
    ) -> None:
        """
        keep        the last so many saves stay, and beside them the last of each tag
        read_only   only `saved` and `restore`, which then change nothing: another process may be training
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint stays")
        self.tables = {table.name: table for table in tables}
        if not tables or len(self.tables) != len(tables):
            names = [table.name for table in tables]
            raise ValueError(f"tables are {names}: give at least one, each with a name of its own (Table(name=...))")
        self._model = model
        if isinstance(dense_optimizer, torch.optim.Optimizer):
            dense_optimizer = [dense_optimizer]
        self._optimizers = list(dense_optimizer or ())
        self._keep = keep
        self._read_only = read_only
        self._run_dir = Path(run_dir)
        self._folder = self._run_dir / "checkpoints"
        self._manifests: dict[int, dict[str, Json]] = {}
        """By number: those that stay."""
        self._ready = False
        """Whether the tables hold what the newest manifest says, plus training since."""
        numbers = self._numbers()
        self._next = max(numbers, default=0) + 1
        self._run = secrets.token_hex(8)
        self.exists = bool(numbers)
        """Whether the folder had a run in it when this object was made."""
        if not numbers and not read_only:
            self._begin()

    # ---- what there is

    def saved(self) -> list[Checkpoint]:
        """All there are, oldest first. Raises `CorruptionError` for a damaged manifest."""
        found = ((number, self._read(number)) for number in self._numbers())
        return [self._describe(number, manifest) for number, manifest in found if not manifest["begin"]]

    def _numbers(self) -> list[int]:
        files = self._folder.glob("*.json") if self._folder.is_dir() else ()
        return sorted(int(file.stem) for file in files if file.stem.isdigit())

    def _path(self, number: int, suffix: str = ".json") -> Path:
        return self._folder / f"{number:08}{suffix}"

    def _read(self, number: int) -> dict[str, Json]:
        path = self._path(number)
        try:
            manifest = published.decode_manifest(path.read_bytes(), str(path))
        except CorruptionError as error:
            raise CorruptionError(f"{error}. Move it away to go on from the checkpoint before it") from None
        if manifest.get("format") != FORMAT:
            raise FormatError(f"{path} has format {manifest.get('format')}; thermocline {__version__} reads {FORMAT}")
        return manifest

    def _describe(self, number: int, manifest: dict[str, Json]) -> Checkpoint:
        step, position, extra, tag = (manifest[name] for name in ("step", "position", "extra", "tag"))
        return Checkpoint(step, position, extra, tag, self._path(number))

    # ---- save

    def _begin(self) -> None:
        """The first manifest: what the tables hold before the first save."""
        for table in self.tables.values():
            if table.store is not None:
                self._require_unused(table, table.store)
        published.make_folder(self._folder)
        for table in self.tables.values():
            if table.store is None:
                table.checkpoint_store = self._open_store(table, create=True)
                self._require_unused(table, table.checkpoint_store)
        self._write(step=0, position=None, extra=None, tag=None, begin=True)
        self._ready = True

    def _require_unused(self, table: Table, store: SsdStore) -> None:
        if store.epoch == 0:
            return
        if store.note.startswith(b'{"thermocline": "begin"') and next(store.scan(1), None) is None:
            return  # a run that died while it began
        raise ThermoclineError(
            f"table {table.name!r}: the store at {store.path} already has commits, but {self._run_dir} has no "
            f"checkpoint that names them. Resume the run they belong to, or begin with an empty folder"
        )

    def _open_store(self, table: Table, *, create: bool = False, epoch: int | None = None) -> SsdStore:
        """Of a table without ssd. Nobody looks rows up in it, so a filter would be wasted."""
        path = self._run_dir / "stores" / table.name
        if create:
            published.make_folder(path.parent)
        elif not path.is_dir():
            raise NotFoundError(f"{path} is missing: it has the rows of table {table.name!r}")
        return table.open_store(path, create=create, epoch=epoch, filter_bits=0, read_only=self._read_only)

    def save(self, step: int, position: Any = None, extra: Any = None, *, tag: str | None = None) -> Checkpoint:
        """Everything as it is now, durable when it returns. Between steps only; a pipeline may be running ahead.

        position   of the last trained batch; extra: whatever else the run needs. Both plain JSON
        tag        the last save of each tag stays, whatever `keep` says
        """
        if self._read_only:
            raise ThermoclineError(f"{self._run_dir} was opened for reading only: nothing can be saved")
        if not self._ready:
            raise ThermoclineError(f"{self._run_dir} has an earlier run: restore() first, or use another folder")
        for table in self.tables.values():
            if table.pending_gradients:
                raise ThermoclineError(f"table {table.name!r} has gradients not yet applied: save between steps")
        published.require_json(position, "position")
        published.require_json(extra, "extra")
        return self._write(step, position, extra, tag, begin=False)

    def _write(self, step: int, position: Json, extra: Json, tag: str | None, *, begin: bool) -> Checkpoint:
        number, self._next = self._next, self._next + 1
        reached("run.begin")
        manifest: dict[str, Json] = {
            "format": FORMAT,
            "run": self._run,
            "begin": begin,
            "step": step,
            "tag": tag,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "torch_threads": torch.get_num_threads(),
            "position": position,
            "extra": extra,
            "tables": {name: self._commit(table, number, step, begin) for name, table in self.tables.items()},
            "files": {},
            "dense": None,
        }
        if not begin:  # before the first save the dense model is its maker's business
            tensors: snapshot.Tensors = {}
            manifest["dense"] = snapshot.pack(self._dense_state(), tensors, "dense")
            data = snapshot.encode(tensors)
            path = self._path(number, ".safetensors")
            manifest["files"] = {path.name: {"bytes": len(data), "sha256": published.digest(data)}}
            published.publish(path, data)
            reached("run.dense_published")
        published.publish(self._path(number), published.encode_manifest(manifest))
        reached("run.published")
        self._manifests[number] = manifest
        self._retain()
        self._sweep()
        reached("run.done")
        return self._describe(number, manifest)

    def _commit(self, table: Table, number: int, step: int, begin: bool) -> Json:
        kind = "begin" if begin else "save"
        note = json.dumps({"thermocline": kind, "run": self._run, "number": number, "step": step})
        store = _store(table)
        table.write_down()
        table.tier.flush(store)
        reached("run.flushed")
        epoch = store.commit(note.encode())
        reached("run.committed")
        return {
            "layout": table.layout,
            "ssd": table.store is not None,
            "epoch": epoch,
            "note": note,
            "step_count": table.step_count,
            "lr": table.lr,
        }

    def _dense_state(self) -> dict[str, Any]:
        return {
            "model": None if self._model is None else dict(self._model.state_dict()),
            "optimizers": [{"kind": type(o).__name__, "state": o.state_dict()} for o in self._optimizers],
            "random": snapshot.random_state(),
        }

    def _retain(self) -> None:
        """Drops from the books what `keep` and the tags do not hold."""
        saves = [number for number, manifest in self._manifests.items() if not manifest["begin"]]
        if not saves:
            return
        last_of_tag = {self._manifests[number]["tag"]: number for number in saves if self._manifests[number]["tag"]}
        stay = {*saves[-self._keep :], *last_of_tag.values()}
        self._manifests = {number: manifest for number, manifest in self._manifests.items() if number in stay}

    def _sweep(self) -> None:
        """Removes what no manifest in the books names: of old saves, and of saves that never ended."""
        gone = [number for number in self._numbers() if number not in self._manifests]
        for number in gone:
            self._path(number).unlink()
            reached("run.manifest_removed")
        # Before anything they name goes; and a manifest found after a kill may not have been durable yet.
        published.sync_folder(self._folder)
        for name, table in self.tables.items():
            store = _store(table)
            named = {manifest["tables"][name]["epoch"] for manifest in self._manifests.values()}
            for epoch in store.epochs[:-1]:  # the newest stays until the next save
                if epoch not in named:
                    store.release(epoch)
                    reached("run.epoch_released")
        files = {name for manifest in self._manifests.values() for name in manifest["files"]}
        for path in self._folder.iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.name not in files):
                path.unlink()
                reached("run.file_removed")

    # ---- restore

    def restore(self, which: int | str | None = None) -> Checkpoint | None:
        """Puts everything back as it was at the newest save, or at the last one of a step or a tag.

        None: nothing was saved; the tables are as they were when the run began, the dense model is left alone. Whatever
        was trained since is forgotten. Not while a pipeline is running.

        Raises before it changes anything: `CorruptionError` (damaged), `FormatError` (of another run, table or model),
        `NotFoundError` (something it names is gone).
        """
        manifests = {number: self._read(number) for number in self._numbers()}
        number = self._choose(manifests, which)
        manifest = manifests[number]
        dense = None if manifest["begin"] else self._load_dense(manifest)
        self._check_tables(manifest, str(self._path(number)))
        self._ready = False  # whatever cuts this short, nothing can be saved before a restore that succeeds
        self._restore_tables(manifest)
        if dense is not None:
            if self._model is not None:
                self._model.load_state_dict(dense["model"])
            for optimizer, saved in zip(self._optimizers, dense["optimizers"], strict=True):
                optimizer.load_state_dict(saved["state"])
            snapshot.set_random_state(dense["random"])
        torch.set_num_threads(manifest["torch_threads"])
        if manifest["versions"] != _versions():
            versions = f"saved with {manifest['versions']}, resumed with {_versions()}"
            warnings.warn(f"{versions}: bits may differ", stacklevel=2)
        self._run = manifest["run"]
        self._manifests = manifests
        if not self._read_only:
            self._ready = True
            self._sweep()
        return None if manifest["begin"] else self._describe(number, manifest)

    def _choose(self, manifests: dict[int, dict[str, Json]], which: int | str | None) -> int:
        fits = [n for n, m in manifests.items() if which is None or (not m["begin"] and which in (m["step"], m["tag"]))]
        if not fits:
            saves = (m for m in manifests.values() if not m["begin"])
            have = ", ".join(f"step {m['step']}" + f" ({m['tag']})" * bool(m["tag"]) for m in saves)
            wanted = "checkpoint" if which is None else f"checkpoint {which!r}"
            raise NotFoundError(f"{self._folder} has no {wanted}; it has {have or 'none'}")
        return fits[-1]

    def _load_dense(self, manifest: dict[str, Json]) -> dict[str, Any]:
        tensors: snapshot.Tensors = {}
        for name, expected in manifest["files"].items():
            path = self._folder / name
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                raise NotFoundError(f"{path} is missing: the checkpoint of step {manifest['step']} needs it") from None
            if len(data) != expected["bytes"] or published.digest(data) != expected["sha256"]:
                raise CorruptionError(f"{path} is damaged: its checksum is not the one its manifest has")
            tensors.update(snapshot.decode(data))
        state: dict[str, Any] = snapshot.unpack(manifest["dense"], tensors)
        snapshot.check_dense(state, self._dense_state())
        return state

    def _check_tables(self, manifest: dict[str, Json], path: str) -> None:
        """Everything that can be wrong with the tables and their stores, before any of them changes."""
        entries = manifest["tables"]
        if set(entries) != set(self.tables):
            raise FormatError(f"{path} is of tables {sorted(entries)}, these are {sorted(self.tables)}")
        for name, table in self.tables.items():
            entry = entries[name]
            for key, was in entry["layout"].items():
                now = table.layout.get(key)
                if now != was:
                    raise FormatError(f"{path}: table {name!r} was saved with {key} {was}, but this one has {now}")
            if entry["ssd"] != (table.store is not None):
                was = "with" if entry["ssd"] else "without"
                raise FormatError(f"{path}: table {name!r} was saved {was} an ssd folder: open it {was} one")
            if pinned := table.tier.stats().pinned:
                raise ThermoclineError(f"table {name!r} has {pinned} rows pinned: close the pipeline before restore()")
            if table.hbm is not None and (windows := table.hbm.stats().windows):
                raise ThermoclineError(
                    f"table {name!r} has {windows} windows pinned: close the pipeline before restore()"
                )
            if table.store is None and table.checkpoint_store is None:
                table.checkpoint_store = self._open_store(table)
            _check_epoch(table, entry, f"{path}: table {name!r}", beside_a_writer=self._read_only)

    def _restore_tables(self, manifest: dict[str, Json]) -> None:
        before: list[tuple[Table, MemTier]] = []
        try:
            for name, table in self.tables.items():
                if table.checkpoint_store is not None:  # these first: they read all rows, and may yet meet damage
                    table.write_down()  # if this fails, the old rows are in the old tier
                    before.append((table, table.tier))
                    table.checkpoint_store.close()
                    table.checkpoint_store = self._open_store(table, epoch=manifest["tables"][name]["epoch"])
                    table.reopen()
                    for keys, rows in table.checkpoint_store.scan():
                        table.tier.push(keys, rows.view(np.float32), dirty=False)
        except BaseException:
            for table, tier in before:
                table.tier = tier
            raise
        for name, table in self.tables.items():
            entry = manifest["tables"][name]
            if table.store is not None:
                table.reopen(entry["epoch"])
            table.step_count = entry["step_count"]
            table.lr = entry["lr"]

    def close(self) -> None:
        """Closes the stores of tables without ssd. Nothing can be saved any more."""
        self._ready = False
        for table in self.tables.values():
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()


def _store(table: Table) -> SsdStore:
    store = table.store or table.checkpoint_store
    assert store is not None
    return store


def _check_epoch(table: Table, entry: Json, what: str, *, beside_a_writer: bool) -> None:
    """That the table's store has the epoch, and that it is the one this checkpoint made: its note says so."""
    store, epoch = _store(table), entry["epoch"]
    if epoch not in store.epochs and not beside_a_writer:  # which may have committed it since the store was opened
        have = ", ".join(map(str, store.epochs)) or "none"
        raise NotFoundError(f"{what} needs epoch {epoch}, but {store.path} has {have}: is it another store?")
    if store.epoch == epoch:
        note = store.note
    else:  # opened on a newer commit, of a save that never ended
        with table.open_store(store.path, epoch=epoch, read_only=True) as old:
            note = old.note
    if note.decode(errors="replace") != entry["note"]:
        raise FormatError(f"{what} was not saved in the store at {store.path}: its epoch {epoch} is of another run")


def _versions() -> dict[str, str]:
    versions = {"thermocline": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version()}
