"""`DramBackend`: rows trained where they are in DRAM, by C++ kernels. Implements `embedding/backend.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, Offsets, Rows, Slots
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.backend import KeyHorizon, Select, ShardPins, TierSet, Unrecorded
from thermocline.embedding.batch_plan import BagInput, BagInputs, BagSpec, Gradient, ReducedGradients, working_set_of
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.key_hash import KeyPart
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.row_statistics import StatisticsState, click_units, example_click_units
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import LookAheadLimits, TableSpec
from thermocline.errors import BudgetError, ThermoclineError
from thermocline.tiers.dram import DramTier, Pins
from thermocline.tiers.dram_horizon import DramBatchAhead, DramHorizon
from thermocline.tiers.host_rows import HostRows
from thermocline.tiers.ssd import SsdStore

GradientIndex = tuple[Slots, Floats | None]
"""Per occurrence of a key: the row of the pooled gradient that belongs to it, and its coefficient."""


@dataclasses.dataclass(slots=True, eq=False)
class DramBag:
    """A bag input with the location of its rows."""

    source: BagInput
    slots: Slots | None
    """Per id: the slot of its row; in a plan with `rows`, the row's index there. None in evaluation."""
    _gradient_index: GradientIndex | None = None

    @property
    def bags(self) -> int:
        """Number of pooled vectors."""
        return self.source.bags

    def gradient_index(self, tier: core.DramTier) -> GradientIndex:
        """Compute, once, the gradient row and coefficient of each id."""
        if self._gradient_index is None:
            source, order = self.source, np.arange(len(self.source.ids), dtype=np.uint32)
            self._gradient_index = tier.plan(order, order, order, source.offsets, source.weights, source.mean)[1:]
        return self._gradient_index


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class DramBatchPlan:
    """See `BatchPlan`."""

    dram: DramTier
    """The tier of its slots: reopening the table replaces it."""
    bags: dict[BagSpec, DramBag]
    working_set: WorkingSet
    slots: Slots | None = None
    """Per unique key: the slot of its row."""
    pins: Pins | None = None
    """Pins of these slots, and of the other batches of the window."""
    rows: Floats | None = None
    """Per unique key: a copy of its row, for evaluation or received from the rank that owns it."""
    gradient_index: GradientIndex | None = None
    """For a plan with one bag: its gradient index in the working set's order."""
    remote: Any = None
    """State of the sharded backend."""
    as_of: int | None = None
    """Step to which its rows were caught up; None: not yet."""

    def use(self) -> None:
        """Nothing: no stream runs behind the host."""


@dataclasses.dataclass(slots=True, eq=False)
class DramWindow:
    """See `RowWindow`."""

    inputs: list[BagInputs]
    working_sets: list[WorkingSet]
    dram: DramTier | None = None
    keys: Keys | None = None
    """Unique keys of all batches; None: not needed yet."""
    index: Slots | None = None
    """Per key of each working set, in order: its index in `keys`. None: keys of all working sets in order."""
    ahead: Sequence[DramBatchAhead] = ()
    """The batches of a look-ahead that gave the working sets, until `pins` owns them."""
    pins: Pins | None = None

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()
        self.drop_ahead()

    def drop_ahead(self) -> None:
        """Release the batches of the look-ahead: their pins are not used."""
        ahead, self.ahead = self.ahead, ()
        for batch in ahead:
            batch.release()


