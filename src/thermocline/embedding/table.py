"""`tc.Table`: rows of one layout, trained through `tc.EmbeddingBag`, one update per unique key and step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast

import numpy as np

from thermocline.arrays import Keys
from thermocline.batch import Batch
from thermocline.core import core
from thermocline.embedding.admission import Admission
from thermocline.embedding.backend import LocalBackend, RowBackend
from thermocline.embedding.bag_registry import BagRegistry
from thermocline.embedding.batch_table import BatchTable
from thermocline.embedding.expiry import Expired, Expiry, Selection
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.key_hash import ALL_KEYS, KeyPart
from thermocline.embedding.member_keys import Member
from thermocline.embedding.optimizers import NAMES as OPTIMIZERS, Optimizer
from thermocline.embedding.pending import PendingBatches
from thermocline.embedding.precision import Kind, Precision
from thermocline.embedding.row_arguments import rows_to_load
from thermocline.embedding.row_statistics import RowStatistics, Statistic, StatisticsState, limited_time, time_range
from thermocline.embedding.table_spec import LookAheadLimits, OnDamage, Policy, TableSpec
from thermocline.errors import (
    require,
    require_type,
    whole_number,
)
from thermocline.tiers.local_backend import make_local_backend
from thermocline.utils.machine import release_memory, require_memory, reserve_memory
from thermocline.utils.text_format import parse_size

if TYPE_CHECKING:
    from thermocline.embedding.admission_backend import AdmissionBackend

Device = Literal["auto", "cpu", "cuda"]
BackendFactory = Callable[[TableSpec, str, int | None], RowBackend]
"""(spec, device, epoch) -> backend: `device` is the table's argument, `epoch` the commit to open."""


