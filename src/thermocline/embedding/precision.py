"""In how many bits rows keep their weights. The bytes and the arithmetic, bit for bit, are in csrc/dram/codec.h."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal, get_args

import numpy as np

from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.quant_scale import LearnedScale
from thermocline.errors import require

Kind = Literal["fp32", "fp16", "bf16", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "int16"]
Rounding = Literal["stochastic", "nearest"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a row's weights are stored, in every tier and in checkpoints; the optimizer's state is always fp32.

    A look-up decodes, a step updates in fp32 and rounds back. Rounding by chance is a function of (seed, table, key,
    step, element).
    """

    kind: Kind = dataclasses.field(default="fp32", kw_only=False)
    """fp32; fp16 and bf16; or integers of so many bits, times a step."""
    rounding: Rounding = "stochastic"
    """stochastic: up or down by chance, so that the mean is the value; nearest: loses updates smaller than half a step.
    fp32 needs neither."""
    range: float | None = None
    """Integers: the table's weights lie in [-range, range], in steps of 2 * range / (2**bits - 1), and what is outside
    is clamped; none: every row has a step of its own, by its largest weight, which takes 4 bytes of it. Codes of a
    table have no NaN: a weight that becomes one is stored as 0. A trainer ends at the loss that is not finite before;
    a loop of one's own should look at its loss, too. Rows with a step of their own keep NaN."""
    scale_lr: float = 0.0
    """Integers with a range: the table's step is a parameter, trained with the rows from the one of `range` on; the
    most that one of the first steps changes it by, relative, such as 0.01 (0.03 overshoots). 0: it stays."""

    def __post_init__(self) -> None:
        require(self.kind in get_args(Kind), "Precision.kind", self.kind, f"one of {', '.join(get_args(Kind))}")
        require(self.rounding in get_args(Rounding), "Precision.rounding", self.rounding, "stochastic or nearest")
        fine = self.range is None or (_is_number(self.range) and 0 < self.range < math.inf)
        require(fine, "Precision.range", self.range, "a finite number above 0, or none")
        fine = self.range is None or self.integer
        require(fine, "Precision.range", self.range, f"none: only integers, int2 to int16, have one, not {self.kind}")
        with np.errstate(over="ignore"):
            fine = self.range is None or 0 < self.scale < math.inf
        require(fine, "Precision.range", self.range, "so large that its step is a float32, neither 0 nor infinite")
        fine = _is_number(self.scale_lr) and 0 <= self.scale_lr <= 0.1
        require(fine, "Precision.scale_lr", self.scale_lr, "a number from 0 to 0.1")
        fine = self.scale_lr == 0 or self.range is not None
        rule = "0, or set range, such as range=1.0: a table's step is learned from that of its range on"
        rule = rule if self.integer else f"0: only integers have a step to learn, not {self.kind}"
        require(fine, "Precision.scale_lr", self.scale_lr, rule)

    @classmethod
    def of(cls, value: Precision | Kind) -> Precision:
        """The same, or one of that kind."""
        return value if isinstance(value, Precision) else cls(kind=value)

    @property
    def integer(self) -> bool:
        """Whether weights are codes times a step."""
        return self.kind.startswith("int")

    @property
    def bits(self) -> int:
        """Of one weight."""
        return int(self.kind[3 if self.integer else 2 :])

    @property
    def code(self) -> int:
        """Of the kind, in csrc/dram/row_layout.h."""
        return 3 if self.integer else ("fp32", "fp16", "bf16").index(self.kind)

    @property
    def stochastic(self) -> bool:
        """Whether storing a row needs chance."""
        return self.kind != "fp32" and self.rounding == "stochastic"

    @property
    def row_scaled(self) -> bool:
        """Whether every row has a step of its own."""
        return self.integer and self.range is None

    @property
    def scale(self) -> float:
        """What the table's codes are multiplied by, rounded to fp32; 0: there is no such number."""
        return float(np.float32(2 * self.range / (2**self.bits - 1))) if self.range is not None else 0.0

    def weight_words(self, dim: int) -> int:
        """Words of four bytes that a row's weights take."""
        return self.row_scaled + -(-self.bits * dim // 32)

    def row_bytes(self, dim: int, optimizer: Optimizer) -> int:
        """Bytes of a stored row, weights and state."""
        return 4 * (self.weight_words(dim) + optimizer.state_floats(dim))

    @property
    def layout(self) -> dict[str, Any]:
        """What rows depend on, as JSON: two tables that differ here cannot share rows."""
        return {"kind": "fp32"} if self.kind == "fp32" else dataclasses.asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


FP32 = Precision()


# ---- what a store's commit says of it


def note_with(note: bytes, precision: Precision, learned: LearnedScale | None) -> bytes:
    """The note of a commit of rows of this precision: one more line, but for fp32."""
    if precision.kind == "fp32":
        return note
    line = {"precision": precision.layout, "learned": None if learned is None else dataclasses.astuple(learned)}
    return note + b"\n" + json.dumps(line).encode()


def current_layout(saved: dict[str, Any]) -> dict[str, Any]:
    """A stored layout with today's names: files before 0.1.0 call `scale_lr` "learn"."""
    return {"scale_lr" if name == "learn" else name: value for name, value in saved.items()}


def noted(note: bytes) -> tuple[dict[str, Any], LearnedScale | None]:
    """The layout and the learned step that `note_with` wrote down."""
    line = note[note.rfind(b"\n") + 1 :]
    if not line.startswith(b'{"precision": '):
        return FP32.layout, None
    found = json.loads(line)
    return current_layout(found["precision"]), None if found["learned"] is None else LearnedScale(*found["learned"])
