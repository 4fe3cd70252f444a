"""Plain values, as TOML and flags have them -> frozen dataclasses, checked by their type hints; and back.

Understands bool, int, float, str, Literal, X | Y, X | None, tuples, sizes and dataclasses within dataclasses. What does
not fit raises `ConfigError`: one line that names the key, what it is and what it may be.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from thermocline.errors import ConfigError
from thermocline.utils.text_format import Size, parse_size

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A value from the command line: TOML where it is TOML, else text; text also where only text fits."""

    text: str

    @property
    def plain(self) -> Any:
        try:
            parsed = tomllib.loads(f"value = {self.text}")
        except tomllib.TOMLDecodeError:
            return self.text
        return parsed["value"] if len(parsed) == 1 else self.text


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """`values` as a `cls`. `where` is the dotted name of the section, for errors."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(_source(value) + _unknown(name, list(fields), where))
    made = {name: convert(value, hints[name], _join(where, name)) for name, value in values.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in made:
            if not dataclasses.is_dataclass(hints[name]):
                raise ConfigError(f"{_join(where, name)} is missing: it must be {describe(hints[name])}")
            made[name] = build(hints[name], {}, _join(where, name))
    try:
        return cls(**made)
    except ValueError as error:
        raise ConfigError(_renamed(str(error), cls, where)) from None


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as the type `kind`."""
    if isinstance(value, Flag):
        return _convert_flag(value, kind, where)
    origin, args = get_origin(kind), get_args(kind)
    if kind == Size:
        return _size(value, where)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, kind, where)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
    elif dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            return build(kind, value, where)  # type: ignore[arg-type]
    elif origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if args[-1] is Ellipsis:  # one value is a list of one
            return tuple(convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(items))
        if len(items) == len(args):
            return tuple(convert(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(items, args, strict=True)))
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:
        return value
    raise ConfigError(f"{where} is {_show(value)}: it must be {describe(kind)}{_hint(value, kind)}")


def _convert_flag(flag: Flag, kind: Any, where: str) -> Any:
    plain = flag.plain
    try:
        return convert(plain, kind, where)
    except ConfigError as error:
        if not isinstance(plain, str):  # a folder may be called 2026
            try:
                return convert(flag.text, kind, where)
            except ConfigError:
                pass
        raise ConfigError(f"--set {error}") from None


def _convert_union(value: Any, kind: Any, where: str) -> Any:
    kinds = list(get_args(kind))
    if type(None) in kinds:
        kinds.remove(type(None))
        if value is None or (value == "none" and not any("none" in get_args(k) for k in kinds)):
            return None  # TOML has no null
    if isinstance(value, Mapping):  # an error inside a section is more telling than one about it
        kinds = [k for k in kinds if dataclasses.is_dataclass(k)] or kinds
    if len(kinds) == 1:
        return convert(value, kinds[0], where)
    for k in kinds:
        try:
            return convert(value, k, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} is {_show(value)}: it must be {describe(kind)}{_hint(value, kind)}")


def _size(value: Any, where: str) -> str | int:
    try:
        parse_size(value, where)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return value  # type: ignore[no-any-return]


# ---- words


def describe(kind: Any) -> str:
    """What a value of this type is, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if kind == Size:
        return 'a size such as "64MB"'
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(k) for k in args if k is not type(None)))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each of it {describe(args[0])}"
        return "a list of " + ", ".join(describe(k) for k in args)
    if dataclasses.is_dataclass(kind):
        return f"a section of keys: {', '.join(field.name for field in dataclasses.fields(kind))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _source(value: Any) -> str:
    """Nested values of one flag are flags."""
    while isinstance(value, Mapping) and value:
        value = next(iter(value.values()))
    return "--set " if isinstance(value, Flag) else ""


def _show(value: Any) -> str:
    def plain(inner: object) -> str:
        return inner.text if isinstance(inner, Flag) else str(inner)

    return json.dumps(value, ensure_ascii=False, default=plain)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a misspelt name: text to put behind an error, or none."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.55)
    return f' (did you mean "{near[0]}"?)' if near else ""


def _hint(value: Any, kind: Any) -> str:
    if not isinstance(value, str):
        return ""
    kinds = get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    choices = [str(choice) for k in kinds if get_origin(k) is Literal for choice in get_args(k)]
    return nearest(value, choices)


def _unknown(name: str, names: list[str], where: str) -> str:
    place = f"[{where}] has no key" if where else "there is no section"
    return f'{place} "{name}"{nearest(name, names)}: it has {", ".join(names)}'


def _renamed(message: str, cls: type, where: str) -> str:
    """Messages of the dataclasses' own checks may name the class; a file has sections."""
    if message.startswith(f"{where}."):
        return message
    for base in cls.__mro__:
        if message.startswith(f"{base.__name__}."):
            return f"{where}.{message.removeprefix(f'{base.__name__}.')}"
    return f"[{where}]: {message}" if where else message


# ---- back


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def to_toml(config: Any) -> str:
    """Every field as TOML; `build` makes the same of it. None is left out, or "none" where it is not the default."""
    sections: dict[str, list[str]] = {}
    _collect(config, "", sections)
    blocks = []
    for name, lines in sections.items():
        if lines:
            blocks.append("\n".join([f"[{name}]", *lines] if name else lines) + "\n")
    return "\n".join(blocks)


def _collect(config: Any, name: str, sections: dict[str, list[str]]) -> None:
    lines = sections.setdefault(name, [])
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _collect(value, _join(name, field.name), sections)
        elif value is not None:
            lines.append(f"{field.name} = {toml_value(value)}")
        elif field.default is not None:
            lines.append(f'{field.name} = "none"')


def toml_value(value: Any) -> str:
    """One value as TOML."""
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escape(c)) for c in value) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"{value!r} is a {type(value).__name__}: TOML holds text, numbers, true, false and lists")


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"
