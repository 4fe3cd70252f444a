"""Error classes, one per cause, and checks of arguments.

The C++ core raises the same classes (csrc/util/error.h, csrc/bind/module.cc).
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any


class ThermoclineError(Exception):
    """Base of all errors of this package; raised itself for misuse, such as use of a closed store."""


class BudgetError(ThermoclineError):
    """A byte budget is too small; the message names the budget and the bytes required."""


class DataError(ThermoclineError, ValueError):
    """A data file is missing or malformed; the message names the file, the line or column, and the cause."""


class StoreError(ThermoclineError):
    """Base of the errors of stores on disk."""


class CorruptionError(StoreError):
    """Bytes on disk differ from the bytes written; the message names file, page, cause and the command that repairs."""


class LockError(StoreError):
    """The store is already open for writing, in this process or another."""


class FormatError(StoreError):
    """The folder is not a store, its format is newer than this package, or its row size differs from the requested."""


class ReadOnlyError(StoreError):
    """The store, or its file system, is read-only."""


class NotFoundError(StoreError):
    """The store, file or epoch does not exist."""


class IoError(StoreError, OSError):
    """The operating system reported an error; `errno` holds its code."""


class DiskFullError(IoError):
    """The file system is full; committed data is intact."""


class RankError(ThermoclineError):
    """Another rank exited, timed out, called a different collective, or sent its error."""

    all_connected = False
    """Whether another rank sent its error, and all ranks can continue."""


class ConfigError(ThermoclineError, ValueError):
    """A config key, flag or path is invalid; the message names it, its value and the allowed values."""


class LabelError(ValueError):
    """A label is neither 0 nor 1."""


class NotRecordable(ThermoclineError):
    """A training step cannot be recorded as a CUDA graph. `tc.Trainer` then runs it without."""


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise ValueError naming a setting, its value and `rule`, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} is {value!r}: it must be {rule}")


def require_type(value: object, types: Any, name: str, rule: str) -> None:
    """Raise TypeError naming an argument, its value and `rule`, unless it is an instance of `types`.

    A bool is not accepted as an int.
    """
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise TypeError(f"{name} is {value!r}: it must be {rule}")


def whole_number(value: Any, name: str, rule: str = "a whole number") -> int:
    """Convert an integer of any type to int; raise TypeError naming the argument for a bool or a non-integer."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} is {value!r}: it must be {rule}")
