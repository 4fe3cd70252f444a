"""`tc.Table`: rows of one layout, trained through `tc.EmbeddingBag`, one update per unique key and step."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.batch import Batch
from thermocline.embedding.backend import BatchAhead, RowBackend, RowWindow
from thermocline.embedding.bag_registry import BagRegistry
from thermocline.embedding.batch_plan import (
    BagInputs,
    BagSpec,
    BatchPlan,
    Gradient,
    Pins,
    ReducedGradients,
    select_inputs,
)
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.pending import PendingBatches
from thermocline.embedding.precision import Kind, Precision, append_precision
from thermocline.embedding.row_version import RowVersion, user_note
from thermocline.embedding.table_spec import LookAheadLimits, OnDamage, Policy, TableSpec
from thermocline.errors import (
    BudgetError,
    CorruptionError,
    ThermoclineError,
    require,
    require_type,
    whole_number,
)
from thermocline.tiers.host_rows import open_store
from thermocline.tiers.local_backend import make_local_backend
from thermocline.utils.machine import require_memory
from thermocline.utils.text_format import format_size, parse_size

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from thermocline.distributed.communicator import Groups
    from thermocline.embedding.bag import EmbeddingBag
    from thermocline.tiers.dram import DramTier
    from thermocline.tiers.hbm import HbmTier
    from thermocline.tiers.ssd import SsdStore

Device = Literal["auto", "cpu", "cuda"]
BackendFactory = Callable[[TableSpec, str, int | None], RowBackend]
"""(spec, device, epoch) -> backend: `device` is the table's argument, `epoch` the commit to open."""


