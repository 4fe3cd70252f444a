"""Sparse optimizers: what happens to a row once per step. The arithmetic, bit for bit, is in csrc/dram/kernels.h."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from thermocline.errors import require


def _require(ok: bool, owner: object, field: str, rule: str) -> None:
    require(ok, f"{type(owner).__name__}.{field}", getattr(owner, field), rule)


def _check(owner: SGD | Adagrad | RowWiseAdagrad | Adam, *not_negative: str) -> None:
    for field in ("lr", "weight_decay", *not_negative):
        value = getattr(owner, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(number and math.isfinite(value) and value >= 0, owner, field, "a finite number, not negative")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """w -= lr * g. A row is its weights."""

    lr: float = 0.01
    """Learning rate; each step may be given another."""
    weight_decay: float = 0.0
    """L2 on the rows a step touches: g += weight_decay * w."""

    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check(self)

    def state_floats(self, dim: int) -> int:
        """Optimizer state per row, in floats."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """s += g * g; w -= lr * g / (sqrt(s) + eps). A row holds as many sums as weights."""

    lr: float = 0.01
    """Learning rate; each step may be given another."""
    eps: float = 1e-10
    """Keeps the division finite."""
    initial_accumulator: float = 0.0
    """Where the sums of squares begin."""
    weight_decay: float = 0.0
    """L2 on the rows a step touches: g += weight_decay * w."""

    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self, "eps", "initial_accumulator")

    def state_floats(self, dim: int) -> int:
        """Optimizer state per row, in floats."""
        return dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad:
    """s += mean(g * g); w -= lr / (sqrt(s) + eps) * g. One sum per row, so little memory."""

    lr: float = 0.01
    """Learning rate; each step may be given another."""
    eps: float = 1e-8
    """Keeps the division finite."""
    initial_accumulator: float = 0.0
    """Where the sum of mean squares begins."""
    weight_decay: float = 0.0
    """L2 on the rows a step touches: g += weight_decay * w."""

    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check(self, "eps", "initial_accumulator")

    def state_floats(self, dim: int) -> int:
        """Optimizer state per row, in floats."""
        return 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """torch.optim.Adam on the rows a step touches; bias correction by the table's steps. A row holds w, m, v."""

    lr: float = 0.001
    """Learning rate; each step may be given another."""
    beta1: float = 0.9
    """Decay of the first moment, below 1."""
    beta2: float = 0.999
    """Decay of the second moment, below 1."""
    eps: float = 1e-8
    """Keeps the division finite."""
    weight_decay: float = 0.0
    """L2 on the rows a step touches: g += weight_decay * w."""

    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _check(self, "eps", "beta1", "beta2")
        _require(self.beta1 < 1, self, "beta1", "below 1")
        _require(self.beta2 < 1, self, "beta2", "below 1")

    def state_floats(self, dim: int) -> int:
        """Optimizer state per row, in floats."""
        return 2 * dim


Optimizer = SGD | Adagrad | RowWiseAdagrad | Adam


def initial_state(optimizer: Optimizer) -> float:
    """The value every element of a row's optimizer state begins with."""
    return float(getattr(optimizer, "initial_accumulator", 0.0))
