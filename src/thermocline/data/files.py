"""Input files: resolves paths, folders, globs and URLs, and reads byte ranges or decompressed text.

Local files are read directly. URLs use Arrow's file systems (s3, gs, hdfs, abfs), configured by the URL's query
(`s3://bucket/file.csv?endpoint_override=host:9000&scheme=http`) or the environment. Other protocols use fsspec behind
Arrow's interface.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import itertools
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from thermocline.config.data import compression_of
from thermocline.errors import DataError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MAGIC = re.compile(r"[*?\[]")
_PARTITION = re.compile(r"[^=]+=.*", re.DOTALL)
_numbers = itertools.count()


class NoFiles(DataError):
    """A path has no files, or does not exist."""


class NoExamples(DataError):
    """The files have no examples."""


_OPEN_FILES = 64  # open remote files kept in the cache


class Source:
    """An input file of fixed size. Thread-safe."""

    def __init__(
        self, name: str, path: str, size: int, filesystem: Any = None, partitions: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        """Path or URL without secrets, for messages."""
        self.path = path
        self.size = size
        self.filesystem = filesystem
        """Arrow file system; None for a local file."""
        self.partitions = dict(partitions or {})
        """Columns that folders of its path are named after, such as date=2026-01-31; "" for a missing value."""
        self.compression = compression_of(path)
        self.number = next(_numbers)
        """Unique within the process."""

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.size} bytes)"

    @property
    def remote(self) -> bool:
        return self.filesystem is not None

    def read(self, start: int, end: int) -> bytes:
        """Read the stored bytes [start, end), without decompression; fewer only at the end of the file."""
        with file_errors(self.name):
            if self.remote:
                data: bytes = _handles.get(self).read_at(max(0, min(end, self.size) - start), start)
            else:
                data = self._read_local(start, end)
        if len(data) < min(end, self.size) - start:
            raise self._changed(start + len(data))
        return data

    def _read_local(self, start: int, end: int) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != self.size:
                raise self._changed(size)
            left, parts = min(end, size) - start, []
            while left > 0:
                part = os.pread(descriptor, left, start)
                if not part:
                    break
                parts.append(part)
                start, left = start + len(part), left - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    def open(self) -> Any:
        """Open as an Arrow random access file."""
        import pyarrow as pa

        with file_errors(self.name):
            file = self.filesystem.open_input_file(self.path) if self.remote else pa.OSFile(self.path)
            size = file.size()
        if size != self.size:
            raise self._changed(size)
        return file

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the decompressed text in chunks of exactly `size` bytes; the last one may be shorter."""
        import pyarrow as pa

        with self.open() as raw:
            stream = raw if self.compression is None else pa.CompressedInputStream(raw, self.compression)
            ended = False
            while not ended:
                parts, left = [], size
                while left > 0 and not ended:
                    with file_errors(self.name):
                        part = stream.read(left)
                    ended = not part
                    parts.append(part)
                    left -= len(part)
                chunk = parts[0] if len(parts) == 1 else b"".join(parts)
                if chunk:
                    yield chunk

    def head(self, size: int) -> tuple[bytes, float]:
        """Return the first `size` bytes of decompressed text, and the compression ratio (text bytes per file byte)."""
        if self.compression is None:
            return self.read(0, size), 1.0
        import pyarrow as pa

        with self.open() as raw, file_errors(self.name):
            stream = pa.CompressedInputStream(raw, self.compression)  # closes `raw` when it is collected
            text = stream.read(size)
            # The stream reads ahead in chunks: a short text would give an inaccurate ratio.
            length = len(text) + len(stream.read(15 * size))
            ratio = length / max(1, self.size if length < 16 * size else min(raw.tell(), self.size))
        return text, max(ratio, 1e-9)

    def check_unchanged(self) -> None:
        """Raise DataError if the file's size changed since it was opened."""
        with file_errors(self.name):
            if self.remote:
                info = self.filesystem.get_file_info(self.path)
                size = info.size if info.is_file else None
            else:
                size = os.stat(self.path).st_size
        if size != self.size:
            raise self._changed(size)

    def _changed(self, size: int | None) -> DataError:
        return DataError(
            f"{self.name} changed while it was read: it had {self.size} bytes, now it has {size}. Files must not "
            "change while a reader uses them"
        )


