"""`Snapshot`: the current version of a publication, memory-mapped, read-only; follows newer versions."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.core import _core
from thermocline.errors import CorruptionError, NotFoundError
from thermocline.serving.version import TableFile, Version, read_current, read_version, version_folder
from thermocline.utils import atomic_file

Missing = Literal["initial", "zero", "error"]
_SCAN_ROWS = 65536


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """One version with its mapped files. Immutable, so that a lookup sees one version."""

    version: Version
    tables: Mapping[str, TableFile]
    views: Mapping[str, _core.SnapshotView]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Keys and stored rows of a piece of a scan."""

    keys: Keys
    rows: npt.NDArray[np.uint8]


class StoredRows:
    """Iterates over the stored rows of a view in hash order."""

    def __init__(self, view: _core.SnapshotView) -> None:
        self._view = view

    def __iter__(self) -> Iterator[Stored]:
        scan = self._view.scan()
        while True:
            keys = np.empty(_SCAN_ROWS, np.uint64)
            rows = np.empty((_SCAN_ROWS, self._view.row_bytes), np.uint8)
            count = scan.next(keys, rows)
            if count == 0:
                return
            yield Stored(keys[:count], rows[:count])


def open(path: str | os.PathLike[str], *, consumer: str | None = None, direct: bool = False) -> Snapshot:
    """Open the current version of a publication.

    consumer  a name under which the version in use is recorded
    direct    read rows of the base from the device at each lookup, many pages at once, past the page cache: for
              publications larger than memory. Deltas are mapped
    """
    return Snapshot(path, consumer=consumer, direct=direct)


