"""Rows of keys seen for the first time, as functions of (seed, table, key). The integers are in csrc/dram/initial.h."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar


def _finite(owner: object, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{type(owner).__name__}.{field} is {value!r}: it must be a finite number")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Weights uniform inside (-scale, scale)."""

    scale: float = 0.01
    """Half the width."""

    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _finite(self, "scale", self.scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Weights normal around zero: sums of twelve uniforms, so never beyond six deviations."""

    scale: float = 0.01
    """Standard deviation."""

    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _finite(self, "scale", self.scale)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """All weights the same."""

    value: float = 0.0
    """Every weight."""

    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _finite(self, "value", self.value)

    @property
    def scale(self) -> float:
        """The value, under the name the other kinds use."""
        return self.value


Initial = Uniform | Normal | Constant
