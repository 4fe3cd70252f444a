"""Initial weights of a row, as a function of (seed, table, key). The integer arithmetic is in csrc/dram/initial.h."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar


def _require_finite(owner: object, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{type(owner).__name__}.{field} is {value!r}: it must be a finite number")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Uniform weights in (-scale, scale)."""

    scale: float = 0.01
    """Half the width of the interval."""

    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _require_finite(self, "scale", self.scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Approximately normal weights with mean 0: sums of twelve uniforms, bounded by six standard deviations."""

    scale: float = 0.01
    """Standard deviation."""

    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require_finite(self, "scale", self.scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Equal weights."""

    value: float = 0.0
    """Value of every weight."""

    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _require_finite(self, "value", self.value)

    @property
    def scale(self) -> float:
        """Alias of `value`: the attribute that all initializers share."""
        return self.value


Initial = Uniform | Normal | Constant
