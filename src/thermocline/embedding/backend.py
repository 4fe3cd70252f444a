"""`RowBackend`: the one interface for where rows are stored and trained. Read this file first.

A `tc.Table` owns a backend and does not depend on its type. Four implementations:

    tiers/dram_backend.py              rows are trained in DRAM, by C++ kernels
    tiers/hbm_backend.py               rows are trained in GPU memory, by Triton kernels, above the DRAM tier
    distributed/sharded_backend.py     rows are spread over ranks; each rank trains its own through one of the two above
    embedding/reference_backend.py     a Python dict; slow, the specification that tests compare with

`embedding/admission_backend.py` is a layer above one of them, for tables with admission.

The path of a batch. Window: the batches that share one pull. Each stage is one thread that handles windows in order;
the pipeline (`pipeline/prefetch.py`) runs the stages of different windows at the same time.

    stage      thread     call                      effect
    collect    collect    stage(inputs)             deduplicate keys or send ids to the device; touches no rows
    exchange   exchange   exchange(window)          send keys to the ranks that own them; only over several ranks
    pull       pull       pin(window)               give every key a slot and keep it; DRAM: read missing rows from SSD
    load       load       prepare(window)           plan pooling and gradient sums per batch; needs slots, not values
    load       load       load(window)              HBM: bring the values into the slots, from DRAM or SSD
    train      caller     fetch(plan), pool         make values current; read rows, batch by batch
    train      caller     weight_gradient           in backward, for weights per id that require grad
    train      caller     update(gradients)         change rows once per step; or reduce, norm, apply to clip by norm
    train      caller     end_step()                release what the batches of the step still hold
    -          caller     window.release()          after the last batch of the window

A plan is stored in `batch.prepared[table]`, where `EmbeddingBag` finds it. Backward passes the gradient of each pooled
bag to `Table.add_gradient`; `Table.step` passes all of them to `update`.

Training reads and changes rows in their slots, so a batch pulled early still sees what earlier batches wrote. Rows that
are received from other ranks are fetched after the preceding step. The result therefore does not depend on how far any
stage runs ahead.

Row statistics (`row_statistics.py`) are part of the row layout (`TableSpec`); `update` and `apply` change them with the
row. `expire` deletes rows at a step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from thermocline.arrays import Floats, Keys, Rows, Slots
from thermocline.batch import WorkingSet
from thermocline.embedding.batch_plan import BagInputs, BatchPlan, Gradient, ReducedGradients

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from thermocline.distributed.communicator import Groups
    from thermocline.embedding.expiry import Expiry
    from thermocline.embedding.key_hash import KeyPart
    from thermocline.embedding.quant_scale import LearnedScale
    from thermocline.embedding.row_statistics import StatisticsState
    from thermocline.embedding.step_rates import StepRates
    from thermocline.embedding.table_spec import LookAheadLimits
    from thermocline.tiers.dram import DramTier
    from thermocline.tiers.hbm import HbmTier
    from thermocline.tiers.ssd import SsdStore


class TierSet(NamedTuple):
    """The tiers of a backend, for inspection (`stats()`, `check()`). None: the backend has no such tier."""

    hbm: HbmTier | None = None
    dram: DramTier | None = None
    ssd: SsdStore | None = None


class RowWindow(Protocol):
    """The rows of one table for the batches of one window. Its content belongs to the backend that made it."""

    def release(self) -> None:
        """Give up the window's ownership of its pins. May be called at any stage, and twice."""


class BatchAhead(Protocol):
    """A batch of a `RowHorizon`. All methods may be called on any thread."""

    def restore(self) -> Keys:
        """Return the ids of all inputs, in order. Not after `release`."""

    @property
    def to_visit(self) -> float:
        """The part of a sweep, from 0 to 2, that is left until all rows of the batch were visited."""

    def release(self) -> None:
        """End the batch: rows that no other batch of the horizon uses are unpinned. May be called twice."""

    @property
    def bytes(self) -> int:
        """Memory of the batch, which is a part of the horizon's."""


Select = Callable[[Iterator[tuple[Keys, Floats]]], Keys]
"""Chooses keys, given every trained row of a process, or of a part of its keys: keys and float32[n,
`TableSpec.row_floats`], caught up."""


class ReadCounts(NamedTuple):
    """Reads of a store so far, and what one costs on its device."""

    reads: int
    bytes: int
    read_cost: float
    """Microseconds of one more request."""
    page_cost: float
    """Microseconds of one more page of 4 KiB in a request."""