class _Handles:
    """LRU cache of open remote files. An evicted handle closes when its last read ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def get(self, source: Source) -> Any:
        with self._lock:
            file = self._open.get(source.number)
            if file is not None:
                self._open.move_to_end(source.number)
                return file
        file = source.open()
        with self._lock:
            self._open[source.number] = file
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return file


_handles = _Handles()


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Re-raise errors of the operating system and of Arrow as a DataError of one line that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:  # Arrow raises ValueErrors
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{name} cannot be read: {' '.join(cause.split())}") from None


def is_remote(path: str) -> bool:
    """Whether a path is read through a URL's file system: all schemes except file."""
    match = _URL.fullmatch(path)
    return match is not None and match[1].lower() != "file"


def local_path(path: str) -> str:
    """Return the path in the file system of a path or file URL, with the home folder for "~"."""
    match = _URL.fullmatch(path)
    return urllib.parse.unquote(match[2]) if match else os.path.expanduser(path)


def find_files(paths: Sequence[str | Source], *, empty: bool = False) -> list[Source]:
    """Resolve paths, folders, globs and URLs to files, in the given order; files of a folder or glob by name.

    empty   accept files of 0 bytes. Otherwise they raise `NoExamples`
    """
    if not paths:
        raise DataError("no input files: give at least one path, folder, glob or URL")
    sources: list[Source] = []
    for path in paths:
        if isinstance(path, Source):
            sources.append(path)
            continue
        match = _URL.fullmatch(path)
        if match is not None and is_remote(path):
            with file_errors(without_secrets(path)):
                sources += _find_remote(path, match[1], match[2])
        else:
            sources += _find_local(path, local_path(path))
    for source in sources:
        if source.size == 0 and not empty:
            raise NoExamples(f"{source.name} is empty: remove it from the data, or write examples to it")
    return sources


def dataset_files(dataset: Any) -> list[Source]:
    """Return the Parquet or Arrow files of a `pyarrow.dataset.Dataset`, with the values of their partitions."""
    from pyarrow import dataset as ds, fs

    sources = []
    with file_errors("the dataset"):  # a filtered dataset has no fragments
        fragments = list(dataset.get_fragments())
    for fragment in fragments:
        if not isinstance(getattr(fragment, "format", None), (ds.ParquetFileFormat, ds.IpcFileFormat)):
            raise DataError(
                "the dataset does not consist of Parquet or Arrow files: write it with write_dataset of pyarrow"
            )
        pairs = ds.get_partition_keys(fragment.partition_expression)
        names = [name for name in dataset.schema.names if name in pairs]
        partitions = {name: "" if pairs[name] is None else str(pairs[name]) for name in names}
        local = isinstance(fragment.filesystem, fs.LocalFileSystem)
        size = fragment.filesystem.get_file_info(fragment.path).size
        sources.append(Source(fragment.path, fragment.path, size, None if local else fragment.filesystem, partitions))
    if not sources:
        raise DataError("the dataset has no files")
    return sources


def without_secrets(url: str) -> str:
    """Remove user and query from a URL."""
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0])


def map_threads(action: Any, items: Sequence[Any]) -> list[Any]:
    """Return action(item) for all items, computed concurrently to overlap network latency."""
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(16, len(items)), "thermocline-open") as pool:
        return list(pool.map(action, items))


def _hidden(path: str) -> bool:
    return os.path.basename(path.rstrip("/")).startswith((".", "_"))


def _partitions(folders: Sequence[str]) -> dict[str, str]:
    """Return the columns and values of folders that are named like Hive's partitions, name=value."""
    pairs = [urllib.parse.unquote(folder).split("=", 1) for folder in folders if _PARTITION.fullmatch(folder)]
    return {name: "" if value == "__HIVE_DEFAULT_PARTITION__" else value for name, value in pairs}


# ---- local


