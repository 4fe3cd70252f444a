"""`Publication`: writes versions of rows for serving. A version becomes visible by one atomic rename."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from thermocline.arrays import Floats, Keys, as_keys
from thermocline.core import _core
from thermocline.embedding.key_hash import hash_keys
from thermocline.errors import CorruptionError, FormatError, LockError, NotFoundError, ThermoclineError
from thermocline.serving.row_files import check_formats, is_row_file, write_row_files
from thermocline.serving.row_format import Precision, encode, row_bytes
from thermocline.serving.served_rows import ALL_ROWS, ServedRows
from thermocline.serving.snapshot import StoredRows, consumers, open_version, version_chain
from thermocline.serving.version import (
    CURRENT,
    MANIFEST,
    Current,
    ExtraFile,
    Kind,
    RowFileFormat,
    TableFile,
    Version,
    file_header,
    read_current,
    read_file,
    read_version,
    version_folder,
    version_names,
    versions,
)
from thermocline.utils import atomic_file
from thermocline.utils.untrusted_files import is_file_name

_TEMPORARY = ".tmp-"
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """The rows of one table for a version."""

    name: str
    dim: int
    rows: Iterable[tuple[Keys, Floats]]
    """Keys and weights, float32[n, dim]; in ascending order of `hash_keys` over all pieces (`sort_by_hash`)."""
    deleted: Callable[[], Keys] | None = None
    """Returns the keys that the version before has and this one does not, in any order; called after `rows` ended. Only
    in a delta."""
    seed: int = 0
    table_id: int = 0
    initial: tuple[int, float] | None = None
    """Code and scale of the initializer (`embedding/initializers.py`): what `lookup` returns for an unseen key."""
    shared_key: int | None = None
    """See `TableFile.shared_key`."""
    positions: tuple[str, ...] = ()
    """See `TableFile.positions`: where the next delta continues."""
    served: ServedRows = ALL_ROWS
    """Which rows the version has; `rows` and `deleted` obey it already. It is recorded for the next delta."""
    decays: int | None = None
    """See `TableFile.decays`."""


class Publication:
    """A folder of versions with one writer. Consumers read it meanwhile (`thermocline.serving.open`).

    Thread safety: one thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        precision: Precision | None = None,
        formats: Iterable[RowFileFormat] | None = None,
    ) -> None:
        """Open the folder to write, or create it. Raises `LockError` if another process writes to it.

        precision  stored form of a weight; default: that of the current version, or fp32 if there is none
        formats    also write rows in these formats (`row_files.py`); default: those of the current version
        """
        if precision is not None:
            row_bytes(precision, 1)  # raises if unknown
        chosen = None if formats is None else check_formats(formats)
        self.path = Path(path)
        _require_ours(self.path)
        atomic_file.make_folder(self.path)
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._folder)
            raise LockError(f"another process publishes to {self.path}: wait until it ends") from None
        self._pointer: Current | None = None  # what CURRENT has; None: not read yet, or there is none
        self._version: Version | None = None  # the version that it names. No other process writes either of them
        self._newest = 0  # largest number of a version
        self._remove_leftovers()
        current = None
        with contextlib.suppress(ThermoclineError):  # a damaged version is reported when it is needed
            current = self.current
        if current is not None:
            precision = precision or current.tables[0].precision
            chosen = current.formats if chosen is None else chosen
        self.precision: Precision = precision or "fp32"
        self.formats = chosen or ()

    @staticmethod
    def check(path: str | os.PathLike[str], *, delta: bool, precision: Precision | None = None) -> None:
        """Raise if no base, or no delta with this precision, can be published there. Needs no lock, changes nothing."""
        folder = Path(path)
        _require_ours(folder)
        if not delta:
            return
        try:
            found = version_folder(folder, read_current(folder).number)
        except (NotFoundError, FileNotFoundError):
            found = None
        if found is None:
            raise NotFoundError(f"{folder} has no version yet: publish a base first, without --delta")
        for table in read_version(found).tables:
            if precision not in (None, table.precision):
                raise ValueError(
                    f"precision is {precision}, that of the current version of {folder} is {table.precision}: publish "
                    "a base, without --delta, to change it"
                )

    def close(self) -> None:
        """Release the lock."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def current(self) -> Version | None:
        """The version that consumers read; None before the first."""
        try:
            number = self._read_pointer().number
        except NotFoundError:
            return None
        if self._version is None or self._version.number != number:
            self._version = self._read(number)
        return self._version

    def publish_base(
        self,
        tables: Sequence[TableRows],
        *,
        step: int,
        event_time: float | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
    ) -> Version:
        """Publish a version with all rows, and return it. `files`: further files of the version, by name."""
        if any(table.deleted is not None for table in tables):
            raise ValueError("a base has no deleted keys: leave them out of its rows")
        current = self.current
        if current is not None and step < current.step:
            warnings.warn(
                f"{self.path}: the new version has the rows of step {step}, the current version {current.number} those "
                f"of step {current.step}: consumers go back",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._publish("base", None, tables, step, event_time, files)

    def publish_delta(
        self,
        tables: Sequence[TableRows],
        *,
        step: int,
        event_time: float | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
        previous: int | None = None,
    ) -> Version:
        """Publish the rows that were changed or inserted, and the keys deleted, since a version.

        files     further files of the version, by name; those of the version before are not part of it
        previous  number of the version that the delta changes, such as that of `position`; default: the current one.
                  Readers of another version read the base of `previous`, the deltas up to it, and this one
        """
        current = self.current
        if current is None:
            raise NotFoundError(f"{self.path} has no base: publish a base before a delta")
        if self._read_pointer().rolled_back:
            raise ThermoclineError(
                f"{self.path} was rolled back to version {current.number}: publish a base, because a delta contains "
                "only changes since the version before it"
            )
        changed = current if previous in (None, current.number) else self._complete(previous)
        before = {table.name: table for table in changed.tables}
        if {table.name for table in tables} != set(before):
            raise ValueError(f"the delta has tables {sorted(t.name for t in tables)}, the base {sorted(before)}")
        for table in tables:
            base = before[table.name]
            if (table.dim, self.precision) != (base.dim, base.precision):
                raise ValueError(
                    f"table {table.name!r}: the delta has dim {table.dim} and precision {self.precision}, the base dim "
                    f"{base.dim} and {base.precision}: choose those of the base, or publish a base"
                )
        if step < current.step:
            raise ValueError(f"step is {step}: it must be at least {current.step}, that of the current version")
        return self._publish("delta", changed.number, tables, step, event_time, files)

    def compact(self) -> Version:
        """Publish the current version again, as a base: consumers then need no deltas. Reads and writes all rows."""
        state = open_version(self.path, self._read_pointer().number)
        tables = [
            TableRows(
                name=t.name,
                dim=t.dim,
                rows=(),
                seed=t.seed,
                table_id=t.table_id,
                initial=t.initial,
                shared_key=t.shared_key,
                positions=t.positions,
                served=ServedRows.of(t),
                decays=t.decays,
            )
            for t in state.version.tables
        ]

        def write(index: int, writer: _core.SnapshotWriter) -> None:
            for stored in StoredRows(state.views[tables[index].name]):
                writer.append(stored.keys, stored.rows)

        version = state.version
        precisions = {table.precision for table in version.tables}
        assert len(precisions) == 1
        others = [file for file in version.files if not is_row_file(file.name)]
        files = {file.name: read_file(self.path / version.folder, file) for file in others}
        return self._publish("base", None, tables, version.step, version.event_time, files, write, precisions.pop())

    def roll_back(self, number: int) -> Version:
        """Make an earlier version the current one. The next version published must be a base."""
        version = self._read(number)
        open_version(self.path, number)  # every file that it needs exists, and its deltas are sound
        self._set_current(Current(version.publication, number, rolled_back=number != self._newest))
        return version

    def retire(self, keep_bases: int = 2) -> list[int]:
        """Delete versions older than the last `keep_bases` bases, and return their numbers.

        The current version and all that it needs are kept. A delta that continues from a deleted version, such as one
        for a consumer, is deleted too. A consumer with a deleted version reads a base.
        """
        if keep_bases < 1:
            raise ValueError(f"keep_bases is {keep_bases}: it must be at least 1")
        folders = versions(self.path)
        bases = sorted(number for number, folder in folders.items() if folder.name.endswith("base"))
        oldest = min(bases[-keep_bases:], default=0)
        current = self.current
        while current is not None:
            oldest = min(oldest, current.number)
            current = None if current.previous is None else self._read(current.previous)
        gone = sorted(number for number in folders if number < oldest)
        if gone:
            for number in sorted(number for number in folders if number > oldest):
                with contextlib.suppress(CorruptionError, FormatError):  # a damaged version is kept for inspection
                    if self._read(number).previous in gone:
                        gone.append(number)
        for number in gone:
            atomic_file.remove_folder(folders[number])
        return gone

    def position(self, consumer: str) -> Version | str:
        """Return the version of a named consumer, or why no delta can continue from it: the consumer needs a base."""
        current, number = self.current, self.consumers().get(consumer)
        if current is None or number is None:
            return f"no version of consumer {consumer!r} is recorded"
        try:
            # The new version is read through the deltas of an older one: opening it verifies them.
            version = self._complete(number) if number == current.number else open_version(self.path, number).version
        except (NotFoundError, FileNotFoundError):
            return f"version {number} of consumer {consumer!r} was deleted"
        except (CorruptionError, FormatError) as error:
            return f"version {number} of consumer {consumer!r} is damaged: {error}"
        layouts = [{(t.name, t.dim, t.precision) for t in tables} for tables in (version.tables, current.tables)]
        if layouts[0] != layouts[1]:
            return f"version {number} of consumer {consumer!r} has other tables or precisions than the current one"
        return version

    def consumers(self) -> dict[str, int]:
        """Return the version of each named consumer. `serving.consumers(path)` needs no lock."""
        return consumers(self.path)

    # ---- writing

    def _publish(
        self,
        kind: Kind,
        previous: int | None,
        tables: Sequence[TableRows],
        step: int,
        event_time: float | None,
        extra: Mapping[str, bytes],
        write: Callable[[int, _core.SnapshotWriter], None] | None = None,
        precision: Precision | None = None,
    ) -> Version:
        names = [table.name for table in tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tables are {names}: a version has at least one, each with its own name")
        precision = self.precision if precision is None else precision
        temporary = self.path / f"{_TEMPORARY}{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            files, others = [], list[Path]()
            for index, table in enumerate(tables):
                file = temporary / f"table-{index}.rows"
                writer = _core.SnapshotWriter(os.fsencode(file), row_bytes(precision, table.dim))
                if write is None:
                    _append(writer, table, precision)
                else:
                    write(index, writer)
                if table.deleted is not None:
                    deleted = np.unique(as_keys(table.deleted()))
                    writer.erase(deleted[np.argsort(hash_keys(deleted))])
                writer.finish()
                files.append(_table_file(table, file, writer, precision))
                for format in self.formats:
                    others += write_row_files(temporary, index, file, precision, table.dim, format)
            for name, content in extra.items():
                if not is_file_name(name) or name == MANIFEST or name.startswith("table-"):
                    raise ValueError(f"files has {name!r}: it must be a file name other than those of the version")
                others.append(temporary / name)
                others[-1].write_bytes(content)
            try:
                publication = self._read_pointer().publication
            except NotFoundError:
                publication = secrets.token_hex(16)
            version = Version(
                publication=publication,
                number=self._newest + 1,
                kind=kind,
                previous=previous,
                step=step,
                event_time=event_time,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                tables=tuple(files),
                files=tuple(_extra_file(path) for path in others),
                formats=self.formats,
            )
            (temporary / MANIFEST).write_bytes(version.to_json())
            written = [MANIFEST, *(table.file for table in files), *(path.name for path in others)]
            _core.sync_files([os.fsencode(temporary / name) for name in written])
            atomic_file.sync_folder(temporary)
            atomic_file.failpoint("publish.files_written")
            temporary.rename(self.path / version.folder)
            self._newest = version.number
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        atomic_file.failpoint("publish.folder_renamed")
        self._set_current(Current(publication, version.number, rolled_back=False))
        return version

    def _set_current(self, current: Current) -> None:
        """Replace CURRENT durably, after all that was renamed in the folder before."""
        self._pointer = None  # unknown if writing it fails
        atomic_file.atomic_write(
            self.path / CURRENT, current.to_json(), before_rename=lambda: atomic_file.sync_folder(self.path)
        )
        self._pointer = current

    def _read_pointer(self) -> Current:
        if self._pointer is None:
            self._pointer = read_current(self.path)
        return self._pointer

    def _read(self, number: int) -> Version:
        folder = version_folder(self.path, number)
        if folder is None:
            raise NotFoundError(f"{self.path} has no version {number}: it has {_ranges(sorted(versions(self.path)))}")
        return read_version(folder)

    def _complete(self, number: int) -> Version:
        """Read a version. Raises `NotFoundError` if one that its readers need is gone."""
        return version_chain(self.path, number, None)[-1][0]

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left: incomplete folders, and versions that never became current."""
        names = os.listdir(self.path)
        for name in names:
            if name.startswith(_TEMPORARY) or name.endswith(".gone"):
                shutil.rmtree(self.path / name, ignore_errors=True)
        folders = version_names(names)
        with contextlib.suppress(NotFoundError):
            current = self._read_pointer()
            if not current.rolled_back:
                for number in [number for number in folders if number > current.number]:
                    atomic_file.remove_folder(self.path / folders.pop(number))
        self._newest = max(folders, default=0)


