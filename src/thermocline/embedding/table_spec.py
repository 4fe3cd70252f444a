"""`TableSpec`: the row layout and the budgets of a table, as its backend receives them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from thermocline.embedding.initializers import Initial
from thermocline.embedding.member_keys import Member
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Precision
from thermocline.embedding.row_statistics import NO_STATISTICS, RowStatistics
from thermocline.errors import whole_number
from thermocline.utils.text_format import format_size, parse_size

Policy = Literal["lru_lfu", "lru", "lfu"]
OnDamage = Literal["stop", "continue"]

_LEAST_MEM = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class LookAheadLimits:
    """Limits of the look-ahead over coming batches (`pipeline/lookahead.py`)."""

    batches: int | None
    """Largest number of batches whose rows are loaded together; None: no limit."""
    bytes: int
    """Bytes of the batches in flight and their keys, without their rows."""

    @classmethod
    def of(cls, lookahead: int | str, mem: int, row_bytes: int) -> LookAheadLimits | None:
        """Return the limits of a setting "auto", a number of batches, or a size. None: 0 batches disable it."""
        # A row loaded ahead needs its slot, and about 50 bytes for the ids and keys of the batches that use it.
        share = min(max(50 / (50 + 1.2 * (row_bytes + 40)), 1 / 16), 1 / 4)
        if lookahead == "auto":  # in less memory groups stay small, and cost more than they save
            return cls(None, int(mem * share)) if mem >= _LEAST_MEM else None
        if isinstance(lookahead, str):
            size = parse_size(lookahead, "lookahead")
            if not 0 < size <= mem // 2:
                raise ValueError(
                    f"lookahead is {lookahead!r}: it is a part of mem, {format_size(mem)}, and at most half of it"
                )
            return cls(None, size)
        count = whole_number(lookahead, "lookahead")
        if count < 0:
            raise ValueError(f'lookahead is {count}: it must be "auto", a number of batches from 0, or a size')
        return cls(count, int(mem * share)) if count else None


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
    """Bytes of DRAM for rows and the look-ahead."""
    ssd: Path | None
    """Folder of the store; None: all rows stay in DRAM."""
    lookahead: LookAheadLimits | None
    """Limits of the look-ahead; None: rows are loaded batch by batch. Has no effect without `ssd`."""
    store_options: Mapping[str, Any]
    """Keyword arguments of `SsdStore.open`."""
    on_damage: OnDamage = "stop"
    """Whether training stops when a merge of the store finds damage."""
    statistics: RowStatistics = NO_STATISTICS
    """Statistics that rows have, after the optimizer's state."""
    members: tuple[Member, ...] = ()
    """The tables whose rows are stored here together; empty: one table."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row: weights, optimizer state and statistics."""
        return self.precision.row_bytes(self.dim, self.optimizer) + self.statistics.bytes

    @property
    def trained_floats(self) -> int:
        """Floats of a decoded row without its statistics: weights and optimizer state."""
        return self.dim + self.optimizer.state_floats(self.dim)

    @property
    def row_floats(self) -> int:
        """Floats of a decoded row; those of its statistics are bit patterns."""
        return self.trained_floats + self.statistics.words

    @property
    def table_id(self) -> int:
        """64-bit hash of the name: initial rows and rounding are functions of (seed, table_id, key)."""
        return table_id(self.name)

    @property
    def layout(self) -> dict[str, Any]:
        """Everything that determines rows and their updates, as JSON. Tables can share rows only if it is equal."""
        optimizer = dataclasses.asdict(self.optimizer)
        del optimizer["lr"]  # changes from step to step
        if not self.optimizer.catches_up:  # files of earlier versions do not have these
            del optimizer["lazy"], optimizer["catch_up_steps"]
        return {
            "dim": self.dim,
            "optimizer": {"kind": type(self.optimizer).__name__, **optimizer},
            "seed": self.seed,
            "initial": describe_initial(self.initial),
            "precision": self.precision.layout,
            "statistics": list(self.statistics.names),
            **({"tables": self._member_layouts()} if self.members else {}),
        }

    def _member_layouts(self) -> dict[str, Any]:
        return {member.name: {"initial": describe_initial(member.initial)} for member in self.members}


def table_id(name: str) -> int:
    """Return the 64-bit hash of a table's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def describe_initial(initial: Initial) -> dict[str, Any]:
    """Return an initializer as JSON."""
    return {"kind": type(initial).__name__, **dataclasses.asdict(initial)}
