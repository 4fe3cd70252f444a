"""Publishes the rows of a trained run for serving (`thermocline export`)."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from thermocline.embedding.admission import SHARED_KEY
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.initializers import Constant
from thermocline.embedding.table import Table
from thermocline.errors import NotFoundError
from thermocline.serving import Publication, ServedRows, TableRows, Version
from thermocline.serving.changes import Changes
from thermocline.serving.row_format import Precision
from thermocline.serving.snapshot import open_version
from thermocline.serving.version import RowFileFormat, TableFile
from thermocline.training.rank_rows import RankRows
from thermocline.training.row_source import RowSource


def publish_table(
    table: Table,
    path: str | os.PathLike[str],
    *,
    step: int,
    delta: bool = False,
    precision: Precision | None = None,
    event_time: float | None = None,
    served: ServedRows | None = None,
    formats: Iterable[RowFileFormat] | None = None,
    files: Mapping[str, bytes] | None = None,
    consumer: str | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> Version:
    """Publish the weights of the trained rows; call it between steps. Stable: arguments are only added, by keyword.

    delta      publish only rows that changed since the current version, and the keys that are gone. Reads the rows that
               the table's log has since then; if the log does not reach back, reads and compares all rows, and warns
    precision  stored form of a weight; default: that of the current version, or fp32 if there is none
    served     which rows are served; default: those of the rule of the current version for a delta, all for a base
    formats    also write rows as "parquet" or "safetensors"; default: as the current version
    files      further files of the version, by name, such as those of `scoring_files(run)`
    consumer   with `delta`: publish the changes since the version that this consumer has recorded, instead of the
               current one; a base, with a warning, if no delta can continue from there
    advance    called with the number of rows read since the last call

    Over ranks every rank calls it, between the same steps, with equal arguments; `path` and `files` matter on rank 0
    alone, which writes the version. It has the rows of all ranks, and every rank gets it. If it fails on one rank,
    all raise, and nothing becomes visible.
    """
    if consumer is not None and not delta:
        raise ValueError(f"consumer is {consumer!r}, but delta is False: a base is not for one consumer")
    settings = _Settings(table, path, step, delta, precision, event_time, served, formats, files or {}, consumer)
    if table.groups is None or table.groups.topology.world == 1:
        return _publish(settings, lambda: RowSource(table, advance))
    with table.groups.busy():
        ranks = RankRows(table, advance)
        if not ranks.is_rank0:
            return ranks.answer()
        try:
            version = _publish(settings, lambda: ranks)
        except Exception as error:
            ranks.end(None, error)
            raise
        ranks.end(version)
        return version


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    """Arguments of `publish_table`."""

    table: Table
    path: str | os.PathLike[str]
    step: int
    delta: bool
    precision: Precision | None
    event_time: float | None
    served: ServedRows | None
    formats: Iterable[RowFileFormat] | None
    files: Mapping[str, bytes]
    consumer: str | None


def _publish(given: _Settings, open_source: Callable[[], RowSource]) -> Version:
    table = given.table
    with Publication(given.path, precision=given.precision, formats=given.formats) as publication:
        current = _current(publication) if given.delta else None
        version = current if given.consumer is None else _position(publication, given.consumer)
        rule = ServedRows() if current is None else ServedRows.of(_table_of(current, table.name, publication))
        served = given.served or rule
        served.check(table.spec.statistics.names)
        source = open_source()
        watermark: dict[str, Any] = {"step": given.step, "event_time": given.event_time, "files": given.files}
        options: dict[str, Any] = {
            "name": table.name,
            "dim": table.dim,
            "seed": table.spec.seed,
            "table_id": table.spec.table_id,
            **_missing(table),
            "positions": source.positions,
            "served": served,
            "decays": None if served.min_score is None else source.decays,
        }
        if version is None:
            tables = [TableRows(rows=source.rows(served, options.get("shared_key")), **options)]
            made = publication.publish_base(tables, **watermark)
        else:
            changes = _changes(source, publication, version, table.name, served, options.get("shared_key"))
            tables = [TableRows(rows=changes, deleted=changes.deleted, **options)]
            made = publication.publish_delta(tables, previous=version.number, **watermark)
        source.keep_log()
        return made


def with_coefficients(served: ServedRows, expiry: Expiry | None) -> ServedRows:
    """Return the rule with the coefficients of the score that expiry has."""
    if served.min_score is None or expiry is None:
        return served
    return dataclasses.replace(served, nonclick_coeff=expiry.nonclick_coeff, click_coeff=expiry.click_coeff)


def _current(publication: Publication) -> Version:
    if publication.current is None:
        raise NotFoundError(f"{publication.path} has no version yet: publish a base first, without --delta")
    return publication.current


def _position(publication: Publication, consumer: str) -> Version | None:
    """Return the version that a delta for the consumer continues from; None, with a warning: publish a base."""
    position = publication.position(consumer)
    if not isinstance(position, str):
        return position
    warnings.warn(f"{publication.path}: a base is published: {position}", RuntimeWarning, stacklevel=3)
    return None


def _table_of(version: Version, name: str, publication: Publication) -> TableFile:
    for table in version.tables:
        if table.name == name:
            return table
    raise ValueError(f"{publication.path} has no table {name!r}: publish into another folder")


def _changes(
    source: RowSource, publication: Publication, version: Version, name: str, served: ServedRows, always: int | None
) -> Any:
    """Return the changes since a version, by the log or by comparing all rows."""
    before = _table_of(version, name, publication)
    logged: Any = "other rows are served than before"
    if served == ServedRows.of(before):
        logged = source.changes(before.positions, before.decays, served, always)
    if not isinstance(logged, str):
        return logged
    warnings.warn(
        f"{publication.path}: all rows are compared with version {version.number} to find the changes: {logged}",
        RuntimeWarning,
        stacklevel=3,
    )
    view = open_version(publication.path, version.number).views[name]
    return Changes(source.rows(served, always), view, before.precision)


def _missing(table: Table) -> dict[str, Any]:
    """Return what keys without a row have in evaluation, as arguments of `TableRows`."""
    otherwise = "initial" if table.admission is None else table.admission.otherwise
    if otherwise == "zero":
        return {"initial": (Constant.code, 0.0)}
    initial = table.spec.initial
    exact = table.spec.precision.kind == "fp32"  # below fp32 they are rounded at the start too
    return {
        "initial": (initial.code, initial.scale) if exact else None,
        "shared_key": SHARED_KEY if otherwise == "shared" else None,
    }
