"""TOML files and `--set` flags -> validated sections; and sections -> TOML."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import TypeAdapter, ValidationError

from thermocline.config.messages import Problem, accepts_only_text, first_problem, show_toml, type_at
from thermocline.config.section import SETTINGS
from thermocline.errors import ConfigError

T = TypeVar("T")

_RENAMED_KEYS = {"precision.learn": "scale_lr"}
_RENAMED_VALUES = {"data.hashing.fields": {"together": "per_example", "apart": "per_field"}}
"""Old names, accepted in files of versions before 0.1.0: config.toml of a run contains every key."""


def load(cls: type[T], path: str | Path, sets: Sequence[str] = ()) -> T:
    """Read a `cls` from a TOML file, with overrides such as "train.lr=0.01". Raises `ConfigError`, one line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{path} cannot be read: {cause or error}") from None
    return parse(cls, text, sets, name=str(path))


def parse(cls: type[T], text: str, sets: Sequence[str] = (), *, name: str) -> T:
    """Read a `cls` from TOML text; errors name the file `name`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    return build(cls, values, sets, name=name)


def build(cls: type[T], values: Mapping[str, Any], sets: Sequence[str] = (), *, name: str) -> T:
    """Validate the values of a file, changed by overrides; errors name the file or the override."""
    overrides = [_Override.parse(text) for text in sets]
    changed = dict(values)
    for override in overrides:
        changed = _replaced(changed, override.path, override.value(cls), override)
    result = _validate(cls, changed)
    if not isinstance(result, Problem):
        return result
    raise ConfigError(_with_origin(result, cls, values, overrides, name))


def _with_origin(
    problem: Problem, cls: type[T], values: Mapping[str, Any], overrides: Sequence[_Override], name: str
) -> str:
    """Name the override that has the error, else the file; both if the file is valid without overrides."""
    keys = [".".join(override.path) for override in overrides]
    file_is_valid = bool(overrides) and not isinstance(_validate(cls, values), Problem)
    culprits = [key for key in keys if f"{problem.key}.".startswith(f"{key}.")]
    if file_is_valid and not culprits:
        culprits = [key for key in keys if key.startswith(f"{problem.key}.")]
    if culprits:
        key = culprits[-1]
        return f"--set {problem.text}" if problem.text.startswith(f"{key} is ") else f"--set {key}: {problem.text}"
    if file_is_valid:
        flags = " ".join(f"--set {override.text}" for override in overrides)
        return f"{name} with {flags}: {problem.text}"
    return f"{name}: {problem.text}"


def _validate(cls: type[T], values: Mapping[str, Any]) -> T | Problem:
    # JSON, because strict mode then accepts tables for sections and arrays for tuples. `| None`, because TypeAdapter
    # accepts no config for a dataclass, but plain dataclasses (Schedule, Hardware) need SETTINGS.
    kind: Any = cls | None
    adapter: TypeAdapter[T] = TypeAdapter(kind, config=SETTINGS)
    text = json.dumps(_renamed(values), default=lambda date: {"TOML date": str(date)})
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        return first_problem(error, cls, "", show_toml)


def _renamed(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Replace keys and values that files before 0.1.0 name differently."""
    renamed = {}
    for name, value in values.items():
        key = f"{where}{name}"
        if isinstance(value, Mapping):
            value = _renamed(value, f"{key}.")
        elif isinstance(value, str):
            value = _RENAMED_VALUES.get(key, {}).get(value, value)
        current = _RENAMED_KEYS.get(key, name)
        renamed[name if current in values else current] = value
    return renamed


# ---- --set


@dataclasses.dataclass(frozen=True, slots=True)
class _Override:
    """A `--set` flag, "section.key=value"."""

    text: str
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> _Override:
        name, equals, _ = text.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path) or len(path) < 2:
            raise ConfigError(f'--set is "{text}": write section.key=value, such as train.lr=0.01')
        return cls(text, path)

    def value(self, cls: type) -> Any:
        """Return the value as TOML if it is valid TOML, else as text; text also for a key that accepts only text."""
        text = self.text.partition("=")[2].strip()
        try:
            parsed = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            return text
        value = parsed["value"] if len(parsed) == 1 else text
        if isinstance(value, (str, list)) or not accepts_only_text(type_at(cls, self.path)):
            return value
        return text  # a folder may be called 2026


def _replaced(values: dict[str, Any], path: Sequence[str], value: Any, override: _Override) -> dict[str, Any]:
    """Copy `values` with one key changed."""
    name, *rest = path
    if not rest:
        return {**values, name: value}
    inner = values.get(name, {})
    if not isinstance(inner, dict):
        section = ".".join(override.path[: len(override.path) - len(rest)])
        raise ConfigError(f"--set {override.text}: {section} is a value, not a section")
    return {**values, name: _replaced(inner, rest, value, override)}


# ---- sections -> values


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def to_toml(config: Any) -> str:
    """Write every field as TOML, which `parse` reads to an equal object."""
    return tomli_w.dumps(_plain(config))


def _plain(config: Any) -> dict[str, Any]:
    """Return the fields as TOML values. None is left out, or "none" where it is not the default."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            plain[field.name] = _plain(value)
        elif value is not None:
            plain[field.name] = value
        elif field.default is not None:
            plain[field.name] = "none"
    return plain
