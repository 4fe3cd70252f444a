"""The memory tier: a cache of rows within a byte budget, over an SSD store or by itself; trained on in place.

One batch: `lookup = tier.lookup(ids, offsets)` pulls and pins its rows (any thread, ahead of time);
`tier.pool(lookup)` gathers, `tier.update(lookup, grad, step=t)` applies one optimizer step;
`tier.release(lookup)` gives the rows back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys, Offsets, Pooling, Slots, as_keys, bags_of, floats_of, out_of
from thermocline.batch import WorkingSet
from thermocline.core import core
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.optimizers import Optimizer, initial_state
from thermocline.embedding.precision import FP32, Precision
from thermocline.embedding.quant_scale import UNIT, LearnedScale
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.text_format import format_size, parse_size

Step = core.Step
Pins = core.Pins
Policy = Literal["lru_lfu", "lru", "lfu"]

_POLICIES = {"lru_lfu": 0, "lru": 1, "lfu": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DramStats:
    """A tier's counters at one moment; work is counted from the tier's beginning."""

    capacity: int
    """Rows the budget holds."""
    resident: int
    free: int
    pinned: int
    dirty: int
    """Rows changed since they were last written to the store."""
    shards: int
    hits: int
    misses: int
    from_store: int
    initialised: int
    """Misses that no store had: they began with their initial row."""
    pushed: int
    reads: int
    """Rows asked for by read and evaluate."""
    read_hits: int
    evictions: int
    flushed: int
    """Rows written to the store, by eviction or flush."""
    puts: int
    """Calls that wrote them."""
    bytes_rows: int
    bytes_metadata: int
    bytes_index: int
    bytes_buffers: int
    bytes_total: int
    """All of the above: never above the budget."""
    budget: int
    kernels: str
    """Instruction set of the kernels."""

    @property
    def hit_rate(self) -> float:
        """Share of pulled rows that were here."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A batch's rows, pinned, and everything training needs to find them. Made by `DramTier.lookup`."""

    working_set: WorkingSet
    slots: Slots
    """Per unique key: where its row is pinned."""
    id_slots: Slots
    """Per id."""
    offsets: Offsets | None
    weights: Floats | None
    mean: bool
    grad_rows: Slots
    """Per occurrence, in the working set's order: the row of the gradient that belongs to it."""
    coefs: Floats | None
    """Per occurrence: what that gradient is multiplied by."""

    @property
    def bags(self) -> int:
        """Rows of the pooled result, and of its gradient."""
        return len(self.id_slots) if self.offsets is None else len(self.offsets) - 1


