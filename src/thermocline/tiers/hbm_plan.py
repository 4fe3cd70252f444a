"""Windows and batch plans of `HbmBackend`: device tensors, and the events that tell when they are ready."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from thermocline.embedding.batch_plan import BagInputs, BagSpec, Pins
from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.pool import Pooling
from thermocline.kernels.segments import Segments, find_segments, segment_views
from thermocline.kernels.update import RowUpdate
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_horizon import DramBatchAhead
from thermocline.tiers.hbm import Assign, HbmPins, StagedIds
from thermocline.tiers.plan_layout import PlanLayout, PlanMemory
from thermocline.utils.recording import current_stream

if TYPE_CHECKING:
    from thermocline.tiers.plan_graph import PlanGraph


@dataclasses.dataclass(slots=True, eq=False)
class HbmBag:
    """A bag input on the device."""

    slots: torch.Tensor
    """int32 per id: a slot of the arena; in a plan with `rows`, a row of it."""
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    mean: bool
    pooling: Pooling | None = dataclasses.field(default=None, init=False)
    """The pooling of the table's rows, once it was made."""

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return len(self.slots) if self.offsets is None else len(self.offsets) - 1

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a stream must record before it uses the bag."""
        return [tensor for tensor in (self.slots, self.offsets, self.weights) if tensor is not None]


@functools.lru_cache(1024)
def _shape(layout: PlanLayout, specs: tuple[BagSpec, ...]) -> object:
    return object()


class PlanLists:
    """Lists of a training plan in one allocation; views of it are made on demand, and kept for later plans in it."""

    __slots__ = (
        "_bags", "_gradient_index", "_parts", "_segments", "_shape", "_specs", "ids", "layout", "memory", "streams",
        "update",
    )  # fmt: skip

    def __init__(self, layout: PlanLayout, memory: torch.Tensor, ids: Sequence[int]) -> None:
        self.layout = layout
        self.memory = memory
        """int32[layout.words]."""
        self.ids = ids
        """Number of ids of each bag."""
        self.streams: set[int] = set()
        """Handles of the streams that the allocator knows to use the memory."""
        self.update: RowUpdate | None = None
        """The update of the table's rows by these lists, once it was made."""
        self._parts: PlanMemory | None = None
        self._specs: Sequence[BagSpec] = ()
        self._shape: object = None
        self._bags: dict[BagSpec, HbmBag] = {}
        self._segments: Segments | None = None
        self._gradient_index: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    @property
    def parts(self) -> PlanMemory:
        if self._parts is None:
            self._parts = self.layout.split(self.memory)
        return self._parts

    def bags(self, specs: Sequence[BagSpec]) -> dict[BagSpec, HbmBag]:
        if self._specs != specs:
            parts, bags = self.parts, {}
            for i, (spec, ids, bag) in enumerate(zip(specs, self.ids, self.layout.bags, strict=True)):
                weights = parts.weights[i]
                bags[spec] = HbmBag(
                    parts.slots[i][:ids], parts.offsets[i], None if weights is None else weights[:ids], bag.mean
                )
            self._specs, self._bags, self._shape = specs, bags, _shape(self.layout, tuple(specs))
        return self._bags

    def shape(self, specs: Sequence[BagSpec]) -> object:
        """Return an object that all lists with an equal layout and these bags have in common."""
        self.bags(specs)
        return self._shape

    def segments(self) -> Segments:
        """Return the segments with the largest possible sizes."""
        if self._segments is None:
            self._segments = segment_views(self.parts.segments, self.layout.ids, sum(self.ids))
        return self._segments

    def gradient_index(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._gradient_index is None:
            parts, ids = self.parts, sum(self.ids)
            rows, coefs = (None if part is None else part[:ids] for part in (parts.rows, parts.coefs))
            self._gradient_index = rows, coefs
        return self._gradient_index


def write_plan(
    lists: PlanLists, slots: torch.Tensor, inputs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
) -> Segments:
    """Compute all lists of a batch from the slots of its ids, int32[ids], and offsets and weights of each bag.

    The slots may be those of the lists themselves, if there is one bag. Offsets and weights are in device memory or in
    page-locked memory. Launches only: nothing is read on the host.
    """
    layout, ids = lists.layout, sum(lists.ids)
    parts = lists.parts
    first = 0
    for i, (offsets, weights) in enumerate(inputs):
        size, own_offsets, own_weights = lists.ids[i], parts.offsets[i], parts.weights[i]
        own_slots, given = parts.slots[i][:size], slots[first : first + size]
        if own_slots.data_ptr() != given.data_ptr():
            own_slots.copy_(given)
        if own_offsets is not None and offsets is not None:
            own_offsets.copy_(offsets, non_blocking=True)
        if own_weights is not None and weights is not None:
            own_weights[:size].copy_(weights, non_blocking=True)
        first += size
    segments = find_segments(slots, parts.segments, layout.ids)
    if parts.rows is None and parts.coefs is None:
        return segments
    bags = [
        (size, own_offsets, None if own_weights is None else own_weights[:size], bag.mean)
        for size, own_offsets, own_weights, bag in zip(
            lists.ids, parts.offsets, parts.weights, layout.bags, strict=True
        )
    ]
    if len(bags) == 1 and parts.rows is not None:
        out = parts.rows[:ids], None if parts.coefs is None else parts.coefs[:ids]
        size, own_offsets, own_weights, mean = bags[0]
        index_gradients(size, segments.order, own_offsets, own_weights, mean, slots.device, out)
        return segments
    order = segments.order.long()
    indices = [index_gradients(size, None, starts, factors, mean, slots.device) for size, starts, factors, mean in bags]
    if parts.rows is not None:
        first, rows = 0, []
        for bag, (own_rows, _) in zip(layout.bags, indices, strict=True):
            rows.append(own_rows + first)
            first += bag.vectors
        parts.rows[:ids].copy_(torch.cat(rows)[order])
    if parts.coefs is not None:
        coefs = [torch.ones_like(rows, dtype=torch.float32) if c is None else c for rows, c in indices]
        parts.coefs[:ids].copy_(torch.cat(coefs)[order])
    return segments


class HbmBatchPlan:
    """See `BatchPlan`. A training plan has `lists` and pins; a plan for evaluation has bags and `rows`."""

    __slots__ = (
        "__weakref__", "_bags", "_lists_segments", "as_of", "counted", "counts", "dram", "lists",
        "pins", "ready", "remote", "rows", "specs", "stored", "used_on",
    )  # fmt: skip

    def __init__(
        self,
        dram: DramTier,
        specs: Sequence[BagSpec],
        *,
        bags: dict[BagSpec, HbmBag] | None = None,
        lists: PlanLists | None = None,
        pins: Pins | None = None,
        ready: torch.cuda.Event | None = None,
        counts: Any = None,
        rows: torch.Tensor | None = None,
        stored: bool = False,
    ) -> None:
        self.dram = dram
        """The tier below: reopening the table replaces it."""
        self.specs = specs
        self.lists = lists
        self.pins = pins
        self.ready = ready
        """Recorded after the plan's tensors were computed; None without CUDA."""
        self.counts = counts
        """Counts of the segments: a list; or a tensor in page-locked memory, valid after `ready`."""
        self.rows = rows
        """Per unique key: a copy of its row, for evaluation or received from the rank that owns it."""
        self.stored = stored
        """Whether `rows` have the stored precision; else float32."""
        self.used_on = -1
        """Handle of the stream that `use` prepared."""
        self.counted = False
        """Whether its rows are in `HbmStats.rows`."""
        self.as_of: int | None = None
        """Step to which its rows were caught up; None: not yet."""
        self.remote: Any = None
        """State of the sharded backend."""
        self._bags = bags
        self._lists_segments: Segments | None = None

    @property
    def bags(self) -> dict[BagSpec, HbmBag]:
        if self._bags is None:
            assert self.lists is not None
            self._bags = self.lists.bags(self.specs)
        return self._bags

    @property
    def segments(self) -> Segments:
        """Ids of all bags, concatenated and grouped by slot. Only of a training plan, after `use`."""
        if self._lists_segments is None:
            assert self.lists is not None
            self._lists_segments = self.lists.segments().known(*self.known_counts())
        return self._lists_segments

    @property
    def gradient_index(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Per occurrence in segment order: the row among the gradients of all bags, and the coefficient.

        None: the row is the position; all coefficients are 1.
        """
        assert self.lists is not None
        return self.lists.gradient_index()

    def known_counts(self) -> list[int]:
        """Return the counts of the segments. Blocks until the plan is computed: long past, if it was made ahead."""
        if not isinstance(self.counts, list):
            if self.ready is not None:
                self.ready.synchronize()
            self.counts = self.counts.tolist()
        return self.counts

    def use(self) -> None:
        """Make the current stream wait for the plan's tensors and for the rows of its slots."""
        if self.ready is None:
            return
        lists = self.lists
        tensors = [next(iter(self.bags.values())).slots if lists is None else lists.memory]
        handle = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        if self.used_on == handle:
            return
        stream = current_stream(tensors[0].device)
        stream.wait_event(self.ready)
        if isinstance(self.pins, HbmPins):
            assert self.pins.loaded, "load() did not run for this window"
            if self.pins.ready is not None:
                stream.wait_event(self.pins.ready)
        if lists is None:
            tensors = [tensor for bag in self.bags.values() for tensor in bag.tensors()]
        elif handle in lists.streams:
            tensors = []
        else:
            lists.streams.add(handle)
        if self.rows is not None:
            tensors.append(self.rows)
        for tensor in tensors:
            tensor.record_stream(stream)
        self.used_on = handle


@dataclasses.dataclass(slots=True, eq=False)
class HbmWindow:
    """See `RowWindow`."""

    inputs: list[BagInputs]
    ids: StagedIds | None
    """Ids of all batches, until they are pinned."""
    graph: PlanGraph | None = None
    """The recorded planning of windows of this shape, if there is one."""
    pins: HbmPins | None = None
    ahead: Sequence[DramBatchAhead] = ()
    """The batches of a look-ahead: their rows stay in DRAM until they were copied."""

    @property
    def assign(self) -> Assign | None:
        """The planning of the window for `HbmTier`; None: `find_or_insert` and nothing else."""
        return None if self.graph is None else self.graph.launch

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()
        self.release_ahead()

    def release_ahead(self) -> None:
        ahead, self.ahead = self.ahead, ()
        for batch in ahead:
            batch.release()