class RowHorizon(Protocol):
    """Rows of the coming batches, loaded as a hint: no result depends on it. See `pipeline/lookahead.py`.

    One thread adds batches, and one loads. A batch keeps its horizon alive.
    """

    def add(self, inputs: BagInputs, *, frozen: bool = False) -> BatchAhead:
        """Collect the keys of the next batch; `frozen`: further keys of the last one."""

    @property
    def full(self) -> bool:
        """Whether no further batch should be added: the rows reach the share of memory that they may pin."""

    def load(self, share: float = 1.0) -> bool:
        """Visit up to this share of the sweep, from `position` on: load and pin rows of new keys. Blocks on SSD reads.

        The last rows may still be loading at the return: call it until `BatchAhead.to_visit` is 0.
        Return False if nothing was visited, and nothing is being loaded.
        Raises `BudgetError`, and changes nothing, if the rows do not fit beside those pinned already.
        """

    def drop(self) -> bool:
        """Unpin all rows that no pinned window uses, also those of a load in progress, and load no more.

        Return False if they had been dropped before. Any thread.
        """

    @property
    def dropped(self) -> bool:
        """Whether nothing more will be loaded: `drop` was called, or the table was reopened."""

    @property
    def position(self) -> float:
        """Sweeps since the horizon was begun; the present one counts by its part done."""

    @property
    def late_rows(self) -> int:
        """Rows that were not loaded when a window pinned them."""

    @property
    def rows_loaded(self) -> int:
        """Rows that horizons of this table have loaded."""

    @property
    def read_counts(self) -> ReadCounts:
        """Reads of the store, also for other purposes."""

    @property
    def bytes(self) -> int:
        """Memory of the horizon and its batches, without the rows."""


class RecordedRows(Protocol):
    """A batch plan and the constants of a step at fixed addresses, which replays of a recorded step read."""

    plan: Any
    """The plan that the recorded step uses."""

    def load(self, plan: Any) -> None:
        """Copy a plan of the same shape to the fixed addresses, on the current stream, after its rows are ready."""

    def set_constants(self, step: int, lr: float, scale: float) -> None:
        """Set what `update` gets as arguments otherwise. The device must have used the values before."""

    def recording(self) -> AbstractContextManager[None]:
        """Wrap the function that is recorded."""

    def launched(self, plan: Any) -> None:
        """Note that a replay with this plan was launched on the current stream."""


class KeyHorizon(RowHorizon, Protocol):
    """A horizon whose batches may be lists of keys: see `distributed/sharded_horizon.py`."""

    def add_keys(self, keys: Keys) -> BatchAhead:
        """Collect the keys of the next batch."""


