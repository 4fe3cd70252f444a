"""`ReferenceBackend`: rows in one Python dict. The specification of `RowBackend`, written to be read, not to be fast.

Shares no code with the other backends: no slots, no deduplication by sorting, no planned sums. Tests train a whole
model through it and compare every bit.

    table = tc.Table(16, tc.Adagrad(lr=0.1), make_backend=ReferenceBackend.make)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline.arrays import Floats, Keys, Rows
from thermocline.embedding.backend import RowHorizon, Select, TierSet, Unrecorded
from thermocline.embedding.batch_plan import BagInput, BagInputs, BagSpec, Gradient, Pooling, ReducedGradients
from thermocline.embedding.expiry import Expiry, Selection
from thermocline.embedding.key_hash import KeyPart
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.reference import ReferenceTable, sum_in_blocks
from thermocline.embedding.reference_statistics import ReferenceStatistics, expired_keys, part_of
from thermocline.embedding.row_statistics import StatisticsState
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import ThermoclineError
from thermocline.tiers.ssd import SsdStore


class _Pins:
    """Counts owners; the dict needs no pins, but a plan used too late must be noticed as elsewhere."""

    def __init__(self, backend: ReferenceBackend) -> None:
        self._backend = backend
        self._owners = 1
        backend.windows += 1

    def acquire(self) -> bool:
        if self._owners == 0:
            return False
        self._owners += 1
        return True

    def release(self) -> None:
        self._owners -= 1
        if self._owners == 0:
            self._backend.windows -= 1

    def __del__(self) -> None:
        if self._owners > 0:
            self._owners = 0
            self._backend.windows -= 1


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class _Plan:
    table: ReferenceTable
    bags: dict[BagSpec, BagInput]
    pins: _Pins | None
    copy: ReferenceTable | None = None
    """Copied rows, for evaluation."""

    def use(self) -> None:
        """Nothing: no stream runs behind the host."""


@dataclasses.dataclass(slots=True, eq=False)
class _Window:
    inputs: list[BagInputs]
    pins: _Pins | None = None

    def release(self) -> None:
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.release()


class ReferenceBackend(Unrecorded):
    """See `RowBackend`. Rows are fp32 and stay in memory; checkpoints save them all."""

    groups = None
    dedups_on_host = False
    tiers = TierSet()
    device = torch.device("cpu")

    def __init__(self, spec: TableSpec) -> None:
        if spec.ssd is not None or spec.precision.kind != "fp32":
            raise ValueError("the reference backend keeps fp32 rows in memory: give neither ssd nor precision")
        self.spec = spec
        self.step_count = 0
        self.rates = StepRates.of(spec.optimizer)
        self.windows = 0
        """Pinned windows."""
        self.table = self._empty()
        self.statistics = StatisticsState()
        self.row_statistics: dict[int, ReferenceStatistics] = {}

    @classmethod
    def make(cls, spec: TableSpec, device: str, epoch: int | None) -> ReferenceBackend:
        """Make the backend, as `tc.Table(make_backend=...)` calls it."""
        return cls(spec)

    def _empty(self) -> ReferenceTable:
        spec = self.spec
        return ReferenceTable(spec.dim, spec.optimizer, seed=spec.seed, table=spec.table_id, initial=spec.initial)

    def _current(self) -> ReferenceTable:
        if self.rates is not None:
            self.table.rates = self.rates.by_step()
        return self.table

    # ---- ahead of training

    lookahead = None

    def horizon(self, *, training: bool) -> RowHorizon:
        raise RuntimeError("this backend loads no rows ahead")

    def stage(
        self, inputs: Sequence[BagInputs], ahead: Sequence[object] = (), working_sets: Sequence[object] = ()
    ) -> _Window:
        return _Window(list(inputs))

    def exchange(self, window: _Window, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        """Nothing: this process has all rows."""

    def pin(self, window: _Window) -> None:
        window.pins = _Pins(self)

    def prepare(self, window: _Window) -> list[_Plan]:
        return [_Plan(self.table, dict(inputs), window.pins) for inputs in window.inputs]

    def load(self, window: _Window) -> None:
        """Nothing: the dict has all rows."""

    # ---- training

    def fetch(self, plan: _Plan) -> None:
        """Nothing: rows are read by `pool`."""

    def is_current(self, plan: _Plan) -> bool:
        return plan.table is self.table

    def pool(self, plan: _Plan, bag: BagInput) -> torch.Tensor:
        table = plan.copy or self._current()
        if plan.copy is None:
            for source in plan.bags.values():
                table.touch(source.ids)
        return torch.from_numpy(table.pool(bag.ids, bag.offsets, _pooling(bag), bag.weights))

    def with_weights(self, plan: _Plan, bag: BagInput, weights: torch.Tensor) -> BagInput:
        return dataclasses.replace(bag, weights=weights.cpu().numpy())

    def weight_gradient(self, plan: _Plan, bag: BagInput, grads: torch.Tensor) -> torch.Tensor:
        table = plan.copy or self.table
        return torch.from_numpy(table.weight_gradient(bag.ids, grads.numpy(), bag.offsets, _pooling(bag)))

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        if not gradients:
            return None
        occurrences: dict[int, list[Floats]] = {}
        for gradient in gradients:
            bag = gradient.bag
            self.table.collect_gradients(
                occurrences, bag.ids, gradient.values.numpy(), bag.offsets, _pooling(bag), bag.weights
            )
        labels = self._labels(gradients) if self.spec.statistics else None
        sums = {key: sum_in_blocks(listed) for key, listed in occurrences.items()}
        return ReducedGradients(None, sums, occurrences=labels)

    def _labels(self, gradients: Sequence[Gradient]) -> dict[int, list[float]]:
        """Return per key the label of the example of each occurrence; 0 if clicks are not counted."""
        labels: dict[int, list[float]] = {}
        for gradient in gradients:
            ids, offsets = gradient.bag.ids, gradient.bag.offsets
            if offsets is None:
                offsets = gradient.batch.select(gradient.spec.fields)[1]
            for bag in range(len(offsets) - 1):
                counted = "click" in self.spec.statistics
                label = float(gradient.batch.label[bag // len(gradient.spec.fields)]) if counted else 0.0
                for key in ids[offsets[bag] : offsets[bag + 1]]:
                    labels.setdefault(int(key), []).append(label)
        return labels

    def norm(self, reduced: ReducedGradients) -> float:
        sums: dict[int, Floats] = reduced.values
        if not sums:
            return 0.0
        return float(np.sqrt(np.square(np.stack(list(sums.values())), dtype=np.float64).sum()))

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        self._current().apply_sums(reduced.values, step=step, lr=lr, scale=scale)
        for key, labels in (reduced.occurrences or {}).items():
            self.row_statistics.setdefault(key, ReferenceStatistics()).occurred(labels, step, self.statistics.step_time)

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        reduced = self.reduce(gradients)
        if reduced is not None:
            self.apply(reduced, step, lr, scale)

    def end_step(self) -> None:
        """Nothing."""

    def cannot_record(self) -> str:
        return f"rows of table {self.spec.name!r} are in a dict"

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> _Plan:
        copy = self._empty()
        keys = {int(key) for bag in inputs.values() for key in bag.ids}
        copy.rates = self._current().rates
        copy.rows = {key: self.table.rows[key].copy() for key in keys if key in self.table.rows}
        return _Plan(self.table, dict(inputs), None, copy)

    def read_initial(self, inputs: BagInputs) -> _Plan:
        return _Plan(self.table, dict(inputs), None, self._empty())

    def read(self, keys: Keys) -> Floats:
        rows = self._current().read(keys)
        return np.concatenate([rows, self._words(keys)], 1) if self.spec.statistics else rows

    def _words(self, keys: Keys) -> Floats:
        """Return the statistics as words of a row that includes all decays."""
        words = np.zeros((len(keys), self.spec.statistics.words), np.uint32)
        for row, key in zip(words, keys, strict=True):
            statistics = self.row_statistics.get(int(key), ReferenceStatistics())
            packed = b"".join(
                np.array(getattr(statistics, name), kind).tobytes()
                for name, kind in zip(("frequency", "last_step", "last_time", "show", "click"), "IIqff", strict=True)
                if name in self.spec.statistics
            )
            row[: len(packed) // 4] = np.frombuffer(packed, np.uint32)
            if self.spec.statistics.decays:
                row[-1] = self.statistics.decays
        return words.view(np.float32)

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        """Nothing: rows are in memory."""

    def expire(self, select: Select, store: SsdStore | None, part: KeyPart, *, weights: bool) -> Keys:
        """See `RowBackend.expire`: by the rules of `reference_statistics.py`."""
        assert isinstance(select, Selection)
        expiry = select.expiry
        if expiry.decay != 1 and part.number == 0:
            for statistics in self.row_statistics.values():
                statistics.decay(expiry.decay)
        rows = {
            key: self._current().caught_up(key) for key in self.table.rows if part_of(key, part.parts) == part.number
        }
        select.rows = len(rows)
        newest = self.statistics.newest or 0
        dead = expired_keys(rows, self.row_statistics, self.spec.dim, expiry, self.step_count, newest, part)
        for key in dead:
            del self.table.rows[key]
            self.row_statistics.pop(key, None)
        keys = np.fromiter(dead, np.uint64, len(dead))
        if store is not None:
            store.delete(keys)
        return keys

    # ---- durability: every flush writes all rows

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        keys = np.fromiter(self.table.rows, np.uint64, len(self.table.rows))
        for first in range(0, len(keys), batch_rows):
            piece = keys[first : first + batch_rows]
            rows = np.stack([self.table.row(int(key)) for key in piece])
            yield piece, np.concatenate([rows, self._words(piece)], 1) if self.spec.statistics else rows

    def flush(self, store: SsdStore | None = None) -> None:
        assert store is not None
        for keys, rows in self.rows(None, 65536):
            store.put(keys, rows.view(np.uint8))

    def write_back(self) -> None:
        """Nothing: there is one place for rows."""

    def reopen(self, epoch: int | None = None) -> None:
        self.table, self.row_statistics = self._empty(), {}

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        raise ThermoclineError("the reference backend has no store")

    def undo_point(self) -> Callable[[], None]:
        table, statistics = self.table, self.row_statistics

        def undo() -> None:
            self.table, self.row_statistics = table, statistics

        return undo

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        self.table, self.row_statistics = self._empty(), {}
        for keys, rows in pieces:
            self.import_rows(keys, rows)

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        floats = rows.view(np.float32)
        self.table.push(keys, floats[:, : self.spec.trained_floats])
        if self.spec.statistics:
            values = self.spec.statistics.unpack(floats, StatisticsState())  # as saved: these include all decays
            for i, key in enumerate(keys):
                saved: dict[str, Any] = {name: column[i] for name, column in values.items()}
                whole = {name: int(value) for name, value in saved.items() if name not in ("show", "click")}
                self.row_statistics[int(key)] = ReferenceStatistics(**{**saved, **whole})

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        self.import_rows(keys, rows.view(np.uint8))

    learned_scale = None

    # ---- inspection

    def tier_counts(self) -> dict[str, int]:
        return {"mem": 0, "ssd": 0, "new": 0}

    def require_idle(self) -> None:
        if self.windows:
            raise ThermoclineError(
                f"table {self.spec.name!r} has {self.windows} windows pinned: close tc.prefetch, and drop or step "
                "forward passes, first"
            )

    def close(self) -> None:
        """Nothing to close."""


def _pooling(bag: BagInput) -> Pooling:
    if bag.offsets is None:
        return "none"
    return "mean" if bag.mean else "sum"
