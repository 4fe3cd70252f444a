"""Atomic and durable file operations, directory locks, and failpoints for crash tests. Loads no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from thermocline.errors import ConfigError, DiskFullError, IoError, StoreError

_MAX_NAME = 200
"""Bytes of the file's name in the name of its temporary file: file systems allow 255 bytes."""


_FREE_SPACE = "free some space, or choose a path on another disk, and try again"


def atomic_write(path: Path, data: bytes, before_rename: Callable[[], None] = lambda: None) -> None:
    """Write a file atomically and durably: write to a temporary file, sync, rename, sync the folder.

    `before_rename` is called between the sync and the rename.
    """
    with _temporary_file(path) as (temporary, descriptor):
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
            failpoint("run.file_written")
            file.flush()
            os.fsync(descriptor)
        before_rename()
        failpoint("run.file_synced")
        os.replace(temporary, path)
        failpoint("run.file_renamed")
    sync_folder(path.parent)


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Re-raise errors of writing `path` as `DiskFullError` or `IoError`, with the path, the cause and an advice."""
    try:
        yield
    except (ConfigError, StoreError):
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raised: IoError = DiskFullError(f"{os.fspath(path)} cannot be written: the disk is full; {_FREE_SPACE}")
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            cause = os.strerror(error.errno)
            raised = IoError(f"{os.fspath(path)} cannot be written ({cause}): make it writable, or choose another path")
        else:
            raise
        raised.errno = error.errno
        raise raised from None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file to write to, and rename it to `path` if the block succeeds.

    Not synced: for large files that can be written again.
    """
    with _temporary_file(path) as (temporary, _):
        yield temporary
        os.replace(temporary, path)


@contextlib.contextmanager
def _temporary_file(path: Path) -> Iterator[tuple[Path, int]]:
    """Create `.NAME.<random>.tmp` beside `path` and yield its path and descriptor; remove it unless it was renamed.

    The name is unpredictable and the file is new (O_EXCL), so that no existing file or symlink is written to. The file
    is locked until the block ends. An unlocked temporary file of the same name is of a process that was killed; it is
    removed.
    """
    with disk_errors(path):
        _remove_stale(path)
        temporary, descriptor = _create(path)
        try:
            yield temporary, descriptor
        finally:
            try:
                temporary.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _create(path: Path) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, flags, 0o666)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another process took it for a stale file before it was locked


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MAX_NAME])}."


def _remove_stale(path: Path) -> None:
    """Remove temporary files for `path` that no process has locked."""
    name = re.compile(re.escape(_prefix(path)) + r"[0-9a-f]{16}\.tmp")
    for entry in os.scandir(path.parent):
        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):  # locked: in use; or removed by another process
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably: syncing a file does not sync the entries of its parent folders."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_writable(folder: Path, key: str) -> None:
    """Create the folder that the config key `key` names; raise `ConfigError` unless files can be created in it."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raised = DiskFullError(f"{key} is {str(folder)!r}: the disk is full; {_FREE_SPACE}")
            raised.errno = error.errno
            raise raised from None
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        cause = f"{error.filename} is a file" if is_file else error.strerror
        raise ConfigError(
            f"{key} is {str(folder)!r}: it must be a folder that can be created and written to ({cause}); make it "
            "writable, or choose another folder"
        ) from None


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Create train.run_dir and take an exclusive flock on it, released on process exit."""
    make_writable(folder, "train.run_dir")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise lock_error(folder, "train.run_dir") from None
        yield
    finally:
        os.close(fd)


def lock_error(folder: Path, key: str, process: str | None = None) -> ConfigError:
    """Build the error for a folder, named by the config key `key`, that another training process has locked."""
    owner = "another training" if process is None else f"another training (process {process})"
    return ConfigError(
        f"{owner} uses {folder}: wait until it ends, or end it with Ctrl-C, which saves; a new run needs another {key}"
    )


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable: files created, renamed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_folder(path: Path) -> None:
    """Remove a folder and its content atomically: rename it to `path.gone`, then delete. A crash leaves `path.gone`."""
    gone = path.with_name(path.name + ".gone")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    sync_folder(path.parent)
    failpoint("run.folder_gone")
    shutil.rmtree(gone)


# ---- crash tests

_kill_at, _, _count = os.environ.get("THERMOCLINE_KILL_AT", "").partition(":")
_left = int(_count) if _count.isdigit() else 1


def failpoint(point: str) -> None:
    """Kill the process at the count-th call with the point in THERMOCLINE_KILL_AT=point:count; the core does the same.

    Crash tests use it at the named points of a save.
    """
    global _left
    if point == _kill_at:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
