"""Files of a folder or glob that grows: lists complete files in the order of their names, each once.

A file is complete as soon as it has its final name, or, with `follow_complete = "_SUCCESS"`, when its folder has a file
of that name. Temporary names are ignored: `.*`, `_*` (also of folders below the path), `*.tmp`, `*.inprogress` and
`*._COPYING_`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

from thermocline.data.files import NoFiles, Source, file_errors, find_files, is_remote, local_path, without_secrets
from thermocline.errors import ConfigError, DataError

_TEMPORARY = (".tmp", ".inprogress", "._COPYING_")
_RECENT = 100
"""Files taken last whose sizes are compared at every listing, and which a position names."""
_RELIST_SECONDS = 1.0
_MARKER = "_SUCCESS"


@dataclasses.dataclass(slots=True)
class Taken:
    """The files that were taken so far."""

    count: int = 0
    recent: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """Names below the folder and sizes of the last ones, in order."""

    @property
    def last(self) -> str:
        """Name of the last one; empty before the first."""
        return self.recent[-1][0] if self.recent else ""

    def add(self, name: str, size: int) -> Taken:
        """Return the files with one more; this object does not change."""
        return Taken(self.count + 1, [*self.recent[1 - _RECENT :], (name, size)])


class NewFiles:
    """Lists the new files of one folder, glob or URL. Not thread-safe."""

    def __init__(self, path: str, *, marker: bool) -> None:
        """marker: a file is complete when its folder has a file _SUCCESS."""
        self._path = path
        self._marker = marker
        self.shown = without_secrets(path)
        """The path for messages."""
        listed = self.shown if is_remote(path) else local_path(path)  # what names of files begin with
        fixed = re.split(r"[*?\[]", listed, maxsplit=1)
        self._base = listed.rstrip("/") + "/" if len(fixed) == 1 else fixed[0][: fixed[0].rfind("/") + 1]
        self._check_path(is_glob=len(fixed) > 1)
        self._pending: list[tuple[str, Source]] = []
        self._listed_at = 0.0
        self.list_seconds = 0.0
        """Duration of the last listing."""
        self._known: set[str] | None = None
        """Names listed so far that precede the last one taken; None before the first listing."""

    def _check_path(self, *, is_glob: bool) -> None:
        if is_remote(self._path):
            return
        folder = self._base or "."
        if not os.path.isdir(folder):
            what = "the folder of this glob" if is_glob else "a folder or a glob"
            raise ConfigError(f"data.train is {self.shown!r}: data.follow = true needs {what}, and {folder} is none")

    def next(self, taken: Taken) -> tuple[str, Source] | None:
        """Return name and file of the first complete file after those taken; None: there is none yet.

        Raises `DataError` if a file changed after it was taken. Warns once of every file that appears with a name
        before the last one taken: it is not read.
        """
        if not self._pending or time.monotonic() - self._listed_at > _RELIST_SECONDS:
            self._pending = self._list(taken)
        return self._pending.pop(0) if self._pending else None

    def _list(self, taken: Taken) -> list[tuple[str, Source]]:
        """List the complete files after those taken, and check all others."""
        start = time.monotonic()
        sources = {self._name(source): source for source in self._find()}
        self._listed_at = time.monotonic()
        self.list_seconds = self._listed_at - start
        for name, size in taken.recent:
            if name in sources:
                _check_size(sources[name], size)
        self._report_late({name for name in sources if name <= taken.last}, taken)
        complete: dict[str, bool] = {}
        found = sorted((name, source) for name, source in sources.items() if name > taken.last)
        return [(name, source) for name, source in found if self._is_complete(source, complete)]

    def find(self, name: str, size: int) -> Source:
        """Return the file that was taken under this name. Raises `DataError` if it is gone or changed."""
        for source in self._find():
            if self._name(source) == name:
                _check_size(source, size)
                return source
        raise DataError(
            f"{self._base}{name} is missing: it had {size} bytes, and was trained only in part; put it back"
        )

    def _find(self) -> Sequence[Source]:
        try:
            found = find_files([self._path], empty=True)
        except NoFiles:
            return []  # yet
        return [source for source in found if not self._is_temporary(self._name(source))]

    def _name(self, source: Source) -> str:
        return source.name.removeprefix(self._base).lstrip("/")

    @staticmethod
    def _is_temporary(name: str) -> bool:
        return name.endswith(_TEMPORARY) or any(part.startswith((".", "_")) for part in name.split("/"))

    def _is_complete(self, source: Source, known: dict[str, bool]) -> bool:
        if not self._marker:
            return True
        folder = os.path.dirname(source.path)
        if folder not in known:
            known[folder] = self._has_marker(source.filesystem, os.path.join(folder, _MARKER))
        return known[folder]

    @staticmethod
    def _has_marker(filesystem: Any, path: str) -> bool:
        if filesystem is None:
            return os.path.exists(path)
        with file_errors(path):
            return bool(filesystem.get_file_info(path).is_file)

    def _report_late(self, before: set[str], taken: Taken) -> None:
        """Warn of files that precede the last one taken and were never taken."""
        recent = {name for name, _ in taken.recent}
        if self._known is None:  # a resumed run: only the last names are known
            oldest = taken.recent[0][0] if taken.recent else ""
            self._known = {name for name in before if name < oldest}
        for name in sorted(before - self._known - recent):
            warnings.warn(
                f"{self._base}{name} is not read: it appeared after {taken.last}, and data.follow = true reads files "
                "in the order of their names",
                RuntimeWarning,
                stacklevel=2,
            )
        self._known = before


def _check_size(source: Source, size: int) -> None:
    if source.size != size:
        raise DataError(
            f"{source.name} changed after it was read: it had {size} bytes, now it has {source.size}. Write files "
            "under a temporary name (.*, _*, *.tmp) and rename them when they are complete, or set "
            f'data.follow_complete = "{_MARKER}" and write that file last'
        )
