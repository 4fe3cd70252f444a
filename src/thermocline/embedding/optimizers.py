"""Sparse optimizers: the update of a row, once per step. csrc/dram/kernels.h defines the arithmetic bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, get_args

from thermocline.errors import require

Lazy = Literal["touched", "catch_up"]


def _require(ok: bool, owner: object, field: str, rule: str) -> None:
    require(ok, f"{type(owner).__name__}.{field}", getattr(owner, field), rule)


def _require_nonnegative(owner: SGD | Adagrad | RowWiseAdagrad | _Moments, *fields: str) -> None:
    for field in ("lr", "weight_decay", *fields):
        value = getattr(owner, field)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(is_number and math.isfinite(value) and value >= 0, owner, field, "a finite number, not negative")
    _require(owner.lazy in get_args(Lazy), owner, "lazy", f"one of {', '.join(get_args(Lazy))}")
    steps = owner.catch_up_steps
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and 1 <= steps <= MOST_STEPS
    _require(is_count, owner, "catch_up_steps", f"a whole number from 1 to {MOST_STEPS:,}")


MOST_STEPS = 100_000
"""Largest `catch_up_steps`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Lazy:
    """Steps in which a row has no gradient."""

    lazy: Lazy = dataclasses.field(default="touched", repr=False)
    """touched: a step changes only rows that it has a gradient of. catch_up: as if every step updated every row, with
    L2 gradient and moments: a row replays the steps that it missed before it is read. It stores its last step, in four
    bytes more, and needs fp32."""
    catch_up_steps: int = dataclasses.field(default=1000, repr=False)
    """Most missed steps that a row replays: if it missed more, the last ones."""

    @property
    def catches_up(self) -> bool:
        """Whether rows replay missed steps."""
        return self.lazy == "catch_up"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SGD(_Lazy):
    """w -= lr * g. A row holds w only."""

    lr: float = 0.01
    """Learning rate; `Table.step(lr=...)` overrides it for one step."""
    weight_decay: float = 0.0
    """L2 regularization of the rows that a step updates (all, with lazy = "catch_up"): g += weight_decay * w."""

    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _require_nonnegative(self)

    def state_floats(self, dim: int) -> int:
        """Number of 4-byte words of optimizer state per row."""
        return int(self.catches_up)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(_Lazy):
    """s += g * g; w -= lr * g / (sqrt(s) + eps). A row holds w and s."""

    lr: float = 0.01
    """Learning rate; `Table.step(lr=...)` overrides it for one step."""
    eps: float = 1e-10
    """Added to the denominator, which is never 0 then."""
    initial_accumulator: float = 0.0
    """Initial value of s."""
    weight_decay: float = 0.0
    """L2 regularization of the rows that a step updates (all, with lazy = "catch_up"): g += weight_decay * w."""

    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _require_nonnegative(self, "eps", "initial_accumulator")

    def state_floats(self, dim: int) -> int:
        """Number of 4-byte words of optimizer state per row."""
        return dim + self.catches_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad(_Lazy):
    """s += mean(g * g); w -= lr / (sqrt(s) + eps) * g. A row holds w and one float s."""

    lr: float = 0.01
    """Learning rate; `Table.step(lr=...)` overrides it for one step."""
    eps: float = 1e-8
    """Added to the denominator, which is never 0 then."""
    initial_accumulator: float = 0.0
    """Initial value of s."""
    weight_decay: float = 0.0
    """L2 regularization of the rows that a step updates (all, with lazy = "catch_up"): g += weight_decay * w."""

    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require_nonnegative(self, "eps", "initial_accumulator")

    def state_floats(self, dim: int) -> int:
        """Number of 4-byte words of optimizer state per row."""
        return 1 + self.catches_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Moments(_Lazy):
    """Constants of Adam."""

    lr: float = 0.001
    """Learning rate; `Table.step(lr=...)` overrides it for one step."""
    beta1: float = 0.9
    """Decay rate of the first moment, below 1."""
    beta2: float = 0.999
    """Decay rate of the second moment, below 1."""
    eps: float = 1e-8
    """Added to the denominator, which is never 0 then."""
    weight_decay: float = 0.0
    """L2 regularization of the rows that a step updates (all, with lazy = "catch_up"): g += weight_decay * w."""

    def __post_init__(self) -> None:
        _require_nonnegative(self, "eps", "beta1", "beta2")
        _require(self.beta1 < 1, self, "beta1", "below 1")
        _require(self.beta2 < 1, self, "beta2", "below 1")

    def corrections(self, step: int) -> tuple[float, float]:
        """Return 1 - beta1^step and the square root of 1 - beta2^step."""
        return 1.0 - math.pow(self.beta1, step), math.sqrt(1.0 - math.pow(self.beta2, step))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adam(_Moments):
    """torch.optim.Adam on the rows that a step updates; bias correction uses the table's step. A row holds w, m, v."""

    code: ClassVar[int] = 3

    def state_floats(self, dim: int) -> int:
        """Number of 4-byte words of optimizer state per row."""
        return 2 * dim + self.catches_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialRowWiseAdam(_Moments):
    """Adam with one second moment per row, of mean(g * g). A row holds w, m and one float v."""

    code: ClassVar[int] = 4

    def state_floats(self, dim: int) -> int:
        """Number of 4-byte words of optimizer state per row."""
        return dim + 1 + self.catches_up


Optimizer = SGD | Adagrad | RowWiseAdagrad | Adam | PartialRowWiseAdam
NAMES = "SGD, Adagrad, RowWiseAdagrad, Adam or PartialRowWiseAdam"
"""Names of the optimizers, for messages."""


def initial_state(optimizer: Optimizer) -> float:
    """Return the initial value of every element of a row's optimizer state."""
    return float(getattr(optimizer, "initial_accumulator", 0.0))
