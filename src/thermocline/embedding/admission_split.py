"""Divides the inputs of a batch by admission: ids that are trained, and ids that have no row.

The vector of a pooled bag with ids that are not admitted is

    (sum of admitted rows + sum of initial rows of the others) / number of all its ids, for mean

each sum from left to right; with otherwise="zero" the second sum is missing. Its gradient goes to admitted ids only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thermocline.arrays import Floats, Keys
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.admission import SHARED_KEY, Otherwise
from thermocline.embedding.batch_plan import BagInput, BagInputs, BagSpec, working_set_of

Refused = npt.NDArray[np.bool_]


def all_ids(inputs: BagInputs) -> Keys:
    """Return the ids of all inputs, in order. A single input is not copied."""
    lists = [source.ids for source in inputs.values()]
    return lists[0] if len(lists) == 1 else np.concatenate([np.empty(0, np.uint64), *lists])


def first_reads(inputs: BagInputs) -> npt.NDArray[np.uint8] | None:
    """Return, per id of all inputs, whether no earlier input reads its field: only these ids are counted.

    None: no field is read twice.
    """
    fields = [field for spec in inputs for field in spec.fields]
    if len(set(fields)) == len(fields):
        return None
    seen: set[int | str] = set()
    parts = []
    for spec, source in inputs.items():
        first = []
        for field in spec.fields:
            first.append(field not in seen)
            seen.add(field)
        if source.offsets is None:  # one field
            parts.append(np.full(len(source.ids), first[0], np.uint8))
        else:
            bags = np.tile(np.array(first, np.uint8), source.bags // len(first))
            parts.append(np.repeat(bags, np.diff(source.offsets)))
    return np.concatenate(parts)


@dataclasses.dataclass(slots=True, eq=False)
class SplitInput:
    """One bag input of a batch with ids that are not admitted."""

    refused: Refused
    """Per id of the input: whether it is not admitted."""
    others: BagInput | None
    """The ids that are not admitted, one bag for each element of `places`; None: their vector is zero."""
    places: npt.NDArray[np.int64]
    """Bags of the input with such ids."""
    sizes: Floats | None
    """For mean: the number of ids of each bag of the input, at least 1."""
    id_sizes: Floats | None
    """For mean: the number of ids of each id's bag."""


@dataclasses.dataclass(slots=True, eq=False)
class SplitInputs:
    """The inputs of a batch, as the backend trains them."""

    trained: BagInputs
    splits: dict[BagSpec, SplitInput]
    """Empty: all ids are in `trained`."""
    refused: Refused | None
    """Per id of all inputs: whether it is not admitted; None: all are."""

    @property
    def others(self) -> BagInputs:
        """Inputs of the ids that are not admitted and have initial rows."""
        return {spec: split.others for spec, split in self.splits.items() if split.others is not None}


def split_inputs(inputs: BagInputs, refused: Refused | None, otherwise: Otherwise) -> SplitInputs:
    """Divide the inputs of a batch. `refused`: per id of all inputs, or None if all are admitted."""
    if refused is None:
        return SplitInputs(inputs, {}, None)
    trained, splits = {}, {}
    first = first_other = 0
    for spec, source in inputs.items():
        own = refused[source.id_range]
        if otherwise == "shared":
            trained[spec] = dataclasses.replace(source, ids=np.where(own, np.uint64(SHARED_KEY), source.ids))
            continue
        trained[spec], splits[spec] = _split(source, own, first, first_other, initial=otherwise == "initial")
        first += len(trained[spec].ids)
        first_other += len(own) - len(trained[spec].ids)
    return SplitInputs(trained, splits, refused)


def trained_working_set(working_set: WorkingSet, split: SplitInputs, threads: int | None) -> WorkingSet:
    """Return the working set of the ids that are trained, given that of all ids of the inputs."""
    if split.refused is None:
        return working_set
    if not split.splits:  # refused ids have the shared key
        return working_set_of(split.trained, threads)
    arrays = (working_set.keys, working_set.inverse, working_set.starts, working_set.order)
    return WorkingSet(*core.split_working_set(*arrays, split.refused.view(np.uint8)))


def _split(
    source: BagInput, refused: Refused, first: int, first_other: int, *, initial: bool
) -> tuple[BagInput, SplitInput]:
    """Divide one input. An input without pooling gets a bag per id, with one id or none."""
    ids, offsets, weights, other_ids, other_offsets, other_weights, places = core.split_bags(
        source.ids, source.offsets, source.weights, refused.view(np.uint8)
    )
    trained = BagInput(ids, offsets, weights, mean=False, first_id=first)
    others = None
    if initial:
        others = BagInput(other_ids, other_offsets, other_weights, mean=False, first_id=first_other)
    sizes = id_sizes = None
    if source.mean:
        assert source.offsets is not None
        lengths = np.diff(source.offsets)
        sizes = np.maximum(lengths, 1).astype(np.float32)
        id_sizes = np.repeat(sizes, lengths)
    return trained, SplitInput(refused, others, places, sizes, id_sizes)


@dataclasses.dataclass(slots=True, eq=False)
class SplitBag:
    """A bag of a plan with ids that are not admitted."""

    trained: Any
    """The inner backend's bag of admitted ids."""
    others: Any
    """That of the other ids, in the plan of initial rows; None: zeros."""
    split: SplitInput
    weights: torch.Tensor | None
    """Weights of the admitted ids, on any device; None: all are 1."""
    _device: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return int(self.trained.bags)

    def on(self, device: torch.device, name: str) -> torch.Tensor:
        """Return an array of `split` on a device: copied once, on the thread and stream of the first use."""
        key = f"{name} {device}"
        if key not in self._device:
            self._device[key] = torch.from_numpy(getattr(self.split, name)).to(device)
        return self._device[key]
