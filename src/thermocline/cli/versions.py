"""Implementation of `thermocline versions`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thermocline.cli.serving import usage_errors
from thermocline.errors import ConfigError, CorruptionError, FormatError
from thermocline.serving import Publication, consumers
from thermocline.serving.version import Version, read_current, read_version, versions as version_folders
from thermocline.training.callbacks import Row
from thermocline.utils import atomic_file
from thermocline.utils.text_format import format_size, plural


def versions(folder: str, *, compact: bool, roll_back: int | None, retire: int | None) -> Row:
    """Change the versions of a publication as asked for, and list them."""
    if compact and roll_back is not None:
        raise ConfigError("--compact and --roll-back exclude each other: run the command twice")
    if retire is not None and retire < 1:
        raise ConfigError(f"--retire is {retire}: it must be at least 1, the number of bases that are kept")
    path = Path(folder)
    with usage_errors():
        current = read_current(path)
    if roll_back is not None and roll_back not in version_folders(path):
        known = ", ".join(map(str, sorted(version_folders(path))))
        raise ConfigError(f"--roll-back is {roll_back}: {folder} has the versions {known}")
    deleted: list[int] = []
    if compact or roll_back is not None or retire is not None:
        with atomic_file.disk_errors(folder), Publication(path) as publication:
            if compact:
                publication.compact()
            elif roll_back is not None:
                publication.roll_back(roll_back)
            if retire is not None:
                deleted = publication.retire(retire)
        current = read_current(path)
    positions = consumers(path)
    report: Row = {
        "current": current.number, "rolled_back": current.rolled_back, "consumers": positions, "deleted": deleted,
        "versions": [], "problems": [],
    }  # fmt: skip
    for _, found in sorted(version_folders(path).items()):
        try:
            version = read_version(found)
        except FileNotFoundError:  # deleted by a writer meanwhile
            continue
        except (CorruptionError, FormatError) as error:
            report["problems"].append(str(error))
        else:
            report["versions"].append(_row(version))
    return report


def _row(version: Version) -> Row:
    return {
        "version": version.number, "kind": version.kind, "previous": version.previous, "step": version.step,
        "event_time": version.event_time, "created": version.created,
        "rows": sum(table.rows for table in version.tables),
        "deleted": sum(table.deleted for table in version.tables),
        "bytes": sum(table.bytes for table in version.tables) + sum(file.bytes for file in version.files),
    }  # fmt: skip


def describe(report: Row) -> Iterator[str]:
    """Yield the lines of the list, oldest version first."""
    readers: dict[int, list[str]] = {}
    for name, number in report["consumers"].items():
        readers.setdefault(number, []).append(name)
    for row in report["versions"]:
        number = row["version"]
        kind = "base" if row["kind"] == "base" else f"delta since {row['previous']}"
        notes = ["current"] * (number == report["current"]) + readers.pop(number, [])
        yield (
            f"{number}: {kind}, step {row['step']}, {row['created']}, {plural(row['rows'], 'row')}, "
            f"{row['deleted']} deleted, {format_size(row['bytes'])}{' <- ' if notes else ''}{', '.join(notes)}"
        )
    for number, names in sorted(readers.items()):
        yield f"{number}: deleted or damaged <- {', '.join(names)}"
    if report["rolled_back"]:
        yield f"rolled back to version {report['current']}: the next version must be a base"
    if report["deleted"]:
        yield f"deleted: {plural(len(report['deleted']), 'version')}, up to {report['deleted'][-1]}"
    yield from report["problems"]
