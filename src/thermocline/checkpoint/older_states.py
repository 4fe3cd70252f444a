"""Reads the dense state of checkpoints of formats 1 and 2, which have one model for all ranks.

Their manifest has the state as a tree; the tensors are in one file. Over several ranks (format 2) models were averaged
before a save. `ranks` of the tree has each rank's random states, the state of its `DenseParameters` and, with k-step
merging, of its optimizers.
"""

from __future__ import annotations

from typing import Any

from thermocline.checkpoint import state_tree
from thermocline.checkpoint.manifest import Json
from thermocline.checkpoint.state_tree import RankState
from thermocline.distributed.frozen_adam import without_frozen_state
from thermocline.distributed.model_mean import TensorMean


def older_values(manifest: dict[str, Json], rank: int, world: int) -> tuple[Json, Json]:
    """Return `position` and `extra` of a rank; of rank 0, without a position, if the number of ranks differs."""
    ranks = manifest.get("ranks", [manifest])
    if len(ranks) != world:
        return None, manifest["extra"]
    return ranks[rank]["position"], ranks[rank]["extra"]


def older_state(manifest: dict[str, Json], tensors: state_tree.Tensors, rank: int, world: int) -> RankState:
    """Return the state that a rank restores."""
    saved_world = len(manifest.get("ranks", [None]))
    dense: dict[str, Any] = state_tree.unpack(manifest["dense"], tensors)
    if saved_world == world:
        dense |= dense.get("ranks", {rank: {}})[rank]
        return RankState(dense["model"], dense["optimizers"], dense.get("sync"), dense["random"])
    if saved_world > 1 and "optimizers" in dense["ranks"][0]:
        dense["optimizers"] = _mean_optimizers([saved["optimizers"] for saved in dense["ranks"]], world)
    return RankState(dense["model"], dense["optimizers"])


def _mean_optimizers(ranks: list[Any], world: int) -> list[dict[str, Any]]:
    mean, trees = TensorMean(), []
    for optimizers in ranks:
        tensors: state_tree.Tensors = {}
        trees.append(state_tree.pack(optimizers, tensors, "optimizers"))
        mean.add(0, tensors)
    optimizers = state_tree.unpack(trees[0], mean.result())
    return [without_frozen_state(optimizer) for optimizer in optimizers] if world == 1 else optimizers