class DramTier:
    """Rows of one table in memory: `dim` weights, then the optimizer's state.

    Rows are given and taken as float32[n, dim + state]. With a `precision` below fp32 they are stored as codes, and the
    methods that end in `_stored` move them as they are: float32[n, row_bytes / 4], words of any meaning.

    A row that was pulled stays where it is until it is unpinned as often as it was pulled; unpinned rows leave by
    `policy` when room is needed, changed ones into the `store`. Without a store nothing leaves, and a full tier
    raises `BudgetError`.

    Thread safety: all methods may be called from several threads at once, and none holds the GIL while it works. While
    rows are being changed (`update`, `apply_gradients`, `write`) no other call may touch the same rows, nor `flush`.
    """

    __slots__ = (
        "_coded",
        "_core",
        "_dim",
        "_floats",
        "_optimizer",
        "_policy",
        "_store",
        "_threads",
        "_words",
        "learned",
        "precision",
        "seed",
        "table",
    )

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        budget: str | SupportsIndex = "64MB",
        store: SsdStore | None = None,
        policy: Policy = "lru_lfu",
        threads: int | None = None,
        seed: int = 0,
        table: int = 0,
        initial: Initial | None = None,
        precision: Precision = FP32,
        shards: int | None = None,
    ) -> None:
        """A tier with no rows yet.

        budget    bytes for rows, index, metadata and buffers together
        store     where rows come from and go to; its row_bytes must be `precision.row_bytes(dim, optimizer)`
        policy    "lru_lfu": recently visited rows stay, then often visited ones; "lru" or "lfu": only one of the two
        threads   of one call; default: all cores. No result depends on it
        seed, table, initial   what rows begin with: a function of these and the key. Default: Uniform(scale=0.01)
        precision   how weights are stored
        shards    parts of the index, a power of two up to 256; default: from the capacity
        """
        if dim < 1:
            raise ValueError(f"dim is {dim}: a row has at least one weight")
        if policy not in _POLICIES:
            raise ValueError(f"policy is {policy!r}: it is one of {', '.join(_POLICIES)}")
        if shards is not None and (not 1 <= shards <= 256 or shards & (shards - 1)):
            raise ValueError(f"shards is {shards}: it must be a power of two from 1 to 256")
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}: at least one")
        start = Uniform() if initial is None else initial
        self._dim = dim
        self._floats = dim + optimizer.state_floats(dim)
        self._words = precision.row_bytes(dim, optimizer) // 4
        self._coded = precision.kind != "fp32"
        self.precision = precision
        """As given."""
        self.seed, self.table = _word(seed, "seed"), _word(table, "table")
        self.learned = LearnedScale(precision.scale) if precision.scale_lr else None
        """Where a step that is learned stands."""
        self._optimizer = optimizer
        self._policy = policy
        self._store = store
        self._threads = threads or cores()
        self._core = core.DramTier(
            dim=dim,
            optimizer=optimizer.code,
            budget=parse_size(budget, "budget"),
            policy=_POLICIES[policy],
            threads=self._threads,
            shards=shards or 0,
            seed=self.seed,
            table=self.table,
            initial_kind=start.code,
            initial_scale=start.scale,
            initial_state=initial_state(optimizer),
            precision=core.make_precision(
                precision.code,
                precision.bits,
                precision.stochastic,
                precision.row_scaled,
                precision.scale,
                precision.scale_lr > 0,
            ),
            store=None if store is None else store._core,
        )

    # ---- a batch's life

    def lookup(
        self,
        ids: Any,
        offsets: Any = None,
        *,
        pooling: Pooling | None = None,
        weights: Any = None,
    ) -> Lookup:
        """Pulls the rows of `ids`, an array of keys or their `WorkingSet`, and plans the batch's training.

        `offsets` (int64, one more than bags) cut the ids into bags, for pooling "sum" (the default) or "mean"; without
        them every id is its own bag ("none"). `weights`: one float32 per id. Release the result when done.
        """
        working_set = ids if isinstance(ids, WorkingSet) else WorkingSet.of(ids, threads=self._threads)
        cuts, factors, mean = bags_of(len(working_set.inverse), offsets, pooling, weights)
        slots = self.pull(working_set.keys)
        try:
            planned = self._core.plan(slots, working_set.inverse, working_set.order, cuts, factors, mean)
        except BaseException:
            self.unpin(slots)
            raise
        id_slots, grad_rows, coefs = planned
        return Lookup(working_set, slots, id_slots, cuts, factors, mean, grad_rows, coefs)

    def pool(self, lookup: Lookup, *, out: Any = None) -> Floats:
        """float32[bags, dim]: each bag's rows added left to right, mean over their number; empty bags are zero."""
        result = out_of(out, (lookup.bags, self._dim))
        self._core.pool(lookup.id_slots, lookup.offsets, lookup.weights, lookup.mean, result)
        return result

    def update(self, lookup: Lookup, grad: Any, *, step: int = 1, lr: float | None = None, scale: float = 1.0) -> None:
        """One optimizer step on the rows of `lookup`, given the gradient of what `pool` returned.

        `step` counts the table's steps from 1 (Adam's bias correction); `lr` replaces the optimizer's for this step;
        `scale` multiplies every summed gradient. Release with `dirty=True` afterwards.
        """
        grads = floats_of(grad, (lookup.bags, self._dim), "grad")
        starts = lookup.working_set.starts
        applied = self.step(step, lr, scale)
        self.learn(self._core.update(lookup.slots, starts, lookup.grad_rows, lookup.coefs, grads, applied), step)

    def sum_gradients(self, lookup: Lookup, grad: Any, *, out: Any = None) -> Floats:
        """float32[keys, dim]: the gradient of every unique key; the first half of `update`, for clipping by norm."""
        sums = out_of(out, (len(lookup.slots), self._dim))
        grads = floats_of(grad, (lookup.bags, self._dim), "grad")
        self._core.sum_gradients(lookup.working_set.starts, lookup.grad_rows, lookup.coefs, grads, sums)
        return sums

    def apply_gradients(
        self, slots: Slots, sums: Any, *, step: int = 1, lr: float | None = None, scale: float = 1.0
    ) -> None:
        """The second half of `update`: one gradient per pinned slot. No slot may repeat."""
        gradients = floats_of(sums, (len(slots), self._dim), "sums")
        self.learn(self._core.apply_gradients(slots, gradients, self.step(step, lr, scale)), step)

    def learn(self, gradient: int, step: int) -> None:
        """After step number `step`: what it gave as the gradient of a step that is learned, else nothing happens."""
        if self.learned is not None:
            self.set_scale(self.learned.after(gradient * UNIT, step, self.precision.scale_lr))

    def set_scale(self, learned: LearnedScale) -> None:
        """What codes mean from now on. While no other call looks into rows."""
        self.learned = learned
        self._core.set_scale(learned.scale)

    def release(self, lookup: Lookup, *, dirty: bool = True) -> None:
        """Unpins the rows of a lookup; `dirty` says that they were updated."""
        self._core.unpin(lookup.slots, dirty, lookup.working_set.keys)

    # ---- rows by key or slot

    def pull(self, keys: Any) -> Slots:
        """Pins the rows of `keys` (unique) and returns their slots. All or nothing.

        Raises `BudgetError` when they cannot all be in memory at once, beside what other batches have pinned.
        """
        wanted = as_keys(keys)
        slots = np.empty(len(wanted), np.uint32)
        self._core.pull(wanted, slots)
        return slots

    def pin(self, keys: Any) -> Pins:
        """As `pull`, but the result owns the pins: the last of its holders to let go unpins, or who drops it."""
        return core.Pins(self._core, as_keys(keys))

    def unpin(self, slots: Slots, *, dirty: bool = False) -> None:
        """Gives back one pin per slot; `dirty` says that the rows were changed."""
        self._core.unpin(slots, dirty, None)

    def rows(self, slots: Slots) -> Floats:
        """A copy of pinned rows, float32[n, dim + state]."""
        stored = np.empty((len(slots), self._words), np.float32)
        self._core.copy_out(slots, stored)
        return self.decode(stored)

    def write(self, slots: Slots, rows: Any) -> None:
        """Replaces pinned rows, and marks them dirty. No slot may repeat."""
        self._core.write(slots, self.encode(floats_of(rows, (len(slots), self._floats), "rows")))

    def push(self, keys: Any, rows: Any, *, dirty: bool = True, unique: bool = False) -> None:
        """Replaces the rows of `keys` wherever they are; of a repeated key the last one wins.

        `dirty=False` is for rows that the store below already holds. `unique`: no key repeats, which is faster.
        """
        wanted = as_keys(keys)
        stored = self.encode(floats_of(rows, (len(wanted), self._floats), "rows"))
        self._core.push(wanted, stored, dirty, unique)

    def push_stored(self, keys: Any, stored: Any, *, dirty: bool = True, unique: bool = False) -> None:
        """The same with rows as they are stored."""
        wanted = as_keys(keys)
        self._core.push(wanted, floats_of(stored, (len(wanted), self._words), "stored"), dirty, unique)

    def read(self, keys: Any, *, out: Any = None) -> Floats:
        """float32[n, dim + state]: the rows as they are, for evaluation. Unknown keys give their initial row.

        Changes nothing: no key is inserted, no row is visited.
        """
        if not self._coded:
            return self.read_stored(keys, out=out)
        stored = self.read_stored(keys)
        return self.decode(stored, out=out_of(out, (len(stored), self._floats)))

    def read_stored(self, keys: Any, *, out: Any = None) -> Floats:
        """The same as they are stored."""
        wanted = as_keys(keys)
        stored = out_of(out, (len(wanted), self._words))
        self.read_into(wanted, stored)
        return stored

    def read_into(self, keys: Keys, stored: Floats) -> tuple[int, int]:
        """The same; how many of the rows were here, and how many in the store: the others are new."""
        return self._core.read(keys, stored)

    def decode(self, stored: Floats, *, out: Floats | None = None) -> Floats:
        """float32[n, dim + state] of rows as they are stored: themselves, if they are fp32."""
        if not self._coded:
            return stored
        rows = np.empty((len(stored), self._floats), np.float32) if out is None else out
        self._core.decode(stored, rows)
        return rows

    def encode(self, rows: Floats) -> Floats:
        """The stored form of rows, each weight rounded to the nearest: themselves, if they are fp32."""
        if not self._coded:
            return rows
        stored = np.empty((len(rows), self._words), np.float32)
        self._core.encode(rows, stored)
        return stored

    def evaluate(self, ids: Any, offsets: Any = None, *, pooling: Pooling | None = None, weights: Any = None) -> Floats:
        """What `pool` would return for these ids, read-only."""
        working_set = ids if isinstance(ids, WorkingSet) else WorkingSet.of(ids, threads=self._threads)
        cuts, factors, mean = bags_of(len(working_set.inverse), offsets, pooling, weights)
        rows = self.read(working_set.keys)
        bags = len(working_set.inverse) if cuts is None else len(cuts) - 1
        result = np.empty((bags, self._dim), np.float32)
        self._core.pool_buffer(rows, working_set.inverse, cuts, factors, mean, result)
        return result

    def initial_rows(self, keys: Any) -> Floats:
        """The rows these keys begin with."""
        wanted = as_keys(keys)
        stored = np.empty((len(wanted), self._words), np.float32)
        self._core.initial_rows(wanted, stored)
        return self.decode(stored)

    # ---- the store below

    def flush(self, store: SsdStore | None = None) -> None:
        """Writes all dirty rows to the tier's store, or to another one; commit that to make them durable.

        Takes as long as there are dirty rows, however many others there are.
        """
        self._core.flush(None if store is None else store._core)

    def dirty_rows(self, batch_rows: int = 65536) -> Iterator[tuple[npt.NDArray[np.uint64], Floats]]:
        """Keys and rows changed since they were last flushed, in pieces. Nothing else may use the tier meanwhile."""
        place = 0
        while True:
            keys = np.empty(batch_rows, np.uint64)
            stored = np.empty((batch_rows, self._words), np.float32)
            count, place = self._core.dirty_rows(place, keys, stored)
            if count == 0:
                return
            yield keys[:count], self.decode(stored[:count])

    def make_room(self, rows: int) -> None:
        """Evicts until `rows` slots are free or nothing more can leave. A pull does it by itself, but then waits."""
        self._core.make_room(rows)

    # ---- books

    def check(self, *, idle: bool = True) -> None:
        """Raises `ThermoclineError` unless the books balance; `idle`: no call in progress and nothing pinned."""
        self._core.check(idle)

    def stats(self) -> DramStats:
        """Counters and bytes."""
        return DramStats(**self._core.stats())

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._dim

    @property
    def floats(self) -> int:
        """Of a row as training sees it: weights and state."""
        return self._floats

    @property
    def optimizer(self) -> Optimizer:
        """As given."""
        return self._optimizer

    @property
    def store(self) -> SsdStore | None:
        """As given."""
        return self._store

    @property
    def capacity(self) -> int:
        """Rows the budget holds."""
        return self._core.capacity

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, weights and state: the store's row_bytes."""
        return self._core.row_bytes

    def __repr__(self) -> str:
        below = "memory only" if self._store is None else f"over {self._store!r}"
        size = format_size(self._core.stats()["budget"])
        return f"DramTier(dim={self._dim}, {self._optimizer}, {size}, {self.capacity} rows, {self._policy}, {below})"

    @property
    def core(self) -> core.DramTier:
        """The C++ tier: `tc.Table` trains on it directly."""
        return self._core

    def step(self, step: int, lr: float | None, scale: float) -> Step:
        if step < 1:
            raise ValueError(f"step is {step}: steps count from 1")
        o = self._optimizer
        return core.make_step(
            optimizer=o.code,
            lr=o.lr if lr is None else lr,
            eps=getattr(o, "eps", 0.0),
            weight_decay=o.weight_decay,
            beta1=getattr(o, "beta1", 0.0),
            beta2=getattr(o, "beta2", 0.0),
            t=step,
            scale=scale,
        )


def _word(value: int, what: str) -> int:
    if not 0 <= value < 2**64:
        raise ValueError(f"{what} is {value}: it must be from 0 to 2**64 - 1")
    return value
