"""Tables on every backend, with the same rows: DRAM, HBM, one rank of a sharded table, and the reference."""

from __future__ import annotations

from typing import Any

import thermocline as tc
from thermocline.embedding.reference_backend import ReferenceBackend

BACKENDS = ["dram", "hbm", "sharded", "reference"]


def open_table(backend: str, *, dim: int = 4, optimizer: Any = None, mem: Any = "1MB", **options: Any) -> tc.Table:
    """Open a table of one process. HBM runs on the GPU, or under Triton's interpreter."""
    optimizer = optimizer or tc.Adagrad(lr=0.1)
    if backend == "hbm":
        from thermocline.kernels import INTERPRETED

        options |= {"hbm": options.get("hbm", "1MB"), "device": "interpreter" if INTERPRETED else "cuda"}
    if backend == "sharded":
        return tc.ShardedTable(dim, optimizer, mem=mem, groups=tc.join_ranks(), **options)
    if backend == "reference":
        options["make_backend"] = ReferenceBackend.make
    return tc.Table(dim, optimizer, mem=mem, **options)


def pinned(table: tc.Table) -> int:
    """Return the pinned rows or windows of a table."""
    if isinstance(table.backend, ReferenceBackend):
        return table.backend.windows
    return table.dram.stats().pinned if table.hbm is None else table.hbm.stats().windows


def row_count(table: tc.Table) -> int:
    """Return the rows that the table has in its top tier."""
    if isinstance(table.backend, ReferenceBackend):
        return len(table.backend.table.rows)
    return table.dram.stats().resident if table.hbm is None else table.hbm.stats().resident
