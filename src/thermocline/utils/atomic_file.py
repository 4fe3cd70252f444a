"""Files that are whole or not there, and manifests that check themselves. Loads no torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thermocline.errors import ConfigError, CorruptionError

Json = Any


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def atomic_write(path: Path, data: bytes) -> None:
    """The file appears whole and durable, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        failpoint("run.file_written")
        file.flush()
        os.fsync(file.fileno())
    failpoint("run.file_synced")
    os.replace(temporary, path)
    failpoint("run.file_renamed")
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name to write a large file under; it gets its own once it is whole. Not synced: what can be made again."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Makes it and what leads to it, durable: a file synced inside says nothing about the folder's own name."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_writable(folder: Path, key: str) -> None:
    """Makes the folder that `key` of a config names; raises `ConfigError` unless files can be made in it."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
        cause = f"{error.filename} is a file" if in_the_way else error.strerror
        raise ConfigError(
            f"{key} is {str(folder)!r}: it must be a folder that can be made and written to ({cause}); make this one "
            "writable, or choose another"
        ) from None


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Makes train.run_dir, and keeps others out who ask alike; the system lets go when the process ends, any way."""
    make_writable(folder, "train.run_dir")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise lock_error(folder, "train.run_dir") from None
        yield
    finally:
        os.close(fd)


def lock_error(folder: Path, key: str, process: str | None = None) -> ConfigError:
    """What to raise where another process trains in the folder that `key` of a config names."""
    who = "another training" if process is None else f"another training (process {process})"
    return ConfigError(
        f"{who} uses {folder}: wait until it ends, or end it with Ctrl-C, which saves; a new run needs another {key}"
    )


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_folder(path: Path) -> None:
    """With all that is in it, at once: cut short, what is left has another name, `path.gone`."""
    gone = path.with_name(path.name + ".gone")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    sync_folder(path.parent)
    failpoint("run.folder_gone")
    shutil.rmtree(gone)


def encode_manifest(manifest: dict[str, Json]) -> bytes:
    """JSON with a checksum of itself."""
    return _dump({**manifest, "checksum": digest(_dump(manifest))})


def decode_manifest(data: bytes, name: str) -> dict[str, Json]:
    """Raises `CorruptionError` unless these are the bytes `encode_manifest` made."""
    try:
        manifest = json.loads(data)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptionError(f"{name} is damaged: it is not a checkpoint's manifest ({error})") from None
    if digest(_dump(manifest)) != checksum:
        raise CorruptionError(f"{name} is damaged: its checksum does not fit its content")
    return manifest  # type: ignore[no-any-return]


def _dump(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def require_json(value: Any, what: str) -> None:
    """That JSON gives it back as it is: a tuple would become a list, the number 1 as a key would become text."""
    match value:
        case None | bool() | int() | float() | str():
            return
        case list():
            for i, item in enumerate(value):
                require_json(item, f"{what}[{i}]")
        case dict() if all(isinstance(key, str) for key in value):
            for key, item in value.items():
                require_json(item, f"{what}[{key!r}]")
        case _:
            raise TypeError(f"{what} is a {type(value).__name__}: it must be JSON (numbers, text, lists, dicts)")


# ---- crash tests

_kill_at, _, _count = os.environ.get("THERMOCLINE_KILL_AT", "").partition(":")
_left = int(_count) if _count.isdigit() else 1


def failpoint(point: str) -> None:
    """Named points of a save, where crash tests kill the process: THERMOCLINE_KILL_AT=point:count, as in the core."""
    global _left
    if point == _kill_at:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
