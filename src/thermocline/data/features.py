"""Columns -> features: which column is the label, a field or a dense feature, and what standardises it."""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from thermocline.config.data import CRITEO_CATEGORICAL, CRITEO_LABEL, CRITEO_NUMERIC, Data, Format, Numeric
from thermocline.config.messages import show_toml
from thermocline.errors import DataError

Role = Literal["label", "key", "dense", "number_key", "ignore"]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of a file: what becomes of it."""

    name: str
    role: Role


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """What a model sees of the training data; readers of other data must give the same. JSON by `to_json`."""

    fields: tuple[str, ...]
    """Names of the fields, in order."""
    dense: tuple[str, ...] = ()
    """Names of the dense features, in order."""
    statistics: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Mean and deviation of numeric columns that are standardised."""

    def to_json(self) -> dict[str, Any]:
        return {
            "fields": list(self.fields),
            "dense": list(self.dense),
            "statistics": {name: list(pair) for name, pair in self.statistics.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        pairs = {name: (float(mean), float(deviation)) for name, (mean, deviation) in value["statistics"].items()}
        return cls(tuple(value["fields"]), tuple(value["dense"]), pairs)

    def require(self, fields: Sequence[str], dense: Sequence[str], name: str, ignored: Sequence[str] = ()) -> None:
        """Raises unless the file `name` gives these features. `ignored`: columns that are not read already."""
        mine, its = _kinds(self.fields, self.dense), _kinds(fields, dense)
        lacking, strange = [c for c in mine if c not in its], [c for c in its if c not in mine]
        if len(lacking) == len(mine):
            raise DataError(f"{name} has no column of the training data: it has {_some(strange)}, not {_some(lacking)}")
        wrong = []
        if lacking:
            wrong.append(f"it lacks {_some(lacking)} (add them; empty values will do)")
        if strange:
            wrong.append(f"it also has {_some(strange)} (set data.ignore to {show_toml([*ignored, *strange])})")
        if wrong:
            raise DataError(f"{name} has other columns than the training data: {'; '.join(wrong)}")
        for column, kind in mine.items():
            if its[column] != kind:
                raise DataError(
                    f"{name}: column {column!r} is a {its[column]}, but a {kind} in the training data: leave "
                    "data.numeric, data.categorical and data.numeric_features as they were"
                )
        if list(mine) != list(its):
            difference = _first_difference(list(mine), list(its))
            raise DataError(f"{name} has the training data's columns in another order{difference}")


def _kinds(fields: Sequence[str], dense: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(fields, "field of keys") | dict.fromkeys(dense, "dense feature")


def _first_difference(mine: Sequence[str], its: Sequence[str]) -> str:
    for i in range(max(len(mine), len(its))):
        left, right = (names[i] if i < len(names) else None for names in (mine, its))
        if left != right:
            return f": number {i + 1} is {_or_nothing(right)} instead of {_or_nothing(left)}"
    return ""


def _or_nothing(name: str | None) -> str:
    return "nothing" if name is None else repr(name)


# ---- columns


def criteo_columns(labelled: bool) -> list[str]:
    """The names of Criteo's columns, which its files do not hold."""
    return [*([CRITEO_LABEL] if labelled else []), *CRITEO_NUMERIC, *CRITEO_CATEGORICAL]


def header_of(line: bytes, delimiter: str, name: str) -> list[str]:
    """The column names in the first line of a CSV file."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, line 1: the header is not UTF-8 ({error.reason})") from None
    try:
        names = next(csv.reader([text], delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{name}, line 1: the header is not csv ({error})") from None
    repeated = next((column for i, column in enumerate(names) if column in names[:i]), None)
    if repeated is not None:
        raise DataError(f"{name}, line 1: column {repeated!r} is there twice; names must tell columns apart")
    if not any(names):
        raise DataError(f"{name}, line 1: the header is empty; a csv file begins with the names of its columns")
    return names


def same_header(first: Sequence[str], other: Sequence[str], first_name: str, name: str) -> None:
    """Raises unless both files have the same columns in the same order."""
    if list(first) != list(other):
        raise DataError(f"{name} has another header than {first_name}{_first_difference(first, other)}")


def resolve(
    names: Sequence[str], data: Data, format: Format, name: str, labelled: bool = True, *, known: bool = False
) -> list[Column]:
    """Roles for the columns `names` of file `name`. Label, ignored, numeric, categorical: the first that fits.

    known   the training data has said which columns there must be: `Features.require` compares with those
    """
    numbers = data.numbers_of(format)
    label = CRITEO_LABEL if format == "criteo" else data.label
    numeric = data.numeric or (CRITEO_NUMERIC if format == "criteo" else ())
    lists = {"ignore": data.ignore, "numeric": numeric, "categorical": data.categorical or ()}
    _reject_twice({"label": (label,), **lists})
    if labelled and label not in names:
        hint = "; predicting needs none" if known else ""
        raise DataError(f"{name} has no label column {label!r}: set data.label to one of {_some(names)}{hint}")
    matched = {what: _matching(patterns, names, what, name, known) for what, patterns in lists.items()}
    number_role: Role = "dense" if numbers.to == "dense" else "number_key"
    columns: list[Column] = []
    for column in names:
        role: Role = "ignore"
        if column == label:
            role = "label" if labelled else "ignore"
        elif column in matched["ignore"]:
            role = "ignore"
        elif column in matched["numeric"]:
            role = number_role
        elif data.categorical is None or column in matched["categorical"]:
            if not column:
                raise DataError(
                    f"{name}: column {len(columns) + 1} has no name, like a row number that was written along; add "
                    "'' to data.ignore, or name it"
                )
            role = "key"
        columns.append(Column(column, role))
    if not known and not any(column.role in ("key", "number_key") for column in columns):
        raise DataError(
            f"{name} has no column that becomes keys: set data.categorical to some of {_some(names)}, or "
            'data.numeric_features.to = "keys"'
        )
    return columns


def _reject_twice(lists: dict[str, Sequence[str]]) -> None:
    seen: dict[str, str] = {}
    for what, names in lists.items():
        for column in names:
            if column in seen:
                raise DataError(f"column {column!r} is in data.{seen[column]} and again in data.{what}: choose one")
            seen[column] = what


def _matching(patterns: Sequence[str], names: Sequence[str], what: str, file: str, known: bool) -> set[str]:
    """The columns that a list of names and patterns means; a column of that very name comes before a pattern."""
    found: set[str] = set()
    for pattern in patterns:
        if pattern in names:
            found.add(pattern)
            continue
        matches = (
            [name for name in names if fnmatch.fnmatchcase(name, pattern)] if re.search(r"[*?\[]", pattern) else []
        )
        if not matches and not known:
            raise DataError(f"data.{what} names {pattern!r}, but {file} has no such column: it has {_some(names)}")
        found.update(matches)
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:40])
    return shown if len(names) <= 40 else f"{shown} and {len(names) - 40} more"


# ---- numbers


def numeric_columns(columns: Iterable[Column]) -> list[str]:
    """Those that are treated as numbers."""
    return [column.name for column in columns if column.role in ("dense", "number_key")]


def statistics(names: Sequence[str], rows: Sequence[tuple[Floats, npt.NDArray[np.bool_]]]) -> dict[str, Any]:
    """Mean and deviation of each column over `rows`: pairs of [examples, columns] values and which are there.

    Rounded to float32, so that another machine's order of summing does not make another data set of it.
    """
    values = np.concatenate([value for value, _ in rows]) if rows else np.zeros((0, len(names)), np.float32)
    there = np.concatenate([present for _, present in rows]) if rows else np.zeros((0, len(names)), np.bool_)
    found = {}
    for i, name in enumerate(names):
        column = values[there[:, i], i].astype(np.float64)
        mean = float(np.float32(column.mean())) if len(column) else 0.0
        deviation = float(np.float32(column.std())) if len(column) else 0.0
        found[name] = (mean, deviation if deviation > 0 else 1.0)
    return found


def transform(name: str, numbers: Numeric, fitted: dict[str, tuple[float, float]]) -> tuple[bool, float, float, Any]:
    """What the core needs to know of a numeric column: log, mean, inverse deviation, bucket."""
    mean, deviation = fitted.get(name, (0.0, 1.0))
    return numbers.log, mean, 1.0 / deviation, numbers.bucket