def _append(writer: _core.SnapshotWriter, table: TableRows, precision: Precision) -> None:
    for keys, rows in table.rows:
        if rows.shape != (len(keys), table.dim):
            raise ValueError(f"table {table.name!r}: rows have shape {rows.shape}, expected {(len(keys), table.dim)}")
        writer.append(as_keys(keys), encode(rows, precision))


def _table_file(table: TableRows, file: Path, writer: _core.SnapshotWriter, precision: Precision) -> TableFile:
    return TableFile(
        name=table.name,
        file=file.name,
        dim=table.dim,
        precision=precision,
        rows=writer.rows,
        deleted=writer.deleted,
        bytes=writer.bytes,
        header=file_header(file),
        seed=table.seed,
        table_id=table.table_id,
        initial=table.initial,
        positions=table.positions,
        **dataclasses.asdict(table.served),
        decays=table.decays,
        shared_key=table.shared_key,
    )


def _extra_file(path: Path) -> ExtraFile:
    """Describe a file for the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return ExtraFile(name=path.name, bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


def _require_ours(path: Path) -> None:
    """Raise if the folder, which may not exist yet, has other files than those of a publication."""
    if not path.exists():
        return
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: choose a new folder")
    if not (path / CURRENT).exists() and not all(_is_ours(entry.name) for entry in path.iterdir()):
        raise FileExistsError(f"{path} is not empty and is not a publication: choose a new folder")


def _is_ours(name: str) -> bool:
    return name.startswith((_TEMPORARY, ".CURRENT", "v0")) or name in (CURRENT, "consumers")


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
