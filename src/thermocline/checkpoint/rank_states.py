"""Writes and reads the state of every rank, one file per rank: everything of a checkpoint but the rows.

    checkpoints/00000012.safetensors                       of one process
    checkpoints/00000012.rank-00001-of-00004.safetensors   of one rank of several

A file has the position in the data, `extra`, random states, the dense model, its optimizers, the state of
`DenseParameters`, and the admission counters of tables. Nothing is averaged before a save. Ranks whose parameters are
always equal (`DenseParameters.replicas`) store parameters and optimizers once, in the file of the lowest of them; every
file has the buffers, which differ, and frozen parameters, which nothing keeps equal.

The same ranks restore their own states. A reader, another number of ranks, or ranks with other replicas get the mean of
all ranks' models and optimizers (`distributed/model_mean.py`). Frozen parameters (`requires_grad` False) have no mean:
if they differ between ranks, only the same ranks can restore them. Admission counters move with the keys that they
count (`embedding/admission_state.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thermocline.checkpoint import state_tree
from thermocline.checkpoint.manifest import Json, sha256_hex
from thermocline.checkpoint.older_states import older_state, older_values
from thermocline.checkpoint.state_tree import RankState
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.frozen_adam import check_frozen_state, without_frozen_state
from thermocline.distributed.key_sharding import overlapping_ranks, rank_folder
from thermocline.distributed.model_mean import TensorMean, same_bits
from thermocline.embedding.state_dict import dense_state_dict, load_dense_state_dict
from thermocline.embedding.table import Table
from thermocline.errors import CorruptionError, FormatError, NotFoundError
from thermocline.utils import atomic_file
from thermocline.utils.atomic_file import failpoint
from thermocline.utils.untrusted_files import confined_path, read_limited

Manifest = dict[str, Json]


class RankStates:
    """The state files in a folder of checkpoints. Every rank has one and calls it at the same time."""

    def __init__(
        self,
        folder: Path,
        collective: CollectiveRunner,
        node_of: Sequence[int],
        model: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        dense_sync: Any,
        *,
        tables: Mapping[str, Table],
        read_only: bool,
    ) -> None:
        """
        node_of      index of each rank's node
        dense_sync   `DenseParameters`, or None
        tables       tables by name, for what they save beside rows
        """
        self._folder = folder
        self._rank, self._world = collective.rank, collective.world
        self._node_of = node_of
        self._model = model
        self._optimizers = optimizers
        self._dense_sync = dense_sync
        self._tables = tables
        self._read_only = read_only

    @property
    def _replicas(self) -> list[int]:
        """For every rank, the rank whose file has its parameters and optimizers."""
        return list(range(self._world) if self._dense_sync is None else self._dense_sync.replicas)

    # ---- save

    def write(self, number: int, position: Json, extra: Json) -> Json:
        """Publish this rank's file of save `number`; return its name, size and checksum."""
        tensors: state_tree.Tensors = {}
        state = state_tree.pack(self._own_state(), tensors, "dense")
        data = state_tree.encode(tensors, {"position": position, "extra": extra, "state": state})
        rank = f".{rank_folder(self._rank, self._world)}" if self._world > 1 else ""
        path = self._folder / f"{number:08}{rank}.safetensors"
        atomic_file.atomic_write(path, data)
        failpoint("run.dense_published")
        return {"file": path.name, "bytes": len(data), "sha256": sha256_hex(data)}

    def described(self, written: Sequence[Json]) -> dict[str, Json]:
        """Return the entries of the manifest for the files of all ranks."""
        columns = zip(written, self._replicas, self._node_of, strict=True)
        return {
            "files": {file["file"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in written},
            "states": [{"file": file["file"], "replica": rank, "node": node} for file, rank, node in columns],
        }

    def _own_state(self) -> dict[str, Any]:
        """Return this rank's state, without parameters and optimizers if they are in another rank's file."""
        parameters = {} if self._model is None else dict(self._model.named_parameters(remove_duplicate=False))
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        state: dict[str, Any] = {"random": state_tree.random_state(), "frozen": frozen}
        if self._dense_sync is not None:
            state["sync"] = self._dense_sync.state_dict()
        if tables := {name: own for name, table in self._tables.items() if (own := table.rank_state())}:
            state["tables"] = tables
        if self._replicas[self._rank] == self._rank:
            return {**self._dense_state(), **state}
        shared, model = parameters.keys() - frozen, self._dense_state()["model"]
        state["model"] = {name: value for name, value in (model or {}).items() if name not in shared}
        return state

    def _dense_state(self) -> dict[str, Any]:
        return {
            "model": None if self._model is None else dense_state_dict(self._model),
            "optimizers": [{"kind": type(o).__name__, "state": o.state_dict()} for o in self._optimizers],
        }

    # ---- restore

    def values(self, manifest: Manifest) -> tuple[Json, Json]:
        """Return `position` and `extra` of this rank; of rank 0, without a position, if the number of ranks differs."""
        if "states" not in manifest:
            return older_values(manifest, self._rank, self._world)
        same = len(manifest["states"]) == self._world
        values = self._values(manifest, self._rank if same else 0)
        return values["position"] if same else None, values["extra"]

    def extras(self, manifest: Manifest) -> tuple[Json, ...]:
        """Return `extra` of every rank that saved."""
        if "states" not in manifest:
            return tuple(rank["extra"] for rank in manifest.get("ranks", [manifest]))
        return tuple(self._values(manifest, rank)["extra"] for rank in range(len(manifest["states"])))

    def _values(self, manifest: Manifest, rank: int) -> Json:
        path = self._path(manifest, manifest["states"][rank]["file"])
        try:
            return state_tree.read_values(path)
        except FileNotFoundError:
            raise _missing(path, manifest) from None

    def load(self, manifest: Manifest) -> RankState:
        """Read and check the state that this rank restores: afterwards `apply` succeeds. Changes nothing."""
        entries = manifest.get("states")
        if entries is None:
            state = older_state(manifest, self._read_all(manifest), self._rank, self._world)
        else:
            same_ranks = len(entries) == self._world
            own = self._read(manifest, self._rank) if same_ranks else {}
            restores_own = same_ranks and [entry["replica"] for entry in entries] == self._replicas
            if restores_own and (self._world == 1 or not self._read_only):
                dense = self._completed(manifest, self._rank, own)
                state = RankState(dense["model"], dense["optimizers"], own.get("sync"), own["random"])
            else:
                state = self._mean(manifest)
                state.random = own.get("random")
            if same_ranks:
                state.tables = [own.get("tables", {})]
        state_tree.check_dense({"model": state.model, "optimizers": state.optimizers}, self._dense_state())
        if not self._read_only:
            for optimizer in state.optimizers:
                check_frozen_state(optimizer["state"])
        for current, saved in zip(self._optimizers, state.optimizers, strict=True):
            state_tree.check_optimizer(current, saved["state"])
        if self._dense_sync is not None and state.sync is not None:
            self._dense_sync.check_state_dict(state.sync)
        if state.random is not None:
            state_tree.check_random_state(state.random)
        return state

    def apply(self, state: RankState) -> None:
        """Give model, optimizers, synchronization and random generators the result of `load`."""
        if self._model is not None:
            load_dense_state_dict(self._model, state.model or {})
        for optimizer, saved in zip(self._optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(saved["state"])
        if self._dense_sync is not None and state.sync is not None:
            self._dense_sync.load_state_dict(state.sync)
        for name, table in self._tables.items():
            table.load_rank_state([saved[name] for saved in state.tables if name in saved])
        if state.random is not None:
            state_tree.set_random_state(state.random)

    def _mean(self, manifest: Manifest) -> RankState:
        """Return the mean of all ranks' models and optimizers. Reads one file after the other."""
        mean, tree = TensorMean(), None
        frozen: dict[str, torch.Tensor] = {}
        latest: tuple[int, dict[str, Any]] = (-1, {})
        tables = []
        overlapping = overlapping_ranks(self._rank, self._world, len(manifest["states"]))
        for rank, entry in enumerate(manifest["states"]):
            own = self._read(manifest, rank)
            dense = self._completed(manifest, rank, own, latest)
            latest = (entry["replica"], dense)
            tables += [own.get("tables", {})] * (rank in overlapping)
            for name in own.get("frozen", ()):
                if not same_bits(frozen.setdefault(name, dense["model"][name]), dense["model"][name]):
                    raise FormatError(
                        f"{self._folder / entry['file']}: parameter {name!r} is frozen (requires_grad False) and "
                        f"differs between rank {rank} and rank 0, so the ranks have no mean: restore it with the "
                        f"{len(manifest['states'])} ranks that saved it"
                    )
            tensors: state_tree.Tensors = {}
            packed = state_tree.pack(dense, tensors, "dense")
            tree = packed if tree is None else tree
            try:
                mean.add(entry["node"], tensors)
            except ValueError as error:
                path = self._folder / entry["file"]
                raise FormatError(f"{path}: the ranks have different dense models or optimizers: {error}") from None
        state: dict[str, Any] = state_tree.unpack(tree, mean.result())
        if self._world == 1 < len(manifest["states"]):
            state["optimizers"] = [without_frozen_state(optimizer) for optimizer in state["optimizers"]]
        return RankState(state["model"], state["optimizers"], tables=tables)

    def _completed(
        self, manifest: Manifest, rank: int, own: dict[str, Any], known: tuple[int, dict[str, Any]] = (-1, {})
    ) -> dict[str, Any]:
        """Add the parameters and optimizers that are in another rank's file: that of `known`, or read now."""
        replica = manifest["states"][rank]["replica"]
        shared = own
        if replica != rank:
            shared = known[1] if known[0] == replica else self._read(manifest, replica)
        model = None if shared["model"] is None else {**shared["model"], **own["model"]}
        return {"model": model, "optimizers": shared["optimizers"]}

    def _read(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """Read and verify the file of a rank."""
        name = manifest["states"][rank]["file"]
        data = self._read_file(manifest, name)
        values = state_tree.values_of(data, str(self._folder / name))
        state: dict[str, Any] = state_tree.unpack(values["state"], state_tree.decode(data))
        return state

    def _read_all(self, manifest: Manifest) -> state_tree.Tensors:
        tensors: state_tree.Tensors = {}
        for name in manifest["files"]:
            tensors.update(state_tree.decode(self._read_file(manifest, name)))
        return tensors

    def _path(self, manifest: Manifest, name: str) -> Path:
        return confined_path(self._folder, name, f"the manifest of step {manifest['step']} in {self._folder}")

    def _read_file(self, manifest: Manifest, name: str) -> bytes:
        path, expected = self._path(manifest, name), manifest["files"][name]
        try:
            data = read_limited(path, expected["bytes"])
        except FileNotFoundError:
            raise _missing(path, manifest) from None
        if len(data) != expected["bytes"] or sha256_hex(data) != expected["sha256"]:
            raise CorruptionError(
                f"{path} is damaged: its checksum differs from the manifest. To continue from the checkpoint before, "
                f"move the files of step {manifest['step']} ({path.name.partition('.')[0]}*) away; eval and predict "
                "read another one with --checkpoint"
            )
        return data


def _missing(path: Path, manifest: Manifest) -> NotFoundError:
    return NotFoundError(f"{path} is missing: the checkpoint of step {manifest['step']} needs it")
