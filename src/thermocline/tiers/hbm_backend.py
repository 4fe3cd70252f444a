"""`HbmBackend`: rows trained in GPU memory, by Triton kernels, above the DRAM tier. Implements `embedding/backend.py`.

Streams: `prepare` and `read_batch` run on a stream that works ahead of training; `HbmTier` has its own for planning and
for row transfers. Everything else runs on the caller's current stream. A tensor made on one stream and used on another
is recorded there (`record_stream`), and the user waits for the producer's event (`HbmBatchPlan.use`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, Rows, as_keys
from thermocline.batch import WorkingSet
from thermocline.embedding.backend import Select, ShardPins, TierSet
from thermocline.embedding.batch_plan import BagInput, BagInputs, Gradient, ReducedGradients, working_set_of
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.key_hash import KeyPart
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.row_statistics import StatisticsState
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import LookAheadLimits, TableSpec
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.kernels.codec import Codec
from thermocline.kernels.launch import stream_ahead
from thermocline.kernels.pool import Pooling, pool_rows
from thermocline.kernels.statistics import StoredStatistics
from thermocline.kernels.weight_gradient import weight_gradient
from thermocline.tiers.compile_ahead import compile_ahead
from thermocline.tiers.dram_horizon import DramBatchAhead, DramHorizon
from thermocline.tiers.hbm import HbmPins, HbmTier
from thermocline.tiers.hbm_plan import HbmBag, HbmBatchPlan, HbmWindow, PlanLists, write_plan
from thermocline.tiers.hbm_recorded import HbmRecordedRows
from thermocline.tiers.hbm_update import HbmUpdate, to_device
from thermocline.tiers.host_rows import HostRows
from thermocline.tiers.plan_graph import PlanGraphs, WindowShapes
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.recording import OnStream


class HbmBackend:
    """See `RowBackend` and `ShardBackend`."""

    groups = None
    dedups_on_host = False

    def __init__(self, spec: TableSpec, device: torch.device, *, epoch: int | None = None) -> None:
        assert spec.hbm is not None
        threads = _threads_beside_gpu(cores()) if spec.threads is None else spec.threads
        self.spec = spec
        self.host = HostRows(spec, threads=threads, epoch=epoch)
        self.hbm = HbmTier(self.host.dram, budget=spec.hbm, device=device, name=spec.name)
        self.updates = HbmUpdate(spec, self.host, self.hbm)
        self.step_count = 0
        self.device = device
        self._stream = stream_ahead(device)
        self._shapes = WindowShapes()
        self.plan_graphs = PlanGraphs(self.hbm)
        """Recorded planning of windows of equal shape."""
        self.plans_on_device = False
        self.record_planning(True)
        compile_ahead(self.hbm, self.updates.codec, spec)

    @property
    def tiers(self) -> TierSet:
        return TierSet(hbm=self.hbm, dram=self.host.dram, ssd=self.host.store)

    @property
    def statistics(self) -> StatisticsState:
        return self.updates.statistics

    @statistics.setter
    def statistics(self, state: StatisticsState) -> None:
        self.updates.statistics = state

    @property
    def rates(self) -> StepRates | None:
        return self.updates.rates

    # ---- ahead of training

    @property
    def lookahead(self) -> LookAheadLimits | None:
        return self.spec.lookahead

    def horizon(self, *, training: bool) -> DramHorizon:
        return DramHorizon(self.host, training=training, above=self.hbm)

    def stage(
        self,
        inputs: Sequence[BagInputs],
        ahead: Sequence[DramBatchAhead] = (),
        working_sets: Sequence[WorkingSet] = (),
    ) -> HbmWindow:
        """Send the ids to the device, which deduplicates them: `working_sets` are not used."""
        inputs = [_without_trivial_offsets(batch) for batch in inputs]
        graph = self.plan_graphs.get(self._shapes.of(inputs))
        if graph is not None:
            return HbmWindow(inputs, graph.stage(inputs), graph, ahead=ahead)
        ids = self.hbm.stage([source.ids for batch in inputs for source in batch.values()])
        return HbmWindow(inputs, ids, ahead=ahead)

    def exchange(self, window: HbmWindow, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        """Nothing: this process has all rows."""

    def launch(self, window: HbmWindow) -> None:
        assert window.ids is not None
        window.pins = self.hbm.launch(window.ids, window.assign)

    def pin(self, window: HbmWindow) -> None:
        launched, window.pins = window.pins, None
        if launched is not None:
            with contextlib.suppress(BudgetError):  # windows may have been released since it was planned: again below
                window.pins = self.hbm.finish(launched)
        if window.pins is None:
            assert window.ids is not None
            window.pins = self.hbm.pin(window.ids, window.assign)
        window.ids = None

    def prepare(self, window: HbmWindow) -> list[HbmBatchPlan]:
        pins = window.pins
        assert pins is not None
        assert pins.slots is not None
        if pins.batches is None:
            return self._plan(window.inputs, pins.slots, pins)
        return [
            HbmBatchPlan(pins.dram, list(batch), lists=lists, pins=pins, ready=pins.planned, counts=counts)
            for batch, (lists, counts) in zip(window.inputs, pins.batches, strict=True)
        ]

    def load(self, window: HbmWindow) -> None:
        assert window.pins is not None
        self.hbm.load(window.pins)
        window.release_ahead()

    def loads_nothing(self, window: HbmWindow) -> bool:
        assert window.pins is not None
        return window.pins.pending is not None and window.pins.pending.missing is None

    def _plan(self, inputs: Sequence[BagInputs], slots: torch.Tensor, pins: HbmPins) -> list[HbmBatchPlan]:
        """Plan batches, given the slot of every id of all batches in order."""
        first, plans = 0, []
        with self._ahead(None):
            if self._stream is not None:
                slots.record_stream(self._stream)
            for batch in inputs:
                count = sum(len(source.ids) for source in batch.values())
                plans.append(self._plan_batch(batch, slots[first : first + count], pins))
                first += count
            ready = None if self._stream is None else self._stream.record_event()
        for plan in plans:
            plan.ready = ready
        return plans

    def _plan_batch(self, inputs: BagInputs, slots: torch.Tensor, pins: HbmPins) -> HbmBatchPlan:
        shape = self._shapes.of([inputs])
        memory = torch.empty(shape.layouts[0].words, dtype=torch.int32, device=self.device)
        lists = PlanLists(shape.layouts[0], memory, shape.ids[0])
        bags = [tuple(map(self._page_locked, (source.offsets, source.weights))) for source in inputs.values()]
        segments = write_plan(lists, slots, bags)  # type: ignore[arg-type]
        if self._stream is None:
            counts: Any = segments.counts.tolist()
        else:
            counts = torch.empty(3, dtype=torch.int32, pin_memory=True).copy_(segments.counts, non_blocking=True)
        return HbmBatchPlan(pins.dram, list(inputs), lists=lists, pins=pins, counts=counts)

    def _upload(self, source: BagInput, slots: torch.Tensor) -> HbmBag:
        offsets = None if source.offsets is None else to_device(source.offsets, self.device)
        weights = None if source.weights is None else to_device(source.weights, self.device)
        return HbmBag(slots.clone(), offsets, weights, source.mean)

    def _page_locked(self, array: Any) -> torch.Tensor | None:
        if array is None:
            return None
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory() if self._stream is not None else host

    @contextlib.contextmanager
    def _ahead(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Run on the stream ahead of training, after an event."""
        if self._stream is None:
            yield
        else:
            with OnStream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                yield

    # ---- training

    def fetch(self, plan: HbmBatchPlan) -> None:
        """Record planning, if due: on this thread, because random generators are in use by a recording."""
        self.plan_graphs.record()

    def is_current(self, plan: HbmBatchPlan) -> bool:
        return plan.dram is self.host.dram

    def pool(self, plan: HbmBatchPlan, bag: HbmBag) -> torch.Tensor:
        plan.use()
        if not plan.counted:
            self.count_rows(plan)
        if self.rates is not None and plan.rows is None and plan.as_of != self.step_count:
            self.updates.catch_up(
                self.hbm.arena, plan.segments.slots[: plan.segments.sizes[0]], counts=plan.segments.counts
            )
            plan.as_of = self.step_count
        if plan.rows is None:
            pooling = bag.pooling
            if pooling is None:
                pooling = bag.pooling = Pooling(
                    self.updates.weights, bag.slots, bag.offsets, bag.weights, mean=bag.mean, codec=self.updates.codec
                )
            pooled = pooling()
        else:
            weights, codec = self._weights(plan)
            pooled = pool_rows(weights, bag.slots, bag.offsets, bag.weights, mean=bag.mean, codec=codec)
        self.updates.record_use()
        return pooled

    def catch_up(self, slots: torch.Tensor) -> None:
        if self.rates is not None:
            if slots.is_cuda:  # allocated on the planning stream
                slots.record_stream(torch.cuda.current_stream(slots.device))
            self.updates.catch_up(self.hbm.arena, slots)

    def count_rows(self, plan: HbmBatchPlan) -> None:
        """Add the rows of a trained batch to the statistics, once."""
        if plan.lists is not None and not plan.counted:
            plan.counted = True
            self.hbm.rows += plan.known_counts()[0]

    def _weights(self, plan: HbmBatchPlan) -> tuple[torch.Tensor, Codec | None]:
        """Return the weights that the plan's slots index, and their codec; None: fp32."""
        if plan.rows is None:
            return self.updates.weights, self.updates.codec
        return (
            (self.updates.codec.weights(plan.rows), self.updates.codec)
            if plan.stored
            else (plan.rows[:, : self.spec.dim], None)
        )

    def with_weights(self, plan: HbmBatchPlan, bag: HbmBag, weights: torch.Tensor) -> HbmBag:
        plan.use()
        return dataclasses.replace(bag, weights=weights.to(self.device))

    def weight_gradient(self, plan: HbmBatchPlan, bag: HbmBag, grads: torch.Tensor) -> torch.Tensor:
        plan.use()
        weights, codec = self._weights(plan)
        bags = None if bag.offsets is None else self.updates.gradient_index(bag)[0]
        gradient = weight_gradient(weights, bag.slots, bag.offsets, bags, grads, mean=bag.mean, codec=codec)
        self.updates.record_use()
        return gradient

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        return self.updates.reduce(gradients)

    @property
    def recording(self) -> bool:
        return self.updates.recorded_step is not None

    def norm(self, reduced: ReducedGradients) -> float:
        return float(reduced.values.double().square().sum().sqrt())

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        self.updates.apply(reduced, step, lr, scale)

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        self.updates.update(gradients, step, lr, scale)

    def end_step(self) -> None:
        """Nothing: gradients own the only pins that outlive a batch."""

    def record_planning(self, enabled: bool) -> None:
        self.plan_graphs.enabled = enabled and self.device.type == "cuda"
        self.plans_on_device = self.plan_graphs.enabled and self.spec.ssd is None

    def cannot_record(self) -> str:
        if self.updates.codec.gradient is not None:
            return f"table {self.spec.name!r} learns its quantization scale (scale_lr)"
        if self.rates is not None:
            return f'rows of table {self.spec.name!r} replay missed steps (lazy = "catch_up")'
        return ""

    def recorded_rows(self, plan: HbmBatchPlan) -> HbmRecordedRows:
        return HbmRecordedRows(self, plan)

    def plan_shape(self, plan: Any) -> Any:
        if not self.is_current(plan) or len(self.statistics.runs) > StoredStatistics.RUNS:
            return None
        return HbmRecordedRows.shape(plan)

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> HbmBatchPlan:
        inputs = _without_trivial_offsets(inputs)
        working_set = working_set_of(inputs, self.spec.threads)
        rows, ready = self.hbm.read_to_device(working_set.keys)
        with self._ahead(ready):
            self.updates.catch_up(rows)
        plan = self._evaluation_plan(inputs, working_set, rows, ready)
        plan.stored = True
        return plan

    def read_initial(self, inputs: BagInputs) -> HbmBatchPlan:
        working_set = working_set_of(inputs, self.spec.threads)
        weights = self.host.dram.initial_rows(working_set.keys)[:, : self.spec.dim]
        with self._ahead(None):
            rows = to_device(weights, self.device)
        return self._evaluation_plan(inputs, working_set, rows, None)

    def _evaluation_plan(
        self, inputs: BagInputs, working_set: WorkingSet, rows: torch.Tensor, ready: torch.cuda.Event | None
    ) -> HbmBatchPlan:
        bags = {}
        with self._ahead(ready):
            inverse = to_device(working_set.inverse.view(np.int32), self.device)
            for spec, source in inputs.items():
                bags[spec] = self._upload(source, inverse[source.id_range])
            if self._stream is not None:
                rows.record_stream(self._stream)
                ready = self._stream.record_event()
        return HbmBatchPlan(self.host.dram, list(bags), bags=bags, ready=ready, rows=rows)

    def read(self, keys: Keys) -> Floats:
        self.updates.save_scale()
        return self._caught_up(self.hbm.read(as_keys(keys)))

    def _caught_up(self, rows: Floats) -> Floats:
        """Catch up copies of rows on the host, in place; return them."""
        if self.rates is not None:
            self.host.dram.catch_up(self.rates, rows=rows)
        return rows

    # ---- durability

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        self.write_back()
        yield from self.host.rows(store, batch_rows)

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        self.host.expect_expiry(store, expiry, step)

    def expire(self, select: Select, store: SsdStore | None, part: KeyPart, *, weights: bool) -> Keys:
        with self.hbm.exclusive():  # no window is planned meanwhile
            self.hbm.write_back(part)
            self.updates.save_scale()
            keys = self.host.expire(select, store, part, self._caught_up, weights=weights)
            self.hbm.erase(keys)
        return keys

    def flush(self, store: SsdStore | None = None) -> None:
        self.write_back()
        self.host.dram.flush(store)

    def write_back(self) -> None:
        self.hbm.write_back()
        self.updates.save_scale()

    def reopen(self, epoch: int | None = None) -> None:
        with self.hbm.exclusive():  # no window is planned meanwhile
            if windows := self.hbm.stats().windows:
                raise ThermoclineError(
                    f"table {self.spec.name!r}: reopen() while {windows} windows have rows in HBM: close tc.prefetch, "
                    "and drop or step forward passes, first"
                )
            self.host.reopen(epoch)
            self._reset()

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        self.host.move_store(path, clear=clear)
        self._reset()

    def undo_point(self) -> Callable[[], None]:
        self.write_back()  # the DRAM tier then has all rows of now
        dram = self.host.dram

        def undo() -> None:
            self.host.dram = dram
            self._reset()

        return undo

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        self.host.replace_rows(pieces, scale)
        self._reset()

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        self.host.import_rows(keys, rows)

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        self.write_back()
        try:
            self.host.write_rows(keys, rows)
        finally:
            self._reset()  # rows in HBM may be older now

    def _reset(self) -> None:
        """Drop all rows of the HBM tier and continue above the current DRAM tier."""
        self.hbm.reset(self.host.dram)
        self.updates.load_scale()

    @property
    def learned_scale(self) -> LearnedScale | None:
        self.updates.save_scale()
        return self.host.dram.learned

    # ---- inspection

    def tier_counts(self) -> dict[str, int]:
        stats = self.hbm.stats()
        below = {"mem": stats.from_dram, "ssd": stats.from_ssd, "new": stats.initialised}
        return {"hbm": stats.rows - sum(below.values()), **below}

    def require_idle(self) -> None:
        self.host.require_idle()
        if windows := self.hbm.stats().windows:
            raise ThermoclineError(
                f"table {self.spec.name!r} has {windows} windows pinned: close tc.prefetch, and drop or step "
                "forward passes, first"
            )

    def close(self) -> None:
        self.host.close()

    # ---- ShardBackend

    def pin_keys(self, key_lists: Sequence[Keys]) -> ShardPins:
        pins = self.hbm.pin(self.hbm.stage(key_lists))
        assert pins.slots is not None
        return ShardPins(pins, list(torch.split(pins.slots, [len(keys) for keys in key_lists])), self.hbm)

    def load_keys(self, owned: ShardPins) -> None:
        self.hbm.load(owned.pins)

    def prepare_remote(
        self, inputs: Sequence[BagInputs], working_sets: Sequence[WorkingSet], owned: ShardPins
    ) -> list[HbmBatchPlan]:
        inverse = np.concatenate([working_set.inverse for working_set in working_sets])
        with self._ahead(None):
            index = to_device(inverse.view(np.int32), self.device)
        return self._plan(inputs, index, owned.pins)

    def row_buffer(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.empty(count, self.spec.dim, device=self.device)
        return weights, weights

    def plan_rows(self, inputs: BagInputs, working_set: WorkingSet, rows: torch.Tensor) -> HbmBatchPlan:
        return self._evaluation_plan(inputs, working_set, rows, None)

    def read_weights(self, slots: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        if slots.is_cuda:  # allocated on the planning stream
            slots.record_stream(torch.cuda.current_stream(slots.device))
        weights = self.updates.weights
        out.copy_(pool_rows(weights, slots[index.to(slots.device)], codec=self.updates.codec))
        self.hbm.record_use()

    def renumber(self, bag: HbmBag, index: Any) -> HbmBag:
        rows = torch.from_numpy(index.view(np.int32)).to(bag.slots.device)
        return dataclasses.replace(bag, slots=rows[bag.slots.long()])


def _threads_beside_gpu(count: int) -> int:
    """Leave two of eight or more cores to the threads that plan and launch kernels: the GPU waits for those."""
    return count - 2 if count >= 8 else count


def _without_trivial_offsets(inputs: BagInputs) -> BagInputs:
    """Replace offsets of bags with one id each by None: the same vectors without reading offsets."""
    return {
        spec: BagInput(source.ids, None, source.weights, False, source.first_id) if _one_id_each(source) else source
        for spec, source in inputs.items()
    }


_counting = np.arange(1 << 16)
_last_offsets: tuple[Any, bool] = (None, False)
"""The offsets that were compared last, and the result: a loader's batches often share one array."""


def _one_id_each(source: BagInput) -> bool:
    global _counting, _last_offsets
    if source.offsets is None or source.bags != len(source.ids):
        return False
    known, result = _last_offsets
    if known is not source.offsets:
        if len(_counting) <= source.bags:
            _counting = np.arange(2 * source.bags)
        result = np.array_equal(source.offsets, _counting[: source.bags + 1])
        _last_offsets = (source.offsets, result)
    return result