class Snapshot:
    """Rows of the current version.

    Thread safety: `lookup` and `find` may run on any thread, during `refresh` too; one thread at a time refreshes.
    All rows of one call are of one version.
    """

    def __init__(self, path: str | os.PathLike[str], *, consumer: str | None = None, direct: bool = False) -> None:
        """See `open`."""
        if consumer is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", consumer):
            raise ValueError(f"consumer is {consumer!r}: it must have 1 to 100 letters, digits, '_', '.' and '-'")
        self.path = Path(path)
        self._consumer = consumer
        self._direct = direct
        self._state = open_state(self.path, read_current(self.path).number, direct=direct)
        self._refresh_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last refresh of `follow` failed; None if it succeeded. The version before is served meanwhile."""
        self._record()

    # ---- reading

    @property
    def state(self) -> State:
        """The version in use with its files: several lookups in one state are of one version."""
        return self._state

    @property
    def version(self) -> Version:
        """The version in use."""
        return self._state.version

    @property
    def tables(self) -> Mapping[str, TableFile]:
        """The tables by name."""
        return self._state.tables

    def lookup(self, keys: Any, *, table: str | None = None, missing: Missing = "initial") -> Floats:
        """Return float32[n, dim]: the weights of each key.

        missing  a key without a row: "initial", the value it has in training before its first update; "zero"; "error"
                 raises KeyError
        """
        rows, _ = self.find(keys, table=table, missing=missing)
        return rows

    def find(
        self, keys: Any, *, table: str | None = None, missing: Missing = "initial"
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the rows as `lookup` does, and whether the table has each key."""
        return find(self._state, as_keys(keys), table, missing)

    @property
    def mem_bytes(self) -> int:
        """Bytes of DRAM beside the page cache: directories of pages, and the index of changed rows."""
        return sum(view.mem_bytes for view in self._state.views.values())

    def verify(self) -> None:
        """Verify every page. Without this call a page is verified when it is first read."""
        for view in self._state.views.values():
            view.verify()

    # ---- newer versions

    def refresh(self) -> bool:
        """Read the newest version; return whether there was one.

        A damaged or incomplete version raises `CorruptionError`, and the version before stays in use.
        """
        with self._refresh_lock:
            current = read_current(self.path)
            state = self._state
            if current.publication == state.version.publication and current.number == state.version.number:
                return False
            known = state if current.publication == state.version.publication else None
            self._state = open_state(self.path, current.number, known, direct=self._direct)
            self._record()
            return True

    def follow(self, seconds: float = 1.0) -> None:
        """Refresh every `seconds` on a thread of its own, until `close`."""
        if seconds <= 0:
            raise ValueError(f"seconds is {seconds}: it must be positive")
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._follow, args=(seconds,), name="refresh", daemon=True)
            self._thread.start()

    def _follow(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
                self.error = None
            except Exception as error:  # whatever it is: the version before is served, and the error reported
                self.error = error

    def close(self) -> None:
        """End following. Files are unmapped with the last reference."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self) -> None:
        """Record the position of a named consumer."""
        if self._consumer is not None:
            atomic_file.make_folder(self.path / "consumers")
            position = {"version": self.version.number, "step": self.version.step}
            atomic_file.atomic_write(
                self.path / "consumers" / f"{self._consumer}.json", json.dumps(position).encode() + b"\n"
            )


def consumers(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the version of each named consumer of a publication. Needs no lock."""
    folder = Path(path) / "consumers"
    if not folder.is_dir():
        return {}
    return {file.stem: int(json.loads(file.read_text())["version"]) for file in sorted(folder.glob("*.json"))}


def find(state: State, keys: Keys, table: str | None, missing: Missing) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """See `Snapshot.find`."""
    if table is None:
        if len(state.tables) != 1:
            raise ValueError(f"table must be one of {sorted(state.tables)}")
        table = next(iter(state.tables))
    elif table not in state.tables:
        raise KeyError(f"no table {table!r}: it must be one of {sorted(state.tables)}")
    file = state.tables[table]
    found = np.empty(len(keys), np.uint8)
    rows = np.zeros((len(keys), file.dim), np.float32)
    state.views[table].lookup(keys, found, rows)
    if missing == "initial":
        if not found.all() and file.shared_key is not None and not (len(keys) == 1 and keys[0] == file.shared_key):
            rows[found == 0] = find(state, np.array([file.shared_key], np.uint64), table, missing)[0]
        elif not found.all():
            if file.initial is None:
                raise ValueError(
                    f"table {table!r}: the version has no initializer for unseen keys: pass missing='zero'"
                )
            _core.fill_initial(keys, found, rows, *file.initial, file.seed, file.table_id)
    elif missing == "error":
        if not found.all():
            first = int(np.flatnonzero(found == 0)[0])
            raise KeyError(f"{len(keys) - int(found.sum())} of {len(keys)} keys have no row, first {keys[first]}")
    elif missing != "zero":
        raise ValueError(f"missing is {missing!r}: it must be initial, zero or error")
    return rows, found.view(np.bool_)


def open_state(path: Path, number: int, state: State | None = None, *, direct: bool = False) -> State:
    """Open the current version, which has this number, or its successor if the writer deletes versions meanwhile.

    See `open_version`.
    """
    for attempt in range(3):
        try:
            return open_version(path, number, state, direct=direct)
        except (FileNotFoundError, NotFoundError, CorruptionError) as error:
            before, number = number, read_current(path).number
            if attempt == 2 or (isinstance(error, CorruptionError) and number == before):
                raise
    raise AssertionError


def open_version(path: Path, number: int, state: State | None = None, *, direct: bool = False) -> State:
    """Open a version and no other: from `state` by the deltas after it if possible, else from the base before it.

    Verifies all deltas on the way; pages of the base are verified when they are read. `direct`: see `open`.
    """
    chain = version_chain(path, number, None if state is None else state.version.number)
    views: dict[str, _core.SnapshotView] = {} if state is None else dict(state.views)
    for version, folder in chain:
        for table in version.tables:
            file = os.fsencode(folder / table.file)
            if version.kind == "base":
                view = _core.SnapshotView.open(file, table.precision, table.dim)
                views[table.name] = view.with_direct_reads() if direct else view
            else:
                views[table.name] = views[table.name].with_delta(file)
    newest = chain[-1][0]
    names = {table.name for table in newest.tables}
    return State(
        newest,
        MappingProxyType({table.name: table for table in newest.tables}),
        MappingProxyType({name: view for name, view in views.items() if name in names}),
    )


def version_chain(path: Path, number: int, known: int | None) -> list[tuple[Version, Path]]:
    """Return what a reader of version `known` reads to get to `number`, oldest first: deltas, or a base and deltas.

    Raises `NotFoundError` if a version is missing and `CorruptionError` if one does not belong to `number`.
    """
    chain: list[tuple[Version, Path]] = []
    at: int | None = number
    while at is not None and at != known:
        folder = version_folder(path, at)
        if folder is None:
            raise NotFoundError(f"{path} has no version {at}, which version {number} needs")
        version = read_version(folder)
        if chain and (version.publication != chain[0][0].publication or at >= chain[-1][0].number):
            raise CorruptionError(f"{folder}: it does not belong to version {number}: publish a base")
        chain.append((version, folder))
        at = version.previous
    return chain[::-1]
