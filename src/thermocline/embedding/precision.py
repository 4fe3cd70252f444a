"""Storage precision of weights. csrc/dram/codec.h defines the bytes and the arithmetic to the bit."""

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
    """Storage precision of weights, in every tier and in checkpoints. Optimizer state is always fp32.

    A lookup decodes rows; an update computes in fp32 and rounds the result. Stochastic rounding is a function of
    (seed, table, key, training step, element).
    """

    kind: Kind = dataclasses.field(default="fp32", kw_only=False)
    """A float format, or an integer code of that many bits, times a scale."""
    rounding: Rounding = "stochastic"
    """stochastic: up or down at random, so that the expected value is exact; nearest: loses updates smaller than half a
    scale. fp32 ignores it."""
    range: float | None = None
    """Integers: one scale for the table, 2 * range / (2**bits - 1); weights are clamped to [-range, range]. None: one
    scale per row, from its largest weight, stored in 4 bytes of the row.

    With a table scale a NaN weight is stored as 0, so check the loss in your own loop, as `Trainer` does. Rows with
    their own scale keep NaN."""
    scale_lr: float = 0.0
    """Integers with a range: learning rate of the table's scale, which starts at the scale of `range`: the largest
    relative change by one of the first training steps, such as 0.01 (0.03 overshoots). 0: the scale is constant."""

    def __post_init__(self) -> None:
        require(self.kind in get_args(Kind), "Precision.kind", self.kind, f"one of {', '.join(get_args(Kind))}")
        require(self.rounding in get_args(Rounding), "Precision.rounding", self.rounding, "stochastic or nearest")
        fine = self.range is None or (_is_number(self.range) and 0 < self.range < math.inf)
        require(fine, "Precision.range", self.range, "a finite number above 0, or None")
        fine = self.range is None or self.integer
        require(
            fine, "Precision.range", self.range, f"None: only integers, int2 to int16, have a range, not {self.kind}"
        )
        with np.errstate(over="ignore"):
            fine = self.range is None or 0 < self.scale < math.inf
        require(fine, "Precision.range", self.range, "such that its scale is a float32, neither 0 nor infinite")
        fine = _is_number(self.scale_lr) and 0 <= self.scale_lr <= 0.1
        require(fine, "Precision.scale_lr", self.scale_lr, "a number from 0 to 0.1")
        fine = self.scale_lr == 0 or self.range is not None
        rule = "0, or set range, such as range=1.0: a learned scale starts at the scale of its range"
        rule = rule if self.integer else f"0: only integers have a scale to learn, not {self.kind}"
        require(fine, "Precision.scale_lr", self.scale_lr, rule)

    @classmethod
    def of(cls, value: Precision | Kind) -> Precision:
        """Return `value` itself, or the precision of that kind."""
        return value if isinstance(value, Precision) else cls(kind=value)

    @property
    def integer(self) -> bool:
        """Whether weights are integer codes times a scale."""
        return self.kind.startswith("int")

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return int(self.kind[3 if self.integer else 2 :])

    @property
    def code(self) -> int:
        """Number of the kind in csrc/dram/row_layout.h."""
        return 3 if self.integer else ("fp32", "fp16", "bf16").index(self.kind)

    @property
    def stochastic(self) -> bool:
        """Whether storing a row needs random bits."""
        return self.kind != "fp32" and self.rounding == "stochastic"

    @property
    def row_scaled(self) -> bool:
        """Whether every row stores its own scale."""
        return self.integer and self.range is None

    @property
    def scale(self) -> float:
        """Initial scale of the table, rounded to fp32; 0 without a range."""
        return float(np.float32(2 * self.range / (2**self.bits - 1))) if self.range is not None else 0.0

    def weight_words(self, dim: int) -> int:
        """Return the 4-byte words of a row's weights."""
        return self.row_scaled + -(-self.bits * dim // 32)

    def row_bytes(self, dim: int, optimizer: Optimizer) -> int:
        """Return the bytes of a stored row: weights and optimizer state."""
        return 4 * (self.weight_words(dim) + optimizer.state_floats(dim))

    @property
    def layout(self) -> dict[str, Any]:
        """Storage format of rows as JSON: tables with different layouts cannot share rows."""
        return {"kind": "fp32"} if self.kind == "fp32" else dataclasses.asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


FP32 = Precision()


# ---- in the note of a store's commit


def append_precision(note: bytes, precision: Precision, learned: LearnedScale | None) -> bytes:
    """Append a line with the precision and the learned scale to the note of a commit; none for fp32."""
    if precision.kind == "fp32":
        return note
    line = {"precision": precision.layout, "learned": None if learned is None else dataclasses.astuple(learned)}
    return note + b"\n" + json.dumps(line).encode()


def current_layout(saved: dict[str, Any]) -> dict[str, Any]:
    """Convert a stored layout to the current field names: files before 0.1.0 call `scale_lr` "learn"."""
    return {"scale_lr" if name == "learn" else name: value for name, value in saved.items()}


def parse_precision(note: bytes) -> tuple[dict[str, Any], LearnedScale | None]:
    """Return the layout and the learned scale that `append_precision` added to a note."""
    line = note[note.rfind(b"\n") + 1 :]
    if not line.startswith(b'{"precision": '):
        return FP32.layout, None
    saved = json.loads(line)
    return current_layout(saved["precision"]), None if saved["learned"] is None else LearnedScale(*saved["learned"])
