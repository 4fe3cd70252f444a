"""Figures of one rank between two logs: speed, memory and disk of its tiers, rows that moved between them.

They are plain numbers, so that one collective gathers those of all ranks; the log of a run has them as "ranks".
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from thermocline.embedding.table import Table

SIZES = (
    "hbm_bytes", "hbm_budget", "hbm_rows", "dram_bytes", "dram_budget", "dram_rows", "ssd_rows", "disk_bytes",
    "disk_free", "disk_total",
)  # fmt: skip
"""Present state, summed over the tables of the rank. `ssd_rows` counts all versions of a row."""
RATES = (
    "used_hbm", "used_mem", "used_ssd", "used_new", "dram_to_hbm", "hbm_to_dram", "ssd_to_dram", "dram_to_ssd",
    "disk_read_bytes", "disk_written_bytes",
)  # fmt: skip
"""Per second: rows of batches by the tier they were in, rows moved between tiers, bytes of the disk."""
AHEAD = ("batches", "rows", "late_rows", "mb_per_s", "bytes", "budget")
NAMES = (
    "examples", "examples_per_s", "damaged_partitions", *SIZES, *(f"{name}_per_s" for name in RATES),
    *(f"ahead_{name}" for name in AHEAD),
)  # fmt: skip
"""Names of the figures, in the order of `RankFigures.take`."""


class RankFigures:
    """Reads the counters of a rank's tables; `take` returns the figures since the last `take`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._time = time.perf_counter()
        self._last = _read(tables)

    def take(
        self, examples: int, examples_per_s: float, ahead: Mapping[str, Any] | None, *, damaged: bool
    ) -> list[float]:
        """Return one number per name of `NAMES`; rates cover the time since the last call."""
        now, read = time.perf_counter(), _read(self._tables)
        seconds = max(now - self._time, 1e-9)
        # A restored table counts from 0 again.
        rates = [max(0, read[name] - self._last[name]) / seconds for name in RATES]
        self._time, self._last = now, read
        partitions = sum(map(_damaged_partitions, self._tables)) if damaged else 0
        horizon = [0 if ahead is None else ahead[name] for name in AHEAD]
        return [examples, examples_per_s, partitions, *(read[name] for name in SIZES), *rates, *horizon]


def by_name(figures: Sequence[float]) -> dict[str, float]:
    """Return the figures of a rank as a dict; numbers without a fraction are integers."""
    return {
        name: int(value) if float(value).is_integer() else round(value, 3)
        for name, value in zip(NAMES, figures, strict=True)
    }


def _damaged_partitions(table: Table) -> int:
    """Return the partitions of the table's stores that a merge set aside."""
    return sum(store.stats().damaged_partitions for store in _stores(table))


def _stores(table: Table) -> list[Any]:
    return [store for store in (table.store, table.checkpoint_store) if store is not None]


def _read(tables: Sequence[Table]) -> Counter[str]:
    """Return the figures of `SIZES`, and the counters behind `RATES`, summed over the tables."""
    total: Counter[str] = Counter()
    disks: dict[int, os.statvfs_result] = {}
    for table in tables:
        total.update({f"used_{tier}": count for tier, count in table.tier_counts().items()})
        tiers = table.backend.tiers
        if tiers.hbm is not None:
            hbm = tiers.hbm.stats()
            total.update(hbm_bytes=hbm.bytes_total, hbm_budget=hbm.budget, hbm_rows=hbm.resident)
            total.update(dram_to_hbm=hbm.from_dram + hbm.from_ssd + hbm.initialised, hbm_to_dram=hbm.written_back)
        if tiers.dram is not None:
            dram = tiers.dram.stats()
            total.update(dram_bytes=dram.bytes_total, dram_budget=dram.budget, dram_rows=dram.resident)
            total.update(ssd_to_dram=dram.from_store, dram_to_ssd=dram.flushed)
        for store in _stores(table):
            ssd = store.stats()
            total.update(ssd_rows=ssd.rows_in_base + ssd.rows_in_log, disk_bytes=ssd.disk_bytes)
            total.update(disk_read_bytes=ssd.bytes_read, disk_written_bytes=ssd.bytes_written)
            disks[os.stat(store.path).st_dev] = os.statvfs(store.path)
    for disk in disks.values():
        total.update(disk_free=disk.f_bavail * disk.f_frsize, disk_total=disk.f_blocks * disk.f_frsize)
    return total
