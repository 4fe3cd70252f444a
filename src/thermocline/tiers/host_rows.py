"""The rows of a table below the GPU: a DRAM tier, and the SSD store under it if the table has one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.arrays import Floats, Keys, Rows
from thermocline.embedding.backend import Select
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.key_hash import ALL_KEYS, KeyPart
from thermocline.embedding.precision import parse_precision
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.embedding.row_statistics import parse_statistics
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import FormatError, ThermoclineError
from thermocline.tiers.dram import DramTier
from thermocline.tiers.scan_ahead import ScanAhead
from thermocline.tiers.ssd import SsdStore
from thermocline.utils import atomic_file

_PUSH_ROWS = 65536


def open_store(spec: TableSpec, path: str | os.PathLike[str], **options: Any) -> SsdStore:
    """Open a store for rows of this table. `options` replace those of the spec.

    Raises `FormatError` if the store has rows of another precision.
    """
    try:
        store = SsdStore.open(path, **{**spec.store_options, **options})
    except FormatError as error:
        if not spec.statistics:
            raise
        raise FormatError(
            f"{error}. Statistics {list(spec.statistics.names)} of table {spec.name!r} take {spec.statistics.bytes} "
            "bytes of a row: they cannot be added to existing rows. Open it with the statistics it was created with, "
            "or use an empty folder"
        ) from None
    names = ((store.epoch and parse_statistics(store.note)) or {}).get("names", [])
    if store.epoch and names != list(spec.statistics.names):
        store.close()
        raise FormatError(
            f"{store.path} has rows with statistics {names}, but table {spec.name!r} has "
            f"{list(spec.statistics.names)}: open it with the statistics it was created with"
        )
    if store.epoch and (saved := parse_precision(store.note)[0]) != spec.precision.layout:
        store.close()
        raise FormatError(
            f"{store.path} has rows of precision {saved}, but table {spec.name!r} has {spec.precision.layout}: open "
            "it with the precision it was created with"
        )
    return store


def make_dram_tier(
    spec: TableSpec, *, budget: int, store: SsdStore | None, reserved: int = 0, threads: int | None = None
) -> DramTier:
    """Make an empty DRAM tier for rows of this table."""
    return DramTier(
        spec.dim,
        spec.optimizer,
        budget=budget,
        reserved=reserved,
        store=store,
        policy=spec.policy,
        threads=threads or spec.threads,
        seed=spec.seed,
        table=spec.table_id,
        initial=spec.initial,
        initial_parts=[(member.prefix, member.initial) for member in spec.members],
        precision=spec.precision,
        statistics=spec.statistics,
    )


class HostRows:
    """DRAM tier and store of one table. `dram` and `store` are replaced when the table is reopened."""

    dram: DramTier
    store: SsdStore | None

    def __init__(self, spec: TableSpec, *, threads: int | None = None, epoch: int | None = None) -> None:
        self._spec = spec
        self._threads = threads
        self._path = spec.ssd
        self._opening = threading.Lock()  # held while the store is replaced
        self._ahead = ScanAhead()
        self.store = None
        self.reopen(epoch)

    def replaced(self, dram: DramTier) -> bool:
        """Return whether a call of `dram` failed because the table was reopened. Blocks while it is being reopened."""
        with self._opening:
            return self.dram is not dram

    def reopen(self, epoch: int | None = None) -> None:
        """Open the store on a commit, the newest or `epoch`, below an empty DRAM tier."""
        with self._opening:
            self._open(epoch)

    def _open(self, epoch: int | None) -> None:
        self.close()
        self.store = None
        if self._path is not None:
            self.store = open_store(self._spec, self._path, create=epoch is None, epoch=epoch)
        self.dram = self._empty_tier()
        if self.store is not None and self.store.epoch:
            scale = parse_precision(self.store.note)[1]
            if scale is not None:
                self.dram.set_scale(scale)

    def _empty_tier(self) -> DramTier:
        ahead = self._spec.lookahead
        reserved = 0 if ahead is None else ahead.bytes
        budget = self._spec.mem
        return make_dram_tier(self._spec, budget=budget, reserved=reserved, store=self.store, threads=self._threads)

    def move_store(self, path: Path, *, clear: bool) -> None:
        """See `RowBackend.move_store`."""
        with self._opening:
            self.close()
            if clear and path.exists():
                atomic_file.remove_folder(path)
            self._path = path
            self._open(None)

    def replace_rows(self, pieces: Iterable[tuple[Keys, Rows]], scale: LearnedScale | None) -> None:
        """Fill a new DRAM tier with stored rows and use it."""
        fresh = self._empty_tier()
        if scale is not None:
            fresh.set_scale(scale)
        for keys, rows in pieces:
            fresh.push_stored(keys, rows.view(np.float32), dirty=False)
        self.dram.stop_write_ahead()  # its rows must not reach the store any more
        self.dram = fresh

    def import_rows(self, keys: Keys, rows: Rows) -> None:
        """See `RowBackend.import_rows`."""
        if self.store is not None:
            self.store.put(keys, rows)
        else:
            self.dram.push_stored(keys, rows.view(np.float32), unique=True)

    def write_rows(self, keys: Keys, rows: Floats) -> None:
        """Push rows in pieces: a push pins all its rows."""
        piece = max(1, min(_PUSH_ROWS, self.dram.capacity // 4))
        for first in range(0, len(keys), piece):
            self.dram.push(keys[first : first + piece], rows[first : first + piece])

    def rows(self, store: SsdStore | None, batch_rows: int, part: KeyPart = ALL_KEYS) -> Iterator[tuple[Keys, Floats]]:
        """See `RowBackend.rows`, of a part of the keys."""
        store = self.store or store
        if store is None:
            yield from self.dram.dirty_rows(batch_rows, part)  # never flushed: these are all trained rows
            return
        self.dram.flush(store, part)
        for keys, rows in store.scan(batch_rows, part):
            yield keys, self.dram.decode(rows.view(np.float32))

    def expect_expiry(self, store: SsdStore | None, expiry: Expiry, step: int) -> None:
        """See `RowBackend.expect_expiry`."""
        store = self.store or store
        if store is not None:
            self._ahead.expect(store, self.dram, expiry, step, self._words(expiry.weights))

    def _words(self, weights: bool) -> slice:
        """Return the words of a stored row that an expiry needs: all, or the statistics if they can be told apart."""
        statistics = self._spec.statistics
        return slice(None) if weights or self.dram.coded or not statistics else slice(-statistics.words, None)

    def expire(
        self, select: Select, store: SsdStore | None, part: KeyPart, caught_up: Callable[[Floats], Floats], *,
        weights: bool,
    ) -> Keys:  # fmt: skip
        """Delete the rows of a part that `select` chooses, in DRAM and store; return their keys.

        caught_up   catches up copies of rows
        weights     `select` needs whole rows, not only their statistics
        """
        at, words = self.store or store, self._words(weights)
        taken = None if at is None else self._ahead.take(at, self.dram, part, words)
        if taken is None:
            keys = select((keys, caught_up(rows)) for keys, rows in self.rows(store, 65536, part))
            unwritten = keys[:0]
        else:
            pieces, unwritten = taken
            if words == slice(None):
                pieces = [(keys, caught_up(self.dram.decode(rows))) for keys, rows in pieces]
            keys = select(iter(pieces))
        self._erase(keys, at, np.intersect1d(keys, unwritten))
        return keys

    def _erase(self, keys: Keys, store: SsdStore | None, unwritten: Keys) -> None:
        """Delete rows. `unwritten`: those that may be dirty, or being written."""
        if len(keys) == 0:
            return
        if store is not None:
            store.delete(keys)  # first: then the DRAM tier cannot read them again
            if len(unwritten):
                self.dram.end_writes(unwritten)
                store.delete(unwritten)  # a write may have ended after the first deletion
        self.dram.erase(keys)

    def require_idle(self) -> None:
        """See `RowBackend.require_idle`."""
        if pinned := self.dram.stats().pinned:
            raise ThermoclineError(
                f"table {self._spec.name!r} has {pinned} rows pinned: close tc.prefetch, and drop or step "
                "forward passes, first"
            )

    def close(self) -> None:
        """Close the store."""
        try:
            self._ahead.close()
        finally:
            if self.store is not None:
                self.store.close()
