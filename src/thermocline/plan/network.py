"""What a dense network does per example and per step: counted while it runs once on two small batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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
    operations: int
    """Of torch, per step."""


def work_of(network: torch.nn.Module, inputs: Callable[[int], torch.Tensor]) -> Work:
    """Of a network; `inputs(examples)` makes some."""
    small, large = (_count(network, inputs(size)) for size in _SIZES)
    apart = _SIZES[1] - _SIZES[0]
    each = (large[1] - small[1]) / apart
    return Work((large[0] - small[0]) / apart, each, max(0.0, small[1] - _SIZES[0] * each), large[2])


def _count(network: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float, int]:
    flops, written = FlopCounterMode(display=False), _Written()
    network.zero_grad()
    inputs.requires_grad_()
    with flops, written:
        network(inputs).sum().backward()
    return flops.get_total_flops() / 2, written.floats, written.operations


class _Written(TorchDispatchMode):
    """Floats that operations put into memory of their own: no views, no matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats = 0.0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        if func.overloadpacket.__name__.rstrip("_") not in _PRODUCTS and not func.is_view:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            self.floats += sum(t.numel() for t in tensors if isinstance(t, torch.Tensor))
        return out
