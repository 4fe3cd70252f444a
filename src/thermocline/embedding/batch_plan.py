"""The parts of a batch that one table reads, and the gradients that backward leaves for the next step.

`BagInput` is the host-side input of one bag. Each backend turns it into its own prepared form (`BatchPlan.bags`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from thermocline.arrays import Floats, Keys, Offsets
from thermocline.batch import Batch, WorkingSet
from thermocline.embedding.member_keys import LARGEST_ID, member_keys

if TYPE_CHECKING:
    import torch

Pooling = Literal["sum", "mean", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class BagSpec:
    """Fields that one bag pools alike, and their positions among the bag's outputs."""

    fields: tuple[int, ...] | tuple[str, ...]
    """Numbers or names of fields of a batch."""
    pooling: Pooling
    positions: tuple[int, ...] = dataclasses.field(compare=False)  # bags that differ only here share an input
    salts: tuple[int, ...] = ()
    """Per field: the salt of its table, for tables that are stored together (`member_keys.py`). Empty: keys are ids."""
    parts: tuple[BagSpec, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Specs of several tables that were joined to this one, in the order of its fields (`merged_bags.py`)."""
    _hash: int = dataclasses.field(init=False, compare=False, repr=False)
    """Computed once: the specs of joined tables have many fields, and every pass looks them up several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.fields, self.pooling, self.salts)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # another process has other hashes
        return type(self), (self.fields, self.pooling, self.positions, self.salts, self.parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BagInput:
    """Ids, offsets and weights that one BagSpec selects from a batch."""

    ids: Keys
    offsets: Offsets | None
    """Bag b pools ids[offsets[b] : offsets[b + 1]]; None: one vector per id."""
    weights: Floats | None
    mean: bool
    first_id: int
    """Index of its first id among the ids of all inputs of the batch."""

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    @property
    def id_range(self) -> slice:
        """Its ids among the ids of all inputs of the batch."""
        return slice(self.first_id, self.first_id + len(self.ids))


BagInputs = Mapping[BagSpec, BagInput]
"""All that one table reads of one batch."""


def required_fields(specs: Iterable[BagSpec]) -> tuple[int, tuple[str, ...] | None]:
    """Return the smallest number of fields, and names of fields, that a batch for these bags has."""
    read = list(dict.fromkeys(field for spec in specs for field in spec.fields))
    names = [field for field in read if isinstance(field, str)]
    count = max([1, len(names), *(1 + field for field in read if isinstance(field, int))])
    if not names:
        return count, None
    unused = (name for i in itertools.count() if (name := f"unused {i}") not in names)
    return count, (*names, *itertools.islice(unused, count - len(names)))


def select_inputs(batch: Batch, specs: Sequence[BagSpec]) -> dict[BagSpec, BagInput]:
    """Cut a batch into the inputs of these bags. Touches no rows."""
    inputs: dict[BagSpec, BagInput] = {}
    first = 0
    for spec in specs:
        ids, offsets, weights = batch.select(spec.fields)
        if spec.salts:
            ids = salted(ids, offsets, spec)
        inputs[spec] = BagInput(
            ids, None if spec.pooling == "none" else offsets, weights, spec.pooling == "mean", first
        )
        first += len(ids)
    return inputs


def salted(ids: Keys, offsets: Offsets, spec: BagSpec) -> Keys:
    """Return the keys of the ids of a spec with salts, which `batch.select` returned."""
    salts = np.array(spec.salts, np.uint64)
    if len(salts) == 1:
        return member_keys(ids, salts[0], f"field {spec.fields[0]!r}")
    if len(ids) and ids.max() > LARGEST_ID:
        field = np.searchsorted(offsets, int(ids.argmax()), side="right") - 1
        member_keys(ids, salts[0], f"field {spec.fields[field % len(salts)]!r}")  # raises
    if len(ids) == len(offsets) - 1 and (np.diff(offsets) == 1).all():
        return (ids.reshape(-1, len(salts)) ^ salts).reshape(-1)
    return ids ^ np.repeat(np.tile(salts, (len(offsets) - 1) // len(salts)), np.diff(offsets))


def working_set_of(inputs: BagInputs, threads: int | None) -> WorkingSet:
    """Deduplicate the ids of all inputs, in order. A single input is not copied."""
    lists = [source.ids for source in inputs.values()]
    ids = lists[0] if len(lists) == 1 else np.concatenate([np.empty(0, np.uint64), *lists])
    return WorkingSet.of(ids, threads=threads)


class Pins(Protocol):
    """Shared ownership of the slots of one window: the rows stay in their slots until the last owner releases."""

    def acquire(self) -> bool:
        """Add an owner. Return False if the last owner has already released."""

    def release(self) -> None:
        """Remove an owner; the last one unpins the rows."""


class BatchPlan(Protocol):
    """The rows of one table that a batch reads, ready to be pooled: pinned for training, or copied for evaluation.

    The pipeline owns the pins until the loop requests the next batch; every gradient owns them until the step. An owner
    drops its reference before it calls `release`, so that an interrupt in between cannot release twice. Pins that lose
    their last reference are released too: a plan that no pipeline made ends with the autograd graph that refers to it.
    Plans can be referenced weakly.
    """

    @property
    def bags(self) -> Mapping[BagSpec, Any]:
        """The prepared inputs."""

    @property
    def pins(self) -> Pins | None:
        """None: the rows are copies; backward through them is an error."""

    def use(self) -> None:
        """Make the current device stream wait until the plan and its rows are ready. Does nothing on a CPU."""


@dataclasses.dataclass(slots=True, eq=False)
class Gradient:
    """The gradient of one pooled bag, kept from backward to the step."""

    order: int
    """Number of its forward pass: gradients are summed in this order."""
    batch: Batch
    plan: Any
    pins: Pins
    bag: Any
    values: torch.Tensor
    """float32[bags, dim], on the backend's device."""
    unchanged: Callable[[], bool]
    """Whether `values` is unchanged since backward: autograd may share its memory with a dense parameter."""
    spec: BagSpec
    """The fields of `batch` that `bag` pools."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReducedGradients:
    """One summed gradient per unique key of a step."""

    slots: Any
    """Location of each row, in the backend's own terms."""
    values: Any
    keys: Any = None
    """The keys themselves, where the backend needs them."""
    occurrences: Any = None
    """int64[n, 2], for row statistics: occurrences of each key, and the sum of their labels in `CLICK_UNIT`."""
