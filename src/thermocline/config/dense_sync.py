"""`DenseSync`, the section [dist.dense_sync]: synchronization of the dense parameters. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from thermocline.config.fields import Count, Maybe, PositiveSize
from thermocline.config.messages import reject
from thermocline.config.section import section

Merge = Literal["v_frozen", "all", "params"]
Scope = Literal["ranks", "nodes"]
SyncMode = Literal["gradients", "v_frozen", "all", "params"]


@section("dist.dense_sync")
class DenseSync:
    """Average gradients every step, or step locally on each rank or node and merge the models every k steps."""

    every: Count = 1
    """Steps between merges, k. With 1 and no `merge`, gradients are averaged every step and all models stay equal."""
    merge: Maybe[Merge] = None
    """Values that a merge averages; by default v_frozen if `every` is above 1. v_frozen: parameters and Adam's second
    moments; all ranks divide by the merged moments until the next merge, and update their local m and v meanwhile. It
    also merges after steps 1, 2, 4, 8 and so on below k. all: parameters and all state of the optimizer. params:
    parameters only; the second moments of the ranks diverge, which harms some models."""
    scope: Scope = "ranks"
    """Unit that steps alone between merges. ranks: every rank. nodes: every node; its ranks average their gradients
    every step, and models are merged between nodes. It needs several nodes, all with the same number of ranks."""
    every_m: Maybe[Count] = None
    """Steps between merges of first moments, with merge = "all". By default as `every`."""
    every_v: Maybe[Count] = None
    """Steps between merges of second moments, with merge = "all" or "v_frozen". By default as `every`."""
    amsgrad: bool = False
    """Merged second moments never decrease (merge = "v_frozen")."""
    exact: bool = True
    """Sum in one fixed order: a run of all ranks in one process has the same bits. false: sums between nodes, and
    between GPUs, use torch's all-reduce, whose order depends on the library and the number of nodes; it sends as many
    bytes and can be faster."""
    bucket: PositiveSize = "25MB"
    """Approximate size of the buckets in which gradients are averaged; one bucket is in memory at a time."""

    @model_validator(mode="after")
    def _check_merge(self) -> Self:
        if self.scope == "nodes" and self.mode == "gradients":
            reject("scope", self.scope, '"ranks", unless every is above 1 or merge is set')
        if self.every_m is not None and self.mode != "all":
            reject("every_m", self.every_m, 'none, unless merge is "all"')
        if self.every_v is not None and self.mode not in ("all", "v_frozen"):
            reject("every_v", self.every_v, 'none, unless merge is "all" or "v_frozen"')
        if self.amsgrad and self.mode != "v_frozen":
            reject("amsgrad", self.amsgrad, 'false, unless merge is "v_frozen"')
        return self

    @property
    def mode(self) -> SyncMode:
        """The values that are averaged, with the default of `merge` resolved."""
        return self.merge or ("gradients" if self.every == 1 else "v_frozen")

    def periods(self) -> tuple[int | None, int | None, int | None]:
        """Return the steps between merges of parameters, first and second moments; None if they are not merged."""
        m = self.every if self.every_m is None else self.every_m
        v = self.every if self.every_v is None else self.every_v
        return self.every, m if self.mode == "all" else None, None if self.mode in ("params", "gradients") else v
