"""`tc.Checkpoints`: saves and restores the tables, dense model, reader position and random states of a run.

    run_dir/checkpoints/00000012.json           manifest of save 12; names everything below
    run_dir/checkpoints/00000012*.safetensors   state of each rank: dense model and optimizers, position, random states
    run_dir/stores/<table>/                     rows of tables without `ssd`
    store of each table                         one epoch per manifest

Over several ranks each rank has a store per table (table_stores.py) and a state file (rank_states.py). Rank 0 writes
the manifest, which names those of all ranks, and a checksum of each file.

Order of a save: commit the stores, write the state files, write the manifest. The save exists once its manifest does.
Then everything that no kept manifest names is removed: old manifests first, then epochs, then files. So a manifest
always names things that exist, whenever the process is killed, and leftovers are removed by the next save or restore.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
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
from thermocline.checkpoint.manifest import Json, encode_manifest, format_errors, read_manifest, require_json
from thermocline.checkpoint.rank_states import RankStates
from thermocline.checkpoint.table_stores import TableStores
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.dense_sync import synchronization_of
from thermocline.distributed.rank_agreement import require_equal
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.shared_tiers import Tiers
from thermocline.embedding.table import Table, row_tables
from thermocline.errors import CorruptionError, FormatError, NotFoundError, ThermoclineError
from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import failpoint

FORMAT = 3
OLDER_FORMATS = (1, 2)
"""Formats that are only read (older_states.py), of one process and of several ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One save of a run."""

    step: int
    position: Any
    """`Batch.position` of the last trained batch. None if the number of ranks changed: shards of the data differ."""
    extra: Any
    """The value passed to `save`."""
    tag: str | None
    path: Path
    """Path of the manifest."""
    world: int = 1
    """Number of ranks that saved it."""
    extras: tuple[Any, ...] = ()
    """If `restore` returned it to another number of ranks: `extra` of every rank that saved it."""


class Checkpoints:
    """The checkpoints of a run folder.

        checkpoints = tc.Checkpoints("runs/a", tables=[table], model=model, dense_optimizer=optimizer)
        saved = checkpoints.restore()             # None: a new run
        ...
        checkpoints.save(step, batch.position)    # between steps; writes only rows changed since the last save

    Create it before training starts: it saves the initial state of the tables, so that a run killed before its first
    save restarts from there. In a folder that already has checkpoints, `restore` must precede `save`.

    Not thread-safe: use it on the training thread.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tables: Sequence[Table | MemberTable] | Tiers,
        model: torch.nn.Module | None = None,
        dense_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        keep: int = 2,
        read_only: bool = False,
        dense_sync: Any = None,
    ) -> None:
        """
        tables      a list, or `tc.Tiers`: all of its tables
        keep        number of most recent saves to keep, in addition to the last save of each tag
        read_only   allow only `saved` and `restore`, without changes on disk: another process may be training
        dense_sync  over several ranks: their `DenseParameters`. Its state is saved, and parameters that are equal on
                    several ranks are saved once. `save` and `restore` raise without it if ranks differ, with
                    `DenseSync(every=k)` or with buffers such as batch norm's: `begin` of a resumed loop would give
                    every rank those of rank 0

        Over several ranks, every rank creates it and calls it at the same steps, on a shared folder. Every rank's own
        dense state is saved and restored. With `read_only`, or another number of ranks, every rank gets the mean.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: it must be at least 1 checkpoint")
        given = [tables] if isinstance(tables, Tiers) else list(tables)
        stored = row_tables(given)
        self.tables = {table.name: table for table in stored}
        if not stored or len(self.tables) != len(stored) or len(set(map(id, given))) < len(given):
            names = [table.name for table in (stored if isinstance(tables, Tiers) else tables)]
            raise ValueError(f"tables are {names}: pass at least one, with unique names (Table(name=...))")
        self._collective = CollectiveRunner.of(stored)
        if isinstance(dense_optimizer, torch.optim.Optimizer):
            dense_optimizer = [dense_optimizer]
        self._model, self._dense_sync = model, dense_sync
        self._keep = keep
        self._read_only = read_only
        self._run_dir = Path(run_dir)
        self._stores = TableStores(self._run_dir, self.tables, self._collective, read_only=read_only)
        self._folder = self._run_dir / "checkpoints"
        groups = stored[0].groups
        self._comm = None if groups is None else groups.train
        node_of = (0,) if groups is None else groups.topology.node_of
        optimizers = list(dense_optimizer or ())
        self._states = RankStates(
            self._folder,
            self._collective,
            node_of,
            model,
            optimizers,
            dense_sync,
            tables=self.tables,
            read_only=read_only,
        )
        self._manifests: dict[int, dict[str, Json]] = {}
        """Kept manifests, by number."""
        self._ready = False
        """Whether the tables hold the state of the newest manifest plus the training since then."""
        numbers, self._run = self._collective.broadcast("listing checkpoints", self._numbers_and_run)
        self._next = max(numbers, default=0) + 1
        self.exists = bool(numbers)
        """Whether the folder had a run when this object was created."""
        if not numbers and not read_only:
            self._begin()

    # ---- list

    def saved(self) -> list[Checkpoint]:
        """Return all saves, oldest first. Raises `CorruptionError` for a damaged manifest."""
        manifests = ((number, self._read(number)) for number in self._numbers())
        return [self._describe(number, manifest) for number, manifest in manifests if not manifest["begin"]]

    def _numbers_and_run(self) -> tuple[list[int], str]:
        return self._numbers(), secrets.token_hex(8)

    def _numbers(self) -> list[int]:
        files = self._folder.glob("*.json") if self._folder.is_dir() else ()
        return sorted(int(file.stem) for file in files if file.stem.isdigit())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.json"

    def _read(self, number: int) -> dict[str, Json]:
        path = self._path(number)
        try:
            manifest = read_manifest(path)
        except CorruptionError as error:
            raise CorruptionError(f"{error}. Move it away to continue from the previous checkpoint") from None
        if manifest.get("format") not in (FORMAT, *OLDER_FORMATS):
            known = ", ".join(map(str, (*OLDER_FORMATS, FORMAT)))
            raise FormatError(f"{path} has format {manifest.get('format')}; thermocline {__version__} reads {known}")
        return manifest

    def _describe(self, number: int, manifest: dict[str, Json], *, restored: bool = False) -> Checkpoint:
        world = len(manifest.get("ranks", [None]))
        with format_errors(str(self._path(number))):
            position, extra = self._states.values(manifest)
            extras = self._states.extras(manifest) if restored and world != self._collective.world else ()
        return Checkpoint(manifest["step"], position, extra, manifest["tag"], self._path(number), world, extras)

    # ---- save

    def _begin(self) -> None:
        """Write the first manifest: the state of the tables before training."""
        self._collective.run_all("starting a run", self._stores.require_unused)
        self._collective.broadcast("starting a run", lambda: atomic_file.make_folder(self._folder))
        self._collective.run_all("starting a run", self._stores.create)
        self._write(step=0, position=None, extra=None, tag=None, begin=True)
        self._ready = True

    def save(self, step: int, position: Any = None, extra: Any = None, *, tag: str | None = None) -> Checkpoint:
        """Save the current state; it is durable on return. Call between steps; a pipeline may be running.

        position   `Batch.position` of the last trained batch, as JSON values
        extra      further state of the run, as JSON values
        tag        the last save of each tag is kept, regardless of `keep`
        """
        if self._read_only:
            raise ThermoclineError(f"{self._run_dir} was opened with read_only=True: it cannot be saved to")
        if not self._ready:
            raise ThermoclineError(f"{self._run_dir} has an earlier run: call restore() first, or use another folder")
        for table in self.tables.values():
            if table.pending_gradients:
                raise ThermoclineError(f"table {table.name!r} has unapplied gradients: save between steps")
        require_json(position, "position")
        require_json(extra, "extra")
        self._require_synchronization()
        return self._write(step, position, extra, tag, begin=False)

    def _require_synchronization(self) -> None:
        """Raise if ranks differ in dense state that only `dense_sync` can restore, and it was not passed."""
        if self._model is None or self._dense_sync is not None or self._collective.world == 1 or self._read_only:
            return
        sync = synchronization_of([*self._model.parameters(), *self._model.buffers()])
        if sync is not None and sync.has_own_state:
            raise ThermoclineError(
                "tc.Checkpoints has no dense_sync, but tc.DenseParameters synchronizes its model, whose ranks differ "
                "between merges or in running means: a resumed run would not continue with each rank's own. Pass "
                "dense_sync=sync"
            )

    def _write(self, step: int, position: Json, extra: Json, tag: str | None, *, begin: bool) -> Checkpoint:
        number, self._next = self._next, self._next + 1
        failpoint("run.begin")
        collective = self._collective
        note = {"thermocline": "begin" if begin else "save", "run": self._run, "number": number, "step": step}
        committed = collective.gather_to_rank0("committing tables", lambda: self._stores.commit(json.dumps(note)))
        written: list[Json] = []
        if not begin:  # the initial dense model is not saved: the caller creates it again
            write = functools.partial(self._states.write, number, position, extra)
            written = collective.gather_to_rank0("writing the state of the ranks", write)
        manifest = collective.broadcast(
            "publishing the checkpoint",
            lambda: self._publish(number, self._manifest(step, tag, begin, committed, written)),
        )
        self._manifests[number] = manifest
        self._retain()
        self._sweep()
        failpoint("run.done")
        world = self._collective.world
        return Checkpoint(step, position, extra, tag, self._path(number), world)

    def _manifest(
        self, step: int, tag: str | None, begin: bool, committed: Sequence[Json], written: Sequence[Json]
    ) -> dict[str, Json]:
        """Build the manifest from the stores and state files of all ranks."""
        manifest: dict[str, Json] = {
            "format": FORMAT,
            "run": self._run,
            "begin": begin,
            "step": step,
            "tag": tag,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "torch_threads": torch.get_num_threads(),
            "tables": self._stores.described(committed[0]),
            "files": {},
            "states": [],
        }
        if written:
            manifest |= self._states.described(written)
        if self._stores.sharded:
            manifest["ranks"] = [{"stores": stores} for stores in committed]
        return manifest

    def _publish(self, number: int, manifest: dict[str, Json]) -> dict[str, Json]:
        atomic_file.atomic_write(self._path(number), encode_manifest(manifest))
        failpoint("run.published")
        return manifest

    def _retain(self) -> None:
        """Drop manifests that are neither among the last `keep` nor the last of a tag."""
        saves = [number for number, manifest in self._manifests.items() if not manifest["begin"]]
        if not saves:
            return
        last_of_tag = {self._manifests[number]["tag"]: number for number in saves if self._manifests[number]["tag"]}
        kept = {*saves[-self._keep :], *last_of_tag.values()}
        self._manifests = {number: manifest for number, manifest in self._manifests.items() if number in kept}

    def _sweep(self) -> None:
        """Remove everything that no kept manifest names: old saves and interrupted saves."""
        self._collective.broadcast("removing old checkpoints", self._sweep_manifests)
        self._collective.run_all("removing old commits", lambda: self._stores.sweep(list(self._manifests.values())))
        self._collective.broadcast("removing old files", self._sweep_files)

    def _sweep_manifests(self) -> None:
        for number in self._numbers():
            if number not in self._manifests:
                self._path(number).unlink()
                failpoint("run.manifest_removed")
        # Removals must be durable before the named epochs and files are removed. This also makes a kept manifest
        # durable whose writer was killed before it synced the folder.
        atomic_file.sync_folder(self._folder)

    def _sweep_files(self) -> None:
        files = {name for manifest in self._manifests.values() for name in manifest["files"]}
        for path in self._folder.iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.name not in files):
                path.unlink()
                failpoint("run.file_removed")

    # ---- restore

    def restore(self, which: int | str | None = None) -> Checkpoint | None:
        """Restore the newest save, or the last one of a step or a tag, and return it.

        Returns None if nothing was saved: the tables are in their initial state and the dense model is unchanged.
        Training since the save is discarded. Call it while no pipeline is running.

        Raises before it changes anything: `CorruptionError` (damaged file), `FormatError` (another run, table or
        model), `NotFoundError` (a missing save, file or epoch).
        """
        collective = self._collective
        require_equal(self._comm, {"the checkpoint to restore": which}, "select the same checkpoint on all ranks")
        manifests, number = collective.broadcast("reading the checkpoints", lambda: self._load(which))
        manifest = manifests[number]
        doing = "checking the checkpoint"
        with format_errors(str(self._path(number))):
            state = collective.run_all(doing, lambda: None if manifest["begin"] else self._states.load(manifest))
        self._require_synchronization()
        restored = collective.run_all(
            doing, lambda: None if manifest["begin"] else self._describe(number, manifest, restored=True)
        )
        collective.run_all(doing, lambda: self._stores.check(manifest, str(self._path(number))))
        self._ready = False  # after an interrupted restore, `save` raises until a restore succeeds
        collective.run_all("restoring rows", lambda: self._stores.restore(manifest, list(manifests.values())))
        if state is not None:
            self._states.apply(state)
        torch.set_num_threads(manifest["torch_threads"])
        if manifest["versions"] != _versions():
            versions = f"saved with {manifest['versions']}, resumed with {_versions()}"
            warnings.warn(f"{versions}: results may differ in the last bits", stacklevel=2)
        self._run = manifest["run"]
        self._manifests = manifests
        if not self._read_only:
            self._ready = True
            self._sweep()
        return restored

    def _load(self, which: int | str | None) -> tuple[dict[int, dict[str, Json]], int]:
        """Return all manifests, and the number of the selected one."""
        manifests = {number: self._read(number) for number in self._numbers()}
        return manifests, self._select(manifests, which)

    def _select(self, manifests: dict[int, dict[str, Json]], which: int | str | None) -> int:
        matches = [
            n for n, m in manifests.items() if which is None or (not m["begin"] and which in (m["step"], m["tag"]))
        ]
        if not matches:
            saves = (m for m in manifests.values() if not m["begin"])
            have = ", ".join(f"step {m['step']}" + f" ({m['tag']})" * bool(m["tag"]) for m in saves)
            wanted = "checkpoint" if which is None else f"checkpoint {which!r}"
            raise NotFoundError(f"{self._folder} has no {wanted}; it has {have or 'none'}")
        return matches[-1]

    def close(self) -> None:
        """Close the stores of tables without `ssd`. `save` raises afterwards."""
        self._ready = False
        self._stores.close()


def _versions() -> dict[str, str]:
    versions = {"thermocline": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version()}
