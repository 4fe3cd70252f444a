"""`TableSpec`: the row layout and the budgets of a table, as its backend receives them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from thermocline.embedding.initializers import Initial
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Precision

Policy = Literal["lru_lfu", "lru", "lfu"]
OnDamage = Literal["stop", "continue"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSpec:
    """Constant for the life of a table."""

    name: str
    dim: int
    optimizer: Optimizer
    precision: Precision
    initial: Initial
    seed: int
    policy: Policy
    """Eviction policy of the DRAM tier."""
    threads: int | None
    """Threads of one host operation; None: all cores. No result depends on it."""
    hbm: int | None
    """Bytes of GPU memory; None: rows are trained in DRAM."""
    mem: int
    """Bytes of DRAM for rows."""
    ssd: Path | None
    """Folder of the store; None: all rows stay in DRAM."""
    store_options: Mapping[str, Any]
    """Keyword arguments of `SsdStore.open`."""
    on_damage: OnDamage = "stop"
    """Whether training stops when a merge of the store finds damage."""

    @property
    def table_id(self) -> int:
        """64-bit hash of the name: initial rows and rounding are functions of (seed, table_id, key)."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")

    @property
    def layout(self) -> dict[str, Any]:
        """Everything that determines rows and their updates, as JSON. Tables can share rows only if it is equal."""
        optimizer = dataclasses.asdict(self.optimizer)
        del optimizer["lr"]  # changes from step to step
        return {
            "dim": self.dim,
            "optimizer": {"kind": type(self.optimizer).__name__, **optimizer},
            "seed": self.seed,
            "initial": {"kind": type(self.initial).__name__, **dataclasses.asdict(self.initial)},
            "precision": self.precision.layout,
        }
