"""`ShardReaderTable`: the rows of all ranks' stores in one process, read only, to evaluate a model trained by ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys
from thermocline.distributed.key_sharding import owner_of
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_backend import DramBackend
from thermocline.tiers.host_rows import make_dram_tier, open_store
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.text_format import parse_size


class ShardReaderBackend(DramBackend):
    """Reads each key from the store of the rank that owns it. Budgets are divided among the stores."""

    def __init__(self, spec: TableSpec, root: Path | None) -> None:
        super().__init__(spec)
        self.root = root
        """Folder of all ranks' folders; None: the stores are read into DRAM."""
        self._stores: list[SsdStore] = []
        self._tiers: list[DramTier] = []

    def open_ranks(self, sources: Sequence[tuple[Path, int]]) -> None:
        """Open (folder, epoch) of each rank, by rank. Without `root` all rows are read into DRAM."""
        self.close()
        budget = self.spec.store_options["mem_budget"]
        share = None if budget is None else parse_size(budget, "ssd_mem") // len(sources)
        for path, epoch in sources:
            store = open_store(self.spec, path, epoch=epoch, read_only=True, mem_budget=share)
            self._stores.append(store)
            if self.root is not None:
                self._tiers.append(make_dram_tier(self.spec, budget=self.spec.mem // len(sources), store=store))
            else:
                for keys, rows in store.scan():
                    self.host.dram.push_stored(keys, rows.view(np.float32), dirty=False)

    def read(self, keys: Keys) -> Floats:
        if not self._tiers:
            return super().read(keys)
        owners = owner_of(keys, len(self._tiers))
        rows = np.empty((len(keys), self.host.dram.floats), np.float32)
        for rank, tier in enumerate(self._tiers):
            owned = owners == rank
            rows[owned] = tier.read(keys[owned])
        return rows

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        for shard in self._stores:
            for keys, rows in shard.scan(batch_rows=batch_rows):
                yield keys, self.host.dram.decode(rows.view(np.float32))

    def close(self) -> None:
        super().close()
        self._tiers = []
        while self._stores:
            self._stores.pop().close()


class ShardReaderTable(Table):
    """A read-only table. `tc.Checkpoints(read_only=True).restore()` opens the stores that a checkpoint names.

    `ssd` is the folder of all ranks' folders.
    """

    backend: ShardReaderBackend

    def __init__(
        self, dim: int, optimizer: Optimizer, *, ssd: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        root = None if ssd is None else Path(ssd)
        super().__init__(
            dim, optimizer, make_backend=lambda spec, device, epoch: ShardReaderBackend(spec, root), **options
        )

    @property
    def store_root(self) -> Path | None:
        """Folder of all ranks' stores; None: the checkpoint's run folder has them."""
        return self.backend.root
