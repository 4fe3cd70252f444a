"""`Dist`, the section [dist]: runs of several ranks. Imports no torch."""

from __future__ import annotations

from typing import Literal

from thermocline.config.dense_sync import DenseSync
from thermocline.config.fields import Maybe, Positive
from thermocline.config.section import section

Hops = Literal["two", "flat"]
Wire = Literal["fp32", "fp16", "bf16", "int8"]


@section("dist")
class Dist:
    """Communication between the ranks that torchrun starts. A single process does not use it."""

    hops: Hops = "two"
    """two: keys, rows and gradients pass through a rank of the same node, which sends each once between nodes. flat:
    every rank communicates with every owner. Both have the same bits."""
    wire: Wire = "fp32"
    """Precision of rows and gradients between nodes. fp32 is exact; int8 uses unbiased stochastic rounding."""
    overlap: bool = False
    """Exchange the rows of the next batch that no rank uses in the current one while the network computes on that one.
    Rows trained in DRAM. Same bits."""
    topology: Maybe[str] = None
    """File that maps ranks to nodes. By default torchrun's assignment (LOCAL_WORLD_SIZE)."""
    timeout: Positive = 300.0
    """Seconds of silence after which a rank that waits for other ranks fails. Commits, loads and other long local work
    do not count as silence."""
    busy_timeout: Positive = 3600.0
    """Seconds that a commit, a load or other local work of one rank may take while other ranks wait for it."""
    bind: bool = True
    """Bind each rank to the cores of one NUMA node, on machines with several."""
    dense_sync: DenseSync = DenseSync()
    """Synchronization of dense parameters."""
