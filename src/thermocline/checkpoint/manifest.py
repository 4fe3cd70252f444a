"""Checkpoint manifests: JSON with a checksum of the content, whose names stay inside the run's folder. Loads no torch.

A run may come from elsewhere, so a manifest is checked before use: its size, its structure, and that files and rank
folders are plain names. `untrusted_files.confined_path` refuses symlinks that leave the folder when one is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from thermocline.errors import CorruptionError, FormatError
from thermocline.utils.untrusted_files import MAX_TEXT_BYTES, is_file_name, read_limited

Json = Any
"""A value that JSON can hold: see `require_json`."""


# ---- structure


def _require_file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("it must be the name of a file or folder, without a path")
    return name


_Name = Annotated[str, AfterValidator(_require_file_name)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Strict):
    bytes: _Count
    sha256: str


class _Store(_Strict):
    folder: _Name
    epoch: _Count
    note: str


class _Rank(_Strict):
    stores: dict[_Name, _Store]


class _State(_Strict):
    file: _Name
    replica: _Count
    node: _Count


class _Optimizer(_Strict):
    kind: str


class _Layout(_Strict):
    dim: _Count
    optimizer: _Optimizer
    precision: dict[str, Any] = {}


class _Table(_Strict):
    layout: _Layout
    ssd: bool
    epoch: _Count
    note: str
    step_count: _Count
    lr: float


class _Manifest(_Strict):
    """Entries of all formats that name files or are used before the dense state is restored."""

    format: _Count
    run: str
    begin: bool
    step: _Count
    tag: str | None
    versions: dict[str, str]
    torch_threads: Annotated[int, Field(ge=1, le=1 << 16)]
    tables: dict[_Name, _Table]
    files: dict[_Name, _File]
    states: list[_State] = []
    ranks: list[_Rank] = Field(default_factory=list, min_length=1)

    @model_validator(mode="after")
    def _check_tables_of_ranks(self) -> Self:
        if any(rank.stores.keys() != self.tables.keys() for rank in self.ranks):
            raise ValueError("every rank must have a store of every table")
        if any(state.file not in self.files or state.replica >= len(self.states) for state in self.states):
            raise ValueError("the state of every rank must name a file and a rank of the manifest")
        if self.states and self.ranks and len(self.states) != len(self.ranks):
            raise ValueError("every rank must have a state")
        return self


def _check_structure(manifest: dict[str, Json], name: str) -> None:
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "ranks"
        raise FormatError(
            f"{name} is not a manifest that this version reads (format {manifest.get('format')!r}): {where}: "
            f"{first['msg']}. Another version or another program wrote it"
        ) from None


@contextlib.contextmanager
def format_errors(name: str) -> Iterator[None]:
    """Re-raise errors of code that reads a malformed state as `FormatError`; `name` is the path of its manifest."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(
            f"{name} has a state that this version cannot read ({type(error).__name__}: {error}). Another version or "
            "another program wrote it"
        ) from error


# ---- bytes


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode_manifest(manifest: dict[str, Json]) -> bytes:
    """Serialize a manifest to JSON, with a checksum of its content under "checksum"."""
    return _dump({**manifest, "checksum": sha256_hex(_dump(manifest))})


def read_manifest(path: Path) -> dict[str, Json]:
    """Read and verify a manifest file. Raises FileNotFoundError, and the errors of `decode_manifest`."""
    return decode_manifest(read_limited(path, MAX_TEXT_BYTES), str(path))


def decode_manifest(data: bytes, name: str) -> dict[str, Json]:
    """Parse and verify a manifest; `name` is its path, for errors.

    Raises `CorruptionError` unless `data` has the checksum that `encode_manifest` wrote, `FormatError` if it has
    another structure.
    """
    try:
        manifest = json.loads(data)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{name} is damaged: it is not a checkpoint's manifest ({error})") from None
    if sha256_hex(_dump(manifest)) != checksum:
        raise CorruptionError(f"{name} is damaged: its checksum does not match its content")
    _check_structure(manifest, name)
    return manifest  # type: ignore[no-any-return]


def run_of_note(note: str) -> str | None:
    """Return the id of the run that made a commit with this note; None for a commit of another program."""
    try:
        run = json.loads(note.partition("\n")[0])["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return run if isinstance(run, str) else None


def _dump(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def require_json(value: Any, name: str) -> None:
    """Raise TypeError unless JSON preserves `value` exactly; `name` is its name in the error.

    Rejects values that JSON would change silently: a tuple becomes a list, an integer key becomes a string.
    """
    match value:
        case None | bool() | int() | float() | str():
            return
        case list():
            for i, item in enumerate(value):
                require_json(item, f"{name}[{i}]")
        case dict() if all(isinstance(key, str) for key in value):
            for key, item in value.items():
                require_json(item, f"{name}[{key!r}]")
        case _:
            raise TypeError(
                f"{name} is a {type(value).__name__}: it must be JSON (None, bool, number, string, list, or dict with "
                "string keys)"
            )