def _find_local(name: str, path: str) -> list[Source]:
    if os.path.isdir(path):
        base, files = path, _files_below(path)
        if not files:
            raise NoFiles(f"{name} is a folder without files: give a file, a folder with files, a glob or a URL")
    elif os.path.exists(path):
        base, files = os.path.dirname(path), [path]
    elif _MAGIC.search(path):
        files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        base = path[: _MAGIC.search(path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        if not files:
            raise NoFiles(f"{name} matches no file")
    else:
        raise NoFiles(f"{name}: no such file{_nearest_folder(path)}")
    below = [os.path.relpath(file, base or ".").split(os.sep)[:-1] for file in files]
    return [
        Source(file, file, os.stat(file).st_size, partitions=_partitions(folders))
        for file, folders in zip(files, below, strict=True)
    ]


def _files_below(folder: str) -> list[str]:
    """Return the files of a folder by name, then those in its partitions (name=value), which may have partitions."""
    entries = [os.path.join(folder, entry) for entry in sorted(os.listdir(folder))]
    entries = [entry for entry in entries if not _hidden(entry)]
    files = [entry for entry in entries if os.path.isfile(entry)]
    for entry in entries:
        if os.path.isdir(entry) and _PARTITION.fullmatch(os.path.basename(entry)):
            files += _files_below(entry)
    return files


def _nearest_folder(path: str) -> str:
    """Describe the nearest existing parent folder and its content."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    shown = sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
    names = ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")
    return f" ({folder} has {names})" if shown else f" ({folder} is empty)"


# ---- remote


def _find_remote(url: str, scheme: str, rest: str) -> list[Source]:
    from pyarrow import fs

    rest, _, query = rest.partition("?")
    parts = rest.split("/")
    fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    filesystem, base = _filesystem(scheme, "/".join(parts[:fixed]), query)
    shown = without_secrets(url)
    # In some file systems the host is part of the path (a bucket), in others it is not (a name node).
    host = shown.partition("://")[2].partition("/")[0]
    prefix = f"{scheme}://" + ("" if base.strip("/").partition("/")[0] == host else f"{host}/")

    skip = len(base.rstrip("/")) + 1 if base else 0

    def source(info: Any) -> Source:
        partitions = _partitions(info.path[skip:].split("/")[:-1])
        return Source(prefix + info.path.lstrip("/"), info.path, int(info.size), filesystem, partitions)

    def listed(recursive: bool) -> list[Any]:
        infos = filesystem.get_file_info(fs.FileSelector(base, recursive=recursive, allow_not_found=True))
        return sorted((info for info in infos if info.is_file), key=lambda info: info.path)

    if fixed < len(parts):
        pattern = _pattern("/".join(parts[fixed:]))
        deep = fixed < len(parts) - 1 or "**" in parts[-1]
        files = [info for info in listed(deep) if pattern.fullmatch(info.path[skip:])]
        if not files:
            raise NoFiles(f"{shown} matches no file")
        return [source(info) for info in files]
    info = filesystem.get_file_info(base)
    if info.is_file:
        return [source(info)]
    entries = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True))
    # All folders below are listed only if there are partitions: a bucket may have many others.
    partitioned = any(not entry.is_file and _PARTITION.fullmatch(entry.base_name) for entry in entries)
    files = [entry for entry in listed(partitioned) if _is_below(entry.path[skip:].split("/"))]
    if not files:
        raise NoFiles(f"{shown}: no such file, and no folder with files")
    return [source(info) for info in files]


def _is_below(parts: Sequence[str]) -> bool:
    """Whether a path below a folder is a file of the folder, or of its partitions."""
    return not any(map(_hidden, parts)) and all(map(_PARTITION.fullmatch, parts[:-1]))


def _filesystem(scheme: str, path: str, query: str) -> tuple[Any, str]:
    """Return the Arrow file system of a URL without globs, and the path in it."""
    import pyarrow as pa
    from pyarrow import fs

    quoted = urllib.parse.quote(path, safe="/:@!$&'()*+,;=~%") if "%" not in path else path
    url = f"{scheme}://{quoted}" + (f"?{query}" if query else "")
    try:
        return fs.FileSystem.from_uri(url)  # type: ignore[no-any-return]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if "nrecognized filesystem type" not in str(error) and "built without" not in str(error).lower():
            raise
    import fsspec

    try:
        wrapped, inner = fsspec.core.url_to_fs(f"{scheme}://{path}")
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{scheme}://{path}: no file system for this protocol ({error}); supported are Arrow's (s3, gs, hdfs, "
            "abfs) and those of installed fsspec packages"
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(wrapped)), inner


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression over paths: * and [abc] match within one folder, ** across folders."""
    out, parts = "", text.split("/")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:.*/)?"
            continue
        for piece in re.split(r"(\*|\[[^\]]+\])", part):
            out += "[^/]*" if piece == "*" else piece.replace("[!", "[^", 1) if piece[:1] == "[" else re.escape(piece)
        out += "" if last else "/"
    return re.compile(out)
