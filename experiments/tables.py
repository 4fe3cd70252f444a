"""Tables and figures as files for machines: CSV and JSON, every figure marked as measured, predicted or the paper's."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.experiment import Figure, Table


def kind_of(table: Table, column: str) -> str:
    """ "measured", "predicted" or "paper"."""
    return "paper" if column in table.paper else "predicted" if column in table.predicted else "measured"


def heads(table: Table) -> list[str]:
    """The columns' names; those that are not measured say so."""
    marks = {"paper": " (the paper)", "predicted": " (predicted)", "measured": ""}
    return [column + marks[kind_of(table, column)] for column in table.columns]


def table_csv(table: Table) -> bytes:
    """One line of names, then the rows."""
    return _csv(heads(table), table.rows)


def figure_csv(figure: Figure) -> bytes:
    """Every point: series, kind, x, y."""
    rows = [
        (series.name, series.kind, x, y) for series in figure.series for x, y in zip(series.x, series.y, strict=True)
    ]
    return _csv(("series", "kind", figure.x, figure.y), rows)


def as_json(part: Table | Figure, about: Mapping[str, Any]) -> bytes:
    """Everything, with what it was made by (`about`)."""
    kinds = {"kinds": {c: kind_of(part, c) for c in part.columns}} if isinstance(part, Table) else {}
    return json.dumps({**dataclasses.asdict(part), **kinds, "about": about}, indent=1).encode() + b"\n"


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return out.getvalue().encode()
