"""Wrappers of windows, plans and batches ahead by which `AdmissionBackend` keeps the decisions about a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any, Protocol

import numpy as np

from thermocline.arrays import Keys
from thermocline.embedding.admission_split import Refused, SplitInputs, all_ids
from thermocline.embedding.backend import BatchAhead, ReadCounts, RecordedRows, RowHorizon, RowWindow
from thermocline.embedding.batch_plan import BagInputs, BagSpec, Pins


class Planner(Protocol):
    """The backend, as these objects use it."""

    def decide(self, inputs: BagInputs) -> Decision:
        """Plan the next training batch."""

    def split(self, inputs: BagInputs, decision: Decision) -> SplitInputs:
        """Divide the inputs of a batch by a decision about it."""

    def replayed(self) -> None:
        """Note that a recorded step has trained one batch."""


class Decision:
    """The decision of the filter about one batch. It changes if a row of a coming batch is deleted (`inputs`)."""

    __slots__ = ("inputs", "refused", "specs")

    def __init__(self, inputs: BagInputs, refused: Refused | None, *, keep: bool = False) -> None:
        self.specs = tuple(inputs)
        self.refused = refused
        """Per id of all inputs; None: all are admitted. Another thread may replace it: read it once."""
        self.inputs = inputs if keep else None
        """The inputs, to decide again; None: the decision is final."""


class AdmittedAhead:
    """A batch of a horizon that loads admitted rows only. See `BatchAhead`."""

    def __init__(
        self,
        inner: BatchAhead,
        decision: Decision,
        inputs: BagInputs,
        refused: Refused | None,
        horizon: AdmittedHorizon,
    ) -> None:
        self.inner = inner
        self.decision = decision
        self.refused = refused
        """The decision when the batch was added: the horizon has the rows of the other ids."""
        self._lost = None if refused is None else all_ids(inputs)[refused]
        kept = () if decision.inputs is None else (source.ids for source in decision.inputs.values())
        self._bytes: int = sum(array.nbytes for array in (refused, self._lost, *kept) if array is not None)
        self._horizon: AdmittedHorizon | None = horizon
        horizon.count_bytes(self._bytes)

    def restore(self) -> Keys:
        ids, refused, lost = self.inner.restore(), self.refused, self._lost
        if refused is None or lost is None:
            return ids
        whole: Keys = np.empty(len(refused), np.uint64)
        whole[~refused] = ids[~refused] if len(ids) == len(refused) else ids
        whole[refused] = lost
        return whole

    @property
    def to_visit(self) -> float:
        return self.inner.to_visit

    def release(self) -> None:
        self.forget()
        self.inner.release()

    def forget(self) -> None:
        """Stop counting the memory of the decision."""
        horizon, self._horizon = self._horizon, None
        if horizon is not None:
            horizon.count_bytes(-self._bytes)

    @property
    def bytes(self) -> int:
        return self.inner.bytes + self._bytes


class AdmittedHorizon:
    """A horizon over training batches: each is planned when it is added. See `RowHorizon`."""

    def __init__(self, inner: RowHorizon, backend: Planner) -> None:
        self._inner = inner
        self._backend = backend
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, inputs: BagInputs, *, frozen: bool = False) -> BatchAhead:
        if frozen:
            return self._inner.add(inputs, frozen=True)  # rows that are only read
        decision = self._backend.decide(inputs)
        split = self._backend.split(inputs, decision)
        return AdmittedAhead(self._inner.add(split.trained), decision, inputs, split.refused, self)

    def count_bytes(self, added: int) -> None:
        with self._lock:
            self._bytes += added

    @property
    def full(self) -> bool:
        return self._inner.full

    def load(self, share: float = 1.0) -> bool:
        return self._inner.load(share)

    def drop(self) -> bool:
        return self._inner.drop()

    @property
    def dropped(self) -> bool:
        return self._inner.dropped

    @property
    def position(self) -> float:
        return self._inner.position

    @property
    def late_rows(self) -> int:
        return self._inner.late_rows

    @property
    def rows_loaded(self) -> int:
        return self._inner.rows_loaded

    @property
    def read_counts(self) -> ReadCounts:
        return self._inner.read_counts

    @property
    def bytes(self) -> int:
        return self._inner.bytes + self._bytes


@dataclasses.dataclass(slots=True, eq=False)
class AdmittedWindow:
    """See `RowWindow`."""

    inner: RowWindow
    inputs: list[SplitInputs]
    again: list[RowWindow] = dataclasses.field(default_factory=list)
    """Windows of batches that were planned again."""

    def release(self) -> None:
        self.inner.release()
        while self.again:
            self.again.pop().release()


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class AdmittedPlan:
    """See `BatchPlan`: the plan of a batch in which some ids are not admitted, or which may be planned again."""

    inner: Any
    initial: Any
    """Plan of the initial rows of the other ids; None: their vectors are zero, or there are none."""
    bags: dict[BagSpec, Any]
    """`SplitBag` if the batch has ids that are not admitted and not shared, else the inner plan's."""
    refused: Refused | None
    """The decision that was used."""
    window: AdmittedWindow | None
    """None in evaluation."""

    @property
    def pins(self) -> Pins | None:
        pins: Pins | None = self.inner.pins
        return pins

    def use(self) -> None:
        self.inner.use()
        if self.initial is not None:
            self.initial.use()


def inner_plan(plan: Any) -> Any:
    """Return the plan of the backend below."""
    return plan.inner if isinstance(plan, AdmittedPlan) else plan


class AdmittedRecordedRows:
    """See `RecordedRows`. A replay calls neither `update` nor `end_step`."""

    def __init__(self, inner: RecordedRows, backend: Planner) -> None:
        self._inner = inner
        self._backend = backend
        self.plan = inner.plan

    def load(self, plan: Any) -> None:
        self._inner.load(inner_plan(plan))

    def set_constants(self, step: int, lr: float, scale: float) -> None:
        self._inner.set_constants(step, lr, scale)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return self._inner.recording()

    def launched(self, plan: Any) -> None:
        self._inner.launched(inner_plan(plan))
        self._backend.replayed()
