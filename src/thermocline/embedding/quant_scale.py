"""The scale of a table's integer codes as a trained parameter. csrc/dram/codec.h defines its gradient.

Each training step of the table multiplies the scale by 1 - rate * m / s: m is the decayed mean of the gradients, s that
of their absolute values. The rate decays as 1 / t, because the scale changes the value of every code at once and rows
that are not trained any more should keep their values.

All arithmetic is float64 and uses only operations that round identically on every device: Python floats and CUDA
tensors give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

UNIT = 2.0**-44
"""Value of 1 in the integer sum of a gradient."""
_BETA1, _BETA2 = 0.9, 0.99
_HALF_LIFE = 100.0
"""Training steps after which the rate has halved."""


@dataclasses.dataclass(frozen=True, slots=True)
class LearnedScale:
    """A learned scale and its optimizer state: Python floats, or float64 tensors of one element."""

    scale: Any
    """Factor of the codes; rounded to fp32 where it is used."""
    mean: Any = 0.0
    """Decayed mean of the gradients."""
    size: Any = 0.0
    """Decayed mean of their absolute values."""

    def after(self, gradient: Any, number: int, rate: float) -> LearnedScale:
        """Return the scale after the table's training step `number`."""
        mean = self.mean * _BETA1 + gradient * (1.0 - _BETA1)
        size = self.size * _BETA2 + abs(gradient) * (1.0 - _BETA2)
        ratio = (mean / (1.0 - _BETA1**number)) / (size / (1.0 - _BETA2**number) + 1e-300)
        ratio = min(max(ratio, -1.0), 1.0) if isinstance(ratio, float) else ratio.clamp(-1.0, 1.0)
        factor = 1.0 - ratio * (rate * (_HALF_LIFE / (_HALF_LIFE - 1.0 + number)))
        return LearnedScale(self.scale * factor, mean, size)
