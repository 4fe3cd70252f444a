"""`tc.ShardedTable`: one table over all ranks of a job."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.communicator import Groups
from thermocline.distributed.key_sharding import owner_of, rank_folder
from thermocline.distributed.rank_agreement import flatten, require_equal, versions
from thermocline.distributed.row_exchange import RowExchange
from thermocline.distributed.sharded_admission import ShardedAdmissionBackend
from thermocline.distributed.sharded_backend import ShardedBackend
from thermocline.distributed.store_files import require_store_files
from thermocline.distributed.topology import Topology
from thermocline.embedding.admission import Admission
from thermocline.embedding.admission_backend import AdmissionBackend
from thermocline.embedding.backend import ShardBackend
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec
from thermocline.tiers.local_backend import make_local_backend, training_device


class ShardedTable(Table):
    """A `tc.Table` whose rows are spread over the ranks of a job by the hash of their keys.

    Budgets are per rank; `ssd` is a folder shared by all ranks, in which each rank has its own. Every rank makes the
    same calls in the same order: batches (the same number on each rank; `tc.prefetch` adds empty ones where data has
    ended), steps, evaluation. Creating it is such a call: it raises `ConfigError` if name, dim, optimizer, precision,
    initializer, seed, device type, `hops`, `wire` or the versions of thermocline, torch and NumPy differ. A step
    applies the mean of the ranks' gradients. The result is bit for bit that of one process that computes all ranks'
    batches, whatever the tiers, the pipeline and the hops.
    """

    backend: ShardedBackend

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        groups: Groups,
        hops: Hops = "two",
        wire: Wire = "fp32",
        ssd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """
        groups   process groups of the job, from `tc.join_ranks()`
        hops     "two": within the node, then between nodes; "flat": every rank sends to every owner. Same bits
        wire     precision of rows and gradients between nodes: "fp32" is exact
        All other arguments are those of `tc.Table`; `expected_keys` is the number over all ranks.
        """
        topology = groups.topology
        if options.get("expected_keys") is not None:
            options["expected_keys"] = -(-options["expected_keys"] // topology.world)
        if ssd is not None:
            ssd = Path(ssd) / rank_folder(topology.rank, topology.world)
            ssd.parent.mkdir(parents=True, exist_ok=True)

        def make_backend(spec: TableSpec, device: str, epoch: int | None) -> ShardedBackend:
            if spec.precision.scale_lr:
                raise ValueError(
                    f"precision.scale_lr is {spec.precision.scale_lr}: it must be 0 for a table over ranks: each rank "
                    "would learn its own scale"
                )
            target = training_device(device, spec.hbm)
            more = {"hops": hops, "wire": wire, "device": "cpu" if target is None else target.type}
            more |= _admission_settings(options.get("admission"))
            require_equal(groups.train, _settings(spec, more), "a table over ranks must be equal on all ranks")
            spec = agree_on_lookahead(spec, groups)
            with groups.busy():  # opening a large store takes minutes
                local = make_local_backend(spec, device, epoch)
            try:
                require_store_files(groups, spec)
            except BaseException:
                local.close()
                raise
            return make_sharded_backend(spec, local, groups, hops=hops, wire=wire)

        super().__init__(dim, optimizer, ssd=ssd, make_backend=make_backend, **options)

    @property
    def topology(self) -> Topology:
        """The ranks and nodes of the job."""
        return self.backend.groups.topology

    @property
    def store_root(self) -> Path | None:
        """Folder of all ranks' stores; None: the table was opened without `ssd`."""
        return None if self.spec.ssd is None else self.spec.ssd.parent

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        mine: npt.NDArray[np.bool_] = owner_of(keys, self.topology.world) == self.topology.rank
        return mine

    def _make_admission(self, admission: Admission) -> AdmissionBackend:
        return ShardedAdmissionBackend(self.backend, self.spec, admission)

    def _new_history(self) -> str:
        """Return the token of rank 0. Collective."""
        token = np.array([secrets.randbits(62)])
        return f"{self.backend.groups.train.all_gather(token, 'beginning to train')[0, 0]:016x}"

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()[:-1]}, rank {self.topology.rank} of {self.topology.world})"


def agree_on_lookahead(spec: TableSpec, groups: Groups) -> TableSpec:
    """Return the spec without look-ahead if any rank has none: every rank sends hints, or none does. Collective."""
    wanted = groups.train.all_gather(np.array([spec.lookahead is not None]), "creating a table")
    return spec if wanted.all() else dataclasses.replace(spec, lookahead=None)


def make_sharded_backend(
    spec: TableSpec, local: ShardBackend, groups: Groups, *, hops: Hops, wire: Wire
) -> ShardedBackend:
    """Make the backend of a table whose rows of this rank are in `local`."""
    salt = spec.table_id & (2**63 - 1)
    exchange = RowExchange(groups.topology, hops=hops, wire=wire, salt=salt, threads=spec.threads)
    return ShardedBackend(spec, local, groups, exchange)


def _admission_settings(admission: Admission | None) -> dict[str, Any]:
    """Return the settings of admission that must be equal on all ranks; each may have counters of another size."""
    if admission is None:
        return {"admission": None}
    settings = dataclasses.asdict(admission)
    del settings["memory"]
    return {"admission": settings}


def _settings(spec: TableSpec, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that must be equal on all ranks. Budgets, folders and threads of a rank may differ."""
    layout = {**spec.layout, "optimizer": {**spec.layout["optimizer"], "lr": spec.optimizer.lr}, **more}
    table = flatten(layout, f"{spec.name}.")
    return {"name of the table": spec.name, **table, **versions()}
