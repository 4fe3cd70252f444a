"""`tc.Table`: rows of one layout, trained through `tc.EmbeddingBag`, one update per unique key and step."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.batch import Batch
from thermocline.embedding.backend import RowBackend, RowWindow, ShardBackend
from thermocline.embedding.batch_plan import BagInputs, BagSpec, BatchPlan, Gradient, ReducedGradients, select_inputs
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Kind, Precision, append_precision
from thermocline.embedding.row_version import RowVersion, user_note
from thermocline.embedding.table_spec import OnDamage, Policy, TableSpec
from thermocline.errors import CorruptionError, require, require_type, whole_number
from thermocline.tiers.host_rows import open_store
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
        per_rank: bool = False,
        make_backend: BackendFactory | None = None,
    ) -> None:
        """Open the table; with `ssd`, on the rows of the store's newest commit, or of `epoch`.

        hbm          bytes of GPU memory for rows, their index and metadata; bags then give vectors on the GPU
        mem          bytes of DRAM for rows, their index and metadata
        ssd          folder of the store that holds the rows beyond DRAM; created if missing
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
        stored = Precision.of(precision)
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
            mem=parse_size(mem, "mem"),
            ssd=None if ssd is None else Path(ssd),
            store_options={
                "row_bytes": stored.row_bytes(dim, optimizer),
                "mem_budget": ssd_mem,
                "filter_bits": ssd_filter_bits,
                "expected_keys": None if expected_keys is None else whole_number(expected_keys, "expected_keys"),
                **(ssd_options or {}),
            },
            on_damage=on_damage,
        )
        self.lr = optimizer.lr
        """Learning rate of the next steps."""
        self.checkpoint_store: SsdStore | None = None
        """Store of a table without `ssd`, where `tc.Checkpoints` saves its rows."""
        self._specs: weakref.WeakKeyDictionary[Any, tuple[BagSpec, ...]] = weakref.WeakKeyDictionary()
        self._specs_lock = threading.Lock()  # bags may be made while a pipeline collects
        self._gradients: list[Gradient] = []
        self._reduced: ReducedGradients | None = None
        """Sums of `_gradients`, once `reduce_gradients` has computed them."""
        self._forwards = 0
        self._after_step: list[Callable[[], None]] = []
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
        return len(self._gradients)

    # ---- bags

    def register(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads, so that batches can be prepared before its forward pass."""
        with self._specs_lock:
            self._specs[bag] = specs

    @property
    def bags(self) -> list[EmbeddingBag]:
        """The bags that read the table, in the order in which they were made."""
        with self._specs_lock:
            return list(self._specs)

    @property
    def registered(self) -> list[BagSpec]:
        """What all bags read, each spec once, in an order that does not depend on memory addresses."""
        with self._specs_lock:
            specs = {spec for registered in self._specs.values() for spec in registered}
        return sorted(specs, key=lambda spec: (isinstance(spec.fields[0], str), spec.fields, spec.pooling))

    # ---- batches

    def inputs(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BagInputs:
        """Select the inputs of the registered bags, or of `specs`. Touches no rows."""
        return select_inputs(batch, self.registered if specs is None else specs)

    def stage(self, batches: Sequence[Batch]) -> RowWindow:
        """Begin a window of batches: the first stage of `tc.prefetch`."""
        return self.backend.stage([self.inputs(batch) for batch in batches])

    def prepare(self, batch: Batch) -> BatchPlan:
        """Pull and pin the rows of one batch now: all stages of `tc.prefetch` in order. Release its pins when done.

        Collective over ranks.
        """
        backend = self.backend
        window = self.stage([batch])
        backend.exchange(window, ahead=False)
        backend.pin(window)
        (plan,) = backend.prepare(window)
        backend.load(window)
        backend.fetch(plan)
        return plan

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> BatchPlan:
        """Copy the rows of one batch for evaluation. Inserts nothing. Collective over ranks."""
        return self.backend.read_batch(self.inputs(batch, specs))

    def usable(self, plan: BatchPlan, specs: Sequence[BagSpec], training: bool) -> bool:
        """Return whether the plan has these bags' inputs, current rows and, for training, pins."""
        pinned = plan.pins is not None or not training
        return pinned and self.backend.is_current(plan) and plan.bags.keys() >= set(specs)

    def next_forward(self) -> int:
        """Number the forward passes: gradients are summed in this order, whatever the order of backward."""
        self._forwards += 1
        return self._forwards

    def add_gradient(
        self, order: int, plan: BatchPlan, bag: Any, values: torch.Tensor, unchanged: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep the gradient of one pooled bag until the step. Called by backward; `values` are used in place."""
        pins = plan.pins
        if pins is None:
            raise RuntimeError(f"backward through rows of table {self.name!r} that were read for evaluation")
        if not self.backend.is_current(plan) or not pins.acquire():
            raise RuntimeError(
                f"backward through rows of table {self.name!r} that were released: call it before the loop requests "
                "the next batch"
            )
        self._reduced = None
        self._gradients.append(Gradient(order, plan, pins, bag, values, unchanged))

    # ---- steps

    def reduce_gradients(self) -> None:
        """Sum the collected gradients per key now; their memory may change afterwards. Collective over ranks."""
        if self._reduced is None:
            self._reduced = self.backend.reduce(self._ordered_gradients())

    def gradient_norm(self) -> float:
        """Return the joint norm of all gradients since the last step, to clip it with other gradients.

        Calls `reduce_gradients`. Collective over ranks: the norm of the mean over ranks.
        """
        self.reduce_gradients()
        return 0.0 if self._reduced is None else self.backend.norm(self._reduced)

    def step(self, *, lr: float | None = None, scale: float = 1.0, max_norm: float | None = None) -> float | None:
        """Apply all gradients since the last step: one update per unique key. Collective over ranks.

        lr         learning rate of this step only; default: `table.lr`
        scale      factor of every gradient (1 / loss scale under AMP, 1 / batches when accumulating)
        max_norm   scale all gradients of the table down if their joint norm is larger; returns the norm before.
                   To clip together with other gradients use `gradient_norm`, then `scale`
        """
        step, rate = self.step_count + 1, self.lr if lr is None else lr
        norm = None
        try:
            if not self._history_begun:
                self._history, self._history_begun = self._new_history(), True
            if max_norm is not None:
                norm = abs(scale) * self.gradient_norm()
                scale *= max_norm / norm if norm > max_norm else 1.0
            if self._reduced is not None:
                self.backend.apply(self._reduced, step, rate, scale)
            else:
                self.backend.update(self._ordered_gradients(), step, rate, scale)
            self.step_count = step
        finally:
            self.discard_gradients()
        return norm

    def on_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after the next step."""
        self._after_step.append(callback)

    def discard_gradients(self) -> None:
        """Drop the collected gradients, for instance of an AMP step that overflowed. All ranks or none."""
        self._reduced = None
        while self._gradients:
            self._gradients.pop().pins.release()
        while self._after_step:
            self._after_step.pop()()
        self.backend.end_step()

    def _ordered_gradients(self) -> list[Gradient]:
        """Return the collected gradients in the order of their forward passes."""
        if not all(gradient.unchanged() for gradient in self._gradients):
            raise RuntimeError(
                f"table {self.name!r}: a gradient was changed in place between backward and step, perhaps as that of a "
                "dense parameter that shares its memory: call table.step() before dense gradients are clipped or zeroed"
            )
        return sorted(self._gradients, key=lambda gradient: gradient.order)

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


def make_local_backend(spec: TableSpec, device: str, epoch: int | None = None) -> ShardBackend:
    """Make the backend of one process: HBM where the table has `hbm` and there is a GPU, else DRAM."""
    target = _training_device(device, spec.hbm)
    if target is None:
        from thermocline.tiers.dram_backend import DramBackend

        return DramBackend(spec, epoch=epoch)
    from thermocline.tiers.hbm_backend import HbmBackend

    return HbmBackend(spec, target, epoch=epoch)


def _training_device(device: str, hbm: int | None) -> torch.device | None:
    """Return the GPU that trains rows; None: they are trained in DRAM."""
    if device not in ("auto", "cpu", "cuda", "interpreter"):  # the last: kernels interpreted on a CPU, for tests
        raise ValueError(f"device is {device!r}: it must be one of auto, cpu, cuda")
    if hbm is None:
        if device == "cuda":
            raise ValueError("device is 'cuda', but there is no hbm: set the bytes of GPU memory that rows may use")
        return None
    if device == "cpu":
        return None
    import torch

    if device == "interpreter":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if device == "cuda":
        raise ValueError("device is 'cuda', but torch sees no GPU: use device='auto', or 'cpu'")
    return None
