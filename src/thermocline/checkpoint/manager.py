"""What survives: `tc.Checkpoints` keeps a run's tables, dense model, reader position and random numbers collective.

    run_dir/checkpoints/00000012.json           manifest of save 12: names all of the below; its appearance is the save
    run_dir/checkpoints/00000012.safetensors    dense model, dense optimizers, random numbers
    run_dir/stores/<table>/                     rows of tables that have no ssd of their own
    each table's store                          one epoch per manifest

Over several ranks each has a store per table, in a folder of its own, and rank 0 writes the manifest, which names them
all (checkpoint_stores.py).

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

from thermocline import __version__
from thermocline.checkpoint import state_tree
from thermocline.checkpoint.manifest import Json, decode_manifest, encode_manifest, require_json, sha256_hex
from thermocline.checkpoint.table_stores import TableStores
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.frozen_adam import check_frozen_state
from thermocline.embedding.table import Table
from thermocline.errors import CorruptionError, FormatError, NotFoundError, ThermoclineError
from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import failpoint

FORMAT = 1
RANKS_FORMAT = 2
"""Of manifests that name the stores of several ranks."""


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
    world: int = 1
    """Ranks that saved it. With another number of them `position` is none: each has other data."""
    extras: tuple[Any, ...] = ()
    """`extra` of every rank that saved it."""


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
        dense_sync: Any = None,
    ) -> None:
        """
        keep        the last so many saves stay, and beside them the last of each tag
        read_only   only `saved` and `restore`, which then change nothing: another process may be training
        dense_sync  of several ranks: `DenseParameters`, whose state is saved, too

        Over several ranks, all of them make it and call it, at the same steps; the folder is one that all see.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint stays")
        self.tables = {table.name: table for table in tables}
        if not tables or len(self.tables) != len(tables):
            names = [table.name for table in tables]
            raise ValueError(f"tables are {names}: give at least one, each with a name of its own (Table(name=...))")
        self._collective = CollectiveRunner.of(tables)
        self._model = model
        if isinstance(dense_optimizer, torch.optim.Optimizer):
            dense_optimizer = [dense_optimizer]
        self._optimizers = list(dense_optimizer or ())
        self._keep = keep
        self._read_only = read_only
        self._dense_sync = dense_sync
        self._run_dir = Path(run_dir)
        self._stores = TableStores(self._run_dir, self.tables, self._collective, read_only=read_only)
        self._folder = self._run_dir / "checkpoints"
        self._manifests: dict[int, dict[str, Json]] = {}
        """By number: those that stay."""
        self._ready = False
        """Whether the tables hold what the newest manifest says, plus training since."""
        numbers, self._run = self._collective.broadcast("listing checkpoints", self._look)
        self._next = max(numbers, default=0) + 1
        self.exists = bool(numbers)
        """Whether the folder had a run in it when this object was made."""
        if not numbers and not read_only:
            self._begin()

    # ---- what there is

    def saved(self) -> list[Checkpoint]:
        """All there are, oldest first. Raises `CorruptionError` for a damaged manifest."""
        found = ((number, self._read(number)) for number in self._numbers())
        return [self._describe(number, manifest) for number, manifest in found if not manifest["begin"]]

    def _look(self) -> tuple[list[int], str]:
        return self._numbers(), secrets.token_hex(8)

    def _numbers(self) -> list[int]:
        files = self._folder.glob("*.json") if self._folder.is_dir() else ()
        return sorted(int(file.stem) for file in files if file.stem.isdigit())

    def _path(self, number: int, suffix: str = ".json") -> Path:
        return self._folder / f"{number:08}{suffix}"

    def _read(self, number: int) -> dict[str, Json]:
        path = self._path(number)
        try:
            manifest = decode_manifest(path.read_bytes(), str(path))
        except CorruptionError as error:
            raise CorruptionError(f"{error}. Move it away to go on from the checkpoint before it") from None
        if manifest.get("format") not in (FORMAT, RANKS_FORMAT):
            raise FormatError(
                f"{path} has format {manifest.get('format')}; thermocline {__version__} reads {FORMAT}, {RANKS_FORMAT}"
            )
        return manifest

    def _describe(self, number: int, manifest: dict[str, Json]) -> Checkpoint:
        step, position, extra, tag = (manifest[name] for name in ("step", "position", "extra", "tag"))
        ranks = manifest.get("ranks", [None])
        if _world(manifest) != self._collective.world:
            position = None
        elif "ranks" in manifest:
            position, extra = (ranks[self._collective.rank][name] for name in ("position", "extra"))
        extras = tuple(rank["extra"] for rank in ranks) if "ranks" in manifest else (extra,)
        return Checkpoint(step, position, extra, tag, self._path(number), len(ranks), extras)

    # ---- save

    def _begin(self) -> None:
        """The first manifest: what the tables hold before the first save."""
        self._collective.run_all("starting a run", self._stores.require_unused)
        self._collective.broadcast("starting a run", lambda: atomic_file.make_folder(self._folder))
        self._collective.run_all("starting a run", self._stores.create)
        self._write(step=0, position=None, extra=None, tag=None, begin=True)
        self._ready = True

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
        require_json(position, "position")
        require_json(extra, "extra")
        return self._write(step, position, extra, tag, begin=False)

    def _write(self, step: int, position: Json, extra: Json, tag: str | None, *, begin: bool) -> Checkpoint:
        number, self._next = self._next, self._next + 1
        failpoint("run.begin")
        collective = self._collective
        note = {"thermocline": "begin" if begin else "save", "run": self._run, "number": number, "step": step}
        committed = collective.gather("committing tables", lambda: self._stores.commit(json.dumps(note)))
        own = collective.gather("gathering the checkpoint state", lambda: self._own(position, extra, begin))
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
            "tables": self._stores.described(committed[0]),
            "files": {},
            "dense": None,
        }
        if self._stores.sharded:
            manifest["format"] = RANKS_FORMAT
            manifest["ranks"] = [
                {"position": mine["position"], "extra": mine["extra"], "stores": stores}
                for mine, stores in zip(own, committed, strict=True)
            ]
        manifest = collective.broadcast("publishing the checkpoint", lambda: self._publish(number, manifest, own))
        self._manifests[number] = manifest
        self._retain()
        self._sweep()
        failpoint("run.done")
        return self._describe(number, manifest)

    def _publish(self, number: int, manifest: dict[str, Json], own: list[dict[str, Any]]) -> dict[str, Json]:
        if not manifest["begin"]:  # before the first save the dense model is its maker's business
            tensors: state_tree.Tensors = {}
            state = self._dense_state() | own[0]["state"]
            if len(own) > 1:
                state["ranks"] = [mine["state"] for mine in own]
            manifest["dense"] = state_tree.pack(state, tensors, "dense")
            data = state_tree.encode(tensors)
            path = self._path(number, ".safetensors")
            manifest["files"] = {path.name: {"bytes": len(data), "sha256": sha256_hex(data)}}
            atomic_file.atomic_write(path, data)
            failpoint("run.dense_published")
        atomic_file.atomic_write(self._path(number), encode_manifest(manifest))
        failpoint("run.published")
        return manifest

    def _own(self, position: Json, extra: Json, begin: bool) -> dict[str, Any]:
        """What each rank has for itself: its place in the data, its random numbers, perhaps its optimizers."""
        state: dict[str, Any] = {}
        if not begin:
            state["random"] = state_tree.random_state()
            if self._dense_sync is not None:
                state["sync"] = self._dense_sync.state_dict()
                if self._dense_sync.has_rank_state:
                    state["optimizers"] = self._optimizer_states()
        return {"position": position, "extra": extra, "state": state}

    def _dense_state(self) -> dict[str, Any]:
        return {
            "model": None if self._model is None else dict(self._model.state_dict()),
            "optimizers": self._optimizer_states(),
        }

    def _optimizer_states(self) -> list[dict[str, Any]]:
        return [{"kind": type(o).__name__, "state": o.state_dict()} for o in self._optimizers]

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
        self._collective.broadcast("removing old checkpoints", self._sweep_manifests)
        self._collective.run_all("removing old commits", lambda: self._stores.sweep(list(self._manifests.values())))
        self._collective.broadcast("removing old files", self._sweep_files)

    def _sweep_manifests(self) -> None:
        gone = [number for number in self._numbers() if number not in self._manifests]
        for number in gone:
            self._path(number).unlink()
            failpoint("run.manifest_removed")
        # Before anything they name goes; and a manifest found after a kill may not have been durable yet.
        atomic_file.sync_folder(self._folder)

    def _sweep_files(self) -> None:
        files = {name for manifest in self._manifests.values() for name in manifest["files"]}
        for path in self._folder.iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.name not in files):
                path.unlink()
                failpoint("run.file_removed")

    # ---- restore

    def restore(self, which: int | str | None = None) -> Checkpoint | None:
        """Puts everything back as it was at the newest save, or at the last one of a step or a tag.

        None: nothing was saved; the tables are as they were when the run began, the dense model is left alone. Whatever
        was trained since is forgotten. Not while a pipeline is running.

        Raises before it changes anything: `CorruptionError` (damaged), `FormatError` (of another run, table or model),
        `NotFoundError` (something it names is gone).
        """
        collective = self._collective
        manifests, number, files = collective.broadcast("reading the checkpoints", lambda: self._chosen(which))
        manifest = manifests[number]
        what = "checking the checkpoint"
        dense = collective.run_all(what, lambda: None if manifest["begin"] else self._unpacked(manifest, files))
        collective.run_all(what, lambda: self._stores.check(manifest, str(self._path(number))))
        self._ready = False  # whatever cuts this short, nothing can be saved before a restore that succeeds
        collective.run_all("restoring rows", lambda: self._stores.restore(manifest, list(manifests.values())))
        if dense is not None:
            self._restore_dense(dense, _world(manifest))
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

    def _restore_dense(self, own: dict[str, Any], world: int) -> None:
        if self._model is not None:
            self._model.load_state_dict(own["model"])
        for optimizer, saved in zip(self._optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(saved["state"])
        if self._dense_sync is not None and "sync" in own:
            self._dense_sync.load_state_dict(own["sync"])
        if world == self._collective.world:  # of another number of ranks: these would all draw the same
            state_tree.set_random_state(own["random"])

    def _chosen(self, which: int | str | None) -> tuple[dict[int, dict[str, Json]], int, dict[str, bytes]]:
        """All manifests, the number of the one asked for, and the files it names."""
        manifests = {number: self._read(number) for number in self._numbers()}
        number = self._choose(manifests, which)
        return manifests, number, self._files(manifests[number])

    def _choose(self, manifests: dict[int, dict[str, Json]], which: int | str | None) -> int:
        fits = [n for n, m in manifests.items() if which is None or (not m["begin"] and which in (m["step"], m["tag"]))]
        if not fits:
            saves = (m for m in manifests.values() if not m["begin"])
            have = ", ".join(f"step {m['step']}" + f" ({m['tag']})" * bool(m["tag"]) for m in saves)
            wanted = "checkpoint" if which is None else f"checkpoint {which!r}"
            raise NotFoundError(f"{self._folder} has no {wanted}; it has {have or 'none'}")
        return fits[-1]

    def _files(self, manifest: dict[str, Json]) -> dict[str, bytes]:
        files = {}
        for name, expected in manifest["files"].items():
            path = self._folder / name
            try:
                files[name] = data = path.read_bytes()
            except FileNotFoundError:
                raise NotFoundError(f"{path} is missing: the checkpoint of step {manifest['step']} needs it") from None
            if len(data) != expected["bytes"] or sha256_hex(data) != expected["sha256"]:
                raise CorruptionError(f"{path} is damaged: its checksum is not the one its manifest has")
        return files

    def _unpacked(self, manifest: dict[str, Json], files: dict[str, bytes]) -> dict[str, Any]:
        tensors: state_tree.Tensors = {}
        for data in files.values():
            tensors.update(state_tree.decode(data))
        state: dict[str, Any] = state_tree.unpack(manifest["dense"], tensors)
        state_tree.check_dense(state, self._dense_state())
        own = self._part_of(state, _world(manifest))
        if not self._read_only:
            for optimizer in own["optimizers"]:
                check_frozen_state(optimizer["state"])
        return own

    def _part_of(self, dense: dict[str, Any], world: int) -> dict[str, Any]:
        """What this rank has of what so many ranks saved."""
        if world == self._collective.world > 1:
            return {**dense, **dense["ranks"][self._collective.rank]}
        if world > 1 and "optimizers" in dense["ranks"][0]:
            from thermocline.distributed.dense_sync import reshard_optimizer_states

            ranks = [rank["optimizers"] for rank in dense["ranks"]]
            return {**dense, "optimizers": reshard_optimizer_states(ranks, self._collective.world)}
        return dense

    def close(self) -> None:
        """Closes the stores of tables without ssd. Nothing can be saved any more."""
        self._ready = False
        self._stores.close()


def _world(manifest: dict[str, Json]) -> int:
    """Ranks that saved it."""
    return len(manifest.get("ranks", [None]))


def _versions() -> dict[str, str]:
    versions = {"thermocline": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version()}
