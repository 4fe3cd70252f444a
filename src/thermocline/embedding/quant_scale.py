"""A table's step as a parameter of the model: learned from the gradient that csrc/dram/codec.h defines.

Each of the table's steps changes it by a factor: 1 less the mean of the last gradients over their mean size, times a
rate, which falls as 1 / t: what codes mean changes everywhere at once, and rows that no step touches any more should
keep their values. In double, and only by operations that round alike everywhere: Python's numbers and a GPU's tensors
give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

UNIT = 2.0**-44
"""Of the integer that a gradient is summed as."""
_BETA1, _BETA2 = 0.9, 0.99
_SETTLES = 100.0
"""Steps after which the rate has halved."""


@dataclasses.dataclass(frozen=True, slots=True)
class LearnedScale:
    """Where a step stands: numbers, or float64 tensors of one element."""

    scale: Any
    """What codes are multiplied by, rounded to fp32."""
    mean: Any = 0.0
    size: Any = 0.0
    """Decayed means of the gradients so far, and of their absolute values."""

    def after(self, gradient: Any, number: int, rate: float) -> LearnedScale:
        """After the table's step `number`, whose gradient this is."""
        mean = self.mean * _BETA1 + gradient * (1.0 - _BETA1)
        size = self.size * _BETA2 + abs(gradient) * (1.0 - _BETA2)
        ratio = (mean / (1.0 - _BETA1**number)) / (size / (1.0 - _BETA2**number) + 1e-300)
        ratio = min(max(ratio, -1.0), 1.0) if isinstance(ratio, float) else ratio.clamp(-1.0, 1.0)
        factor = 1.0 - ratio * (rate * (_SETTLES / (_SETTLES - 1.0 + number)))
        return LearnedScale(self.scale * factor, mean, size)