class RowBackend(Protocol):
    """Rows of one table. Unless stated otherwise a method runs on the thread that trains, between two batches."""

    step_count: int
    """Training steps applied so far; Adam's bias correction depends on it."""
    statistics: StatisticsState
    """State of the row statistics; the table sets its step time before `update` and `apply`."""

    @property
    def rates(self) -> StepRates | None:
        """Rates of the last steps, which `Table.step` records; None: rows do not catch up (`lazy`)."""

    @property
    def device(self) -> torch.device:
        """Device of pooled vectors and gradients."""

    @property
    def groups(self) -> Groups | None:
        """The ranks over which rows are spread; None: this process has all rows. Every rank then makes the same calls
        in the same order."""

    @property
    def tiers(self) -> TierSet:
        """The tiers of this process."""

    # ---- ahead of training

    @property
    def lookahead(self) -> LookAheadLimits | None:
        """Limits of the look-ahead; None: `horizon` may not be called."""

    def horizon(self, *, training: bool) -> RowHorizon:
        """Begin to collect the rows of coming batches, to train or only to read them. Thread: the reader's."""

    def stage(self, inputs: Sequence[BagInputs], ahead: Sequence[Any] = ()) -> RowWindow:
        """Begin a window with the inputs of its batches. Thread: collect. Blocks on nothing.

        ahead   the `BatchAhead` of each batch, or nothing. The window owns them from now on: it releases each as soon
                as the rows are pinned or copied elsewhere, at the latest in its own `release`
        """

    def exchange(self, window: Any, padding: Sequence[BagInputs] = (), *, ahead: bool = True) -> None:
        """Send the window's keys to their owners. Thread: exchange, or the caller's with `ahead=False`. Collective.

        padding   inputs of batches without examples, so that every rank has the same number of batches
        Raises `RankError` if a rank is lost. Does nothing for a backend without ranks.
        """

    def pin(self, window: Any) -> None:
        """Give every key of the window a slot and pin it. Thread: pull. Blocks on SSD reads.

        Raises `BudgetError`, and changes nothing, if the rows do not fit beside those pinned by earlier windows; the
        caller may try again after one of those was released.
        """

    def launch(self, window: Any) -> None:
        """Begin `pin`, without waiting for the device. Only where `plans_on_device`; optional."""

    def prepare(self, window: Any) -> Sequence[BatchPlan]:
        """Plan each batch of a pinned window. Thread: load. Blocks on nothing."""

    def load(self, window: Any) -> None:
        """Bring the values of a pinned window into their slots. Thread: load. Blocks on SSD reads and device copies."""

    @property
    def plans_on_device(self) -> bool:
        """Whether `stage`, `pin` and `prepare` only launch work on a device: any thread may run them at little cost."""

    def loads_nothing(self, window: Any) -> bool:
        """Whether all rows of a pinned window are in their slots, or on their way: `load` does not block."""

    # ---- training

    def fetch(self, plan: Any) -> None:
        """Make the plan's row values current before its forward pass. Collective over ranks; else does nothing."""

    def is_current(self, plan: Any) -> bool:
        """Whether the plan refers to the rows as they are now: reopening a table invalidates earlier plans."""

    def pool(self, plan: Any, bag: Any) -> torch.Tensor:
        """Return float32[bags, dim] on `device`: each bag's rows added left to right, divided for mean.

        Rows that catch up are brought to step `step_count` first: those of a training plan in place.
        """

    def with_weights(self, plan: Any, bag: Any, weights: torch.Tensor) -> Any:
        """Return a bag of the plan with other weights: float32, one per id, on any device."""

    def weight_gradient(self, plan: Any, bag: Any, grads: torch.Tensor) -> torch.Tensor:
        """Return float32[ids] on `device`: the gradient of the bag's weights, from float32[bags, dim] of its vectors.

        Per id the dot product of its row and its bag's gradient: lane j of 16 adds the products j, j + 16, ... in that
        order, then lanes j and j + 8 are added, j and j + 4, j and j + 2, j and j + 1; mean divides by the number of
        ids. The rows must not have changed since the forward pass.
        """

    def reduce(self, gradients: Sequence[Gradient]) -> ReducedGradients | None:
        """Sum the gradients of each unique key, in the order given, in blocks of 64. None: there is nothing to apply.

        Later changes of the gradients' memory have no effect. Collective over ranks.
        """

    def norm(self, reduced: ReducedGradients) -> float:
        """Return the joint L2 norm, computed in double. Blocks on the device. Collective over ranks."""

    def apply(self, reduced: ReducedGradients, step: int, lr: float, scale: float) -> None:
        """Apply one optimizer step per unique key to reduced gradients, multiplied by `scale`.

        Rows that catch up are brought to the step before it first.
        """

    def update(self, gradients: Sequence[Gradient], step: int, lr: float, scale: float) -> None:
        """Do `reduce` and `apply` in one pass. Collective over ranks."""

    def end_step(self) -> None:
        """Release what batches since the last step still hold. Called after each step and when gradients are
        discarded."""

    # ---- recorded steps (CUDA graphs); no result depends on them

    def record_planning(self, enabled: bool) -> None:
        """Set whether `pin` and `prepare` may replay recordings. The default is True on a GPU."""

    def cannot_record(self) -> str:
        """Return why training steps of this table cannot be recorded; empty: they can."""

    @property
    def recording(self) -> bool:
        """Whether a training step is being recorded, or run in its place: see `RecordedRows.recording`."""

    def plan_shape(self, plan: Any) -> Any:
        """Return what plans that share `RecordedRows` have in common; None: this one can only be trained as it is."""

    def recorded_rows(self, plan: Any) -> RecordedRows:
        """Allocate fixed addresses for plans with the shape of this one."""

    # ---- evaluation

    def read_batch(self, inputs: BagInputs) -> BatchPlan:
        """Copy a batch's rows. Inserts nothing; a key never trained gives its initial row. Any one thread.

        Collective over ranks.
        """

    def read(self, keys: Keys) -> Floats:
        """Return float32[n, `TableSpec.row_floats`] by key, as `read_batch`. Collective over ranks."""

    # ---- durability and expiry; between steps

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        """Begin to read rows that `expire` is called for after steps that follow `step`. A hint."""

    def expire(self, select: Select, store: SsdStore | None, part: KeyPart, *, weights: bool) -> Keys:
        """Delete the rows of this process that `select` chooses among those of `part`, in all tiers; return their keys.

        Every batch that is fetched afterwards reads their initial rows, also if it was pulled before. Pipelines may be
        running.

        store     where checkpoints are
        weights   `select` needs whole rows; else it may get the statistics of rows alone
        """

    def rows(self, store: SsdStore | None, batch_rows: int) -> Iterator[tuple[Keys, Floats]]:
        """Iterate over every trained row of this process once, in bounded memory. `store`: where checkpoints are.

        Rows that catch up are as of the last batch that trained them.
        """

    def flush(self, store: SsdStore | None = None) -> None:
        """Write every row changed since the last flush to the table's own store, or to `store`."""

    def write_back(self) -> None:
        """Copy every row changed in HBM to the DRAM tier."""

    def reopen(self, epoch: int | None = None) -> None:
        """Drop all changes since a commit of the table's own store: the newest, or `epoch`. Without one: no rows."""

    def move_store(self, path: Path, *, clear: bool = False) -> None:
        """Use the store in another folder from now on, emptied first if `clear`, opened on its newest commit."""

    def undo_point(self) -> Callable[[], None]:
        """Return a function that brings back the rows of now, whatever `replace_rows` did meanwhile."""

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        """Replace all rows by stored rows that are already durable. Raises what `pieces` raises."""

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        """Add stored rows that no commit of this table has yet."""

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        """Insert or replace float32[n, `TableSpec.row_floats`] by key; of a repeated key the last row counts.

        Collective over ranks, which pass equal arguments.
        """

    @property
    def learned_scale(self) -> LearnedScale | None:
        """State of a learned quantization scale; None: the precision has none. Blocks on the device."""

    # ---- inspection

    def tier_counts(self) -> Mapping[str, int]:
        """Rows of trained batches so far, by the tier they were found in: "hbm", "mem", "ssd", "new"."""

    def require_idle(self) -> None:
        """Raise `ThermoclineError` if any row is pinned: a pipeline is still running."""

    def close(self) -> None:
        """Close the table's own store. What was not committed is lost."""


