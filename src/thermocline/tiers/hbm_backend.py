"""A batch on the GPU: its bags' slots and segments, pooled vectors, and one update per unique key.

The same as `mem_train.py`, with torch tensors on the device. Everything here runs on the caller's stream, but
`prepare`, which runs ahead on a stream of its own; tensors made there are told which stream uses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Slots
from thermocline.batch import WorkingSet
from thermocline.embedding.batch_plan import BagSpec, Part, Remote
from thermocline.embedding.quant_scale import UNIT, LearnedScale
from thermocline.kernels.codec import Codec
from thermocline.kernels.gradient_index import find_occurrences
from thermocline.kernels.launch import stream_ahead
from thermocline.kernels.optimizer_rules import Step
from thermocline.kernels.pool import pool_rows
from thermocline.kernels.random import table_mix
from thermocline.kernels.segments import Segments, find_segments
from thermocline.kernels.update import apply_gradients, sum_gradients, update_rows
from thermocline.tiers.dram import DramTier
from thermocline.tiers.hbm import HbmPins, HbmTier, StagedIds


@dataclasses.dataclass(slots=True, eq=False)
class HbmPart:
    """One bag's share of a batch."""

    slots: torch.Tensor
    """int32 per id: of the arena, or of `HbmPrepared.rows` in evaluation."""
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    mean: bool

    @property
    def bags(self) -> int:
        """Vectors it pools to."""
        return len(self.slots) if self.offsets is None else len(self.offsets) - 1

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.slots, self.offsets, self.weights) if tensor is not None]


@dataclasses.dataclass(slots=True, eq=False)
class HbmPrepared:
    """A batch's rows of one table: pinned in the arena, or copied for evaluation."""

    tier: DramTier
    """The one below, as in `Prepared`: reopening a table replaces it."""
    parts: dict[Any, HbmPart]
    pins: HbmPins | None
    ready: torch.cuda.Event | None
    segments: Segments | None = None
    """The dedup of all parts' ids, one after the other."""
    counted: torch.Tensor | None = None
    """Its counts on the host, at `ready`; none: they are known."""
    plan: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """Of the only part, in the segments' order: rows and factors of its gradient."""
    rows: torch.Tensor | None = None
    """Per unique key: a copy of its row, for evaluation."""
    stored: bool = False
    """Whether they are as rows are stored, not float32."""
    used_on: Any = None
    served: bool = False
    """Whether its rows were counted."""
    remote: Remote | None = None
    """As in `Prepared`."""

    def use(self) -> None:
        """The current stream is about to use it."""
        if self.ready is None:
            return  # on a CPU
        stream = torch.cuda.current_stream(next(iter(self.parts.values())).slots.device)
        if self.used_on == stream:
            return
        stream.wait_event(self.ready)
        if self.segments is not None and self.counted is not None:
            self.ready.synchronize()  # long past, unless nothing runs ahead
            self.segments, self.counted = self.segments.known(*self.counted.tolist()), None
        if self.pins is not None:
            assert self.pins.ready is not None, "rows that were not loaded"
            stream.wait_event(self.pins.ready)
        tensors = [tensor for part in self.parts.values() for tensor in part.tensors()]
        if self.segments is not None:
            tensors.append(self.segments.order)  # all its lists are one piece of memory
        if self.plan is not None:
            tensors += [tensor for tensor in self.plan if tensor is not None]
        if self.rows is not None:
            tensors.append(self.rows)
        for tensor in tensors:
            tensor.record_stream(stream)
        self.used_on = stream


