"""Field types that the sections of a config share."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt
from pydantic import BeforeValidator, FiniteFloat, GetCoreSchemaHandler, PlainValidator, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from thermocline.utils.text_format import parse_duration, parse_size

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The end of the error "it must be ..." for an annotated type, with an optional condition on the value."""

    text: str
    is_valid: Callable[[Any], bool] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return schema if self.is_valid is None else core_schema.no_info_after_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        assert self.is_valid is not None
        if not self.is_valid(value):
            raise ValueError(self.text)
        return value


def native(value: Any) -> Any:
    """Convert NumPy scalars and `os.PathLike` objects to int, float and str; return other values unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    single = isinstance(value, (str, Mapping)) or not isinstance(value, Iterable)
    return (native(value),) if single else tuple(native(item) for item in value)


def _text_as_none(value: Any) -> Any:
    return None if isinstance(value, str) and value == "none" else value


class FrozenTable(dict[str, Any]):
    """A table of a config, which has a hash and cannot be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return FrozenTable, (dict(self),)

    def __deepcopy__(self, memo: Any) -> FrozenTable:
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a table of a config cannot be changed: make another one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


Maybe = Annotated[T | None, BeforeValidator(_text_as_none)]
"""An optional value. TOML has no null: a file contains "none"."""
Items = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A list of values. One value is accepted as a list of one."""
Count = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegative = Annotated[FiniteFloat, Ge(0)]
Positive = Annotated[float, Gt(0)]


def _check_size(value: Any) -> str | int:
    try:
        size = parse_size(value)
    except TypeError as error:
        raise ValueError(str(error)) from None  # pydantic collects ValueError, not TypeError
    return value if isinstance(value, str) else size


_SPACE = r"[ \t-\r]*"
_SIZE_PATTERN = rf"^{_SPACE}([0-9]+(\.[0-9]*)?|\.[0-9]+){_SPACE}([KMGTPkmgtp]([Ii]?[Bb])?|[Bb])?{_SPACE}$"
_SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_PATTERN}]
}
Size = Annotated[
    str | int,
    PlainValidator(_check_size),
    WithJsonSchema(_SIZE_SCHEMA),
    Rule(
        "a size: a number of bytes, or a number with one of B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB, such as "
        '"256MB" or "1.5GiB"'
    ),
]
"""A size in bytes, kept as written; see `parse_size`."""


def _check_lookahead(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is neither a number nor text")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{value} is negative")
    return value if value == "auto" or isinstance(value, int) else _check_size(value)


Lookahead = Annotated[
    str | int,
    PlainValidator(_check_lookahead),
    WithJsonSchema({"anyOf": [{"const": "auto"}, *_SIZE_SCHEMA["anyOf"]]}),
    Rule('"auto", a number of batches from 0, or a size such as "256MB"'),
]
"""A number is a count of batches; a text is "auto" or a size in bytes."""
PositiveSize = Annotated[Size, Rule('a size above 0 bytes, such as "25MB"', lambda size: parse_size(size) > 0)]


def _check_duration(value: Any) -> str | int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is neither a number nor text")
    parse_duration(value)
    return value


_DURATION_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": rf"^{_SPACE}([0-9]+(\.[0-9]*)?|\.[0-9]+){_SPACE}(ms|s|m|min|h|d)?{_SPACE}$"},
    ]
}
Duration = Annotated[
    str | int | float,
    PlainValidator(_check_duration),
    WithJsonSchema(_DURATION_SCHEMA),
    Rule('a duration above 0: a number of seconds, or a number with one of ms, s, m, h, d, such as "30s"'),
]
"""A duration, kept as written; see `parse_duration`."""
