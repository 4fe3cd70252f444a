"""Reads the rows of the next parts of an expiry from the store on threads, so that the step of a part need not.

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
_SHARE_OF_SPARE = 4
"""At most one of so many bytes that the budget of the store has left: changes and read buffers take others."""
_PIECE_BYTES = 1 << 20
"""Rows of one call of the store. Few calls: after each, the thread waits until others release the interpreter."""
_CHUNKS = 4
"""Scans that the parts ahead are divided among. Each reads a page per file of the log, and the base, at least."""
_READERS = 2
"""Scans that read at once."""

Piece = tuple[Keys, Floats]
"""Keys and decoded rows, or only the statistics of these rows."""


class _Chunk:
    """The rows of consecutive parts in the store, read by one scan."""

    def __init__(self, store: SsdStore, dram: DramTier, parts: Sequence[KeyPart], words: slice, kept: int) -> None:
        self.store = store
        self.dram = dram
        self.words = words
        self.kept = kept
        """Bytes of the rows, as estimated."""
        self.left = [*parts]
        """Parts that were not taken yet."""
        self._parts = tuple(parts)
        self._scan: FollowedScan | None = store.follow(parts[0].lo, parts[-1].hi, kept + 2 * _PIECE_BYTES)
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
        row_bytes = _bytes_of(scan.row_bytes, self.words)
        lows = np.array([part.lo for part in self._parts], np.uint64)
        pieces: list[list[Piece]] = [
            [(np.empty(0, np.uint64), np.empty((0, row_bytes // 4), np.float32))] for _ in self._parts
        ]
        done = 0
        for keys, rows in scan.rows(max(1, _PIECE_BYTES // (8 + row_bytes)), row_bytes):
            if self._stop:
                return
            begins = np.append(np.searchsorted(hash_keys(keys), lows), len(keys))  # keys are in hash order
            last = int(np.searchsorted(begins[:-1], len(keys))) - 1
            for part in range(done, last + 1):
                of_part = slice(begins[part], begins[part + 1])
                pieces[part].append((keys[of_part].copy(), rows.view(np.float32)[of_part].copy()))
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
        newer = ~np.isin(changed_keys, unwritten) & ~deleted
        replaced = _places(keys, np.concatenate([changed_keys, unwritten]))
        pieces = [
            (np.delete(keys, replaced), np.delete(rows, replaced, axis=0)),
            (changed_keys[newer], changed_rows.view(np.float32)[newer][:, self.words]),
        ]
        return [*pieces, (unwritten, unwritten_rows[:, self.words])], unwritten


def _places(keys: Keys, some: Keys) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the places of those of `some` keys that are among `keys`, which are in hash order."""
    hashes = hash_keys(keys)  # a key has a hash of its own
    wanted = hash_keys(some)
    places = np.searchsorted(hashes, wanted)
    found: Mask = hashes[np.minimum(places, len(keys) - 1)] == wanted if len(keys) else np.zeros(len(some), np.bool_)
    return places[found]


class ScanAhead:
    """Reads ahead for one table. Used by one thread."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def expect(self, store: SsdStore, dram: DramTier, coming: Sequence[KeyPart], words: slice) -> None:
        """Begin to read parts whose turns come in this order, in steps soon.

        words   the last ones of a stored row that are needed
        """
        known = {part for chunk in self._chunks for part in chunk.left}
        first = next((i for i, part in enumerate(coming) if part not in known), len(coming))
        soon = {*coming[:first]}
        self._drop([
            chunk for chunk in self._chunks if not _fits(chunk, store, dram, words) or soon.isdisjoint(chunk.left)
        ])  # fmt: skip
        if first == len(coming) or sum(chunk.reading for chunk in self._chunks) >= _READERS:
            return
        stats = store.stats()
        of_part = max(1, (stats.rows_in_base + stats.rows_in_log) // coming[first].parts)
        of_part *= 8 + _bytes_of(store.row_bytes, words)
        kept = sum(chunk.kept for chunk in self._chunks)
        ahead = min(STEPS_AHEAD, _MOST_BYTES // of_part, (stats.mem_spare + kept) // _SHARE_OF_SPARE // of_part)
        if first >= ahead:  # parts that fit
            return
        parts = [part for i, part in enumerate(coming[first : first + -(-ahead // _CHUNKS)])
                 if part == KeyPart(coming[first].number + i, coming[first].parts)]  # fmt: skip
        self._chunks.append(_Chunk(store, dram, parts, words, len(parts) * of_part))

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


def _bytes_of(row_bytes: int, words: slice) -> int:
    return len(range(row_bytes // 4)[words]) * 4
