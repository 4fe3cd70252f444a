"""Translate pydantic's `ValidationError` into one line that names the key, its value and the allowed values."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, ValidationError
from pydantic_core import PydanticCustomError

from thermocline.config.fields import Rule

_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The first error of a validation."""

    key: str
    """Dotted name of the key, or of the section that has the error."""
    text: str


def reject(key: str, value: object, rule: str) -> NoReturn:
    """Raise from a validator of several keys: `key` of the section is `value`, and it must be `rule`."""
    raise PydanticCustomError("cross_key", "{rule}", {"key": key, "value": value, "rule": rule})


def first_problem(error: ValidationError, cls: Any, where: str, show: Callable[[object], str]) -> Problem:
    """Translate the first error of a validation of `cls`; `where` is the dotted name of its section."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    if kind == "unexpected_keyword_argument":
        *parents, name = first["loc"]
        section, target = _locate(cls, parents, where)
        return Problem(_join(section, str(name)), _unknown(str(name), section, section_class(target)))
    key, target = _locate(cls, first["loc"], where)
    context = first.get("ctx", {})
    if kind == "cross_key":
        key = _join(key, context["key"])
        return Problem(key, f"{key} is {show(context['value'])}: it must be {context['rule']}")
    if kind == "value_error" and (plain := section_class(target)):
        return Problem(key, _with_key(str(context["error"]), plain, key))
    if kind.startswith("missing"):
        return Problem(key, f"{key} is missing: it must be {describe(target)}")
    rule = (kind in _BOUNDS and _limits(target)) or describe(target)
    return Problem(key.partition("[")[0], f"{key} is {show(value)}: it must be {rule}{_hint(value, target)}")


def show_toml(value: object) -> str:
    """Format a value as TOML in one line; None is "none"."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps("none" if value is None else value, ensure_ascii=False, default=str)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ' (did you mean "..."?)' for a misspelt name, or an empty text."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.55)
    return f' (did you mean "{near[0]}"?)' if near else ""


# ---- description of types


def describe(kind: Any) -> str:
    """Describe the values that an annotated type accepts."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rules = [item.text for item in kind.__metadata__ if isinstance(item, Rule)]
        if rules:
            return rules[-1]
        limits, name = _range(kind.__metadata__), describe(args[0])
        name = f"a finite number{name.removeprefix('a number')}" if _is_finite(kind) else name
        return f"{name}, {limits}" if limits else name
    if origin in (typing.Union, types.UnionType):
        words = [describe(member) for member in args if member is not type(None)]
        return ", or ".join([*words, *(["none"] if type(None) in args else [])])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin is tuple:
        return f"a list, each item {describe(args[0])}"
    if dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(field.name for field in dataclasses.fields(kind))}"
    return _NAMES[kind]


def _limits(kind: Any) -> str:
    """Describe the bounds of a number without its type; empty for finite numbers, which need their type."""
    if get_origin(kind) is Annotated and get_args(kind)[0] in (int, float) and not _is_finite(kind):
        return _range(kind.__metadata__)
    members = [_limits(member) for member in _members(kind) if member != kind]
    return f"{members[0]}, or none" if len(members) == 1 and members[0] else ""


def _is_finite(kind: Any) -> bool:
    return any(isinstance(item, AllowInfNan) and not item.allow_inf_nan for item in kind.__metadata__)


def _range(metadata: Iterable[Any]) -> str:
    low, high = "", ""
    closed = {}
    for item in metadata:
        if isinstance(item, Ge):
            low, closed["low"] = f"at least {_number(item.ge)}", _number(item.ge)
        elif isinstance(item, Gt):
            low = f"above {_number(item.gt)}"
        elif isinstance(item, Le):
            high, closed["high"] = f"at most {_number(item.le)}", _number(item.le)
        elif isinstance(item, Lt):
            high = f"below {_number(item.lt)}"
    return "{low} to {high}".format(**closed) if len(closed) == 2 else " and ".join(filter(None, (low, high)))


def _number(value: Any) -> str:
    """Format a bound; a large power of two as 2**n."""
    for offset, suffix in ((0, ""), (1, " - 1")):
        power = int(value) + offset
        if power >= 1 << 20 and power & (power - 1) == 0:
            return f"2**{power.bit_length() - 1}{suffix}"
    return str(value)


def _hint(value: Any, kind: Any) -> str:
    choices = [str(choice) for member in _members(kind) if get_origin(member) is Literal for choice in get_args(member)]
    return nearest(value, choices) if isinstance(value, str) else ""


# ---- location of errors


def _locate(cls: Any, loc: Iterable[int | str], where: str) -> tuple[str, Any]:
    """Return the dotted key at `loc` of a section and its annotated type."""
    key, target = where, cls
    for item in loc:
        section = section_class(target)
        if isinstance(item, int):
            kinds = next(get_args(member) for member in _members(target) if get_origin(member) is tuple)
            key, target = f"{key}[{item}]", kinds[0 if kinds[-1] is Ellipsis else item]
        elif section is not None and item in (hints := typing.get_type_hints(section, include_extras=True)):
            key, target = _join(key, item), hints[item]
        else:
            break  # pydantic adds the name of a union's member
    return key, target


def type_at(cls: Any, path: Iterable[str]) -> Any:
    """Return the annotated type of a dotted key, or None where there is no such key."""
    target = cls
    for name in path:
        section = section_class(target)
        target = None if section is None else typing.get_type_hints(section, include_extras=True).get(name)
    return target


def accepts_only_text(kind: Any) -> bool:
    """Whether every value of an annotated type is text, or a list of text."""
    items = [get_args(member)[0] if get_origin(member) is tuple else member for member in _members(kind)]
    plain = [get_args(item)[0] if get_origin(item) is Annotated else item for item in items]
    return bool(plain) and all(item is str for item in plain)


def _members(kind: Any) -> list[Any]:
    """Return the members of a union without None, or the type itself; outer annotations removed."""
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) in (typing.Union, types.UnionType, tuple):
        return _members(get_args(kind)[0])
    if get_origin(kind) in (typing.Union, types.UnionType):
        return [inner for member in get_args(kind) if member is not type(None) for inner in _members(member)]
    return [] if kind is None else [kind]


def section_class(kind: Any) -> Any:
    """Return the dataclass of an annotated type, or None."""
    return next((member for member in _members(kind) if dataclasses.is_dataclass(member)), None)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _unknown(name: str, section: str, cls: Any) -> str:
    names = [field.name for field in dataclasses.fields(cls)]
    owner = f"[{section}] has no key" if section else "there is no section"
    return f'{owner} "{name}"{nearest(name, names)}: it has {", ".join(names)}'


def _with_key(message: str, cls: Any, key: str) -> str:
    """Replace the class name in an error of a plain dataclass by the section's name."""
    for base in cls.__mro__:
        if message.startswith(f"{base.__name__}."):
            return _join(key, message.removeprefix(f"{base.__name__}."))
    return f"[{key}]: {message}" if key else message
