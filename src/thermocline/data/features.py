"""Columns to features: the role of each column (label, field, dense feature, ignored) and its standardization."""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from thermocline.arrays import Floats, Mask
from thermocline.config.data import CRITEO_CATEGORICAL, CRITEO_LABEL, CRITEO_NUMERIC, Data, Format, Numeric
from thermocline.config.messages import show_toml
from thermocline.errors import CorruptionError, DataError
from thermocline.utils.untrusted_files import MAX_TEXT_BYTES, read_limited

Role = Literal["label", "key", "dense", "number_key", "time", "time_key", "ignore"]
KEY_ROLES = ("key", "number_key", "time_key")
"""Roles of columns that are fields of keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a file and its role."""

    name: str
    role: Role


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """The features of the training data; files read for validation, test or prediction must have the same ones."""

    fields: tuple[str, ...]
    """Names of the fields, in order."""
    dense: tuple[str, ...] = ()
    """Names of the dense features, in order."""
    statistics: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Mean and standard deviation of each standardized numeric column."""
    format: str | None = dataclasses.field(default=None, compare=False)
    """Format of the files, which may be gone later; None: not known."""

    def to_json(self) -> dict[str, Any]:
        """Return what identifies the data."""
        return {
            "fields": list(self.fields),
            "dense": list(self.dense),
            "statistics": {name: list(pair) for name, pair in self.statistics.items()},
        }

    def saved(self) -> dict[str, Any]:
        """Return the content of the features.json of a run."""
        return {**self.to_json(), "format": self.format}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        pairs = {name: (float(mean), float(deviation)) for name, (mean, deviation) in value["statistics"].items()}
        return cls(tuple(value["fields"]), tuple(value["dense"]), pairs, value.get("format"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the features.json of a run. Raises `CorruptionError` if it is malformed."""
        try:
            features = cls.from_json(json.loads(read_limited(path, MAX_TEXT_BYTES)))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptionError(f"{path} is damaged: it has no features ({type(error).__name__}: {error})") from None
        if not all(isinstance(name, str) for name in (*features.fields, *features.dense)):
            raise CorruptionError(f"{path} is damaged: the name of a feature is not text")
        return features

    def require(self, fields: Sequence[str], dense: Sequence[str], name: str, ignored: Sequence[str] = ()) -> None:
        """Raise DataError unless the file `name`, with these fields and dense features, has the same features.

        ignored   the current data.ignore, which the error message extends
        """
        expected, actual = _kinds(self.fields, self.dense), _kinds(fields, dense)
        missing, extra = [c for c in expected if c not in actual], [c for c in actual if c not in expected]
        if len(missing) == len(expected):
            raise DataError(f"{name} has no column of the training data: it has {_some(extra)}, not {_some(missing)}")
        differences = []
        if missing:
            differences.append(f"it lacks {_some(missing)} (add them; values may be empty)")
        if extra:
            differences.append(f"it also has {_some(extra)} (set data.ignore to {show_toml([*ignored, *extra])})")
        if differences:
            raise DataError(f"{name} has different columns than the training data: {'; '.join(differences)}")
        for column, kind in expected.items():
            if actual[column] != kind:
                raise DataError(
                    f"{name}: column {column!r} is a {actual[column]}, but a {kind} in the training data: keep the "
                    "data.numeric, data.categorical and data.numeric_features of the training"
                )
        if list(expected) != list(actual):
            difference = _first_difference(list(expected), list(actual))
            raise DataError(f"{name} has the columns of the training data in a different order{difference}")


