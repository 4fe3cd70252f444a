"""Operation counts of a dense network, measured on two small batches, and the time of a reference network.

The counts predict GPU time. CPU time depends on the shapes of the layers, so `dense_timing` runs the network itself;
`reference_network_seconds` is the speed of the machine on which that was done.
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

_BATCH_SIZES = (16, 32)
_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclasses.dataclass(frozen=True, slots=True)
class OpCounts:
    """Operations of one forward and backward pass."""

    multiply_adds: float
    """Multiply-adds of matrix products, per example."""
    floats: float
    """Floats written by all other operations, per example."""
    step_floats: float
    """Floats written by all other operations, per step: independent of the batch size (parameter gradients)."""


def count_ops(network: torch.nn.Module, make_inputs: Callable[[int], torch.Tensor]) -> OpCounts:
    """Count the operations of `network` on `make_inputs(examples)`: counts at two batch sizes give slope and offset."""
    (small_madds, small_floats), (large_madds, large_floats) = (
        _count(network, make_inputs(size)) for size in _BATCH_SIZES
    )
    examples = _BATCH_SIZES[1] - _BATCH_SIZES[0]
    floats = (large_floats - small_floats) / examples
    return OpCounts(
        multiply_adds=(large_madds - small_madds) / examples,
        floats=floats,
        step_floats=max(0.0, small_floats - _BATCH_SIZES[0] * floats),
    )


def _count(network: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """(multiply-adds of matrix products, floats written by other operations)."""
    flops, written = FlopCounterMode(display=False), _FloatsWritten()
    network.zero_grad()
    inputs.requires_grad_()
    with flops, written:
        network(inputs).sum().backward()
    return flops.get_total_flops() / 2, written.floats


def reference_network_seconds(rounds: int = 5) -> float:
    """Processor seconds of forward and backward of the reference network: three layers of 400, 4,096 examples."""
    hidden = [torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.ReLU()) for _ in range(3)]
    network, inputs = torch.nn.Sequential(*hidden, torch.nn.Linear(400, 1)), torch.randn(4096, 400)
    seconds = []
    for _ in range(rounds + 1):
        network.zero_grad()
        inputs = inputs.detach().requires_grad_()
        start = time.process_time()
        network(inputs).sum().backward()
        seconds.append(time.process_time() - start)
    return float(np.median(seconds[1:]))


class _FloatsWritten(TorchDispatchMode):
    """Counts the floats that operations write to new memory: views and matrix products are excluded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") not in _MATRIX_PRODUCTS and not func.is_view:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            self.floats += sum(t.numel() for t in tensors if isinstance(t, torch.Tensor))
        return out
