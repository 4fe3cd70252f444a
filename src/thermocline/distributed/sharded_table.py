"""`tc.ShardedTable`: one table over all ranks. Each rank owns the rows of its keys, in tiers and a store of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, as_keys
from thermocline.batch import Batch
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.communicator import Groups
from thermocline.distributed.key_sharding import rank_folder
from thermocline.distributed.row_exchange import Exchange
from thermocline.distributed.sharded_backend import Ranks
from thermocline.distributed.topology import Topology
from thermocline.embedding.batch_plan import BagSpec, Prepared
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.utils import atomic_file


class ShardedTable(Table):
    """A `tc.Table` whose rows are spread over the ranks of a job by their keys' hash.

    Budgets are each rank's own; `ssd` is the folder of all, in which each rank has one. Every rank makes the same calls
    in the same order: batches (as many on each, empty ones where data ran out: `tc.prefetch` sees to it), steps,
    evaluation. A step applies the mean over ranks of their gradients. The result is, bit for bit, what one process
    playing all ranks would get: however many keys they share, whatever the tiers, the pipeline and the hops.
    """

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        groups: Groups,
        hops: Hops = "two",
        wire: Wire = "fp32",
        ssd: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """
        groups   of the job, made by every rank
        hops     "two": within the node, then between nodes; "flat": every rank asks every owner. The same bits
        wire     of rows and gradients between nodes: "fp32" is exact
        Everything else is as in `tc.Table`.
        """
        self._open: list[Any] = []
        """Batches fetched since the last step: their rows stay pinned here, for all ranks."""
        t = groups.topology
        if ssd is not None:
            ssd = Path(ssd) / rank_folder(t.rank, t.world)
            ssd.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(dim, optimizer, ssd=ssd, threads=threads, **options)
        if self.precision.scale_lr:
            raise ValueError(
                f"precision.scale_lr is {self.precision.scale_lr}: it must be 0 for a table over ranks: each rank "
                "would learn its own scale"
            )
        salt: int = self._tier_options["table"] & (2**63 - 1)
        self.ranks: Ranks = Ranks(self, groups, Exchange(t, hops=hops, wire=wire, salt=salt, threads=threads))

    @property
    def topology(self) -> Topology:
        """Of its ranks."""
        return self.ranks.groups.topology

    @property
    def training(self) -> Any:
        """Of the rows that this rank owns."""
        return self._training

    # ---- a batch's life

    def prepare(self, batch: Batch) -> Any:
        """Keys and rows at once: what `tc.prefetch` spreads over its stages. All ranks call it."""
        ranks = self.ranks
        planned = ranks.plan([self.collect(batch)], ranks.groups.train)
        ranks.pin(planned)
        (prepared,) = ranks.prepare(planned)
        ranks.load(planned)
        self.fetch(prepared)
        return prepared

    def fetch(self, prepared: Any) -> None:
        """Brings the batch's rows from their owners, as the last step left them. All ranks call it."""
        self.ranks.fetch(prepared)
        if not prepared.pins.acquire():
            raise RuntimeError(f"table {self.name!r}: rows of a batch that was given back")
        self._open.append(prepared)

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> Any:
        """Copies of the batch's rows from their owners, for evaluation: inserts nothing. All ranks call it."""
        parts, working_set = self.collect(batch, specs)
        if self.gpu is None:
            rows, out = self.empty_rows(len(working_set))
            self.ranks.read(working_set.keys, out)
            return Prepared(self.dram, parts, working_set, None, None, rows)
        out = torch.empty(len(working_set), self.dim)
        self.ranks.read(working_set.keys, out)
        return self.gpu.prepare_rows(parts, working_set, out.to(self.gpu.tier.device), None)

    def empty_rows(self, count: int) -> tuple[Any, torch.Tensor]:
        """Rows of a batch as they are pooled, where training runs, and what of them is to be filled: their weights.

        On a CPU whole rows; the state, which nobody reads, is left as it is.
        """
        if self.gpu is not None:
            weights = torch.empty(count, self.dim, device=self.gpu.tier.device)
            return weights, weights
        rows = np.empty((count, self.dram.floats), np.float32)
        return rows, torch.from_numpy(rows)[:, : self.dim]

    def pool(self, prepared: Any, part: Any) -> Floats | torch.Tensor:
        """float32[bags, dim], where training runs."""
        remote = prepared.remote
        if remote is not None and remote.step != self.step_count:
            when = "have not come yet" if remote.step is None else "are those before the last step"
            raise RuntimeError(
                f"table {self.name!r}: the rows of this batch {when}: the order is batch, forward, backward, step, "
                "then the next batch"
            )
        return super().pool(prepared, part)

    # ---- the update

    def _sums(self) -> tuple[Any, Any, Any]:
        if self._summed is None:
            if not self._open:
                raise RuntimeError(f"table {self.name!r}: a step without a batch since the last one")
            self._summed = self.ranks.sums(self._open, self._in_order())
        summed: tuple[Any, Any, Any] = self._summed
        return summed

    def reduce_gradients(self) -> None:
        """What backward has collected goes to its owners now: autograd's memory may change. All ranks call it."""
        self._sums()

    def gradient_norm(self) -> float:
        """The joint norm of the mean over ranks of what backward has collected, on all ranks the same. All call it."""
        keys, _, sums = self._sums()
        order = np.argsort(keys)  # one order, whatever way the keys came
        ordered = sums[torch.from_numpy(order).to(sums.device)]
        mine = self._training.norm(ordered.numpy() if self.gpu is None else ordered)
        world = self.topology.world
        norms = self.ranks.groups.train.all_gather(np.array([mine]), "summed gradients")
        return math.hypot(*norms[:, 0].tolist()) / world

    def _apply(self, step: int, lr: float, scale: float) -> None:
        """By the mean over ranks of their gradients: all ranks call `step`, with the same arguments."""
        _, slots, sums = self._sums()
        if len(slots):
            if self.gpu is None:
                slots, sums = slots.numpy().view(np.uint32), sums.numpy()
            self._training.apply(slots, sums, step, lr, scale / self.topology.world)

    def discard_gradients(self) -> None:
        """Throws away what backward has collected; all ranks call it, or none."""
        super().discard_gradients()
        while self._open:
            self._open.pop().pins.release()

    # ---- the store, by folder: checkpoints of another number of ranks need others

    def use_folder(self, folder: str) -> None:
        """This rank's rows are in that folder of the table's, which is opened."""
        assert self._ssd_path is not None
        self._ssd_path = str(Path(self._ssd_path).parent / folder)
        self.reopen()

    def clear_folder(self, folder: str) -> None:
        """The same, with nothing in it."""
        assert self._ssd_path is not None
        assert self.store is not None
        self.store.close()
        path = Path(self._ssd_path).parent / folder
        if path.exists():
            atomic_file.remove_folder(path)
        self.use_folder(folder)

    # ---- rows

    def read(self, keys: Any) -> Floats:
        """float32[n, dim + state], from the rows' owners. All ranks call it, each with its own keys."""
        wanted = as_keys(keys)
        out = torch.empty(len(wanted), self.dram.floats)
        self.ranks.read(wanted, out)
        return out.numpy()

    def read_here(self, keys: Any) -> Floats:
        """The same of keys that this rank owns; of others it gives initial rows."""
        return super().read(keys)

    def __repr__(self) -> str:
        t = self.topology
        return f"Sharded{super().__repr__()[:-1]}, rank {t.rank} of {t.world})"