class FeatureCounts:
    """Base of readers: what their batches have, by features and settings."""

    data: Data
    features: Features

    @property
    def fields(self) -> int:
        """Number of fields of a batch; 1 if data.hashing combines them."""
        fields = len(self.features.fields)
        return fields if self.data.hashing is None else self.data.hashing.fields_of(fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        names = self.features.fields
        return names if self.fields == len(names) else ("all fields",)

    @property
    def dense(self) -> int:
        """Number of dense features."""
        return len(self.features.dense)


def _kinds(fields: Sequence[str], dense: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(fields, "field of keys") | dict.fromkeys(dense, "dense feature")


def _first_difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    for i in range(max(len(expected), len(actual))):
        left, right = (names[i] if i < len(names) else None for names in (expected, actual))
        if left != right:
            return f": column {i + 1} is {_or_missing(right)} instead of {_or_missing(left)}"
    return ""


def _or_missing(name: str | None) -> str:
    return "missing" if name is None else repr(name)


# ---- columns


def criteo_columns(labelled: bool) -> list[str]:
    """Return the column names of the Criteo format, whose files have no header."""
    return [*([CRITEO_LABEL] if labelled else []), *CRITEO_NUMERIC, *CRITEO_CATEGORICAL]


def header_of(line: bytes, delimiter: str, name: str) -> list[str]:
    """Parse the column names in the first line of a CSV file."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, line 1: the header is not UTF-8 ({error.reason})") from None
    try:
        names = next(csv.reader([text], delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{name}, line 1: the header is not valid CSV ({error})") from None
    repeated = next((column for i, column in enumerate(names) if column in names[:i]), None)
    if repeated is not None:
        raise DataError(f"{name}, line 1: column {repeated!r} occurs twice; column names must be unique")
    if not any(names):
        raise DataError(f"{name}, line 1: the header is empty; a CSV file begins with its column names")
    return names


def same_header(first: Sequence[str], other: Sequence[str], first_name: str, name: str) -> None:
    """Raise DataError unless both files have the same columns in the same order."""
    if list(first) != list(other):
        raise DataError(f"{name} has a different header than {first_name}{_first_difference(first, other)}")


def resolve(
    names: Sequence[str],
    data: Data,
    format: Format,
    name: str,
    labelled: bool = True,
    *,
    known: bool = False,
    carried: Sequence[str] = (),
) -> list[Column]:
    """Assign a role to each column `names` of the file `name`: label, time, ignored, numeric, categorical, in this
    priority.

    known    the features of the training data are known: `Features.require` checks the columns later
    carried  columns that are ignored unless they are features of the training data
    """
    numbers = data.numbers_of(format)
    label = CRITEO_LABEL if format == "criteo" else data.label
    numeric = data.numeric or (CRITEO_NUMERIC if format == "criteo" else ())
    lists = {"ignore": data.ignore, "numeric": numeric, "categorical": data.categorical or ()}
    times = {"time": () if data.time is None else (data.time,), "time_buckets": tuple(data.time_buckets)}
    _reject_duplicates({"label": (label,), **times, **lists})
    if labelled and label not in names:
        hint = "; prediction needs no label" if known else ""
        raise DataError(f"{name} has no label column {label!r}: set data.label to one of {_some(names)}{hint}")
    if labelled and data.time is not None and data.time not in names:
        raise DataError(f"{name} has no time column {data.time!r}: set data.time to one of {_some(names)}")
    matched = {option: _matching(patterns, names, option, name, known) for option, patterns in lists.items()}
    number_role: Role = "dense" if numbers.to == "dense" else "number_key"
    columns: list[Column] = []
    for column in names:
        role: Role = "ignore"
        if column == label:
            role = "label" if labelled else "ignore"
        elif column == data.time:
            role = "time"
        elif column in matched["ignore"] or column in carried:
            role = "ignore"
        elif column in matched["numeric"]:
            role = number_role
        elif column in data.time_buckets:
            role = "time_key"
        elif data.categorical is None or column in matched["categorical"]:
            if not column:
                raise DataError(
                    f"{name}: column {len(columns) + 1} has no name (it may be a row index); add '' to data.ignore, or "
                    "name it"
                )
            role = "key"
        columns.append(Column(column, role))
    _check_tables(columns, data, name, known)
    if not known and not any(column.role in KEY_ROLES for column in columns):
        raise DataError(
            f"{name} has no categorical column: set data.categorical to some of {_some(names)}, or "
            'data.numeric_features.to = "keys"'
        )
    return columns


def _check_tables(columns: Sequence[Column], data: Data, name: str, known: bool) -> None:
    """Raise unless the columns of data.separators and data.time_buckets exist, and the former are categorical."""
    roles = {column.name: column.role for column in columns}
    for option, named in (("separators", data.separators), ("time_buckets", data.time_buckets)):
        missing = next((column for column in named if column not in roles), None)
        if missing is not None and not known:
            raise DataError(f"data.{option} names {missing!r}, but {name} has no such column: it has {_some(roles)}")
    for column in data.separators:
        if roles.get(column, "key") != "key":
            raise DataError(
                f"data.separators names {column!r}, which is not categorical in {name}: remove it from there, or from "
                "data.label, data.time, data.ignore, data.numeric or data.time_buckets"
            )


def _reject_duplicates(lists: dict[str, Sequence[str]]) -> None:
    seen: dict[str, str] = {}
    for option, names in lists.items():
        for column in names:
            if column in seen:
                raise DataError(f"column {column!r} is in data.{seen[column]} and in data.{option}: remove it from one")
            seen[column] = option


def _matching(patterns: Sequence[str], names: Sequence[str], option: str, file: str, known: bool) -> set[str]:
    """Return the columns that match names or glob patterns; an exact name has priority over a pattern."""
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in names:
            matched.add(pattern)
            continue
        matches = (
            [name for name in names if fnmatch.fnmatchcase(name, pattern)] if re.search(r"[*?\[]", pattern) else []
        )
        if not matches and not known:
            raise DataError(f"data.{option} names {pattern!r}, but {file} has no such column: it has {_some(names)}")
        matched.update(matches)
    return matched


def _some(columns: Iterable[str]) -> str:
    names = list(columns)
    shown = ", ".join(repr(name) for name in names[:40])
    return shown if len(names) <= 40 else f"{shown} and {len(names) - 40} more"


# ---- numbers


def numeric_columns(columns: Iterable[Column]) -> list[str]:
    """Return the names of the numeric columns."""
    return [column.name for column in columns if column.role in ("dense", "number_key")]


def statistics(names: Sequence[str], rows: Sequence[tuple[Floats, Mask]]) -> dict[str, Any]:
    """Compute mean and standard deviation of each column over `rows`: [examples, columns] values and presence masks.

    Rounded to float32, so that the summation order of another machine does not change the features.
    """
    values = np.concatenate([value for value, _ in rows]) if rows else np.zeros((0, len(names)), np.float32)
    present = np.concatenate([mask for _, mask in rows]) if rows else np.zeros((0, len(names)), np.bool_)
    result = {}
    for i, name in enumerate(names):
        column = values[present[:, i], i].astype(np.float64)
        mean = float(np.float32(column.mean())) if len(column) else 0.0
        deviation = float(np.float32(column.std())) if len(column) else 0.0
        result[name] = (mean, deviation if deviation > 0 else 1.0)
    return result


def transform(name: str, numbers: Numeric, fitted: dict[str, tuple[float, float]]) -> tuple[bool, float, float, Any]:
    """Return the transform of a numeric column for the core: log, mean, inverse standard deviation, bucket."""
    mean, deviation = fitted.get(name, (0.0, 1.0))
    return numbers.log, mean, 1.0 / deviation, numbers.bucket
