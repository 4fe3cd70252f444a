"""Parsing and formatting of byte sizes (4096, "256MB", "1.5GiB") and durations ("30s"); plural forms for messages."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(size: str | SupportsIndex, name: str = "size") -> int:
    """Convert a size to bytes, rounded down. MB is 1000**2, MiB is 1024**2; `name` names the argument in errors."""
    if isinstance(size, str):
        match = _PATTERN.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(
                f"{name} is {size!r}: write a number of bytes or a number with one of B, KB, MB, GB, TB, PB, KiB, MiB, "
                f'GiB, TiB, PiB, such as "256MB" or "1.5GiB"'
            )
        return int(Fraction(match[1]) * unit)
    if isinstance(size, bool):
        raise TypeError(f"{name} is {size!r}: a size is a number of bytes or a string, not a bool")
    try:
        value = operator.index(size)
    except TypeError:
        raise TypeError(
            f'{name} is {size!r}: a size is a whole number of bytes or a string such as "256MB", '
            f"not a {type(size).__name__}"
        ) from None
    if value < 0:
        raise ValueError(f"{name} is {value}: a size cannot be negative")
    return value


_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(duration: str | float) -> float:
    """Convert a duration above 0 to seconds: a number of seconds, or a number with one of ms, s, m, min, h, d."""
    match = _PATTERN.fullmatch(duration if isinstance(duration, str) else f"{duration:f}")
    unit = _SECONDS.get(match[2]) if match else None
    if match is None or unit is None or isinstance(duration, bool) or not (seconds := float(match[1]) * unit) > 0:
        raise ValueError(f"{duration!r} is no duration")
    return seconds


def format_size(size: float) -> str:
    """Format bytes with three digits and a decimal unit: 1234567 -> "1.23 MB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"


def plural(count: int, singular: str, plural: str | None = None) -> str:
    """Format a count with its noun: "1 rank", "1,200 ranks". `plural` defaults to `singular` with an s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
