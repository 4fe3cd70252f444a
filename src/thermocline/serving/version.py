"""One published version: a folder with `manifest.json` and a snapshot file per table. docs/formats.md has the format.

PUBLICATION/
  CURRENT                  the version that consumers read
  v0000000001-base/        all rows
  v0000000002-delta/       rows changed and keys deleted since the version before it
  consumers/NAME.json      the version that a named consumer has
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from thermocline.errors import CorruptionError, FormatError, NotFoundError
from thermocline.serving.row_format import Precision, row_bytes
from thermocline.utils.untrusted_files import confined_path, read_limited

FORMAT = 1
CURRENT = "CURRENT"
MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 24
_FOLDER = re.compile(r"v(\d{10,19})-(base|delta)")

Kind = Literal["base", "delta"]
RowFileFormat = Literal["parquet", "safetensors"]
"""Formats that rows can have beside the native one (`row_files.py`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """The rows of one table in one version."""

    name: str
    file: str
    dim: int
    precision: Precision
    rows: int
    deleted: int
    """Keys deleted since the version before; 0 in a base."""
    bytes: int
    header: str
    """Checksum of the file's header, which has a random number of the file: files cannot be exchanged unnoticed."""
    seed: int
    table_id: int
    initial: tuple[int, float] | None
    """Code and scale of the initializer: the value of a key that was never trained. None: it cannot be computed."""
    positions: tuple[str, ...] = ()
    """Positions of the stores that the rows were read from (`SsdStore.position`). Empty: unknown."""
    min_norm: float = 0.0
    """Rows with a smaller L2 norm are not served."""
    max_rows: int | None = None
    """At most this number of rows is served, those with the largest norms."""
    min_frequency: int = 0
    min_score: float | None = None
    nonclick_coeff: float = 0.1
    click_coeff: float = 1.0
    """These and the two before: the rule of `ServedRows`."""
    decays: int | None = None
    """Decays of show and click of all rows before this version, if the rule depends on them."""
    shared_key: int | None = None
    """The key whose row stands for keys without a row. None: they have their initial row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraFile:
    """A file of a version beside its rows, such as the dense model."""

    name: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The content of a manifest."""

    publication: str
    """Random identity of the publication."""
    number: int
    kind: Kind
    previous: int | None
    """The version that a delta changes; None for a base."""
    step: int
    """Training steps that the rows contain."""
    event_time: float | None
    """Newest event time, in seconds since 1970, that the rows contain."""
    created: str
    tables: tuple[TableFile, ...]
    files: tuple[ExtraFile, ...] = ()
    formats: tuple[RowFileFormat, ...] = ()
    """Formats of the rows beside the native one."""

    @property
    def created_time(self) -> float:
        """Seconds since 1970."""
        return datetime.datetime.fromisoformat(self.created).timestamp()

    @property
    def folder(self) -> str:
        return f"v{self.number:010}-{self.kind}"

    def to_json(self) -> bytes:
        """Return the manifest with its own digest."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**content, "digest": _digest(content)}).encode() + b"\n"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions(publication: Path) -> dict[int, Path]:
    """Return the folders of all complete versions by number."""
    return {number: publication / name for number, name in version_names(os.listdir(publication)).items()}


def version_names(names: Iterable[str]) -> dict[int, str]:
    """Return those names that a complete version has, by number."""
    matches = (_FOLDER.fullmatch(name) for name in names)
    return {int(match[1]): match[0] for match in matches if match}


def version_folder(publication: Path, number: int) -> Path | None:
    """Return the folder of a complete version, without listing all of them; None: there is no such version."""
    for kind in get_args(Kind):
        folder = publication / f"v{number:010}-{kind}"
        if folder.is_dir():
            return folder
    return None


def read_version(folder: Path) -> Version:
    """Read and check a manifest and the sizes of its files. Raises `CorruptionError` or `FormatError`."""
    match = _FOLDER.fullmatch(folder.name)
    path = folder / MANIFEST
    content = _read_json(path)
    digest = content.pop("digest", None)
    if content.get("format") != FORMAT:
        raise FormatError(f"{path}: format {content.get('format')!r}; this version reads format {FORMAT}")
    if digest != _digest(content):
        raise CorruptionError(f"{path}: the digest differs from the content: publish or copy this version again")
    del content["format"]
    try:
        tables = tuple(
            TableFile(
                **{
                    **table,
                    "initial": None if table["initial"] is None else tuple(table["initial"]),
                    "positions": tuple(table.get("positions", ())),
                }
            )
            for table in content.pop("tables")
        )
        files = tuple(ExtraFile(**file) for file in content.pop("files", ()))
        formats = tuple(content.pop("formats", ()))
        version = Version(tables=tables, files=files, formats=formats, **content)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: {error}") from None
    if match is None or int(match[1]) != version.number or match[2] != version.kind:
        raise CorruptionError(f"{path}: it is the manifest of {version.folder}: publish or copy this version again")
    for table in version.tables:
        _check_file(confined_path(folder, table.file, str(path)), table)
    for file in version.files:
        confined_path(folder, file.name, str(path))
    return version


def read_file(folder: Path, file: ExtraFile) -> bytes:
    """Read a file of a version that is not rows. Raises `CorruptionError` if it is damaged or missing."""
    path = confined_path(folder, file.name, str(folder / MANIFEST))
    try:
        content = read_limited(path, file.bytes)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing: publish or copy this version again") from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise CorruptionError(f"{path} is not the file that its manifest names: publish or copy this version again")
    return content


def _check_file(path: Path, table: TableFile) -> None:
    row_bytes(table.precision, table.dim)  # raises if unknown
    try:
        size, header = path.stat().st_size, file_header(path)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing: publish or copy this version again") from None
    if size != table.bytes or header != table.header:
        raise CorruptionError(f"{path} is not the file that its manifest names: publish or copy this version again")


def file_header(path: Path) -> str:
    """Return the checksum of the header of a snapshot file."""
    with path.open("rb") as file:
        return file.read(8).hex()


@dataclasses.dataclass(frozen=True, slots=True)
class Current:
    """The content of CURRENT."""

    publication: str
    number: int
    rolled_back: bool
    """Whether it is older than the last published version: the next version must be a base."""

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}).encode() + b"\n"


def read_current(publication: Path) -> Current:
    """Read CURRENT. Raises `NotFoundError` if there is no publication or no version yet."""
    path = publication / CURRENT
    try:
        content = _read_json(path)
    except FileNotFoundError:
        if (publication / "checkpoints").is_dir():
            remedy = f"it is the folder of a run: `thermocline export {publication} --out FOLDER` publishes its rows"
        else:
            remedy = f"`thermocline export RUN --out {publication}` makes one"
        raise NotFoundError(f"{publication} has no published version: {remedy}") from None
    if content.pop("format", None) != FORMAT:
        raise FormatError(f"{path}: this version reads format {FORMAT}")
    try:
        return Current(**content)
    except TypeError as error:
        raise FormatError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_limited(path, _MAX_MANIFEST))
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptionError(f"{path}: no JSON ({error}): publish or copy this version again") from None
    if not isinstance(content, dict):
        raise CorruptionError(f"{path}: no JSON object: publish or copy this version again")
    return content
