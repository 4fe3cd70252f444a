"""What a batch is to a table: parts that are pooled alike, rows pinned for it, gradients that wait for a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from thermocline.arrays import Floats, Keys, Offsets, Slots
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.tiers.dram import DramTier, Pins

if TYPE_CHECKING:
    from thermocline.tiers.hbm import HbmPins

Pooling = Literal["sum", "mean", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class BagSpec:
    """What one bag reads of a batch: fields that are pooled alike, and their places among the bag's outputs."""

    fields: tuple[int, ...]
    pooling: Pooling
    places: tuple[int, ...] = dataclasses.field(compare=False)  # bags that differ in these share a part


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """One BagSpec's share of a prepared batch."""

    ids: Keys
    offsets: Offsets | None
    weights: Floats | None
    mean: bool
    first_id: int
    """Where its ids stand among those of the batch's other parts."""
    id_slots: Slots | None = None
    """Per id: where its row is pinned; none when rows were copied for evaluation."""

    plan: tuple[Slots, Floats | None] | None = None

    @property
    def bags(self) -> int:
        """Vectors it pools to."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def gradient_plan(self, tier: core.DramTier) -> tuple[Slots, Floats | None]:
        """Per id: the row of the part's gradient that belongs to it, and what it is multiplied by."""
        if self.plan is None:
            order = np.arange(len(self.ids), dtype=np.uint32)
            self.plan = tier.plan(order, order, order, self.offsets, self.weights, self.mean)[1:]
        return self.plan


@dataclasses.dataclass(slots=True, eq=False)
class Prepared:
    """A batch's rows of one table, shared by all bags on the table: pinned, or copied for evaluation.

    The pipeline holds the pins until the loop moves on, every gradient until the step. A holder forgets its pins before
    it lets go: an interrupt in between leaves them to the garbage collector, never to a second let_go.
    """

    tier: DramTier
    parts: dict[BagSpec, Part]
    working_set: WorkingSet
    slots: Slots | None
    """Per unique key: where its row is pinned."""
    pins: Pins | None
    """Of these slots, and perhaps of other batches in the same window."""
    rows: Floats | None = None
    """Per unique key: a copy of its row, for evaluation, or from the rank that owns it."""
    plan: tuple[Slots, Floats | None] | None = None
    """Of the only part, in the working set's order: `Part.gradient_plan` per occurrence."""
    remote: Remote | None = None
    """Of a table over several ranks: `slots` are then places in the working set."""


@dataclasses.dataclass(slots=True, eq=False)
class Remote:
    """What the ranks have agreed about a batch."""

    route: Any  # dist.exchange.Route
    slots: Any
    """Of the keys that this rank owns, in the route's order: pinned here, for all ranks."""
    step: int | None = None
    """The table's steps when the rows came; none: they have not come yet."""


@dataclasses.dataclass(slots=True, eq=False)
class Gradient:
    """Of one pooled part, since backward."""

    order: int
    prepared: Any  # all of one kind: those of the CPU, or of the GPU
    pins: Pins | HbmPins
    part: Any
    grad: Any
    unchanged: Callable[[], bool]
    """Whether grad's memory is as backward left it: autograd may give the same memory to others."""
