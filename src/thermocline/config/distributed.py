"""`Dist`: the section [dist] of a config, for runs of several ranks. Loads no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from thermocline.config.dense_sync import DenseSync
from thermocline.errors import require

Hops = Literal["two", "flat"]
Wire = Literal["fp32", "fp16", "bf16", "int8"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dist:
    """How the ranks that torchrun starts train one model. A process by itself needs none of it."""

    hops: Hops = "two"
    """Keys, rows and gradients go through a rank of the own node, which sends each once between nodes; or "flat": every
    rank talks to every owner. The same bits."""
    wire: Wire = "fp32"
    """Of rows and gradients between nodes. fp32 is exact; int8 is rounded by chance, right on average."""
    topology: str | None = None
    """File that says which ranks are on which node; none: as torchrun says (LOCAL_WORLD_SIZE)."""
    timeout: float = 300.0
    """Seconds that a rank waits for others before it gives up."""
    bind: bool = True
    """Each rank runs on the cores of one NUMA node, where a machine has several."""
    dense_sync: DenseSync = dataclasses.field(default_factory=DenseSync)
    """Dense parameters: averaged every step, or merged every k."""

    def __post_init__(self) -> None:
        require(self.timeout > 0, "dist.timeout", self.timeout, "above 0")
