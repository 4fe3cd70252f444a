"""What a dense network does per example and per step: counted while it runs on two small batches; and its time here.

What an operation costs depends on its shape (a narrow layer, a wide one, dropout's random numbers), so the network
itself is run; `reference_seconds` says how fast the machine is on which that was done.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_SIZES = (16, 32)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Of forward and backward together."""

    multiply_adds: float
    """Of matrix products, per example."""
    floats: float
    """Written by all other operations, per example."""
    step_floats: float
    """Written by them per step, whatever its size: gradients of parameters."""


def work_of(network: torch.nn.Module, inputs: Callable[[int], torch.Tensor]) -> Work:
    """Of a network; `inputs(examples)` makes some."""
    small, large = (_count(network, inputs(size)) for size in _SIZES)
    apart = _SIZES[1] - _SIZES[0]
    each = (large[1] - small[1]) / apart
    return Work((large[0] - small[0]) / apart, each, max(0.0, small[1] - _SIZES[0] * each))


def _count(network: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    flops, written = FlopCounterMode(display=False), _Written()
    network.zero_grad()
    inputs.requires_grad_()
    with flops, written:
        network(inputs).sum().backward()
    return flops.get_total_flops() / 2, written.floats


def reference_seconds(rounds: int = 5) -> float:
    """Processor time of a network of common shape, both ways: three hidden layers of 400, 4,096 examples."""
    hidden = [torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.ReLU()) for _ in range(3)]
    network, inputs = torch.nn.Sequential(*hidden, torch.nn.Linear(400, 1)), torch.randn(4096, 400)
    taken = []
    for _ in range(rounds + 1):
        network.zero_grad()
        inputs = inputs.detach().requires_grad_()
        start = time.process_time()
        network(inputs).sum().backward()
        taken.append(time.process_time() - start)
    return float(np.median(taken[1:]))


class _Written(TorchDispatchMode):
    """Floats that operations put into memory of their own: no views, no matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") not in _PRODUCTS and not func.is_view:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            self.floats += sum(t.numel() for t in tensors if isinstance(t, torch.Tensor))
        return out