class Table(BatchTable):
    """Rows by 64-bit key: `dim` weights and the optimizer's state, in HBM (`hbm`), DRAM (`mem`) and SSD (`ssd`).

    No vocabulary is declared: a key exists once it has been trained. Training gives the same bits whatever the budgets.
    Without `ssd` all rows must fit `mem`.

    A table collects gradients and decides when rows change; its `backend` stores rows and computes
    (`embedding/backend.py`).
    """

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        hbm: str | SupportsIndex | None = None,
        mem: str | SupportsIndex = "1GB",
        ssd: str | os.PathLike[str] | None = None,
        lookahead: int | str = "auto",
        name: str = "table",
        seed: int = 0,
        initial: Initial | None = None,
        precision: Precision | Kind = "fp32",
        policy: Policy = "lru_lfu",
        threads: int | None = None,
        ssd_mem: str | SupportsIndex | None = None,
        ssd_filter_bits: int = 10,
        ssd_options: Mapping[str, Any] | None = None,
        expected_keys: int | None = None,
        on_damage: OnDamage = "stop",
        epoch: int | None = None,
        device: Device = "auto",
        accumulate: int = 1,
        statistics: Sequence[Statistic] | RowStatistics = (),
        expiry: Expiry | None = None,
        admission: Admission | None = None,
        mem_overcommit: bool = False,
        per_rank: bool = False,
        make_backend: BackendFactory | None = None,
    ) -> None:
        """Open the table; with `ssd`, on the rows of the store's newest commit, or of `epoch`.

        hbm          bytes of GPU memory for rows, their index and metadata; bags then give vectors on the GPU
        mem          bytes of DRAM for rows, their index and metadata
        ssd          folder of the store that holds the rows beyond DRAM; created if missing
        lookahead    how far rows are loaded from SSD ahead of training, in `tc.prefetch` and `tc.Trainer`: "auto", a
                     number of batches loaded together (0: none), or bytes of `mem` for the batches in flight
        name         initial rows are a function of (seed, name, key); checkpoints identify tables by name
        precision    stored precision of weights: "fp32", "fp16", "bf16", "int8" .. "int2", or a `tc.Precision`
        threads      threads of one host operation; default: all cores, less two beside a GPU. No result depends on it
        ssd_mem      bytes of DRAM for the store's index and buffers, beside `mem`; default: an eighth of the machine's
        ssd_filter_bits   bits per key of that index which avoid reads of new keys; given up if ssd_mem is short
        ssd_options  further arguments of `SsdStore.open`
        expected_keys   refuse to open if ssd_mem cannot hold the index of this many keys
        on_damage    when a merge finds a damaged page: "stop" ends training at the next step boundary or commit;
                     "continue" trains on without merging that partition. Reading a damaged row always raises
        device       "cuda", "cpu", or "auto": with `hbm`, the GPU if there is one
        accumulate   batches per step: with more and without a step, a bag warns once; see `accumulate`
        statistics   statistics to keep with each row: any of "frequency", "last_step", "last_time", "show", "click";
                     see `read_statistics`. 4 bytes per row each, last_time 8, and 4 for show or click
        expiry       rules by which steps delete rows, and at which steps: see `tc.Expiry`
        admission    which keys get a row, such as `tc.Admission(count=5)`; None: all that are trained
        mem_overcommit   accept budgets beyond the memory of the machine, and do not count them; else the budgets of all
                     open tables of the process together are compared with it, and refused with the numbers
        per_rank     True: every rank of torch.distributed trains rows of its own. Without it, training over several
                     ranks raises: rows would differ between ranks; `tc.ShardedTable` shares them
        make_backend a `RowBackend` other than the built-in ones
        """
        dim, seed = whole_number(dim, "dim"), whole_number(seed, "seed")
        require_type(optimizer, Optimizer, "optimizer", f"{OPTIMIZERS}, such as Adagrad(lr=0.1)")
        require_type(initial, Initial | None, "initial", "Uniform, Normal or Constant, such as Uniform(scale=0.01)")
        require_type(ssd, str | os.PathLike | None, "ssd", "a folder's name, or None")
        require_table_name(name)
        require(on_damage in ("stop", "continue"), "on_damage", on_damage, "stop or continue")
        require_type(admission, Admission | None, "admission", "a tc.Admission, such as Admission(count=5), or None")
        counters = 0 if admission is None else admission.memory_bytes
        if not mem_overcommit:
            store = 0 if ssd is None or ssd_mem is None else parse_size(ssd_mem, "ssd_mem")
            budgets = "mem + ssd_mem" if store else "mem"  # the default of ssd_mem depends on the machine
            budgets += " + admission.memory" if counters else ""
            needed = parse_size(mem, "mem") + store + counters
            require_memory(needed, name=budgets, override="mem_overcommit=True")
        stored = Precision.of(precision)
        require(
            stored.kind == "fp32" or not optimizer.catches_up, f"{type(optimizer).__name__}.lazy", optimizer.lazy,
            f'"touched" with precision {stored.kind}: rows that catch up are stored as fp32',
        )  # fmt: skip
        kept = RowStatistics.of(statistics)
        require_type(expiry, Expiry | None, "expiry", "a tc.Expiry, such as Expiry(every=1000, unused_steps=10000)")
        row_bytes = stored.row_bytes(dim, optimizer) + kept.bytes
        self.spec = TableSpec(
            name=name,
            dim=dim,
            optimizer=optimizer,
            precision=stored,
            initial=Uniform() if initial is None else initial,
            seed=seed,
            policy=policy,
            threads=None if threads is None else whole_number(threads, "threads"),
            hbm=None if hbm is None else parse_size(hbm, "hbm"),
            mem=(budget := parse_size(mem, "mem")),
            lookahead=None if ssd is None else LookAheadLimits.of(lookahead, budget, row_bytes),
            ssd=None if ssd is None else Path(ssd),
            store_options={
                "row_bytes": row_bytes,
                "mem_budget": ssd_mem,
                "filter_bits": ssd_filter_bits,
                "expected_keys": None if expected_keys is None else whole_number(expected_keys, "expected_keys"),
                **(ssd_options or {}),
            },
            on_damage=on_damage,
            statistics=kept,
        )
        if admission is not None:
            _require_fixed_initial_rows(admission, self.spec)
        self.expiry = None if expiry is None else expiry.checked(kept)
        """Rules by which `step` deletes rows; None: nothing is deleted."""
        self.expired = Expired()
        """Counters of expiry since the table was opened."""
        self.on_expired: list[Callable[[Keys], None]] = []
        """Called with the keys of this process that an expiry has deleted after a step, if there are any."""
        self.max_time_jump: int | None = None
        """Most seconds by which the event time of a step may exceed the newest one before; None: no limit."""
        self.lr = optimizer.lr
        """Learning rate of the next steps."""
        self.pipelines = weakref.WeakSet()
        self.checkpoint_store = None
        self._bags = BagRegistry()
        self._pending = PendingBatches(name)
        self.accumulate = accumulate
        self._reduced = None
        self._forwards = 0
        self.per_rank = per_rank
        """Whether every rank may train rows of its own."""
        self.backend = (make_backend or make_local_backend)(self.spec, device, epoch)
        self.backend.statistics = StatisticsState()
        self.admission = admission
        """Which keys get a row; None: all that are trained."""
        self._admission = None
        if admission is not None:
            self._admission = self._make_admission(admission)
            self._admission.may_forget = self.expiry is not None
            self.backend = cast(RowBackend, self._admission)
        self._open_version()
        if not mem_overcommit:
            reserve_memory(self, repr(name), needed)

    updated_in_backward: bool = False
    """Whether a module, such as a collection of `thermocline.torchrec`, makes the steps, in backward passes."""

    # ---- tables that store rows

    @property
    def storage(self) -> Table:
        """The table that stores the rows: this one. Of a table of `tc.Tiers`, the one it shares with others."""
        return self

    @property
    def row_tables(self) -> list[Table]:
        """The tables that store the rows: see `row_tables`."""
        return [self]

    # ---- admission

    def _make_admission(self, admission: Admission) -> AdmissionBackend:
        """Make the layer above the backend that decides which keys get a row."""
        from thermocline.embedding.admission_backend import AdmissionBackend

        return AdmissionBackend(cast(LocalBackend, self.backend), self.spec, admission)

    @property
    def admission_stats(self) -> core.AdmissionStats | None:
        """Counters of admission since the table was opened, and its memory; None: the table has no admission."""
        return None if self._admission is None else self._admission.stats

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this process that a checkpoint saves beside rows, as of the last step."""
        return {} if self._admission is None else {"admission": self._admission.state()}

    def load_rank_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the results of `rank_state` of the processes that had this one's rows, after the rows."""
        if self._admission is not None:
            saved = [state["admission"] for state in states if "admission" in state]
            self._admission.load_state(saved, self.owns)

    # ---- steps

    def reduce_gradients(self) -> None:
        """Sum the collected gradients per key now; their memory may change afterwards. Collective over ranks."""
        if self._reduced is None and not self._idle:
            self._reduced = self.backend.reduce(self._pending.ordered())

    def gradient_norm(self) -> float:
        """Return the joint norm of all gradients since the last step, to clip it with other gradients.

        Calls `reduce_gradients`. Collective over ranks: the norm of the mean over ranks.
        """
        self.reduce_gradients()
        return 0.0 if self._reduced is None else self.backend.norm(self._reduced)

    def step(self, *, lr: float | None = None, scale: float = 1.0, max_norm: float | None = None) -> float | None:
        """Apply all gradients since the last step: one update per unique key. Collective over ranks.

        Of a frozen table: do nothing, `step_count` included.

        lr         learning rate of this step only; default: `table.lr`
        scale      factor of every gradient (1 / loss scale under AMP, 1 / batches when accumulating)
        max_norm   scale all gradients of the table down if their joint norm is larger; returns the norm before.
                   To clip together with other gradients use `gradient_norm`, then `scale`
        """
        step, rate = self.step_count + 1, self.lr if lr is None else lr
        norm = None
        try:
            if not self._history_begun and not self._idle:
                self._history, self._history_begun = self._new_history(), True
            if max_norm is not None:
                norm = abs(scale) * self.gradient_norm()
                scale *= max_norm / norm if norm > max_norm else 1.0
            if not self._idle:
                if not self.backend.recording:
                    self.set_step_time([gradient.batch for gradient in self._pending.gradients])
                if self._reduced is not None:
                    self.backend.apply(self._reduced, step, rate, scale)
                else:
                    self.backend.update(self._pending.ordered(), step, rate, scale)
                if self.backend.rates is not None:
                    self.backend.rates.add(step, rate)
                self.step_count = step
        finally:
            self.discard_gradients()
        if self.step_count == step and not self.backend.recording:
            self.expire_after_step()
        return norm

    def set_step_time(self, batches: Sequence[Batch]) -> None:
        """Set the event time of the next step: the newest one of its batches, of all ranks. `step` does so, except
        while it is recorded. Collective over ranks."""
        if "last_time" not in self.spec.statistics:
            return
        times = time_range(self.name, batches)
        if self.groups is not None:
            own = times if len(times) else np.array([1, 0])  # no example: a range that is empty
            ranges = self.groups.train.all_gather(own, "event time")
            times = ranges[ranges[:, 0] <= ranges[:, 1]].ravel()
        statistics = self.backend.statistics
        statistics.set_time(limited_time(times, statistics.newest, self.max_time_jump) if len(times) else None)

    def expire_after_step(self) -> None:
        """Run the part of an expiry that follows step `step_count`. `step` does so, except while it is recorded."""
        if self.expiry is None:
            return
        if (part := self.expiry.part_after(self.step_count)) is not None:
            self._expire(self.expiry, part)
        self.backend.expect_expiry(self.checkpoint_store, self.expiry, self.step_count)

    def expire(self, expiry: Expiry) -> int:
        """Delete rows by the rules of `expiry` now, whatever its `every`; return their number. Between steps.

        All tiers are changed at once; files shrink at their next merge. A key that returns starts from its initial row,
        with statistics 0. Cost: one scan of all rows (docs/online.md). Collective over ranks: each deletes its own.
        """
        return self._expire_now(expiry)

    def _expire_now(self, expiry: Expiry, member: Member | None = None) -> int:
        self._require_no_gradients("expire()")
        if self._admission is not None and self.expiry is None:
            self._admission.require_no_planner("expire() of a table without expiry=...")
        deleted = self._expire(expiry.checked(self.spec.statistics), ALL_KEYS, member)
        self._history, self._history_begun = self._new_history(), True  # step_count alone does not tell these rows
        return deleted

    def _expire(self, expiry: Expiry, part: KeyPart, member: Member | None = None) -> int:
        """Delete rows of a part of the keys, and of one of the tables that are stored together; return their number."""
        selection = Selection(expiry, self.spec, self.backend.statistics, self.step_count, part, self._total)
        select = selection if member is None else member.select(selection)
        keys = self.backend.expire(select, self.checkpoint_store, part, weights=expiry.weights)
        self.expired.add(part, len(keys), selection.rows - len(keys), selection.seconds)
        if self._admission is not None and (len(keys) or self.groups is not None):
            self._admission.forget(keys)
        if len(keys):
            for called in self.on_expired:
                called(keys)
        return len(keys)

    def _total(self, count: int) -> int:
        """Return the sum of a count over the ranks. Collective."""
        if self.groups is None:
            return count
        return int(self.groups.train.all_gather(np.array([count]), "counting rows").sum())

    @property
    def _idle(self) -> bool:
        """Whether a step has nothing to do. A trained bag that was deleted may have left gradients."""
        return self.frozen and not self.pending_gradients

    def discard_gradients(self) -> None:
        """Drop the collected gradients, for instance of an AMP step that overflowed. All ranks or none."""
        self._reduced = None
        self._pending.clear()
        self.backend.end_step()

    # ---- rows from elsewhere

    def load_rows(self, keys: Any, rows: Any, state: Any = None) -> None:
        """Insert or replace rows, between steps; other rows stay as they are. `read_rows` returns its arguments.

        keys    uint64, int64 bit patterns or whole numbers, one per row; of a repeated key the last row counts
        rows    float32[n, dim]: weights, rounded to nearest below fp32
        state   float32[n, state] (with one float per row also [n]): the optimizer's state; None: its initial state

        Statistics of the rows are 0. Steps go on from `step_count`, which Adam's bias correction uses. Rows are durable
        after the next commit. Over ranks, all ranks pass equal arguments, and each takes the rows that it owns. After a
        `BudgetError` a part of the rows was loaded.
        """
        wanted, values = rows_to_load(self.spec, self.step_count, keys, rows, state)
        self._require_no_gradients("load_rows()")
        self.backend.require_idle()
        self._history, self._history_begun = self._new_history(), True  # an earlier state_dict has other rows
        self.backend.write_rows(wanted, values)

    # ---- open and close

    def reopen(self, epoch: int | None = None) -> None:
        """Drop everything since a commit, the newest or `epoch`, and open it. Without `ssd`: an empty table."""
        self.discard_gradients()
        self.backend.reopen(epoch)
        self._open_version()

    def close(self) -> None:
        """Close the table's stores. What was not committed is lost."""
        release_memory(self)
        self.discard_gradients()
        self.backend.close()
        if self.checkpoint_store is not None:
            self.checkpoint_store.close()


def require_table_name(name: str) -> None:
    """Raise unless a table can have this name."""
    require_type(name, str, "name", "text")
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise ValueError(f"name is {name!r}: it must consist of letters, digits, '-', '_', '.', and not begin with '.'")


def row_tables(tables: Iterable[Any]) -> list[Table]:
    """Return the tables that store the rows of these, each once.

    tables   `tc.Table`s, tables of `tc.Tiers`, or `tc.Tiers`, which stand for all of their tables
    """
    return list(dict.fromkeys(table for given in tables for table in given.row_tables))


def _require_fixed_initial_rows(admission: Admission, spec: TableSpec) -> None:
    """Raise ValueError if keys that are not admitted read initial rows, and these would change during training."""
    if admission.otherwise != "initial":
        return
    rule = "with admission and otherwise='initial', as initial rows would change; or use otherwise='zero' or 'shared'"
    require(not spec.precision.scale_lr, "precision.scale_lr", spec.precision.scale_lr, f"0 {rule}")
    require(
        not spec.optimizer.catches_up, f"{type(spec.optimizer).__name__}.lazy", spec.optimizer.lazy, f"touched {rule}"
    )
