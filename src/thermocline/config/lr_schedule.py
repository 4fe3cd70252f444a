"""Learning-rate schedule: one multiplier for the learning rates of all dense parameters and all tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Multiplier of every learning rate: `schedule(step)`, where steps count from 0."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    """Decay: none; multiplied by `factor` every `decay_steps`; half a cosine over `decay_steps`, then `floor`."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 1 / `warmup_steps` to 1. Decay starts after them."""
    decay_steps: int = 0
    """Period of the decay, in steps; ignored if `kind` is "constant"."""
    factor: float = 0.1
    """Decay per period if `kind` is "step"."""
    floor: float = 0.0
    """Smallest value of the multiplier during decay."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "step", "cosine"):
            raise ValueError(f"Schedule.kind is {self.kind!r}: allowed are constant, step, cosine")
        if self.warmup_steps < 0:
            raise ValueError(f"Schedule.warmup_steps is {self.warmup_steps}: must be 0 or more")
        if self.kind != "constant" and self.decay_steps < 1:
            raise ValueError(f"Schedule.decay_steps is {self.decay_steps}: kind {self.kind!r} needs at least 1")
        for name in ("factor", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Schedule.{name} is {getattr(self, name)}: must be from 0 to 1")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        step -= self.warmup_steps
        if self.kind == "step":
            return max(self.floor, self.factor ** (step // self.decay_steps))
        if self.kind == "cosine":
            fraction = min(1.0, step / self.decay_steps)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * fraction))
        return 1.0
