"""Writes a publication to Redis: one string per key, the weights as little-endian float32.

Names, with `prefix` "tc" and table "t":

    tc:t:<8 bytes of the key, little-endian>     weights
    tc:version                                   JSON: publication, number and step of the version that is complete

A delta writes what changed. `tc:version` is set after all rows of a version, so that a writer that was stopped starts
again with the same version: writing a row or deleting a key twice gives the same result. During a write, readers see
rows of two versions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.arrays import Keys
from thermocline.core import _core
from thermocline.errors import NotFoundError
from thermocline.serving.row_format import decode
from thermocline.serving.snapshot import Snapshot, StoredRows, version_chain
from thermocline.serving.version import TableFile, Version, read_current

_ROWS = 4096
"""Rows per request."""


class RedisWriter:
    """Keeps the rows of a publication in Redis up to date. `client`: a `redis.Redis`. One thread, one writer."""

    def __init__(self, path: str | os.PathLike[str], client: Any, *, prefix: str = "tc") -> None:
        if not prefix or any(symbol in prefix for symbol in "*?[]\\"):
            raise ValueError(f"prefix is {prefix!r}: it must have at least one character, none of * ? [ ] \\")
        options = getattr(getattr(client, "connection_pool", None), "connection_kwargs", {})
        if options.get("decode_responses"):
            raise ValueError(
                "the client has decode_responses=True, which cannot read keys of 8 bytes: pass a redis.Redis without it"
            )
        self._path = Path(path)
        self._client = client
        self._prefix = prefix

    @property
    def position(self) -> dict[str, Any] | None:
        """Publication, number and step of the version in Redis; None: there is none."""
        data = self._client.get(f"{self._prefix}:version")
        return None if data is None else json.loads(data)

    def sync(self, advance: Callable[[int], object] = lambda rows: None) -> Version | None:
        """Write the current version; return it, or None if Redis has it already.

        Uses the deltas after the version in Redis if all are there, else writes all rows and deletes those that the
        version does not have. `advance` is called with the number of rows written since the last call.
        """
        current = read_current(self._path)
        position = self.position
        if position is not None and (position["publication"], position["number"]) == (
            current.publication, current.number
        ):  # fmt: skip
            return None
        known = None
        if position is not None and position["publication"] == current.publication:
            known = int(position["number"])
        try:
            chain = version_chain(self._path, current.number, known)
        except NotFoundError:  # deleted meanwhile: all rows
            chain = []
        if not chain or chain[0][0].kind == "base" or known is None:
            return self._write_all(advance)
        for version, folder in chain:
            for table in version.tables:
                file = _core.SnapshotFile(os.fsencode(folder / table.file))
                file.verify()
                self._write(table, _pieces(file), advance)
                self._delete(table, file.deleted)
            self._set_position(version)
        return chain[-1][0]

    def _write_all(self, advance: Callable[[int], object]) -> Version:
        with Snapshot(self._path) as snapshot:
            state = snapshot.state
            for name, table in state.tables.items():
                rows = ((piece.keys, piece.rows) for piece in StoredRows(state.views[name]))
                self._write(table, rows, advance)
                head = self._key(table, b"")
                names = list(self._client.scan_iter(match=_literal(head) + b"*", count=_ROWS))
                keys = np.frombuffer(b"".join(n[len(head) :] for n in names if len(n) == len(head) + 8), "<u8")
                _, found = snapshot.find(keys, table=name, missing="zero")
                self._delete(table, keys[~found])
            self._set_position(state.version)
            return state.version

    def _write(self, table: TableFile, pieces: Iterator[tuple[Keys, Any]], advance: Callable[[int], object]) -> None:
        for keys, stored in pieces:
            for first in range(0, len(keys), _ROWS):
                part = slice(first, first + _ROWS)
                values = decode(stored[part], table.precision, table.dim).astype("<f4")
                names = keys[part].astype("<u8")
                self._client.mset(
                    {self._key(table, key.tobytes()): row.tobytes() for key, row in zip(names, values, strict=True)}
                )
                advance(len(names))

    def _delete(self, table: TableFile, keys: Keys) -> None:
        for first in range(0, len(keys), _ROWS):
            names = keys[first : first + _ROWS].astype("<u8")
            self._client.unlink(*(self._key(table, key.tobytes()) for key in names))

    def _key(self, table: TableFile, key: bytes) -> bytes:
        return f"{self._prefix}:{table.name}:".encode() + key

    def _set_position(self, version: Version) -> None:
        position = {"publication": version.publication, "number": version.number, "step": version.step}
        self._client.set(f"{self._prefix}:version", json.dumps(position))


def _pieces(file: _core.SnapshotFile) -> Iterator[tuple[Keys, Any]]:
    for first in range(0, file.rows, _ROWS):
        count = min(_ROWS, file.rows - first)
        keys, rows = np.empty(count, np.uint64), np.empty((count, file.row_bytes), np.uint8)
        file.copy_rows(first, keys, rows)
        yield keys, rows


def _literal(text: bytes) -> bytes:
    """Escape the characters that have a meaning in a pattern of Redis: a table may have any name."""
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]^-\\" else bytes([byte]) for byte in text)
