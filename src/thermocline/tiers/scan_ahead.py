"""Reads the rows of the next parts of an expiry from the store on threads, so that the step of a part need not.

A scan is a snapshot of the store from some steps before the part's turn. The store keeps a copy of the rows of the
scanned range that change since, and the DRAM tier has those that the store does not have yet. Together they are the
rows of the part as of its step: what is read ahead decides when rows are read, never which rows are deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np

from thermocline.arrays import Floats, Keys, Mask
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.key_hash import KeyPart, hash_keys
from thermocline.errors import ThermoclineError
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import FollowedScan, SsdStore

_STEPS_AHEAD = 128
"""Steps before the turn of a part at which its rows may be read, if memory allows."""
_SHARE_OF_SPARE = 4
"""Rows that were read take one of so many bytes that the budget of the store has left: changes and read buffers take
others."""
_PIECE_BYTES = 1 << 20
"""Rows of one call of the store. Few calls: after each, the thread waits until others release the interpreter."""
_CHUNKS = 8
"""Scans that the parts ahead are divided among. Each reads a page per file of the log, and the base, at least; its read
buffers take several MB until it ends."""
_READERS = 2
"""Scans that read at once."""
_LOOKS = 4
"""Steps between two looks at the memory of the store: a look may wait for a lock."""

Piece = tuple[Keys, Floats]
"""Keys and decoded rows, or only the statistics of these rows."""


class _Chunk:
    """The rows of consecutive parts in the store, read by one scan."""

    def __init__(
        self, store: SsdStore, dram: DramTier, scan: FollowedScan, parts: Sequence[KeyPart], first: int, words: slice,
        kept: int, threads: Executor,
    ) -> None:  # fmt: skip
        self.store = store
        self.dram = dram
        self.words = words
        self.kept = kept
        """Bytes of the rows, as estimated."""
        self.left = [*parts]
        """Parts that were not taken yet."""
        self.last = first + len(parts) - 1
        """The step that the last part follows."""
        self._parts = tuple(parts)
        self._scan: FollowedScan | None = scan
        self._rows: dict[KeyPart, Piece] = {}
        """Parts that were read, and not taken yet."""
        self._changed = threading.Condition()  # of _rows, or the end of the scan
        self._ended = self._stop = False
        self._reading = threads.submit(self._run)

    @property
    def first(self) -> int:
        """The step that the first part left follows."""
        return self.last - len(self.left) + 1

    @property
    def reading(self) -> bool:
        return not self._ended

    @property
    def lost(self) -> bool:
        """Whether the parts must be read again: too many of their rows have changed."""
        return self._ended and self._scan is not None and self._scan.lost

    def stop(self) -> None:
        """Stop reading soon."""
        self._stop = True

    def close(self) -> None:
        """Free the memory, after `stop`."""
        self._reading.result()
        scan, self._scan = self._scan, None
        if scan is not None:
            scan.close()
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
            if self._stop or scan.lost:
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
        self._threads = _threads()
        self._checked = 0
        """The step of the last look at the memory of the store."""

    def expect(self, store: SsdStore, dram: DramTier, expiry: Expiry, step: int, words: slice) -> None:
        """Begin to read parts that follow the steps after `step`, if it is time.

        words   the last ones of a stored row that are needed
        """
        most = min(_STEPS_AHEAD, expiry.every)  # so each part is read once at a time
        self._drop([
            chunk for chunk in self._chunks
            if not _fits(chunk, store, dram, words)
            or not (chunk.left and step < chunk.last <= step + most) or chunk.lost
        ])  # fmt: skip
        first = self._first_unread(expiry, step)
        if first + _chunk_of(most) > step + most + 1 or sum(chunk.reading for chunk in self._chunks) >= _READERS:
            return
        if self._checked < step < self._checked + _LOOKS and first > step + _LOOKS:
            return
        self._checked = step
        stats = store.stats()
        of_part = max(1, (stats.rows_in_base + stats.rows_in_log) // expiry.parts)
        of_part *= 8 + _bytes_of(store.row_bytes, words)
        kept = sum(chunk.kept for chunk in self._chunks)
        ahead = min(most, (stats.mem_spare + kept) // _SHARE_OF_SPARE // of_part)
        end = min([first + max(1, _chunk_of(ahead)), *(chunk.first for chunk in self._chunks if chunk.first > first)])
        parts = [part for part in map(expiry.part_after, range(first, end)) if part is not None]
        parts = parts[: parts[0].parts - parts[0].number]  # of one expiry
        if first + len(parts) - 1 > step + ahead:  # they do not fit yet
            return
        kept = len(parts) * of_part
        scan = store.follow(parts[0].lo, parts[-1].hi, kept, 2 * _PIECE_BYTES)
        if scan is not None:
            self._chunks.append(_Chunk(store, dram, scan, parts, first, words, kept, self._threads))

    def _first_unread(self, expiry: Expiry, step: int) -> int:
        """Return the first step after `step` that a part follows which no chunk has."""
        first = expiry.next_turn(step + 1)
        for chunk in sorted(self._chunks, key=lambda chunk: chunk.first):
            if chunk.first <= first <= chunk.last:
                first = expiry.next_turn(chunk.last + 1)
        return first

    def take(self, store: SsdStore, dram: DramTier, part: KeyPart, words: slice) -> tuple[list[Piece], Keys] | None:
        """See `_Chunk.take`; None also if the part was not expected."""
        for chunk in self._chunks:
            if part in chunk.left and _fits(chunk, store, dram, words):
                return chunk.take(part)
        return None

    def close(self) -> None:
        """Forget what was read."""
        for chunk in self._chunks:
            chunk.stop()
            chunk.close()
        self._chunks.clear()
        self._threads.shutdown()
        self._threads = _threads()

    def _drop(self, chunks: Sequence[_Chunk]) -> None:
        """Forget chunks. Their memory is freed by the threads: that can take longer than a step."""
        for chunk in chunks:
            self._chunks.remove(chunk)
            chunk.stop()
            self._threads.submit(chunk.close)


def _threads() -> ThreadPoolExecutor:
    # Threads that stay: the start of one waits until it runs.
    return ThreadPoolExecutor(_READERS, "thermocline-expiry-scan")


def _chunk_of(ahead: int) -> int:
    return -(-ahead // _CHUNKS)


def _fits(chunk: _Chunk, store: SsdStore, dram: DramTier, words: slice) -> bool:
    return chunk.store is store and chunk.dram is dram and chunk.words == words


def _bytes_of(row_bytes: int, words: slice) -> int:
    return len(range(row_bytes // 4)[words]) * 4
