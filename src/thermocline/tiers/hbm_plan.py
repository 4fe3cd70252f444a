"""Windows and batch plans of `HbmBackend`: device tensors, and the events that tell when they are ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from thermocline.embedding.batch_plan import BagInputs, BagSpec
from thermocline.kernels.segments import Segments
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_horizon import DramBatchAhead
from thermocline.tiers.hbm import HbmPins, StagedIds


@dataclasses.dataclass(slots=True, eq=False)
class HbmBag:
    """A bag input on the device."""

    slots: torch.Tensor
    """int32 per id: a slot of the arena; in a plan with `rows`, a row of it."""
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    mean: bool

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return len(self.slots) if self.offsets is None else len(self.offsets) - 1

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a stream must record before it uses the bag."""
        return [tensor for tensor in (self.slots, self.offsets, self.weights) if tensor is not None]


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class HbmBatchPlan:
    """See `BatchPlan`."""

    dram: DramTier
    """The tier below: reopening the table replaces it."""
    bags: dict[BagSpec, HbmBag]
    pins: HbmPins | None
    ready: torch.cuda.Event | None
    """Recorded after the plan's tensors were computed; None without CUDA."""
    segments: Segments | None = None
    """Ids of all bags, concatenated and grouped by slot."""
    counts: torch.Tensor | None = None
    """Counts of the segments in page-locked memory, valid after `ready`; None: already known."""
    gradient_index: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """For a plan with one bag: per occurrence in segment order, the row of its gradient and the coefficient."""
    rows: torch.Tensor | None = None
    """Per unique key: a copy of its row, for evaluation or received from the rank that owns it."""
    stored: bool = False
    """Whether `rows` have the stored precision; else float32."""
    used_on: Any = None
    """The stream that `use` prepared."""
    counted: bool = False
    """Whether its rows are in `HbmStats.rows`."""
    remote: Any = None
    """State of the sharded backend."""

    def use(self) -> None:
        """Make the current stream wait for the plan's tensors and for the rows of its slots."""
        if self.ready is None:
            return
        tensors = [tensor for bag in self.bags.values() for tensor in bag.tensors()]
        if self.segments is not None:
            tensors.append(self.segments.order)  # all its lists share one allocation
        if self.gradient_index is not None:
            tensors += [tensor for tensor in self.gradient_index if tensor is not None]
        if self.rows is not None:
            tensors.append(self.rows)
        stream = torch.cuda.current_stream(tensors[0].device)
        if self.used_on == stream:
            return
        stream.wait_event(self.ready)
        if self.segments is not None and self.counts is not None:
            self.ready.synchronize()  # long past, unless nothing runs ahead
            self.segments, self.counts = self.segments.known(*self.counts.tolist()), None
        if self.pins is not None:
            assert self.pins.ready is not None, "load() did not run for this window"
            stream.wait_event(self.pins.ready)
        for tensor in tensors:
            tensor.record_stream(stream)
        self.used_on = stream


@dataclasses.dataclass(slots=True, eq=False)
class HbmWindow:
    """See `RowWindow`."""

    inputs: list[BagInputs]
    ids: StagedIds | None
    """Ids of all batches on the device, until they are pinned."""
    pins: HbmPins | None = None
    ahead: Sequence[DramBatchAhead] = ()
    """The batches of a look-ahead: their rows stay in DRAM until they were copied."""

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()
        self.release_ahead()

    def release_ahead(self) -> None:
        ahead, self.ahead = self.ahead, ()
        for batch in ahead:
            batch.release()