class Table:
    """Rows by 64-bit key: `dim` weights and the optimizer's state, in HBM (`hbm`), DRAM (`mem`) and SSD (`ssd`).

    No vocabulary is declared: a key exists once it has been trained. Training gives the same bits whatever the budgets.
    Without `ssd` all rows must fit `mem`.

    A table collects gradients and decides when rows change; its `backend` stores rows and computes
    (`embedding/backend.py`).
    """

    backend: RowBackend

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
        mem_overcommit   accept budgets beyond the memory of the machine; else they are refused with both numbers
        per_rank     True: every rank of torch.distributed trains rows of its own. Without it, training over several
                     ranks raises: rows would differ between ranks; `tc.ShardedTable` shares them
        make_backend a `RowBackend` other than the built-in ones
        """
        dim, seed = whole_number(dim, "dim"), whole_number(seed, "seed")
        require_type(optimizer, Optimizer, "optimizer", "SGD, Adagrad, RowWiseAdagrad or Adam, such as Adagrad(lr=0.1)")
        require_type(initial, Initial | None, "initial", "Uniform, Normal or Constant, such as Uniform(scale=0.01)")
        require_type(ssd, str | os.PathLike | None, "ssd", "a folder's name, or None")
        require_type(name, str, "name", "text")
        if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
            raise ValueError(
                f"name is {name!r}: it must consist of letters, digits, '-', '_', '.', and not begin with '.'"
            )
        require(on_damage in ("stop", "continue"), "on_damage", on_damage, "stop or continue")
        if not mem_overcommit:
            store = 0 if ssd is None or ssd_mem is None else parse_size(ssd_mem, "ssd_mem")
            budgets = "mem + ssd_mem" if store else "mem"  # the default of ssd_mem depends on the machine
            require_memory(parse_size(mem, "mem") + store, name=budgets, override="mem_overcommit=True")
        stored = Precision.of(precision)
        row_bytes = stored.row_bytes(dim, optimizer)
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
        )
        self.lr = optimizer.lr
        """Learning rate of the next steps."""
        self.pipelines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Open pipelines that train the table."""
        self.checkpoint_store: SsdStore | None = None
        """Store of a table without `ssd`, where `tc.Checkpoints` saves its rows."""
        self._bags = BagRegistry()
        self._pending = PendingBatches(name)
        self.accumulate = accumulate
        self._reduced: ReducedGradients | None = None
        """Sums of the pending gradients, once `reduce_gradients` has computed them."""
        self._forwards = 0
        self.per_rank = per_rank
        """Whether every rank may train rows of its own."""
        self.backend = (make_backend or make_local_backend)(self.spec, device, epoch)
        self._open_version()

    # ---- description

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self.spec.dim

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the rows."""
        return self.spec.optimizer

    @property
    def precision(self) -> Precision:
        """The stored precision of weights."""
        return self.spec.precision

    @property
    def layout(self) -> dict[str, Any]:
        """See `TableSpec.layout`."""
        return self.spec.layout

    @property
    def device(self) -> torch.device:
        """Device of the bags' outputs."""
        return self.backend.device

    @property
    def groups(self) -> Groups | None:
        """The ranks that share the table; None: this process alone."""
        return self.backend.groups

    @property
    def dram(self) -> DramTier:
        """The DRAM tier, for inspection and direct access to rows."""
        tier = self.backend.tiers.dram
        if tier is None:
            raise AttributeError(f"table {self.name!r} has no DRAM tier: its backend is {type(self.backend).__name__}")
        return tier

    @property
    def hbm(self) -> HbmTier | None:
        """The HBM tier; None: rows are trained elsewhere."""
        return self.backend.tiers.hbm

    @property
    def store(self) -> SsdStore | None:
        """The SSD store; None: the table was opened without `ssd`."""
        return self.backend.tiers.ssd

    @property
    def store_root(self) -> Path | None:
        """Folder of the table's store, or of all ranks' stores; None: the table was opened without `ssd`."""
        return self.spec.ssd

    @property
    def damage(self) -> str:
        """Damage that a merge of the table's store found, with the command that repairs it; empty: none. Fast."""
        stores = (self.store, self.checkpoint_store)
        return next((store.damage for store in stores if store is not None and store.damage), "")

    def require_undamaged(self) -> None:
        """Raise `CorruptionError` if a merge found damage and `on_damage` is "stop"."""
        if self.spec.on_damage == "stop" and (damage := self.damage):
            raise CorruptionError(f'table {self.name!r}: {damage}, or set on_damage to "continue" to train on')

    @property
    def step_count(self) -> int:
        """Steps applied so far."""
        return self.backend.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.backend.step_count = count

    @property
    def version(self) -> RowVersion:
        """Identity of the rows as they are now."""
        return RowVersion(self._history, self.step_count)

    def set_version(self, version: RowVersion) -> None:
        """Declare that the rows are those of `version`: they were loaded or restored."""
        self._history, self.step_count = version
        self._history_begun = False

    def _open_version(self) -> None:
        """Take the version of the commit on which the backend was opened."""
        store = self.store
        if store is None or store.epoch == 0:
            self.set_version(RowVersion("", 0))
        else:
            self.set_version(RowVersion.of_commit(store.note, store.epoch))

    def _new_history(self) -> str:
        """Return a token for the training that begins with the next step."""
        return secrets.token_hex(8)

    @property
    def pending_gradients(self) -> int:
        """Number of backward passes through a bag that no step has applied yet."""
        return len(self._pending.gradients)

    @property
    def accumulate(self) -> int:
        """Batches per step. It changes no result: with more batches than this and without a step, a bag warns once."""
        return self._pending.accumulate

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        require(whole_number(batches, "accumulate") >= 1, "accumulate", batches, "at least 1 batch per step")
        self._pending.accumulate = batches

    # ---- bags

    def register(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads, so that batches can be prepared before its forward pass."""
        self._bags.add(bag, specs)

    def trains(self, bag: Any) -> bool:
        """Return whether neither the table nor the bag is frozen."""
        return self._bags.trains(bag)

    @property
    def frozen(self) -> bool:
        """Whether no step can change a row: the table is frozen, or each of its bags is."""
        return self._bags.frozen

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all bags of the table (False), or unfreeze those that are not frozen themselves.

        See `EmbeddingBag.requires_grad_`.
        """
        self.check_freezable()
        self._bags.table_frozen = not requires_grad
        return self

    def check_freezable(self) -> None:
        """Raise `ThermoclineError` if a bag cannot be frozen or unfrozen now."""
        if self.pending_gradients:
            raise ThermoclineError(
                f"table {self.name!r}: requires_grad_() with gradients that no step has applied: call table.step() or "
                "table.discard_gradients() first"
            )
        if self.groups is not None and len(self.pipelines):
            raise ThermoclineError(
                f"table {self.name!r}: requires_grad_() while a pipeline over ranks is open: all ranks must plan the "
                "same bags for each batch. Close tc.prefetch first"
            )

    @property
    def bags(self) -> list[EmbeddingBag]:
        """The bags that read the table, in the order in which they were made."""
        return self._bags.bags

    @property
    def registered(self) -> list[BagSpec]:
        """Specs of all bags, each once, in an order that does not depend on memory addresses."""
        return self._bags.specs()

    # ---- batches

    def inputs(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BagInputs:
        """Select the inputs of the bags that are trained, or of `specs`. Touches no rows."""
        return select_inputs(batch, self._bags.specs(trained=True) if specs is None else specs)

    def stage(self, batches: Sequence[Batch], ahead: Sequence[BatchAhead] = ()) -> RowWindow:
        """Begin a window of batches: the first stage of `tc.prefetch`. `ahead`: see `RowBackend.stage`."""
        return self.backend.stage([self.inputs(batch) for batch in batches], ahead)

    def inputs_ahead(self, batch: Batch, *, training: bool) -> tuple[BagInputs, BagInputs]:
        """Select the inputs whose rows a look-ahead loads: those of the bags that are trained, or of all bags for
        evaluation; and those of frozen bags."""
        if training:
            return self.inputs(batch), self.inputs(batch, self._bags.specs(trained=False))
        return self.inputs(batch, self._bags.specs()), {}

    def prepare(self, batch: Batch) -> BatchPlan:
        """Pull and pin the rows of one batch now: all stages of `tc.prefetch` in order. Release its pins when done.

        Collective over ranks.
        """
        backend = self.backend
        window = self.stage([batch])
        backend.exchange(window, ahead=False)
        self._pin_now(window)
        (plan,) = backend.prepare(window)
        backend.load(window)
        backend.fetch(plan)
        return plan

    def pin(self, window: RowWindow) -> None:
        """See `RowBackend.pin`. The error names passes of the training loop that hold rows, if there are any."""
        try:
            self.backend.pin(window)
        except BudgetError as error:
            cause = self._pending.explain(error)  # no local exception: its traceback would keep the window alive
            if cause is None:
                raise
            raise BudgetError(cause) from error

    def _pin_now(self, window: RowWindow) -> None:
        """Pin; rows that look-aheads hold are unpinned if the memory is needed."""
        while True:
            try:
                return self.pin(window)
            except BudgetError:
                if not self.drop_lookahead():
                    raise

    def drop_lookahead(self) -> bool:
        """Unpin all rows loaded ahead: a batch needs the memory. Return whether there may have been any. Any thread."""
        dram = self.backend.tiers.dram
        return dram is not None and dram.drop_hints()

    def prepare_forward(self, batch: Batch) -> BatchPlan:
        """Prepare a batch for a forward pass, in training mode, that no pipeline has prepared. Collective over ranks.

        The rows stay pinned until the next step, or until nothing refers to the plan.
        """
        plan = self.prepare(batch)
        self._pending.hold(plan)
        prepared, key = batch.prepared, ("forward", self)

        def forget(ended: weakref.ref[BatchPlan]) -> None:
            if prepared.get(key) is ended:
                del prepared[key]

        prepared[key] = weakref.ref(plan, forget)
        return plan

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BatchPlan:
        """Copy the rows of one batch for evaluation, of all bags or of `specs`. Inserts nothing. Collective over
        ranks."""
        return self.backend.read_batch(self.inputs(batch, self._bags.specs() if specs is None else specs))

    def read_frozen(self, batch: Batch) -> None:
        """Copy the rows that frozen bags read, for their forward passes before the next step. Collective over ranks."""
        if specs := self._bags.specs(trained=False):
            step = self.step_count
            batch.prepared["frozen", self] = step, self.prepare_read(batch, specs)

    def next_forward(self) -> int:
        """Number the forward passes: gradients are summed in this order, whatever the order of backward."""
        self._forwards += 1
        return self._forwards

    def warn_if_step_is_missing(self, batch: Batch) -> None:
        """Warn, once, if a training pass over `batch` begins while too many others wait for a step."""
        self._pending.warn_if_step_is_missing(batch)

    def add_gradient(
        self,
        order: int,
        batch: Batch,
        plan: BatchPlan,
        bag: Any,
        values: torch.Tensor,
        unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        """Keep the gradient of one pooled bag until the step. Called by backward; `values` are used in place."""
        pins = plan.pins
        if pins is None:
            raise RuntimeError(f"backward through rows of table {self.name!r} that were read for evaluation")
        self._acquire(plan, pins)
        self._reduced = None
        self._pending.add(Gradient(order, batch, plan, pins, bag, values, unchanged))

    def weight_gradient(self, plan: BatchPlan, bag: Any, values: torch.Tensor, step: int) -> torch.Tensor:
        """Return float32[ids]: the gradient of the bag's weights, given that of its pooled vectors. Called by backward.

        step   `step_count` at the forward pass: a later step has changed pinned rows
        """
        pins = plan.pins
        if pins is None:
            return self.backend.weight_gradient(plan, bag, values)
        if step != self.step_count:
            raise RuntimeError(
                f"table {self.name!r}: backward to weights per id after table.step(), which has changed the rows of "
                "the forward pass: call backward before the step"
            )
        self._acquire(plan, pins)
        try:
            return self.backend.weight_gradient(plan, bag, values)
        finally:
            pins.release()

    def _acquire(self, plan: BatchPlan, pins: Pins) -> None:
        """Add an owner of the plan's pins, for backward."""
        if not self.backend.is_current(plan) or not pins.acquire():
            raise RuntimeError(
                f"backward through rows of table {self.name!r} that were released: call it before the loop requests "
                "the next batch"
            )

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
                if self._reduced is not None:
                    self.backend.apply(self._reduced, step, rate, scale)
                else:
                    self.backend.update(self._pending.ordered(), step, rate, scale)
                self.step_count = step
        finally:
            self.discard_gradients()
        return norm

    @property
    def _idle(self) -> bool:
        """Whether a step has nothing to do. A trained bag that was deleted may have left gradients."""
        return self.frozen and not self.pending_gradients

    def discard_gradients(self) -> None:
        """Drop the collected gradients, for instance of an AMP step that overflowed. All ranks or none."""
        self._reduced = None
        self._pending.clear()
        self.backend.end_step()

    # ---- durability

    def reopen(self, epoch: int | None = None) -> None:
        """Drop everything since a commit, the newest or `epoch`, and open it. Without `ssd`: an empty table."""
        self.discard_gradients()
        self.backend.reopen(epoch)
        self._open_version()

    def open_store(self, path: str | os.PathLike[str], **options: Any) -> SsdStore:
        """Open a store of rows of this table. `options` replace the table's own of `SsdStore.open`."""
        return open_store(self.spec, path, **options)

    def commit(self, note: bytes = b"") -> int:
        """Make everything up to the last step durable in the table's store; return its epoch.

        The cost is proportional to the rows changed since the last commit. A run with several tables and a dense model
        uses `tc.Checkpoints`. Raises `CorruptionError` after the commit if a merge found damage (`on_damage`).
        """
        if self.store is None:
            raise ValueError(f"table {self.name!r} has no ssd to commit to")
        self.backend.flush()
        epoch = self.store.commit(self.commit_note(note))
        self.require_undamaged()
        return epoch

    def commit_note(self, note: bytes) -> bytes:
        """Return the note of a commit of this table's rows: it records the version and, below fp32, the precision."""
        return append_precision(self.version.append_to(note), self.precision, self.backend.learned_scale)

    @property
    def note(self) -> bytes:
        """The note that was passed to the newest commit of the table's store."""
        return b"" if self.store is None else user_note(self.store.note)

    def owns(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of the keys have their row in this process: all, unless rows are spread over ranks."""
        return np.ones(len(keys), np.bool_)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            f"table {self.name!r} cannot be copied or pickled, as its rows are in tiers of this process: save it with "
            "tc.Checkpoints or tc.state_dict(model, rows=True); copy.deepcopy(model, {id(table): table}) copies the "
            "model and shares the table"
        )

    def write_back(self) -> None:
        """Copy every row that changed in HBM to DRAM: `table.dram` is then complete. Between steps only."""
        self.backend.write_back()

    def rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Floats]]:
        """Iterate over every trained row once: keys and float32[n, dim + state]. Between steps; memory is bounded."""
        return self.backend.rows(self.checkpoint_store, batch_rows)

    def read(self, keys: Any) -> Floats:
        """Return float32[n, dim + state]; a key never trained gives its initial row. Collective over ranks."""
        return self.backend.read(as_keys(keys))

    def tier_counts(self) -> Mapping[str, int]:
        """Return rows of training batches so far by the tier they were in: "hbm", "mem", "ssd", "new"."""
        return self.backend.tier_counts()

    def close(self) -> None:
        """Close the table's stores. What was not committed is lost."""
        self.discard_gradients()
        self.backend.close()
        if self.checkpoint_store is not None:
            self.checkpoint_store.close()

    def __repr__(self) -> str:
        spec = self.spec
        store = "memory only" if spec.ssd is None else f"ssd={str(spec.ssd)!r}"
        hbm = "" if self.hbm is None else f"hbm={format_size(self.hbm.budget)} on {self.hbm.device}, "
        kind = "" if spec.precision.kind == "fp32" else f"{spec.precision.kind}, "
        return (
            f"Table({spec.name!r}, dim={spec.dim}, {kind}{spec.optimizer}, {hbm}mem={format_size(spec.mem)}, {store})"
        )
