"""A table: rows of one layout in HBM, memory and on SSD, trained through `tc.EmbeddingBag`, one update per step."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np

from thermocline.arrays import Floats, Keys, Slots
from thermocline.batch import Batch, WorkingSet
from thermocline.embedding.batch_plan import BagSpec, Gradient, Part, Prepared
from thermocline.embedding.initializers import Initial, Uniform
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Kind, Precision, note_with, noted
from thermocline.errors import FormatError, require_type, whole_number
from thermocline.tiers.dram import DramTier, Pins, Policy
from thermocline.tiers.dram_backend import DramBackend
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.text_format import format_size, parse_size

if TYPE_CHECKING:
    import torch

    from thermocline.distributed.sharded_backend import Ranks
    from thermocline.tiers.hbm import HbmTier
    from thermocline.tiers.hbm_backend import HbmBackend, HbmPart, HbmPrepared

Device = Literal["auto", "cpu", "cuda"]


class Table:
    """Rows by 64-bit key: `dim` weights and the optimizer's state, in HBM (`hbm`), DRAM (`mem`), SSD (`ssd`).

    No vocabulary is declared: a key exists once it has been trained. Training is bit for bit the same whatever the
    budgets. Without `ssd` all rows must fit `mem`.
    """

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
        ssd_mem: str | SupportsIndex = "256MB",
        ssd_filter_bits: int = 10,
        ssd_options: Mapping[str, Any] | None = None,
        epoch: int | None = None,
        device: Device = "auto",
    ) -> None:
        """Opens the table; with `ssd`, on the rows of the store's newest commit, or of `epoch`.

        hbm      bytes of GPU memory for hot rows, their index and metadata; bags then give vectors on the GPU
        mem      bytes of DRAM for rows, their index and metadata
        ssd      folder of the store that holds the rows which do not fit; made if it is not there
        threads  of one call of the memory tier; default: all cores, less two beside a GPU. No result depends on it
        name     tells tables apart: initial rows are a function of (seed, name, key); checkpoints are by name
        precision   how weights are stored, everywhere: "fp32", "fp16", "bf16", "int8" .. "int2", or a `tc.Precision`
        ssd_mem, ssd_filter_bits   DRAM of the store itself (its index), and how much of it spares reads of new keys
        ssd_options   any others of `SsdStore.open`
        device   where training runs: "cuda", "cpu", or "auto": with `hbm`, on the GPU if there is one
        """
        dim, seed = whole_number(dim, "dim"), whole_number(seed, "seed")
        threads = None if threads is None else whole_number(threads, "threads")
        require_type(optimizer, Optimizer, "optimizer", "SGD, Adagrad, RowWiseAdagrad or Adam, such as Adagrad(lr=0.1)")
        require_type(initial, Initial | None, "initial", "Uniform, Normal or Constant, such as Uniform(scale=0.01)")
        require_type(ssd, str | os.PathLike | None, "ssd", "a folder's name, or None")
        require_type(name, str, "name", "text")
        if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
            raise ValueError(f"name is {name!r}: letters, digits, '-', '_' and '.' make a table's name")
        self.dim = dim
        self.optimizer = optimizer
        self.precision = Precision.of(precision)
        self.name = name
        self.lr = optimizer.lr
        """Learning rate of the next steps."""
        self.step_count = 0
        """Steps so far: Adam's bias correction counts them."""
        self._hbm_budget = None if hbm is None else parse_size(hbm, "hbm")
        self._mem_budget = parse_size(mem, "mem")
        self._ssd_path = None if ssd is None else os.fspath(ssd)
        self._tier_options: dict[str, Any] = {
            "policy": policy,
            "threads": threads,
            "seed": seed,
            "table": int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"),
            "initial": initial,
            "precision": self.precision,
        }
        self._store_options: dict[str, Any] = {
            "row_bytes": self.precision.row_bytes(dim, optimizer),
            "mem_budget": ssd_mem,
            "filter_bits": ssd_filter_bits,
            **(ssd_options or {}),
        }
        self._threads = threads
        self._specs: weakref.WeakKeyDictionary[Any, tuple[BagSpec, ...]] = weakref.WeakKeyDictionary()
        self._specs_lock = threading.Lock()  # bags are made while a pipeline collects
        self._gradients: list[Gradient] = []
        self._summed: Any = None  # of all of them, once `gradient_norm` was asked
        self._forwards = 0
        self._after_step: list[Callable[[], None]] = []
        self.ranks: Ranks | None = None
        """The ranks whose tables together are this one: what `tc.prefetch` asks; none: this process alone."""
        self.hbm: HbmTier | None = None
        """The rows on the GPU, above `tier`."""
        self.gpu: HbmBackend | None = None
        """Batches on it: what `tc.prefetch` asks."""
        self._training: Any  # DramBackend, or the same as gpu: their arguments go together
        self._device = _training_device(device, self._hbm_budget)
        if threads is None and self._device is not None:
            self._tier_options["threads"] = _threads_beside_gpu(cores())
        self._dram: DramTier
        self.store: SsdStore | None = None
        self.checkpoint_store: SsdStore | None = None
        """Where a memory-only table's rows are saved, and were restored from: set by `tc.Checkpoints`."""
        self.reopen(epoch)

    def reopen(self, epoch: int | None = None) -> None:
        """Forgets everything since a commit and opens that one: the newest, or `epoch`. Without `ssd`: an empty one."""
        self.discard_gradients()
        if self.store is not None:
            self.store.close()
        self.store = None
        if self._ssd_path is not None:
            self.store = self.open_store(self._ssd_path, create=epoch is None, epoch=epoch)
        self.dram = DramTier(self.dim, self.optimizer, budget=self._mem_budget, store=self.store, **self._tier_options)
        if self.store is not None:
            self.restore_scale(self.store)

    @property
    def dram(self) -> DramTier:
        """The rows in memory."""
        return self._dram

    @dram.setter
    def dram(self, tier: DramTier) -> None:
        self._dram = tier
        if self._device is None:
            self._training = DramBackend(tier, self._threads)
            return
        if self.hbm is not None:
            assert self.gpu is not None
            self.hbm.reset(tier)
            self.gpu.restore_scale()
            return
        from thermocline.tiers.hbm import HbmTier
        from thermocline.tiers.hbm_backend import HbmBackend

        assert self._hbm_budget is not None
        self.hbm = HbmTier(tier, budget=self._hbm_budget, device=self._device, name=self.name)
        self._training = self.gpu = HbmBackend(self.hbm, self.dim, self.optimizer)

    def open_store(self, path: str | os.PathLike[str], **options: Any) -> SsdStore:
        """A store for rows of this table, opened with the table's own settings and `options` of `SsdStore.open`."""
        store = SsdStore.open(path, **{**self._store_options, **options})
        if store.epoch and (was := noted(store.note)[0]) != self.precision.layout:
            store.close()
            raise FormatError(
                f"{store.path} has rows of precision {was}, but table {self.name!r} has {self.precision.layout}: open "
                "it with the precision it was made with"
            )
        return store

    @property
    def layout(self) -> dict[str, Any]:
        """What makes rows and their updates what they are, as JSON: two tables that differ here cannot share rows."""
        optimizer = dataclasses.asdict(self.optimizer)
        del optimizer["lr"]  # changes from step to step
        initial: Any = self._tier_options["initial"] or Uniform()
        return {
            "dim": self.dim,
            "optimizer": {"kind": type(self.optimizer).__name__, **optimizer},
            "seed": self._tier_options["seed"],
            "initial": {"kind": type(initial).__name__, **dataclasses.asdict(initial)},
            "precision": self.precision.layout,
        }

    @property
    def pending_gradients(self) -> int:
        """How many backward passes through a bag no step has applied yet."""
        return len(self._gradients)

    # ---- bags

    def register(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """A bag says what it will read, so that batches can be prepared before it asks."""
        with self._specs_lock:
            self._specs[bag] = specs

    def _wanted(self) -> list[BagSpec]:
        """All registered specs, each once, in an order that does not depend on memory addresses."""
        with self._specs_lock:
            wanted = {spec for specs in self._specs.values() for spec in specs}
        return sorted(wanted, key=lambda s: (s.fields, s.pooling))

    @property
    def fields_read(self) -> int:
        """A batch needs at least so many fields."""
        return 1 + max((field for spec in self._wanted() for field in spec.fields), default=0)

    # ---- a batch's life

    def collect(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> tuple[dict[BagSpec, Part], WorkingSet]:
        """The parts of the batch that the bags will read, and their working set. Touches no rows."""
        parts = self.parts(batch, specs)
        lists = [part.ids for part in parts.values()]
        joined = lists[0] if len(lists) == 1 else np.concatenate([np.empty(0, np.uint64), *lists])
        return parts, WorkingSet.of(joined, threads=self._threads)

    def parts(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> dict[BagSpec, Part]:
        """Without the working set: on a GPU the dedup is the GPU's."""
        parts: dict[BagSpec, Part] = {}
        first = 0
        for spec in self._wanted() if specs is None else specs:
            ids, offsets, weights = batch.select(spec.fields)
            none = spec.pooling == "none"
            parts[spec] = Part(ids, None if none else offsets, weights, spec.pooling == "mean", first)
            first += len(ids)
        return parts

    def bind(
        self, tier: DramTier, parts: dict[BagSpec, Part], working_set: WorkingSet, slots: Slots, pins: Pins
    ) -> Prepared:
        """Ready to train: the slots of the working set's keys in `tier`, which `pins` hold."""
        return DramBackend.prepare(tier, parts, working_set, slots, pins)

    def prepare(self, batch: Batch) -> Prepared | HbmPrepared:
        """Pulls and pins the batch's rows: what `tc.prefetch` does ahead of time. Let go of its pins when done."""
        if self.gpu is not None:
            collected = [self.parts(batch)]
            planned = self.gpu.pin(self.gpu.stage(collected))
            (prepared,) = self.gpu.prepare(collected, planned)
            self.gpu.load(planned)
            return prepared
        parts, working_set = self.collect(batch)
        tier = self.dram
        pins = tier.pin(working_set.keys)
        return self.bind(tier, parts, working_set, pins.slots(), pins)

    def prepare_read(self, batch: Batch, specs: Sequence[BagSpec] | None = None) -> Prepared | HbmPrepared:
        """Copies of the batch's rows, for evaluation: inserts nothing, visits nothing."""
        copies: Prepared | HbmPrepared = self._training.prepare_read(*self.collect(batch, specs))
        return copies

    def pool(self, prepared: Any, part: Any) -> Floats | torch.Tensor:
        """float32[bags, dim], where training runs."""
        pooled: Floats | torch.Tensor = self._training.pool(prepared, part)
        return pooled

    def next_forward(self) -> int:
        """Numbers forward passes: gradients are summed in this order, whatever order backward takes."""
        self._forwards += 1
        return self._forwards

    def add_gradient(
        self,
        order: int,
        prepared: Prepared | HbmPrepared,
        part: Part | HbmPart,
        grad: Floats | torch.Tensor,
        unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        """Called by backward: the gradient of one pooled part, used in place; `step` asks whether it is unchanged."""
        pins = prepared.pins
        if pins is None or prepared.tier is not self.dram or not pins.acquire():
            raise RuntimeError(
                f"backward through rows of table {self.name!r} that were "
                + ("only read" if pins is None else "given back: call it before the loop asks for the next batch")
            )
        self._summed = None
        self._gradients.append(Gradient(order, prepared, pins, part, grad, unchanged))

    # ---- the update

    def reduce_gradients(self) -> None:
        """Sums what backward has collected: from now on, autograd's memory may change."""
        if self._gradients and self._summed is None:
            self._summed = self._training.sums(self._in_order())

    def gradient_norm(self) -> float:
        """The joint norm of everything backward has collected since the last step: to clip it with other gradients.

        Its sums are what `step` will apply: from now on, autograd's memory may change.
        """
        if not self._gradients:
            return 0.0
        self.reduce_gradients()
        norm: float = self._training.norm(self._summed[1])
        return norm

    def step(self, *, lr: float | None = None, scale: float = 1.0, max_norm: float | None = None) -> float | None:
        """Applies everything backward has collected since the last step: one update per unique key.

        lr         for this step only; default: `table.lr`
        scale      multiplies every gradient (1 / loss scale under AMP, 1 / steps when accumulating)
        max_norm   scales all gradients of the table down if their joint norm is above; returns the norm found.
                   CollectiveRunner with other gradients: `gradient_norm`, then `scale`
        """
        step, rate = self.step_count + 1, self.lr if lr is None else lr
        norm = None
        try:
            if max_norm is not None:
                norm = abs(scale) * self.gradient_norm()
                scale *= max_norm / norm if norm > max_norm else 1.0
            self._apply(step, rate, scale)
            self.step_count = step
        finally:
            self.discard_gradients()
        return norm

    def _apply(self, step: int, lr: float, scale: float) -> None:
        if self._summed is not None:
            self._training.apply(*self._summed, step, lr, scale)
        elif self._gradients:
            self._training.update(self._in_order(), step, lr, scale)

    def on_step(self, callback: Callable[[], None]) -> None:
        """Called once, after the next step."""
        self._after_step.append(callback)

    def discard_gradients(self) -> None:
        """Throws away what backward has collected (an AMP step that overflowed)."""
        self._summed = None
        while self._gradients:
            self._gradients.pop().pins.release()
        while self._after_step:
            self._after_step.pop()()

    def _in_order(self) -> list[Gradient]:
        """What backward has collected, in the order of the forward passes."""
        if not all(g.unchanged() for g in self._gradients):
            raise RuntimeError(
                f"table {self.name!r}: a gradient was changed in place between backward and step, perhaps as that of a "
                "dense parameter that shares its memory: call table.step() before dense gradients are clipped or zeroed"
            )
        return sorted(self._gradients, key=lambda g: g.order)

    # ---- what survives

    def commit(self, note: bytes = b"") -> int:
        """Makes everything up to the last step durable in the table's store; returns its epoch.

        Costs what has changed since the last commit. A run with several tables and a dense model uses `tc.Checkpoints`.
        """
        if self.store is None:
            raise ValueError(f"table {self.name!r} has no ssd to commit to")
        self.write_back()
        self.dram.flush()
        return self.store.commit(self.commit_note(note))

    def commit_note(self, note: bytes) -> bytes:
        """What a commit of this table's rows notes: below fp32, one line more says how to read them."""
        return note_with(note, self.precision, self.dram.learned)

    def restore_scale(self, store: SsdStore) -> None:
        """Of a table that learns its step: goes on with the one that the store's commit has."""
        learned = noted(store.note)[1] if store.epoch else None
        if learned is not None:
            self.dram.set_scale(learned)
            if self.gpu is not None:
                self.gpu.restore_scale()

    def write_back(self) -> None:
        """Copies every row that changed in HBM into memory: `tier` then has all there is. Between steps only."""
        if self.hbm is not None and self.gpu is not None:
            self.hbm.write_back()
            self.gpu.save_scale()

    def rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Floats]]:
        """Every trained row once, keys and float32[n, dim + state], in bounded memory. Between steps only."""
        self.write_back()
        store = self.store or self.checkpoint_store
        if store is None:
            yield from self.dram.dirty_rows(batch_rows)  # never flushed: all that were trained
            return
        self.dram.flush(store)
        for keys, rows in store.scan(batch_rows=batch_rows):
            yield keys, self.dram.decode(rows.view(np.float32))

    def read(self, keys: Any) -> Floats:
        """float32[n, dim + state]: rows as they are; keys never trained give their initial row."""
        if self.hbm is None or self.gpu is None:
            return self.dram.read(keys)
        self.gpu.save_scale()
        return self.hbm.read(keys)

    def tier_counts(self) -> dict[str, int]:
        """Rows of training batches so far, by where they were: in HBM if there is one, in memory, on SSD, or new."""
        if self.hbm is not None:
            gpu = self.hbm.stats()
            came = {"mem": gpu.from_mem, "ssd": gpu.from_ssd, "new": gpu.initialised}
            return {"hbm": gpu.rows - sum(came.values()), **came}
        stats = self.dram.stats()
        return {"mem": stats.hits, "ssd": stats.from_store, "new": stats.initialised}

    def close(self) -> None:
        """Closes the store, or the one that its checkpoints are in. What was not committed is gone."""
        self.discard_gradients()
        store = self.store or self.checkpoint_store
        if store is not None:
            store.close()

    def __repr__(self) -> str:
        place = "memory only" if self._ssd_path is None else f"ssd={self._ssd_path!r}"
        gpu = "" if self.hbm is None else f"hbm={format_size(self.hbm.budget)} on {self.hbm.device}, "
        size = format_size(self._mem_budget)
        kind = "" if self.precision.kind == "fp32" else f"{self.precision.kind}, "
        return f"Table({self.name!r}, dim={self.dim}, {kind}{self.optimizer}, {gpu}mem={size}, {place})"


def _threads_beside_gpu(count: int) -> int:
    """Planning and launching kernels have threads of their own, which the GPU waits for: two cores are left to them."""
    return count - 2 if count >= 8 else count


def _training_device(device: str, hbm: int | None) -> torch.device | None:
    """Where rows are trained on; none: in the memory tier."""
    if device not in ("auto", "cpu", "cuda", "interpreter"):  # the last: kernels interpreted on a CPU, for tests
        raise ValueError(f"device is {device!r}: it is one of auto, cpu, cuda")
    if hbm is None:
        if device == "cuda":
            raise ValueError("device is 'cuda', but there is no hbm: say how many bytes of the GPU rows may take")
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
