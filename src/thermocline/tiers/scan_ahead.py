"""Reads the rows of the next parts of an expiry from the store on a thread, so that the step of a part need not.

A scan is a snapshot of the store from some steps before the part's turn. The store keeps a copy of the rows of the
scanned range that change since, and the DRAM tier has those that the store does not have yet. Together they are the
rows of the part as of its step: what is read ahead decides when rows are read, never which rows are deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from thermocline.arrays import Floats, Keys, Mask
from thermocline.embedding.expiry import STEPS_AHEAD
from thermocline.embedding.key_hash import KeyPart, hash_keys
from thermocline.errors import ThermoclineError
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import FollowedScan, SsdStore

_MOST_BYTES = 32 << 20
"""Memory of the rows that were read."""
_PIECE_ROWS = 16384

Piece = tuple[Keys, Floats]
"""Keys and decoded rows, or only the statistics of these rows."""


class _Chunk:
    """The rows of consecutive parts in the store, read by one scan."""

    def __init__(self, store: SsdStore, dram: DramTier, parts: Sequence[KeyPart], words: slice) -> None:
        self.store = store
        self.dram = dram
        self.words = words
        self.left = list(parts)
        """Parts that were not taken yet."""
        self._parts = tuple(parts)
        self._scan: FollowedScan | None = store.follow(parts[0].lo, parts[-1].hi)
        self._rows: dict[KeyPart, Piece] = {}
        """Parts that were read, and not taken yet."""
        self._changed = threading.Condition()  # of _rows, or the end of the scan
        self._ended = self._stop = False
        # No daemon: the end of the process waits for a scan, which is short, instead of cutting it off.
        self._thread = threading.Thread(target=self._run, name="thermocline-expiry-scan")
        self._thread.start()

    @property
    def reading(self) -> bool:
        return not self._ended

    def close(self) -> None:
        """Stop reading."""
        self._stop = True
        self._thread.join()
        self._scan = None
        self._rows.clear()

    def _run(self) -> None:
        """Read all rows. An error is left to the step: it reads the part itself."""
        try:
            self._read()
        except (ThermoclineError, OSError, MemoryError):
            pass
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read(self) -> None:
        scan = self._scan
        assert scan is not None
        edges = np.array([part.lo for part in self._parts[1:]], np.uint64)
        pieces: list[list[Piece]] = [
            [(np.empty(0, np.uint64), np.empty((0, scan.row_bytes // 4), np.float32)[:, self.words])]
            for _ in self._parts
        ]
        done = 0
        for keys, rows in scan.rows(_PIECE_ROWS):
            if self._stop:
                return
            number = np.searchsorted(edges, hash_keys(keys), "right")  # ascending
            last = int(number[-1])
            for part in range(done, last + 1):
                of_part = slice(*np.searchsorted(number, [part, part + 1]))
                pieces[part].append((keys[of_part].copy(), rows.view(np.float32)[of_part, self.words].copy()))
            self._publish(pieces, done, last)
            done = last
        self._publish(pieces, done, len(self._parts))

    def _publish(self, pieces: list[list[Piece]], begin: int, end: int) -> None:
        """Make parts available: the scan has passed them."""
        for part in range(begin, end):
            keys, rows = (np.concatenate(column) for column in zip(*pieces[part], strict=True))
            pieces[part].clear()
            with self._changed:
                self._rows[self._parts[part]] = keys, rows
                self._changed.notify_all()

    def take(self, part: KeyPart) -> tuple[list[Piece], Keys] | None:
        """Return the stored rows of a part as of now, and the keys of those that the store may not have; None: they
        were not read. Blocks while they are being read."""
        with self._changed:
            self._changed.wait_for(lambda: part in self._rows or self._ended)
            taken = self._rows.pop(part, None)
        self.left.remove(part)
        if taken is None or self._scan is None:
            return None
        keys, rows = taken
        unwritten, unwritten_rows = self.dram.unwritten_rows(part)  # first: a write that ends meanwhile is in `changed`
        changed = self._scan.changed(part)
        if changed is None:
            return None
        changed_keys, changed_rows, deleted = changed
        older = _absent(changed_keys, unwritten)
        kept = _absent(keys, np.concatenate([changed_keys, unwritten]))
        newer = changed_rows.view(np.float32)[older & ~deleted][:, self.words]
        pieces = [(keys[kept], rows[kept]), (changed_keys[older & ~deleted], newer)]
        return [*pieces, (unwritten, unwritten_rows[:, self.words])], unwritten


def _absent(keys: Keys, some: Keys) -> Mask:
    """Return which keys are not among a few."""
    if len(some) == 0:
        return np.ones(len(keys), np.bool_)
    some = np.sort(some)
    mask: Mask = some[np.minimum(np.searchsorted(some, keys), len(some) - 1)] != keys
    return mask


class ScanAhead:
    """Reads ahead for one table. Used by one thread."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def expect(self, store: SsdStore, dram: DramTier, coming: Sequence[KeyPart], words: slice) -> None:
        """Begin to read parts whose turns come in this order, in steps soon.

        words   those of a stored row that are needed
        """
        left = [
            chunk for chunk in self._chunks if _fits(chunk, store, dram, words) and not {*chunk.left}.isdisjoint(coming)
        ]
        self._drop([chunk for chunk in self._chunks if chunk not in left])
        if not coming or sum(chunk.reading for chunk in self._chunks) > 1:
            return
        known = {part for chunk in self._chunks for part in chunk.left}
        first = next((i for i, part in enumerate(coming) if part not in known), None)
        if first is None:
            return
        stats = store.stats()
        row_bytes = 8 + len(range(store.row_bytes // 4)[words]) * 4
        of_part = max(1, (stats.rows_in_base + stats.rows_in_log) * row_bytes // coming[first].parts)
        ahead = min(STEPS_AHEAD, _MOST_BYTES // of_part)  # parts that fit
        if first >= ahead:
            return
        parts = [part for i, part in enumerate(coming[first : first + (ahead + 1) // 2])
                 if part == KeyPart(coming[first].number + i, coming[first].parts)]  # fmt: skip
        self._chunks.append(_Chunk(store, dram, parts, words))

    def take(self, store: SsdStore, dram: DramTier, part: KeyPart, words: slice) -> tuple[list[Piece], Keys] | None:
        """See `_Chunk.take`; None also if the part was not expected."""
        for chunk in self._chunks:
            if part in chunk.left and _fits(chunk, store, dram, words):
                return chunk.take(part)
        return None

    def close(self) -> None:
        """Forget what was read."""
        self._drop(list(self._chunks))

    def _drop(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            self._chunks.remove(chunk)
            chunk.close()


def _fits(chunk: _Chunk, store: SsdStore, dram: DramTier, words: slice) -> bool:
    return chunk.store is store and chunk.dram is dram and chunk.words == words