class HbmBackend:
    """Batches of one table on its HBM tier. `prepare` runs on one thread, the rest on the caller's."""

    def __init__(self, tier: HbmTier, dim: int, optimizer: Any) -> None:
        self.tier = tier
        self.dim = dim
        self._optimizer = optimizer
        mem = tier.mem
        self._codec = Codec.of(mem.precision, dim, tier.residents.keys, table_mix(mem.seed, mem.table))
        self._learned: LearnedScale | None = None
        self.restore_scale()
        self._stream = stream_ahead(tier.device)

    # ---- ahead of training

    def stage(self, collected: Sequence[Mapping[BagSpec, Part]]) -> StagedIds:
        """The ids of a window's batches, given their parts, on their way to the GPU. Touches no rows."""
        return self.tier.stage([part.ids for parts in collected for part in parts.values()])

    def pin(self, ids: StagedIds) -> HbmPins:
        """The slots of staged ids."""
        return self.tier.pin(ids)

    def load(self, pins: HbmPins) -> None:
        """Brings the rows."""
        self.tier.load(pins)

    def prepare(
        self, collected: Sequence[Mapping[BagSpec, Part]], pins: HbmPins, places: Slots | None = None
    ) -> list[HbmPrepared]:
        """A window's batches, given their parts and the pins of all their ids, in order. Needs no rows.

        places   instead of the pins' slots: per id, its place among rows that come from other ranks
        """
        first, batches = 0, []
        with self._ahead(None):
            slots = pins.slots if places is None else self._to_device(places.view(np.int32))
            assert slots is not None
            if self._stream is not None:
                slots.record_stream(self._stream)
            for parts in collected:
                begin, mine = first, {}
                for spec, part in parts.items():
                    mine[spec] = self._upload(part, slots[first : first + len(part.ids)])
                    first += len(part.ids)
                batches.append(self._bind(mine, slots[begin:first].clone(), pins))
            ready = None if self._stream is None else self._stream.record_event()
        for batch in batches:
            batch.ready = ready
        return batches

    def _bind(self, parts: dict[Any, HbmPart], slots: torch.Tensor, pins: HbmPins) -> HbmPrepared:
        segments, counted, plan = find_segments(slots), None, None
        if self._stream is None:
            segments = segments.known(*segments.counts.tolist())
        else:
            counted = torch.empty(3, dtype=torch.int32, pin_memory=True).copy_(segments.counts, non_blocking=True)
        if len(parts) == 1:
            (part,) = parts.values()
            plan = self._occurrences(part, segments.order)
        return HbmPrepared(pins.mem, parts, pins, None, segments, counted, plan)

    def prepare_read(self, parts: Mapping[BagSpec, Part], working_set: WorkingSet) -> HbmPrepared:
        """Copies of a batch's rows, for evaluation: inserts nothing."""
        prepared = self.prepare_rows(parts, working_set, *self.tier.read_to_device(working_set.keys))
        prepared.stored = True
        return prepared

    def prepare_rows(
        self,
        parts: Mapping[BagSpec, Part],
        working_set: WorkingSet,
        rows: torch.Tensor,
        ready: torch.cuda.Event | None,
    ) -> HbmPrepared:
        """The same, given the rows of the unique keys and when they are ready."""
        mem = self.tier.mem
        mine, first = {}, 0
        with self._ahead(ready):
            inverse = self._to_device(working_set.inverse.view(np.int32))
            for spec, part in parts.items():
                mine[spec] = self._upload(part, inverse[first : first + len(part.ids)])
                first += len(part.ids)
            if self._stream is not None:
                rows.record_stream(self._stream)
                ready = self._stream.record_event()
        return HbmPrepared(mem, mine, None, ready, rows=rows)

    def _upload(self, part: Part, slots: torch.Tensor) -> HbmPart:
        offsets = None if part.offsets is None else self._to_device(part.offsets)
        weights = None if part.weights is None else self._to_device(part.weights)
        return HbmPart(slots.clone(), offsets, weights, part.mean)

    def _to_device(self, array: Any) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self.tier.device, non_blocking=True) if self._stream is not None else host

    @contextlib.contextmanager
    def _ahead(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                yield

    # ---- training

    def pool(self, prepared: HbmPrepared, part: HbmPart) -> torch.Tensor:
        """float32[bags, dim]."""
        prepared.use()
        if prepared.segments is not None and not prepared.served:
            prepared.served = True
            self.tier.rows += prepared.segments.sizes[0]
        rows = self.tier.arena if prepared.rows is None else prepared.rows
        codec = self._codec if prepared.rows is None or prepared.stored else None
        weights = rows[:, : self.dim] if codec is None else codec.weights(rows)
        pooled = pool_rows(weights, part.slots, part.offsets, part.weights, mean=part.mean, codec=codec)
        self.tier.used_by_training()
        return pooled

    def weights(self, slots: torch.Tensor) -> torch.Tensor:
        """float32[slots, dim]: copies of pinned rows, without their state."""
        weights = pool_rows(self._codec.weights(self.tier.arena), slots, codec=self._codec)
        self.tier.used_by_training()
        return weights

    def combine(self, gradients: Sequence[Any]) -> tuple[Segments, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The dedup of what backward has collected, and which row of the joined gradients belongs to an occurrence."""
        for gradient in gradients:
            gradient.prepared.use()
        one = gradients[0].prepared
        if len(gradients) == 1 and one.plan is not None:
            return one.segments, *one.plan, gradients[0].grad
        plans = [self._occurrences(g.part, None) for g in gradients]
        grads = gradients[0].grad if len(gradients) == 1 else torch.cat([g.grad for g in gradients])
        firsts = np.cumsum([0, *(len(g.grad) for g in gradients[:-1])]).tolist()
        grad_rows = torch.cat([plan[0] + first for plan, first in zip(plans, firsts, strict=True)])
        coefs = None
        if any(plan[1] is not None for plan in plans):
            coefs = torch.cat(
                [torch.ones(len(plan[0]), device=grads.device) if plan[1] is None else plan[1] for plan in plans]
            )
        if all(g.prepared is one for g in gradients) and [g.part for g in gradients] == list(one.parts.values()):
            segments = one.segments
        else:
            segments = find_segments(torch.cat([g.part.slots for g in gradients]))
        order = segments.order.long()
        return segments, grad_rows[order], None if coefs is None else coefs[order], grads

    def _occurrences(self, part: HbmPart, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return find_occurrences(len(part.slots), order, part.offsets, part.weights, part.mean, self.tier.device)

    def update(self, gradients: Sequence[Any], number: int, lr: float, scale: float) -> None:
        """One step: sums and optimizer in one pass."""
        segments, grad_rows, coefs, grads = self.combine(gradients)
        step = Step.of(self._optimizer, number, lr=lr, scale=scale)
        self.tier.mark_dirty(segments.slots[: segments.sizes[0]], segments.counts)
        arena = self.tier.arena
        weights, state = self._codec.weights(arena), self._codec.state(arena)
        update_rows(weights, state, segments, grads, grad_rows, coefs, step, self._codec)
        self._learn(number)
        self.tier.used_by_training()

    def sums(self, gradients: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and summed gradients of the unique keys: waits for the device."""
        segments, grad_rows, coefs, grads = self.combine(gradients)
        segments = segments.known(*segments.counts.tolist())
        return segments.slots[: segments.sizes[0]], sum_gradients(segments, grads, grad_rows, coefs)

    @staticmethod
    def norm(sums: torch.Tensor) -> float:
        """In double; waits for the device."""
        return float(sums.double().square().sum().sqrt())

    def apply(self, slots: torch.Tensor, sums: torch.Tensor, number: int, lr: float, scale: float) -> None:
        """The second half of a step whose sums were asked for."""
        self.tier.mark_dirty(slots, torch.full((1,), len(slots), device=slots.device))
        arena, step = self.tier.arena, Step.of(self._optimizer, number, lr=lr, scale=scale)
        apply_gradients(self._codec.weights(arena), self._codec.state(arena), slots, sums, step, self._codec)
        self._learn(number)
        self.tier.used_by_training()

    # ---- a step that is learned: on the device, so that nobody waits for it

    def _learn(self, number: int) -> None:
        if self._learned is not None and self._codec.gradient is not None:
            gradient = self._codec.gradient.double() * UNIT
            self._learned = self._learned.after(gradient, number, self.tier.mem.precision.scale_lr)
            self._codec.scale.copy_(self._learned.scale)
            self._codec.gradient.zero_()

    def restore_scale(self) -> None:
        """Goes on with the one that the memory tier has."""
        learned = self.tier.mem.learned
        if learned is not None:
            values = (torch.tensor([value], dtype=torch.float64) for value in dataclasses.astuple(learned))
            self._learned = LearnedScale(*(value.to(self.tier.device) for value in values))
            self._codec.scale.copy_(self._learned.scale)

    def save_scale(self) -> None:
        """Tells the memory tier; waits for the device."""
        if self._learned is not None:
            values = torch.cat([self._learned.scale, self._learned.mean, self._learned.size])
            self.tier.mem.set_scale(LearnedScale(*values.tolist()))