class DramBackend(Unrecorded):
    """See `RowBackend` and `ShardBackend`."""

    groups = None
    dedups_on_host = True

    def __init__(self, spec: TableSpec, *, epoch: int | None = None) -> None:
        self.spec = spec
        self.host = HostRows(spec, epoch=epoch)
        self.step_count = 0
        self.statistics = StatisticsState()
        self.rates = StepRates.of(spec.optimizer)
        self.device = torch.device("cpu")

    @property
    def tiers(self) -> TierSet:
        return TierSet(dram=self.host.dram, ssd=self.host.store)

    # ---- ahead of training

    @property
    def lookahead(self) -> LookAheadLimits | None:
        return self.spec.lookahead

    def horizon(self, *, training: bool) -> KeyHorizon:
        return DramHorizon(self.host, training=training)

    def stage(
        self,
        inputs: Sequence[BagInputs],
        ahead: Sequence[DramBatchAhead] = (),
        working_sets: Sequence[WorkingSet] = (),
    ) -> DramWindow:
        if working_sets:
            return DramWindow(list(inputs), list(working_sets))
        of_ahead = [
            batch.working_set
            for batch, own in zip(ahead, inputs, strict=False)
            if batch.working_set is not None and batch.belongs_to(own)
        ]
        if ahead and len(of_ahead) == len(inputs):
            return DramWindow(list(inputs), of_ahead, ahead=ahead)
        for batch in ahead:
            batch.release()
        return DramWindow(list(inputs), [working_set_of(batch, self.spec.threads) for batch in inputs])

    def exchange(self, window: DramWindow, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        """Nothing: this process has all rows."""

    def pin(self, window: DramWindow) -> None:
        while True:
            dram = self.host.dram
            try:
                window.pins = self._pin(window, dram)
            except BudgetError:
                raise
            except ThermoclineError:
                if not self.host.replaced(dram):
                    raise
            else:
                window.dram, window.ahead = dram, ()
                return

    @staticmethod
    def _pin(window: DramWindow, dram: DramTier) -> Pins:
        if window.ahead and all(batch.dram is dram for batch in window.ahead):
            return dram.pin_ahead([batch.core for batch in window.ahead])
        window.drop_ahead()  # of a tier that was replaced
        if window.keys is None:
            keys = [working_set.keys for working_set in window.working_sets]
            if len(keys) == 1:
                window.keys = keys[0]
            else:
                union = WorkingSet.of(np.concatenate(keys))
                window.keys, window.index = union.keys, union.inverse
        return dram.pin(window.keys)

    def prepare(self, window: DramWindow) -> list[DramBatchPlan]:
        assert window.dram is not None
        assert window.pins is not None
        slots, plans, first = window.pins.slots(), [], 0
        for inputs, working_set in zip(window.inputs, window.working_sets, strict=True):
            end = first + len(working_set)
            of_batch = slots[first:end] if window.index is None else slots[window.index[first:end]]
            plans.append(self.plan_batch(inputs, working_set, of_batch, window.pins, window.dram))
            first = end
        return plans

    def load(self, window: DramWindow) -> None:
        """Nothing: `pin` has read the rows into their slots."""

    def plan_batch(
        self, inputs: BagInputs, working_set: WorkingSet, slots: Slots, pins: Pins | None, dram: DramTier | None = None
    ) -> DramBatchPlan:
        """Plan one batch whose unique keys have these slots."""
        dram = dram or self.host.dram
        if len(inputs) == 1:  # the common case, in one C++ call
            ((spec, source),) = inputs.items()
            id_slots, rows, coefs = dram.core.plan(
                slots, working_set.inverse, working_set.order, source.offsets, source.weights, source.mean
            )
            bags = {spec: DramBag(source, id_slots)}
            return DramBatchPlan(dram, bags, working_set, slots, pins, gradient_index=(rows, coefs))
        id_slots = slots[working_set.inverse]
        bags = {spec: DramBag(source, id_slots[source.id_range]) for spec, source in inputs.items()}
        for bag in bags.values():
            bag.gradient_index(dram.core)
        return DramBatchPlan(dram, bags, working_set, slots, pins)

    # ---- training

    def fetch(self, plan: DramBatchPlan) -> None:
        """Nothing: rows are pooled in their slots."""

    def is_current(self, plan: DramBatchPlan) -> bool:
        return plan.dram is self.host.dram

    def pool(self, plan: DramBatchPlan, bag: DramBag) -> torch.Tensor:
        source, dram = bag.source, self.host.dram
        out = np.empty((bag.bags, dram.dim), np.float32)
        if plan.rows is None:
            assert bag.slots is not None
            if self.rates is not None and plan.as_of != self.step_count:
                assert plan.slots is not None
                self.catch_up(plan.slots)
                plan.as_of = self.step_count
            dram.core.pool(bag.slots, source.offsets, source.weights, source.mean, out)
        else:
            index = plan.working_set.inverse[source.id_range]
            dram.core.pool_buffer(plan.rows, index, source.offsets, source.weights, source.mean, out)
        return torch.from_numpy(out)

    def with_weights(self, plan: DramBatchPlan, bag: DramBag, weights: torch.Tensor) -> DramBag:
        source = dataclasses.replace(bag.source, weights=weights.cpu().numpy())
        return dataclasses.replace(bag, source=source, _gradient_index=None)

    def weight_gradient(self, plan: DramBatchPlan, bag: DramBag, grads: torch.Tensor) -> torch.Tensor:
        source, slots = bag.source, bag.slots
        if plan.rows is not None:
            slots = plan.working_set.inverse[source.id_range]
        assert slots is not None
        out = np.empty(len(source.ids), np.float32)
        self.host.dram.core.weight_gradient(plan.rows, slots, source.offsets, source.mean, grads.numpy(), out)
        return torch.from_numpy(out)

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        if not gradients:
            return None
        slots, starts, rows, coefs, values = self._combine(gradients)
        sums = np.empty((len(slots), self.spec.dim), np.float32)
        self.host.dram.core.sum_gradients(starts, rows, coefs, values, sums)
        occurrences = None
        if self.spec.statistics:
            counts, clicks = self._occurrences(gradients, starts, rows)
            occurrences = torch.from_numpy(np.stack([counts, np.zeros_like(counts) if clicks is None else clicks], 1))
        return ReducedGradients(torch.from_numpy(slots.view(np.int32)), torch.from_numpy(sums), occurrences=occurrences)

    def _occurrences(self, gradients: Sequence[Gradient], starts: Slots, rows: Slots) -> tuple[Offsets, Offsets | None]:
        """Return the occurrences of each unique key and, if rows have clicks, the sums of their labels."""
        counts = np.diff(starts).astype(np.int64)
        if "click" not in self.spec.statistics:
            return counts, None
        clicks = np.empty_like(counts)
        self.host.dram.core.sum_clicks(starts, rows, click_units(self.spec.name, gradients), clicks)
        return counts, clicks

    def _update_statistics(self, slots: Slots, counts: Offsets, clicks: Offsets | None, step: int) -> None:
        self.host.dram.core.update_statistics(slots, counts, clicks, self.statistics.step(step))

    def norm(self, reduced: ReducedGradients) -> float:
        return float(np.sqrt(np.square(reduced.values.numpy(), dtype=np.float64).sum()))

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        slots, dram = reduced.slots.numpy().view(np.uint32), self.host.dram
        dram.core.mark_dirty(slots)
        self._catch_up_before(step, slots)
        dram.apply_gradients(slots, reduced.values.numpy(), step=step, lr=lr, scale=scale)
        if self.spec.statistics:
            counts, clicks = np.ascontiguousarray(reduced.occurrences.numpy().T)
            self._update_statistics(slots, counts, clicks, step)

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        if gradients:
            slots, starts, rows, coefs, values = self._combine(gradients)
            dram = self.host.dram
            dram.core.mark_dirty(slots)  # before rows change: a failure after this must not leave a clean changed row
            self._catch_up_before(step, slots)
            scale_gradient = dram.core.update(
                slots, starts, rows, coefs, values, dram.step(step, lr, scale), *self._statistics_step(gradients, step)
            )
            dram.learn(scale_gradient, step)

    def catch_up(self, slots: Slots) -> None:
        if self.rates is not None:
            self.host.dram.catch_up(self.rates, slots=slots)

    def _catch_up_before(self, step: int, slots: Slots) -> None:
        """Bring rows that step `step` updates to the step before it."""
        if self.rates is not None:
            self.host.dram.catch_up(self.rates, slots=slots, step=step)

    def _statistics_step(
        self, gradients: Sequence[Gradient], step: int
    ) -> tuple[core.StatisticsStep | None, Offsets | None]:
        """Return what the update needs to change the statistics of rows."""
        kept = self.spec.statistics
        units = example_click_units(self.spec.name, gradients) if "click" in kept else None
        return self.statistics.step(step) if kept else None, units

    def end_step(self) -> None:
        """Nothing: gradients own the only pins that outlive a batch."""

    def cannot_record(self) -> str:
        return f"rows of table {self.spec.name!r} are trained in DRAM, by the CPU"

    def _combine(self, gradients: Sequence[Gradient]) -> tuple[Slots, Slots, Slots, Floats | None, Floats]:
        """Return slots of the unique keys, segment starts, and per occurrence in segment order the row of the
        concatenated gradients and its coefficient."""
        first = gradients[0].plan
        if len(gradients) == 1 and first.gradient_index is not None and gradients[0].bag in first.bags.values():
            return first.slots, first.working_set.starts, *first.gradient_index, gradients[0].values.numpy()
        lists = [g.values.numpy() for g in gradients]
        values = lists[0] if len(lists) == 1 else np.concatenate(lists)
        starts = np.cumsum([0, *(len(part) for part in lists[:-1])]).astype(np.uint32)
        if _share_no_key(gradients):
            return *_side_by_side(gradients, starts), values
        indices = [g.bag.gradient_index(self.host.dram.core) for g in gradients]
        rows = np.concatenate([index[0] + start for index, start in zip(indices, starts, strict=True)])
        coefs = None
        if any(index[1] is not None for index in indices):
            coefs = np.concatenate(
                [np.ones(len(index[0]), np.float32) if index[1] is None else index[1] for index in indices]
            )
        same = [id(g.bag.slots) for g in gradients] == [id(bag.slots) for bag in first.bags.values()]
        if all(g.plan is first for g in gradients) and same:
            working_set, slots = first.working_set, first.slots  # each bag of one batch, once
        else:
            working_set = WorkingSet.of(
                np.concatenate([g.bag.source.ids for g in gradients]), threads=self.spec.threads
            )
            id_slots = np.concatenate([g.bag.slots for g in gradients])
            slots = id_slots[working_set.order[working_set.starts[:-1]]]
        order = working_set.order
        return slots, working_set.starts, rows[order], None if coefs is None else coefs[order], values

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> DramBatchPlan:
        working_set = working_set_of(inputs, self.spec.threads)
        return self._evaluation_plan(inputs, working_set, self.read(working_set.keys))

    def read_initial(self, inputs: BagInputs) -> DramBatchPlan:
        working_set = working_set_of(inputs, self.spec.threads)
        return self._evaluation_plan(inputs, working_set, self.host.dram.initial_rows(working_set.keys))

    def _evaluation_plan(self, inputs: BagInputs, working_set: WorkingSet, rows: Floats) -> DramBatchPlan:
        bags = {spec: DramBag(source, None) for spec, source in inputs.items()}
        return DramBatchPlan(self.host.dram, bags, working_set, rows=rows)

    def read(self, keys: Keys) -> Floats:
        return self.caught_up(self.host.dram.read(keys))

    def caught_up(self, rows: Floats) -> Floats:
        """Catch up copies of rows, in place; return them."""
        if self.rates is not None:
            self.host.dram.catch_up(self.rates, rows=rows)
        return rows

    # ---- durability

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        return self.host.rows(store, batch_rows)

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        self.host.expect_expiry(store, expiry, step)

    def expire(self, select: Select, store: SsdStore | None, part: KeyPart, *, weights: bool) -> Keys:
        return self.host.expire(select, store, part, self.caught_up, weights=weights)

    def flush(self, store: SsdStore | None = None) -> None:
        self.host.dram.flush(store)

    def write_back(self) -> None:
        """Nothing: DRAM is the top tier."""

    def reopen(self, epoch: int | None = None) -> None:
        self.host.reopen(epoch)

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        self.host.move_store(path, clear=clear)

    def undo_point(self) -> Callable[[], None]:
        dram = self.host.dram
        return lambda: setattr(self.host, "dram", dram)

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        self.host.replace_rows(pieces, scale)

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        self.host.import_rows(keys, rows)

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        self.host.write_rows(keys, rows)

    @property
    def learned_scale(self) -> LearnedScale | None:
        return self.host.dram.learned

    # ---- inspection

    def tier_counts(self) -> dict[str, int]:
        stats = self.host.dram.stats()
        # A row that the look-ahead loaded was found on SSD once; its later uses are hits.
        return {"mem": max(0, stats.hits - stats.loaded_ahead), "ssd": stats.from_store, "new": stats.initialised}

    def require_idle(self) -> None:
        self.host.require_idle()

    def close(self) -> None:
        self.host.close()

    # ---- ShardBackend

    def pin_keys(self, key_lists: Sequence[Keys]) -> ShardPins:
        union = WorkingSet.of(np.concatenate(key_lists))
        dram = self.host.dram
        pins = dram.pin(union.keys)
        slots = pins.slots()[union.inverse]
        return ShardPins(pins, np.split(slots, np.cumsum([len(keys) for keys in key_lists])[:-1]), dram)

    def load_keys(self, owned: ShardPins) -> None:
        """Nothing: `pin_keys` has read the rows into their slots."""

    def prepare_remote(
        self, inputs: Sequence[BagInputs], working_sets: Sequence[WorkingSet], owned: ShardPins
    ) -> list[DramBatchPlan]:
        return [
            self.plan_batch(batch, working_set, np.arange(len(working_set), dtype=np.uint32), owned.pins, owned.tier)
            for batch, working_set in zip(inputs, working_sets, strict=True)
        ]

    def row_buffer(self, count: int) -> tuple[Floats, torch.Tensor]:
        rows = np.empty((count, self.host.dram.floats), np.float32)  # whole rows; nothing reads their state
        return rows, torch.from_numpy(rows)[:, : self.spec.dim]

    def plan_rows(self, inputs: BagInputs, working_set: WorkingSet, rows: Floats) -> DramBatchPlan:
        return self._evaluation_plan(inputs, working_set, rows)

    def read_weights(self, slots: Slots, index: torch.Tensor, out: torch.Tensor) -> None:
        self.host.dram.core.pool(slots[index.numpy()], None, None, False, out.numpy())

    def renumber(self, bag: DramBag, index: Slots) -> DramBag:
        assert bag.slots is not None
        return dataclasses.replace(bag, slots=index[bag.slots])


def _share_no_key(gradients: Sequence[Gradient]) -> bool:
    """Return whether each gradient is of a batch of its own, of another table of the storage, in working set order."""
    salts: list[int] = []
    for gradient in gradients:
        plan = gradient.plan
        if plan.gradient_index is None or plan.bags.get(gradient.spec) is not gradient.bag or not gradient.spec.salts:
            return False
        salts += gradient.spec.salts
    return len(set(salts)) == len(salts)


def _side_by_side(gradients: Sequence[Gradient], rows: Slots) -> tuple[Slots, Slots, Slots, Floats | None]:
    """Return slots, segment starts, gradient rows and coefficients of plans without common keys, without a search.

    rows   number of the first row of each gradient among all
    """
    plans = [gradient.plan for gradient in gradients]
    ids = np.cumsum([0, *(len(plan.working_set.order) for plan in plans)]).astype(np.uint32)
    starts = [plan.working_set.starts[:-1] + first for plan, first in zip(plans, ids[:-1], strict=True)]
    of_ids = [plan.gradient_index[0] + first for plan, first in zip(plans, rows, strict=True)]
    coefs = [plan.gradient_index[1] for plan in plans]
    joined = None
    if any(part is not None for part in coefs):
        sizes = [len(part) for part in of_ids]
        ones = [np.ones(n, np.float32) if part is None else part for n, part in zip(sizes, coefs, strict=True)]
        joined = np.concatenate(ones)
    slots = np.concatenate([plan.slots for plan in plans])
    return slots, np.concatenate([*starts, ids[-1:]]), np.concatenate(of_ids), joined
