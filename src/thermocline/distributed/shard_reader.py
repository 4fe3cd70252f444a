"""`ShardReaderTable`: the rows of a checkpoint's stores, read only, to evaluate a model in one process or over ranks.

The stores may be those of any number of ranks. Over ranks, each rank opens only the stores that can contain rows it
owns, and sends rows to the others as in training (`ShardedBackend`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from thermocline.arrays import Floats, Keys, Rows
from thermocline.config.distributed import Hops
from thermocline.distributed.key_sharding import overlapping_ranks, owner_of
from thermocline.distributed.split_horizon import SplitHorizon
from thermocline.embedding.admission import Admission
from thermocline.embedding.admission_backend import AdmissionBackend
from thermocline.embedding.backend import KeyHorizon, RowBackend
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import parse_precision
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import LookAheadLimits, TableSpec
from thermocline.serving.changes import merge_by_hash
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_backend import DramBackend
from thermocline.tiers.dram_horizon import DramHorizon
from thermocline.tiers.host_rows import make_dram_tier, open_store
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.text_format import parse_size

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.sharded_backend import ShardedBackend


class _Shard(NamedTuple):
    """The open store of one rank that saved the checkpoint."""

    rank: int
    store: SsdStore
    tier: DramTier | None
    """Reads the store; None: its rows were read into DRAM."""

    @property
    def dram(self) -> DramTier:
        assert self.tier is not None
        return self.tier


class ShardReaderBackend(DramBackend):
    """Reads each key from the store of the rank that saved it. Budgets are divided among the open stores.

    rank, world   the reader's: it opens only stores with rows of keys that this rank owns
    """

    def __init__(self, spec: TableSpec, root: Path | None, rank: int = 0, world: int = 1) -> None:
        super().__init__(dataclasses.replace(spec, lookahead=None))
        self._lookahead = None if root is None else spec.lookahead
        self.root = root
        """Folder of all stores; None: the stores are read into DRAM."""
        self._rank, self._world = rank, world
        self._saved_world = 1
        self._shards: list[_Shard] = []

    @property
    def lookahead(self) -> LookAheadLimits | None:
        return self._lookahead

    @property
    def stores(self) -> list[SsdStore]:
        return [shard.store for shard in self._shards]

    def horizon(self, *, training: bool) -> KeyHorizon:
        parts = [DramHorizon(shard, training=training) for shard in self._shards]
        return parts[0] if len(parts) == 1 else SplitHorizon(parts, self._by_shard)

    def _by_shard(self, keys: Keys) -> list[Keys]:
        owners = owner_of(keys, self._saved_world)
        return [keys[owners == shard.rank] for shard in self._shards]

    def open_stores(self, sources: Sequence[tuple[Path, int]]) -> None:
        """Open (folder, epoch) of the ranks that saved a checkpoint, by rank. Without `root`, read rows into DRAM."""
        self.close()
        self._saved_world = len(sources)
        ranks = overlapping_ranks(self._rank, self._world, len(sources))
        budget = self.spec.store_options["mem_budget"]
        share = None if budget is None else parse_size(budget, "ssd_mem") // len(ranks)
        scale: LearnedScale | None = None
        for rank in ranks:
            path, epoch = sources[rank]
            store = open_store(self.spec, path, epoch=epoch, read_only=True, mem_budget=share)
            tier = None
            if self.root is not None:
                reserved = 0 if self._lookahead is None else self._lookahead.bytes // len(ranks)
                tier = make_dram_tier(self.spec, budget=self.spec.mem // len(ranks), reserved=reserved, store=store)
            self._shards.append(_Shard(rank, store, tier))
            saved_scale = parse_precision(store.note)[1] if store.epoch else None
            if saved_scale is not None and tier is not None:
                tier.set_scale(saved_scale)
            scale = saved_scale if scale is None else scale
        if self.root is None:
            self.replace_rows(self._owned_rows(), scale)
        elif scale is not None:
            self.host.dram.set_scale(scale)  # `rows` decodes with it

    def _owned_rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        for shard in self._shards:
            yield from self._owned_rows_of(shard, batch_rows)

    def _owned_rows_of(self, shard: _Shard, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        for keys, rows in shard.store.scan(batch_rows):
            owned = owner_of(keys, self._world) == self._rank
            yield keys[owned], rows[owned]

    def read(self, keys: Keys) -> Floats:
        if self.root is None:
            return super().read(keys)
        owners = owner_of(keys, self._saved_world)
        rows = np.empty((len(keys), self.host.dram.floats), np.float32)
        for shard in self._shards:
            owned = owners == shard.rank
            rows[owned] = shard.dram.read(keys[owned])
        return self.caught_up(rows)

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        streams = [self._owned_rows_of(shard, batch_rows=batch_rows) for shard in self._shards]
        for keys, rows in merge_by_hash(streams):
            yield keys, self.host.dram.decode(rows.view(np.float32))

    def close(self) -> None:
        super().close()
        while self._shards:
            self._shards.pop().store.close()


class ShardReaderTable(Table):
    """A read-only table. `tc.Checkpoints(read_only=True).restore()` opens the stores that a checkpoint names.

    `ssd` is the folder of the checkpoint's stores. With `groups`, the ranks share the rows and all reads are
    collective.
    """

    _reader: ShardReaderBackend

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        ssd: str | os.PathLike[str] | None = None,
        groups: Groups | None = None,
        hops: Hops = "two",
        **options: Any,
    ) -> None:
        root = None if ssd is None else Path(ssd)

        lookahead = options.get("lookahead", "auto")

        def make_backend(spec: TableSpec, device: str, epoch: int | None) -> RowBackend:
            if root is not None:
                spec = dataclasses.replace(spec, lookahead=LookAheadLimits.of(lookahead, spec.mem, spec.row_bytes))
            if groups is None:
                self._reader = ShardReaderBackend(spec, root)
                return self._reader
            from thermocline.distributed.sharded_table import agree_on_lookahead, make_sharded_backend

            topology, spec = groups.topology, agree_on_lookahead(spec, groups)
            self._reader = ShardReaderBackend(spec, root, topology.rank, topology.world)
            return make_sharded_backend(spec, self._reader, groups, hops=hops, wire="fp32")

        super().__init__(dim, optimizer, make_backend=make_backend, **options)

    @property
    def store_root(self) -> Path | None:
        """Folder of all stores; None: the checkpoint's run folder has them."""
        return self._reader.root

    @property
    def stores(self) -> list[SsdStore]:
        """The open stores, by rank."""
        return self._reader.stores

    def open_stores(self, sources: Sequence[tuple[Path, int]]) -> None:
        """Open (folder, epoch) of the ranks that saved a checkpoint, by rank."""
        self._reader.open_stores(sources)
        if self._admission is not None:
            self._admission.rows_replaced()

    def _make_admission(self, admission: Admission) -> AdmissionBackend:
        if self.groups is None:
            return AdmissionBackend(self._reader, self.spec, admission, lambda: self._reader.stores)
        from thermocline.distributed.sharded_admission import ShardedAdmissionBackend

        sharded = cast("ShardedBackend", self.backend)
        return ShardedAdmissionBackend(sharded, self.spec, admission, lambda: self._reader.stores)
