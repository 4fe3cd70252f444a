"""`OpenTable`: the description, version, commits and rows of an open table; `tc.Table` adds training."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.embedding.backend import RowBackend
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Precision, append_precision
from thermocline.embedding.row_arguments import split_rows
from thermocline.embedding.row_statistics import parse_statistics
from thermocline.embedding.row_version import RowVersion, rates_of_commit, user_note
from thermocline.embedding.step_rates import RateRuns
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import CorruptionError
from thermocline.tiers.host_rows import open_store
from thermocline.utils.text_format import format_size

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from thermocline.distributed.communicator import Groups
    from thermocline.tiers.dram import DramTier
    from thermocline.tiers.hbm import HbmTier
    from thermocline.tiers.ssd import SsdStore


class OpenTable:
    """Rows of one layout in the tiers of this process. Nothing here trains or changes a row."""

    spec: TableSpec
    backend: RowBackend
    checkpoint_store: SsdStore | None = None
    """Store of a table without `ssd`, where `tc.Checkpoints` saves its rows."""

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

    def set_version(self, version: RowVersion, rates: RateRuns = ()) -> None:
        """Declare that the rows are those of `version`: they were loaded or restored, with the rates of their steps."""
        if self.backend.rates is not None:
            self.backend.rates.restore(version.step, rates, self.name)
        self._history, self.step_count = version
        self._history_begun = False

    @property
    def rate_runs(self) -> RateRuns | None:
        """Rates of the last steps, to save them; None: rows do not catch up."""
        return None if self.backend.rates is None else self.backend.rates.runs()

    def _open_version(self) -> None:
        """Take the version of the commit on which the backend was opened."""
        store = self.store
        if store is None or store.epoch == 0:
            self.set_version(RowVersion("", 0))
            self.backend.statistics.load(None)
        else:
            self.set_version(RowVersion.of_commit(store.note, store.epoch), rates_of_commit(store.note))
            self.backend.statistics.load(parse_statistics(store.note))

    def _new_history(self) -> str:
        """Return a token for the training that begins with the next step."""
        return secrets.token_hex(8)

    def own_rows(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which of the keys in the tiers are of this table: all, unless it is stored with others."""
        return np.ones(len(keys), np.bool_)

    def ids_of(self, keys: Keys) -> Keys:
        """Return the ids of keys of this table in the tiers: the keys themselves."""
        return keys

    # ---- commits and rows

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
        note = self.backend.statistics.append_to(note, self.spec.statistics)
        return append_precision(
            self.version.append_to(note, self.rate_runs), self.precision, self.backend.learned_scale
        )

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
        floats = self.spec.trained_floats
        return ((keys, rows[:, :floats]) for keys, rows in self.backend.rows(self.checkpoint_store, batch_rows))

    def read(self, keys: Any) -> Floats:
        """Return float32[n, dim + state]; a key never trained gives its initial row. Collective over ranks."""
        return self.backend.read(as_keys(keys))[:, : self.spec.trained_floats]

    def read_statistics(self, keys: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the statistics of rows by name, one element per key; 0 for a key never trained. Collective over ranks.

        frequency   uint32: occurrences of the key in trained batches
        last_step   uint32: number of the last step with the key
        last_time   int64: newest event time, in seconds, of the batches of that step
        show        float32: occurrences, decayed by expiry
        click       float32: sum of the labels of their examples, decayed likewise

        An id counts once per backward pass through a bag.
        """
        if not self.spec.statistics:
            raise ValueError(f'table {self.name!r} keeps no statistics: make it with statistics=["frequency"]')
        return self.spec.statistics.unpack(self.backend.read(as_keys(keys)), self.backend.statistics)

    def read_rows(self, keys: Any) -> tuple[Floats, Floats]:
        """Return weights, float32[n, dim], and optimizer state, float32[n, state]: see `read`, `Table.load_rows`."""
        return split_rows(self.spec, self.read(keys))

    def tier_counts(self) -> Mapping[str, int]:
        """Return rows of training batches so far by the tier they were in: "hbm", "mem", "ssd", "new"."""
        return self.backend.tier_counts()

    def __repr__(self) -> str:
        spec = self.spec
        store = "memory only" if spec.ssd is None else f"ssd={str(spec.ssd)!r}"
        hbm = "" if self.hbm is None else f"hbm={format_size(self.hbm.budget)} on {self.hbm.device}, "
        kind = "" if spec.precision.kind == "fp32" else f"{spec.precision.kind}, "
        return (
            f"Table({spec.name!r}, dim={spec.dim}, {kind}{spec.optimizer}, {hbm}mem={format_size(spec.mem)}, {store})"
        )
