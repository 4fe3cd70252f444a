"""Checks of a sample of the training data: columns that are read differently than their user expects.

A column of timestamps as categories has a key per second, and none of them occurs again; a column that differs in every
row identifies rows; a list of tags as one category has a key per combination. They train without an error, and predict
nothing or little.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from thermocline.config.data import Data
from thermocline.core import core
from thermocline.data.features import Column
from thermocline.errors import DataError
from thermocline.utils.text_format import plural

SAMPLE_ROWS = 5000
_UNIQUE_ROWS = 100
"""Rows from which a column whose values all differ gives a warning."""
_LIST_ROWS = 100
_LIST_SEPARATORS = "|;,"
_TIME = re.compile(r"\s*\d{4}[-/]\d{2}[-/]\d{2}([T ]\d{2}:\d{2}\S*( ?\S+)?)?\s*")

Values = Mapping[str, Sequence[str]]
"""Values of columns, without missing ones."""


def check_columns(values: Values, columns: Sequence[Column], data: Data, name: str) -> None:
    """Raise DataError for a column of times that has no bucket; warn of columns of lists, and that differ in every row.

    values   of the categorical columns without separator, in the first rows of the file `name`
    """
    for column in columns:
        texts = values.get(column.name, ())
        if column.role != "key" or column.name in data.separators or not texts:
            continue
        if column.name not in (data.categorical or ()) and all(map(_TIME.fullmatch, texts)):
            raise DataError(times_as_keys(name, column.name, f"has times such as {texts[0].strip()!r}"))
        if column.name not in (data.categorical or ()) and (separator := list_separator(texts)):
            example = next(text for text in texts if separator in text)
            warnings.warn(
                f"{name}: column {column.name!r} has values such as {example!r}, each of which is one category: if "
                f'they are lists, set data.separators = {{ {column.name} = "{separator}" }}; if not, add the column to '
                "data.categorical",
                stacklevel=2,
            )
        elif len(texts) >= _UNIQUE_ROWS and len(set(texts)) == len(texts):
            warnings.warn(
                f"{name}: column {column.name!r} has a different value in each of the first "
                f"{plural(len(texts), 'row')}: if it identifies rows, the model cannot learn from it and each row "
                f"needs memory; add it to data.ignore, or to data.numeric if it has numbers",
                stacklevel=2,
            )


def list_separator(texts: Sequence[str]) -> str | None:
    """Return what separates the elements of lists; None: the values are no lists.

    Lists combine few elements in many ways: there are more than twice as many values as elements.
    """
    values = set(texts) if len(texts) >= _LIST_ROWS else set()
    for separator in _LIST_SEPARATORS:
        lists = sum(separator in text for text in values)
        if 5 * lists > len(values) > 2 * len({element for text in values for element in text.split(separator)}):
            return separator
    return None


def times_as_keys(name: str, column: str, cause: str) -> str:
    """Build the error message for a column of times that would be used as categories."""
    return (
        f"{name}: column {column!r} {cause}, which do not occur again: set data.time_buckets = "
        f'{{ {column} = "hour_of_day" }}, or weekday, hour_of_week, day_of_month, month; or data.time, if it is the '
        f"time of the event; or add it to data.ignore"
    )


def sampled_values(text: bytes, columns: Sequence[Column], delimiter: str) -> Values:
    """Return the values of the categorical columns in the first rows of a CSV file, without malformed rows."""
    lines = io.StringIO(text.decode("utf-8", "replace"), newline="")
    rows: list[list[str]] = []
    try:
        for row in csv.reader(lines, delimiter=delimiter):
            if len(row) == len(columns):
                rows.append(row)
            if len(rows) == SAMPLE_ROWS:
                break
    except csv.Error:
        pass  # the parser reports it
    keys = [(i, column.name) for i, column in enumerate(columns) if column.role == "key"]
    return {name: [row[i] for row in rows if row[i]] for i, name in keys}


def has_line_breaks(samples: Sequence[bytes], columns: int, delimiter: str) -> bool:
    """Whether quoted values in these samples have line breaks: fewer records are then malformed than lines."""
    specs = [("ignore", str(i), False, 0.0, 1.0, "none") for i in range(columns)]
    options: dict[str, Any] = {"delimiter": delimiter, "quoting": True, "columns": specs}
    lines, records = (core.TextParser("table", line_breaks=breaks, **options) for breaks in (False, True))
    for text in samples:
        malformed = lines.parse(text, True)[-1] if b'"' in text else 0
        if malformed and records.parse(text, True)[-1] < malformed:
            return True
    return False
