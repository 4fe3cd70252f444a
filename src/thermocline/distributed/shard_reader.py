"""`JoinedTable`: the rows of all ranks' stores in one process, read only: evaluates what several ranks have trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.batch import Batch
from thermocline.distributed.key_sharding import owner_of
from thermocline.embedding.batch_plan import BagSpec, Prepared
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table import Table
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.text_format import parse_size


class JoinedTable(Table):
    """Made empty; `tc.Checkpoints(read_only=True).restore()` opens the stores that a checkpoint names.

    `ssd` is the folder of all ranks' folders. The budgets are divided among their stores.
    """

    def __init__(
        self, dim: int, optimizer: Optimizer, *, ssd: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__(dim, optimizer, **options)
        self.root = None if ssd is None else Path(ssd)
        self._stores: list[SsdStore] = []
        self._tiers: list[DramTier] = []

    def open_ranks(self, sources: Sequence[tuple[Path, int]]) -> None:
        """The rows of these folders' epochs, by rank. Without `ssd` all of them are read into memory."""
        self.close()
        share = parse_size(self._store_options["mem_budget"], "ssd_mem") // len(sources)
        for path, epoch in sources:
            store = self.open_store(path, epoch=epoch, read_only=True, mem_budget=share)
            self._stores.append(store)
            if self.root is not None:
                budget = self._mem_budget // len(sources)
                self._tiers.append(DramTier(self.dim, self.optimizer, budget=budget, store=store, **self._tier_options))
            else:
                for keys, rows in store.scan():
                    self.dram.push_stored(keys, rows.view(np.float32), dirty=False)

    def read(self, keys: Any) -> Floats:
        """float32[n, dim + state]: from the rank that owns each key."""
        wanted = as_keys(keys)
        if not self._tiers:
            return super().read(wanted)
        owners = owner_of(wanted, len(self._tiers))
        rows = np.empty((len(wanted), self.dram.floats), np.float32)
        for rank, tier in enumerate(self._tiers):
            mine = owners == rank
            rows[mine] = tier.read(wanted[mine])
        return rows

    def rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Floats]]:
        """Every trained row once, store by store."""
        for store in self._stores:
            for keys, rows in store.scan(batch_rows=batch_rows):
                yield keys, self.dram.decode(rows.view(np.float32))

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> Prepared:
        """As of `Table`."""
        parts, working_set = self.collect(batch, specs)
        return Prepared(self.dram, parts, working_set, None, None, self.read(working_set.keys))

    def close(self) -> None:
        """Closes all stores."""
        super().close()
        self._tiers = []
        while self._stores:
            self._stores.pop().close()
