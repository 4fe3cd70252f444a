"""What can go wrong, one class per cause. The C++ core raises these (csrc/util/error.h, csrc/bind/module.cc)."""

from __future__ import annotations

import contextlib
import operator
from typing import Any


class ThermoclineError(Exception):
    """Base of all errors of this package; also raised itself for misuse, such as a closed store."""


class BudgetError(ThermoclineError):
    """A byte budget cannot hold what was asked for; names the budget and the need."""


class DataError(ThermoclineError, ValueError):
    """Files of examples that are missing or are not what was asked for; names file, line or column, and the cause."""


class StoreError(ThermoclineError):
    """Base of what a store on disk can meet."""


class CorruptionError(StoreError):
    """Bytes on disk are not what was written; names file, page and cause. The rest stays readable."""


class LockError(StoreError):
    """The store is already open for writing, here or in another process."""


class FormatError(StoreError):
    """Not a store's folder, a format newer than this package, or another row size than the one asked for."""


class ReadOnlyError(StoreError):
    """The store, or the file system under it, takes no writes."""


class NotFoundError(StoreError):
    """There is no such store, file or epoch."""


class IoError(StoreError, OSError):
    """The operating system refused; `errno` says why."""


class DiskFullError(IoError):
    """The file system is full; what was committed is safe."""


class RankError(ThermoclineError):
    """Another rank is gone, does not answer in time, or is doing something else than this one."""


class ConfigError(ThermoclineError, ValueError):
    """A config, or a flag, has a key, a type, a value or a path that is not allowed; names it and what is."""


def require(fine: bool, name: str, value: object, rule: str) -> None:
    """Raises ValueError unless a setting is as it must be: names it, its value and the rule."""
    if not fine:
        raise ValueError(f"{name} is {value!r}: it must be {rule}")


def require_type(value: object, kind: Any, name: str, rule: str) -> None:
    """Raises TypeError unless an argument is of this kind, or of one of them: names it, its value and the rule."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}: it must be {rule}")


def whole_number(value: Any, name: str, rule: str = "a whole number") -> int:
    """As an int; raises TypeError for anything else: names it, its value and the rule."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} is {value!r}: it must be {rule}")
