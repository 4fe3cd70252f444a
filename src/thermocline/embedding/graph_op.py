"""Custom ops that let torch.compile keep a bag in one graph with the rest of the model, also with fullgraph=True.

A graph has the ops `thermocline::bag` and, in its backward pass, `thermocline::bag_backward`. They call the module
itself, which records its own autograd graph, so results and errors are those of a model that is not compiled. Tensors
carry the numbers of objects which a graph cannot have: that of the batch into the first op, and that of the autograd
graph from the first to the second. The batch's number is an input, so a new batch compiles nothing again.

Rows stay pinned as long as the autograd graph lives: until the memory of the tensor with its number is freed.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from thermocline.batch import Batch, batch_of_handle

_numbers = itertools.count(1)
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_outside = False
_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""torch's dispatch keys outside of all ops, with which it records autograd graphs."""


class _Graph(NamedTuple):
    """The autograd graph of one forward pass: its output, and the inputs that require grad."""

    out: torch.Tensor
    anchors: list[torch.Tensor]
    weights: torch.Tensor | None


_graphs: dict[int, _Graph] = {}
"""Those whose backward pass is possible, by number."""


def register_module(module: Any) -> int:
    """Return the number by which a graph names the module."""
    number = next(_numbers)
    _modules[number] = module
    return number


def in_graph(batch: Any) -> bool:
    """Return whether torch.compile is tracing, and a call with this batch or tensor of ids can be part of its graph."""
    if not torch.compiler.is_compiling() or _outside:
        return False
    if isinstance(batch, Batch):
        return batch.handle is not None and batch.learned_weights is None
    return isinstance(batch, torch.Tensor)


@contextlib.contextmanager
def outside_graphs() -> Iterator[None]:
    """Let graphs that are compiled meanwhile end before each bag."""
    global _outside
    before, _outside = _outside, True
    try:
        yield
    finally:
        _outside = before


def call_in_graph(
    module: Any, batch: Any, offsets: torch.Tensor | None, weights: torch.Tensor | None, shape: Sequence[int]
) -> torch.Tensor:
    """Call `module.call_outside_graph(batch, offsets, weights)` as an op. `shape`: that of its result.

    batch   a Batch, or a tensor of ids
    """
    is_batch = isinstance(batch, Batch)
    input = batch.handle.number if is_batch else batch
    trained = weights is not None and weights.requires_grad
    out: torch.Tensor
    out, _ = _forward(
        module._anchor, input, offsets, weights, module.graph_number, is_batch,
        torch.is_grad_enabled(), trained, list(shape),
    )  # fmt: skip
    return out


# Seeded: a backward pass does not call it again to save memory. Equal calls of a graph may still become one.
@torch.library.custom_op("thermocline::bag", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward(
    anchor: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    is_batch: bool,
    grad: bool,
    weights_grad: bool,
    shape: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    argument: Any = batch_of_handle(int(input)) if is_batch else input
    with torch._C._ForceDispatchKeyGuard(*_KEYS), torch.set_grad_enabled(grad):
        leaf = None if weights is None else weights.detach().requires_grad_(weights_grad)
        out = _modules[module].call_outside_graph(argument, offsets, leaf)
    if list(out.shape) != list(shape):
        raise RuntimeError(f"the bag returned shape {list(out.shape)}, but the graph expects {list(shape)}")
    if grad and not out.requires_grad and (weights_grad or _modules[module].table.storage.trains(_modules[module])):
        raise RuntimeError("torch recorded no gradients: import thermocline outside of torch.inference_mode()")
    number = np.array([next(_numbers)])
    if grad:
        _graphs[int(number[0])] = _Graph(out, _modules[module].anchors, leaf if weights_grad else None)
        weakref.finalize(number, _graphs.pop, int(number[0]), None).atexit = False
    return out.detach().contiguous(), torch.from_numpy(number)  # the tensor's memory is that of `number`


@_forward.register_fake
def _(
    anchor: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    is_batch: bool,
    grad: bool,
    weights_grad: bool,
    shape: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(shape, device=_modules[module].table.device), torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("thermocline::bag_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, number: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the anchor, zero, and of the weights, which have this shape."""
    graph = _graphs.get(int(number))
    if graph is None:
        raise RuntimeError("backward through a bag whose forward pass ran without gradients")
    nothing = torch.zeros(()), torch.zeros(shape, dtype=dtype, device=device)
    if not graph.out.requires_grad:  # frozen, without weights that require grad
        return nothing
    inputs = graph.anchors if graph.weights is None else [*graph.anchors, graph.weights]
    # A copy: the table keeps gradients until its step, but a graph reuses its memory.
    with torch._C._ForceDispatchKeyGuard(*_KEYS):
        found = torch.autograd.grad(graph.out, inputs, grad.clone(), retain_graph=True, allow_unused=True)
    return nothing if graph.weights is None or found[-1] is None else (nothing[0], found[-1])


@_backward.register_fake
def _(
    grad: torch.Tensor, number: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(()), torch.empty(shape, dtype=dtype, device=device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    weights = inputs[3]
    ctx.like = ([0], torch.float32, torch.device("cpu"))
    if weights is not None:
        ctx.like = (list(weights.shape), weights.dtype, weights.device)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    anchor, weights = _backward(grad, ctx.saved_tensors[0], *ctx.like)
    return anchor, None, None, weights if ctx.needs_input_grad[3] else None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
