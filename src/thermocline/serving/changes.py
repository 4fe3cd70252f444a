"""Streams of rows in hash order: merged over the stores of several ranks, and compared with a published version."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys
from thermocline.core import _core
from thermocline.embedding.key_hash import hash_keys
from thermocline.serving.row_format import Precision, encode
from thermocline.serving.snapshot import StoredRows

Piece = tuple[Keys, Floats]
RowsT = TypeVar("RowsT", bound=npt.NDArray[Any])


def sort_by_hash(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Sort a stream by hash, in memory for all its rows twice."""
    whole = [piece for piece in pieces if len(piece[0])]
    if whole:
        keys = np.concatenate([keys for keys, _ in whole])
        rows = np.concatenate([rows for _, rows in whole])
        order = np.argsort(hash_keys(keys))
        yield keys[order], rows[order]


def merge_by_hash(streams: Sequence[Iterable[tuple[Keys, RowsT]]]) -> Iterator[tuple[Keys, RowsT]]:
    """Merge streams that are in hash order, with disjoint keys, in memory for one piece of each."""
    sources = [iter(stream) for stream in streams]
    held: dict[int, _Hashed[RowsT]] = {}  # the next piece of each stream that has not ended
    while True:
        for i, source in enumerate(sources):
            while i not in held and (given := next(source, None)) is not None:
                if len(given[0]):
                    held[i] = _Hashed(hash_keys(given[0]), *given)
        if not held:
            return
        # Rows up to the least last hash are complete: every stream has passed it.
        bound = min(piece.hashes[-1] for piece in held.values())
        ready = []
        for i, piece in list(held.items()):
            count = int(np.searchsorted(piece.hashes, bound, side="right"))
            ready.append(piece.part(0, count))
            if count == len(piece.keys):
                del held[i]
            else:
                held[i] = piece.part(count, len(piece.keys))
        order = np.argsort(np.concatenate([part.hashes for part in ready]))
        rows: Any = np.concatenate([part.rows for part in ready])
        yield np.concatenate([part.keys for part in ready])[order], rows[order]


@dataclasses.dataclass(frozen=True, slots=True)
class _Hashed(Generic[RowsT]):
    hashes: Keys
    keys: Keys
    rows: RowsT

    def part(self, first: int, last: int) -> _Hashed[RowsT]:
        rows: Any = self.rows[first:last]
        return _Hashed(self.hashes[first:last], self.keys[first:last], rows)


class Changes:
    """The rows of a stream that a published version does not have, or has with other weights.

    Iterate once; then `deleted` has the keys that the version has and the stream does not. Reads all rows of both.
    """

    def __init__(self, rows: Iterable[Piece], published: _core.SnapshotView, precision: Precision) -> None:
        self._rows = rows
        self._published = _PublishedRows(published)
        self._precision = precision
        self._deleted: list[Keys] = []

    def __iter__(self) -> Iterator[Piece]:
        for keys, rows in self._rows:
            if not len(keys):
                continue
            hashes = hash_keys(keys)
            old_hashes, old_keys, old_rows = self._published.up_to(hashes[-1])
            at = np.minimum(np.searchsorted(old_hashes, hashes), max(len(old_hashes) - 1, 0))
            changed = np.ones(len(keys), np.bool_)
            if len(old_hashes):
                known = old_hashes[at] == hashes
                changed = ~known | (old_rows[at] != encode(rows, self._precision)).any(axis=1)
                kept = np.zeros(len(old_hashes), np.bool_)
                kept[at[known]] = True
                self._deleted.append(old_keys[~kept])
            yield keys[changed], rows[changed]
        self._deleted.append(self._published.up_to(np.uint64(2**64 - 1))[1])

    def deleted(self) -> Keys:
        """Return the deleted keys. Call it after the iteration."""
        return np.concatenate([np.empty(0, np.uint64), *self._deleted])


class _PublishedRows:
    """The rows of a view, taken in pieces that end at given hashes."""

    def __init__(self, view: _core.SnapshotView) -> None:
        self._pieces = iter(StoredRows(view))
        self._hashes: Keys = np.empty(0, np.uint64)
        self._keys: Keys = np.empty(0, np.uint64)
        self._rows: npt.NDArray[np.uint8] = np.empty((0, view.row_bytes), np.uint8)
        self._ended = False

    def up_to(self, bound: np.uint64) -> tuple[Keys, Keys, npt.NDArray[np.uint8]]:
        """Return hashes, keys and stored rows of all following rows with a hash of at most `bound`."""
        hashes, keys, rows = [self._hashes], [self._keys], [self._rows]
        while not self._ended and (not len(hashes[-1]) or hashes[-1][-1] <= bound):
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
            else:
                hashes.append(hash_keys(piece.keys))
                keys.append(piece.keys)
                rows.append(piece.rows)
        whole = np.concatenate(hashes), np.concatenate(keys), np.concatenate(rows)
        count = int(np.searchsorted(whole[0], bound, side="right"))
        self._hashes, self._keys, self._rows = whole[0][count:], whole[1][count:], whole[2][count:]
        return whole[0][:count], whole[1][:count], whole[2][:count]
