"""Bounded reads of files that another user may have written, and names in them that must not leave their folder.

A run folder may come from elsewhere: nothing in it may make a command read a device, wait for a pipe, allocate memory
without a bound, or open a file outside of the folder. Loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from thermocline.errors import CorruptionError, FormatError

MAX_TEXT_BYTES = 1 << 28
"""Largest JSON or TOML file of a run: the manifest of a run over 65,536 ranks has about 20 MB."""


def is_file_name(name: str) -> bool:
    """Whether a text names an entry of a folder: one component, neither `.` nor `..`."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(os.fsencode(name)) <= 255


def confined_path(folder: Path, name: str, origin: str) -> Path:
    """Return the path of an entry of `folder`; `origin` is the file that names it, for errors.

    Raises `FormatError` if the name is not one of an entry, or if it is a symlink to a place outside of the folder.
    """
    path = folder / name
    if not is_file_name(name) or not path.resolve().is_relative_to(folder.resolve()):
        raise FormatError(
            f"{origin} names {name!r}, which is not in {folder}: a run may name only entries of its own folders. "
            "Another program changed it: do not use it"
        )
    return path


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Raises `CorruptionError` for a pipe or a device, FileNotFoundError if missing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK a pipe would block
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptionError(f"{path} is not a regular file: a run contains only regular files")
        yield file


def read_limited(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. Raises `CorruptionError` for a larger one, and as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptionError(f"{path} has {size} bytes: it must have at most {limit}")
        data = file.read(limit + 1)  # it may grow meanwhile
    if len(data) > limit:
        raise CorruptionError(f"{path} has more than {limit} bytes")
    return data


def decompress(data: bytes, size: int) -> bytes:
    """Decompress a zlib stream of exactly `size` bytes. Raises ValueError otherwise; allocates at most `size` + 1."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"not a zlib stream: {error}") from None
    if len(content) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"a zlib stream does not have the stated size of {size} bytes")
    return content
