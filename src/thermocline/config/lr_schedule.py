"""Learning rates over time: one schedule multiplies the rates of all dense parameters and of all tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the learning rates are multiplied by, step by step: `schedule(step)`, where steps count from 0."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    """How it falls: not at all; by `factor` every `decay_steps`; along a cosine that ends after `decay_steps`."""
    warmup_steps: int = 0
    """It rises evenly over so many steps, and reaches 1 with the last of them. Falling begins afterwards."""
    decay_steps: int = 0
    """See `kind`; not for "constant"."""
    factor: float = 0.1
    """Of kind "step"."""
    floor: float = 0.0
    """It never falls below this."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "step", "cosine"):
            raise ValueError(f"Schedule.kind is {self.kind!r}: it is one of constant, step, cosine")
        if self.warmup_steps < 0:
            raise ValueError(f"Schedule.warmup_steps is {self.warmup_steps}: it cannot be negative")
        if self.kind != "constant" and self.decay_steps < 1:
            raise ValueError(f"Schedule.decay_steps is {self.decay_steps}: kind {self.kind!r} needs at least 1")
        for name in ("factor", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Schedule.{name} is {getattr(self, name)}: it must be from 0 to 1")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        step -= self.warmup_steps
        if self.kind == "step":
            return max(self.floor, self.factor ** (step // self.decay_steps))
        if self.kind == "cosine":
            done = min(1.0, step / self.decay_steps)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0
