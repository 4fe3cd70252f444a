"""`DramTier`: rows of one table in DRAM within a byte budget, above an SSD store or alone, trained in place."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys, Slots, as_keys, floats_of, out_of
from thermocline.core import core
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.key_hash import ALL_KEYS, KeyPart
from thermocline.embedding.optimizers import Optimizer, initial_state
from thermocline.embedding.precision import FP32, Precision
from thermocline.embedding.quant_scale import UNIT, LearnedScale
from thermocline.embedding.row_statistics import NO_STATISTICS, RowStatistics
from thermocline.embedding.step_rates import StepRates
from thermocline.embedding.table_spec import Policy
from thermocline.errors import BudgetError
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.text_format import format_size, parse_size

Step = core.Step
Pins = core.Pins

_POLICIES = {"lru_lfu": 0, "lru": 1, "lfu": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class KnownSlots:
    """Slots that `DramTier.read_into` returned for the keys of a push."""

    slots: Slots
    """2**32 - 1: unknown."""
    version: int
    """`slots_version` at some time before the read: while it is the same, no slot has lost its key."""

    def __getitem__(self, chosen: npt.NDArray[np.bool_] | slice) -> KnownSlots:
        return KnownSlots(self.slots[chosen], self.version)


class Hint(Protocol):
    """Pins of rows that no result depends on: rows loaded ahead."""

    def drop(self) -> bool:
        """Unpin all rows, and wait until a load in progress has unpinned its own. Return False if called before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DramStats:
    """Counters of a tier; operations are counted since it was created."""

    capacity: int
    """Rows that fit the budget."""
    resident: int
    free: int
    pinned: int
    dirty: int
    """Rows changed since they were last written to a store."""
    shards: int
    hits: int
    misses: int
    loaded_ahead: int
    """Misses of the look-ahead of training; hits of its pulls are not counted."""
    read_ahead: int
    """Rows that the look-ahead of evaluation loaded. No other counter includes them."""
    from_store: int
    initialised: int
    """Misses that the store did not have either: they got their initial row."""
    pushed: int
    reads: int
    """Rows requested by `read`."""
    read_hits: int
    read_from_store: int
    """Rows that `read` itself read from the store."""
    evictions: int
    flushed: int
    """Rows written to the store, by eviction or flush."""
    puts: int
    """Calls of the store that wrote them."""
    written_ahead: int
    """Rows of `flushed` that the background thread wrote before their slots were needed."""
    puts_in_pulls: int
    """Calls of `puts` that a pull waited for."""
    bytes_rows: int
    bytes_metadata: int
    bytes_index: int
    bytes_buffers: int
    bytes_total: int
    """Sum of the above; at most the budget."""
    budget: int
    kernels: str
    """Instruction set of the kernels."""

    @property
    def hit_rate(self) -> float:
        """Fraction of pulled rows that were in DRAM."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


class DramTier:
    """Rows of one table in DRAM: `dim` weights, then the optimizer's state.

    Arguments and results are float32[n, dim + state]. With a `precision` below fp32 rows are stored as codes; methods
    named `*_stored` take and return the stored words, float32[n, row_bytes / 4] of arbitrary bit patterns.

    A pulled row stays in its slot until it has been unpinned as often as pulled. Unpinned rows are evicted by `policy`
    when slots are needed; changed rows are written to the `store`. Without a store nothing is evicted, and a full tier
    raises `BudgetError`.

    Rows of an optimizer with `lazy="catch_up"` are read and changed as they are: call `catch_up` before, as `tc.Table`
    does.

    Thread safety: all methods may be called from several threads at once and release the GIL. While rows are being
    changed (`apply_gradients`, `write`) no other call may use the same rows, nor `flush`.
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
        "hints",
        "learned",
        "precision",
        "reserved",
        "seed",
        "table",
    )

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        budget: str | SupportsIndex = "64MB",
        reserved: int = 0,
        store: SsdStore | None = None,
        policy: Policy = "lru_lfu",
        threads: int | None = None,
        seed: int = 0,
        table: int = 0,
        initial: Initial | None = None,
        precision: Precision = FP32,
        statistics: RowStatistics = NO_STATISTICS,
        shards: int | None = None,
        write_ahead: int | None = None,
        initial_parts: Sequence[tuple[int, Initial]] = (),
    ) -> None:
        """Make an empty tier.

        budget    bytes for rows, index, metadata and buffers together
        reserved  bytes of the budget that the caller uses for batches in flight; `stats` counts them as buffers
        store     the store below; its row_bytes must be those of the tier
        policy    "lru_lfu": keep recently used rows, then frequently used ones; "lru" or "lfu": one criterion only
        threads   threads of one call; default: all cores. No result depends on it
        seed, table, initial   initial rows are a function of these and the key. Default: Uniform(scale=0.01)
        precision   stored precision of weights
        statistics   statistics of rows: their words follow the optimizer's state, in decoded rows as bit patterns
        shards    parts of the index, a power of two up to 256; default: from the capacity
        write_ahead   rows to be evicted next that a background thread keeps clean; default: the slots that two recent
                      pulls took, 1/16 to 1/4 of all; 0: a pull writes the changed rows that it evicts
        initial_parts   top 16 bits of keys, and their initializer; other keys have `initial`
        """
        if dim < 1:
            raise ValueError(f"dim is {dim}: it must be at least 1")
        if policy not in _POLICIES:
            raise ValueError(f"policy is {policy!r}: it must be one of {', '.join(_POLICIES)}")
        if shards is not None and (not 1 <= shards <= 256 or shards & (shards - 1)):
            raise ValueError(f"shards is {shards}: it must be a power of two from 1 to 256")
        if write_ahead is not None and write_ahead < 0:
            raise ValueError(f"write_ahead is {write_ahead}: it must be at least 0, or None for the default")
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}: it must be at least 1")
        start = Uniform() if initial is None else initial
        self._dim = dim
        self._floats = dim + optimizer.state_floats(dim) + statistics.words
        self._words = precision.row_bytes(dim, optimizer) // 4 + statistics.words
        self._coded = precision.kind != "fp32"
        self.precision = precision
        """Stored precision of weights."""
        self.seed, self.table = _word(seed, "seed"), _word(table, "table")
        self.learned = LearnedScale(precision.scale) if precision.scale_lr else None
        """State of a learned quantization scale; None: the precision has none."""
        self.hints: dict[int, weakref.ref[Hint]] = {}
        """Hints that may have pins, by `id`. Threads change it by single operations on a dict, which are atomic."""
        self._optimizer = optimizer
        self._policy = policy
        self._store = store
        self._threads = threads or cores()
        self.reserved = reserved
        """Bytes of the budget for batches in flight."""
        self._core = core.DramTier(
            dim=dim,
            optimizer=optimizer.code,
            budget=parse_size(budget, "budget"),
            reserved=reserved,
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
            statistics=statistics.mask,
            store=None if store is None else store._core,
            write_ahead=write_ahead,
            catch_up=optimizer.catches_up,
            initial_parts=[(prefix, part.code, part.scale) for prefix, part in initial_parts],
        )

    # ---- gradients

    def apply_gradients(
        self, slots: Slots, sums: Any, *, step: int = 1, lr: float | None = None, scale: float = 1.0
    ) -> None:
        """Apply one optimizer step to pinned rows: one summed gradient per slot. No slot may repeat.

        step    number of the table's step, from 1 (Adam's bias correction)
        lr      learning rate of this step; default: the optimizer's
        scale   factor of every gradient
        """
        gradients = floats_of(sums, (len(slots), self._dim), "sums")
        self.learn(self._core.apply_gradients(slots, gradients, self.step(step, lr, scale)), step)

    def catch_up(
        self, rates: StepRates, *, slots: Slots | None = None, rows: Floats | None = None, step: int | None = None
    ) -> None:
        """Replay missed steps, in place: of pinned rows, marked dirty, or of copies. No slot may repeat.

        step   the step that is applied next, which `rates` do not have yet; default: none
        """
        if slots is not None:
            self._core.mark_dirty(slots)
        stamp = rates.step if step is None else step
        self._core.catch_up(slots, rows, rates.ring, self.step(1, 0.0, 1.0), rates.step, stamp)

    def learn(self, gradient: int, step: int) -> None:
        """Update a learned scale by its gradient, as the core summed it in step `step`; else do nothing."""
        if self.learned is not None:
            self.set_scale(self.learned.after(gradient * UNIT, step, self.precision.scale_lr))

    def set_scale(self, learned: LearnedScale) -> None:
        """Set the learned scale. No other call may use rows meanwhile."""
        self.learned = learned
        self._core.set_scale(learned.scale)

    # ---- rows by key or slot

    def pull(self, keys: Any) -> Slots:
        """Pin the rows of unique `keys` and return their slots, or change nothing and raise.

        Raises `BudgetError` if they do not fit beside the rows that are pinned already.
        """
        wanted = as_keys(keys)
        slots = np.empty(len(wanted), np.uint32)
        self._core.pull(wanted, slots)
        return slots

    def pin(self, keys: Any) -> Pins:
        """Pin as `pull` does; the result owns the pins until its last owner's `release` or its destruction."""
        return core.Pins(self._core, as_keys(keys))

    def pin_ahead(self, batches: Sequence[core.HorizonBatch]) -> Pins:
        """Pin the rows of batches of a look-ahead over this tier, batch by batch, and own their release: see `pin`."""
        return core.Pins(self._core, tuple(batches))

    def unpin(self, slots: Slots, *, dirty: bool = False) -> None:
        """Remove one pin per slot; `dirty`: the rows were changed."""
        self._core.unpin(slots, dirty, None)

    def rows(self, slots: Slots) -> Floats:
        """Copy pinned rows: float32[n, dim + state]."""
        stored = np.empty((len(slots), self._words), np.float32)
        self._core.copy_out(slots, stored)
        return self.decode(stored)

    def write(self, slots: Slots, rows: Any) -> None:
        """Replace pinned rows and mark them dirty. No slot may repeat."""
        self._core.write(slots, self.encode(floats_of(rows, (len(slots), self._floats), "rows")))

    def push(self, keys: Any, rows: Any, *, dirty: bool = True, unique: bool = False) -> None:
        """Insert or replace the rows of `keys`; of a repeated key the last row counts.

        dirty    False: the store below already has these rows
        unique   no key repeats, which is faster
        """
        wanted = as_keys(keys)
        stored = self.encode(floats_of(rows, (len(wanted), self._floats), "rows"))
        self._push(wanted, stored, dirty, unique)

    def push_stored(
        self, keys: Any, stored: Any, *, dirty: bool = True, unique: bool = False, known: KnownSlots | None = None
    ) -> None:
        """Insert or replace stored rows: see `push`.

        known   saves lookups of unique keys; a slot that has lost its key is not used
        """
        wanted = as_keys(keys)
        self._push(wanted, floats_of(stored, (len(wanted), self._words), "stored"), dirty, unique, known)

    def _push(self, keys: Keys, stored: Floats, dirty: bool, unique: bool, known: KnownSlots | None = None) -> None:
        """Push, in the memory of hints if that is needed: rows that HBM evicts cannot wait."""
        slots, version = (None, 0) if known is None else (known.slots, known.version)
        while True:
            try:
                return self._core.push(keys, stored, dirty, unique, slots, version)
            except BudgetError:
                if not self.drop_hints():
                    raise

    def erase(self, keys: Keys) -> int:
        """Replace the rows of `keys` by their initial rows, pinned ones in place; return how many were here.

        Call it after the keys were deleted from the store, while none of their rows was dirty or being written: see
        `end_writes`. Waits for no I/O: pulls that are loading one of these rows set the initial row.
        """
        return self._core.erase(keys)

    def end_writes(self, keys: Keys) -> None:
        """Drop changes of these rows that the store does not have. Blocks while one of them is being written."""
        self._core.end_writes(keys)

    def unwritten_rows(self, part: KeyPart) -> tuple[Keys, Floats]:
        """Return keys and stored rows of a part of the keys that the store may not have: changed, or being written.

        No row of the part may change meanwhile; other calls may be in progress. One whose write has ended meanwhile may
        be missing. Waits for no I/O.
        """
        keys, rows = self._core.unwritten_rows(part.lo, part.hi)
        return keys, rows.view(np.float32).reshape(len(keys), self._words)

    def drop_hints(self) -> bool:
        """Unpin all rows that are pinned as a hint. Return whether there may have been any. Thread-safe."""
        hints = [hint for ref in list(self.hints.values()) if (hint := ref()) is not None]
        dropped = [hint.drop() for hint in hints]
        return any(dropped)

    def read(self, keys: Any, *, out: Any = None) -> Floats:
        """Return float32[n, dim + state]. A key without a row gives its initial row.

        Inserts nothing and does not affect eviction.
        """
        if not self._coded:
            return self.read_stored(keys, out=out)
        stored = self.read_stored(keys)
        return self.decode(stored, out=out_of(out, (len(stored), self._floats)))

    def read_stored(self, keys: Any, *, out: Any = None) -> Floats:
        """Return stored rows: see `read`."""
        wanted = as_keys(keys)
        stored = out_of(out, (len(wanted), self._words))
        self.read_into(wanted, stored)
        return stored

    def read_into(self, keys: Keys, stored: Floats, slots: Slots | None = None) -> tuple[int, int]:
        """Fill `stored`, see `read`. Return how many rows were in DRAM and how many in the store; the rest are new.

        slots   filled with the slots of rows that keep them (`keeps_slots`), for `push_stored`; others: 2**32 - 1
        """
        return self._core.read(keys, stored, slots)

    def decode(self, stored: Floats, *, out: Floats | None = None) -> Floats:
        """Convert stored rows to float32[n, dim + state]. Returns the argument for fp32."""
        if not self._coded:
            return stored
        rows = np.empty((len(stored), self._floats), np.float32) if out is None else out
        self._core.decode(stored, rows)
        return rows

    def encode(self, rows: Floats) -> Floats:
        """Convert rows to their stored form, each weight rounded to nearest. Returns the argument for fp32."""
        if not self._coded:
            return rows
        stored = np.empty((len(rows), self._words), np.float32)
        self._core.encode(rows, stored)
        return stored

    def initial_rows(self, keys: Any) -> Floats:
        """Return the initial rows of `keys`."""
        return self.decode(self.initial_stored(as_keys(keys)))

    def initial_stored(self, keys: Keys) -> Floats:
        """Return the initial rows of `keys` as stored."""
        stored = np.empty((len(keys), self._words), np.float32)
        self._core.initial_rows(keys, stored)
        return stored

    # ---- the store below

    def flush(self, store: SsdStore | None = None, part: KeyPart = ALL_KEYS) -> None:
        """Write the dirty rows of a part of the keys to the tier's store, or to another one; commit that store to make
        them durable.

        The cost is proportional to the rows written; of a part, also to the number of dirty rows.
        """
        self._core.flush(None if store is None else store._core, part.lo, part.hi)

    def dirty_rows(
        self, batch_rows: int = 65536, part: KeyPart = ALL_KEYS
    ) -> Iterator[tuple[npt.NDArray[np.uint64], Floats]]:
        """Iterate over keys and rows of a part of the keys changed since the last flush. They must not change, nor be
        flushed or evicted, meanwhile; other rows may be pulled."""
        place = 0
        while True:
            keys = np.empty(batch_rows, np.uint64)
            stored = np.empty((batch_rows, self._words), np.float32)
            count, place = self._core.dirty_rows(place, keys, stored, part.lo, part.hi)
            if count == 0:
                return
            yield keys[:count], self.decode(stored[:count])

    def write_ahead(self, rows: int) -> int:
        """Write the changed rows among about `rows` rows to be evicted next; return their number. They stay in DRAM.

        A background thread does this when slots are taken; see `write_ahead` of the constructor.
        """
        return self._core.write_ahead(rows)

    def stop_write_ahead(self) -> None:
        """Stop the background thread, after the rows it is writing: before the rows of the store are replaced."""
        self._core.stop_write_ahead()

    # ---- inspection

    def check(self, *, idle: bool = True) -> None:
        """Raise `ThermoclineError` if an invariant is violated; `idle`: nothing is pinned and no call is running."""
        self._core.check(idle)

    def stats(self) -> DramStats:
        """Return counters and bytes."""
        return DramStats(**self._core.stats())

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._dim

    @property
    def coded(self) -> bool:
        """Whether a stored row is not the floats of the decoded one."""
        return self._coded

    @property
    def floats(self) -> int:
        """Floats of a decoded row: weights, state, and statistics as bit patterns."""
        return self._floats

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the rows."""
        return self._optimizer

    @property
    def store(self) -> SsdStore | None:
        """The store below; None: rows are in DRAM only."""
        return self._store

    @property
    def capacity(self) -> int:
        """Rows that fit the budget."""
        return self._core.capacity

    @property
    def keeps_slots(self) -> bool:
        """Whether rows stay in their slots until they are erased: without a store."""
        return self._core.keeps_slots

    @property
    def slots_version(self) -> int:
        """Differs between tiers, and changes with `erase`: see `KnownSlots`."""
        return self._core.slots_version

    @property
    def pinned(self) -> int:
        """See `DramStats.pinned`, at little cost."""
        return self._core.pinned

    @property
    def read_from_store(self) -> int:
        """See `DramStats.read_from_store`, at little cost."""
        return self._core.read_from_store

    @property
    def loaded_ahead(self) -> int:
        """See `DramStats`: `loaded_ahead` + `read_ahead`, at little cost."""
        return self._core.loaded_ahead

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row: the store's row_bytes."""
        return self._core.row_bytes

    def __repr__(self) -> str:
        below = "memory only" if self._store is None else f"over {self._store!r}"
        size = format_size(self._core.stats()["budget"])
        return f"DramTier(dim={self._dim}, {self._optimizer}, {size}, {self.capacity} rows, {self._policy}, {below})"

    @property
    def core(self) -> core.DramTier:
        """The C++ tier, used directly by `DramBackend`."""
        return self._core

    def step(self, step: int, lr: float | None, scale: float) -> Step:
        """Return the parameters of one optimizer step for the core."""
        if step < 1:
            raise ValueError(f"step is {step}: it must be at least 1")
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