class LocalBackend(RowBackend, Protocol):
    """A backend of one process: it can compute initial rows without an access to its tiers."""

    @property
    def dedups_on_host(self) -> bool:
        """Whether `stage` deduplicates ids on the host, and uses the `working_sets` of its caller."""

    def stage(
        self, inputs: Sequence[BagInputs], ahead: Sequence[Any] = (), working_sets: Sequence[WorkingSet] = ()
    ) -> RowWindow:
        """See `RowBackend.stage`.

        working_sets   those of the inputs, if the caller has them and there is no batch ahead
        """

    def read_initial(self, inputs: BagInputs) -> BatchPlan:
        """Plan a batch on the initial rows of its keys, whatever the tiers hold. Thread: load."""


class Unrecorded:
    """Base of backends that plan on the CPU: nothing is recorded, and `cannot_record` says why."""

    plans_on_device = False
    recording = False

    def launch(self, window: Any) -> None:
        """Nothing to begin."""

    def loads_nothing(self, window: Any) -> bool:
        """Not known."""
        return False

    def record_planning(self, enabled: bool) -> None:
        """Nothing to record."""

    def plan_shape(self, plan: Any) -> Any:
        """No two plans share addresses."""
        return None

    def recorded_rows(self, plan: Any) -> RecordedRows:
        """Not reached: `plan_shape` returns None."""
        raise NotImplementedError


class ShardBackend(LocalBackend, Protocol):
    """A backend that can serve as one rank's part of a sharded table: rows by key list instead of by batch."""

    def horizon(self, *, training: bool) -> KeyHorizon:
        """See `RowBackend.horizon`."""

    def pin_keys(self, key_lists: Sequence[Keys]) -> ShardPins:
        """Pin the rows of each list; keys may repeat between lists. As `pin` otherwise."""

    def load_keys(self, owned: ShardPins) -> None:
        """Bring the values of pinned rows into their slots: see `load`."""

    def prepare_remote(
        self, inputs: Sequence[BagInputs], working_sets: Sequence[WorkingSet], owned: ShardPins
    ) -> Sequence[Any]:
        """Plan batches whose rows arrive from other ranks, in the order of their working sets, before each batch.

        owned   rows of this rank that other ranks use in the same window: the plans own their pins
        """

    def row_buffer(self, count: int) -> tuple[Any, torch.Tensor]:
        """Allocate `count` rows to receive; return them and a view of their weights, float32[count, dim]."""

    def plan_rows(self, inputs: BagInputs, working_set: WorkingSet, rows: Any) -> Any:
        """Plan an evaluation batch on received rows, in the order of the working set."""

    def catch_up(self, slots: Any) -> None:
        """Bring pinned rows, each once, to step `step_count`, before `read_weights`. Does nothing without `rates`."""

    def read_weights(self, slots: Any, index: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the weights of pinned rows slots[index] to `out`."""

    def renumber(self, bag: Any, index: Slots) -> Any:
        """Return the bag with received row r replaced by index[r]."""


class ShardPins(NamedTuple):
    """Pinned rows of one rank's shard."""

    pins: Any
    slots: list[Any]
    """Per key list: the slot of each key."""
    tier: Any
    """The tier that has the rows: reopening the table replaces it."""
