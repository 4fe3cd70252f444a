"""What one step does to a row: the optimizers of csrc/dram/kernels.h, operation by operation.

No fused multiply-add, square root and division correctly rounded: launch with `launch.EXACT`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl

NONE, SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = -1, 0, 1, 2, 3
"""Codes of optimizers; none: sums are stored, not applied."""
_SGD, _ADAGRAD, _ROW_WISE = tl.constexpr(SGD), tl.constexpr(ADAGRAD), tl.constexpr(ROW_WISE_ADAGRAD)
_ADAM = tl.constexpr(ADAM)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step's constants, computed in double; each is rounded to fp32 once, at the launch."""

    optimizer: int
    """The `code` of an optimizer in thermocline.embedding.optimizers."""
    lr: float
    eps: float
    weight_decay: float
    scale: float
    """Multiplies every summed gradient."""
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    sqrt_bias2: float
    number: int
    """The table's steps, counted from 1."""

    @classmethod
    def of(cls, optimizer: Any, number: int, *, lr: float | None = None, scale: float = 1.0) -> Step:
        """Of an optimizer in thermocline.embedding.optimizers."""
        if number < 1:
            raise ValueError(f"step is {number}: steps count from 1")
        rate = optimizer.lr if lr is None else lr
        beta1, beta2 = getattr(optimizer, "beta1", 0.0), getattr(optimizer, "beta2", 0.0)
        return cls(
            optimizer=optimizer.code,
            lr=rate,
            eps=getattr(optimizer, "eps", 0.0),
            weight_decay=optimizer.weight_decay,
            scale=scale,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            step_size=rate / (1.0 - math.pow(beta1, number)),
            sqrt_bias2=math.sqrt(1.0 - math.pow(beta2, number)),
            number=number,
        )

    @property
    def constants(self) -> tuple[float, ...]:
        """What kernels take, in the order of `new_row`'s arguments."""
        return (
            self.lr, self.eps, self.weight_decay, self.scale, self.one_minus_beta1, self.beta2, self.one_minus_beta2,
            self.step_size, self.sqrt_bias2,
        )  # fmt: skip


def state_floats(optimizer: int, dim: int) -> int:
    """Optimizer state per row, in floats."""
    return {NONE: 0, SGD: 0, ADAGRAD: dim, ROW_WISE_ADAGRAD: 1, ADAM: 2 * dim}[optimizer]


@triton.jit
def load_state(state, slot, live, cols, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr):
    """The state of rows, as two tiles; those an optimizer does not have are the slots, to have something."""
    inside = live[:, None] & (cols[None, :] < DIM)
    place = state + slot[:, None] * STRIDE + cols[None, :]
    first = slot
    second = slot
    if OPTIMIZER == _ADAGRAD:
        first = tl.load(place, mask=inside, other=0.0)
    elif OPTIMIZER == _ROW_WISE:
        first = tl.load(state + slot * STRIDE, mask=live, other=0.0)
    elif OPTIMIZER == _ADAM:
        first = tl.load(place, mask=inside, other=0.0)
        second = tl.load(place + DIM, mask=inside, other=0.0)
    return first, second


@triton.jit
def store_state(
    state, slot, live, cols, first, second, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr
):
    inside = live[:, None] & (cols[None, :] < DIM)
    place = state + slot[:, None] * STRIDE + cols[None, :]
    if OPTIMIZER == _ADAGRAD:
        tl.store(place, first, mask=inside)
    elif OPTIMIZER == _ROW_WISE:
        tl.store(state + slot * STRIDE, first, mask=live)
    elif OPTIMIZER == _ADAM:
        tl.store(place, first, mask=inside)
        tl.store(place + DIM, second, mask=inside)


@triton.jit
def mean_of_squares(g, cols, DIM: tl.constexpr):
    """Per row: comm j of 16 adds squares j, j + 16, ... in that order; then halves are added; divided by DIM.

    A sum of which all terms but one are zero is exact in any order: that is how a comm's n-th term is taken out.
    """
    ROWS: tl.constexpr = g.shape[0]
    LANES: tl.constexpr = 16 if g.shape[1] > 16 else g.shape[1]
    TERMS: tl.constexpr = g.shape[1] // LANES
    squares = tl.where(cols[None, :] < DIM, g * g, 0.0)
    squares = tl.reshape(squares, [ROWS, TERMS, LANES])
    nth = tl.arange(0, TERMS)[None, :, None]
    comms = tl.sum(tl.where(nth == 0, squares, 0.0), axis=1)
    for term in tl.static_range(1, TERMS):
        comms = comms + tl.sum(tl.where(nth == term, squares, 0.0), axis=1)
    if LANES >= 16:
        comms = tl.sum(tl.reshape(comms, [ROWS, 2, 8]), axis=1)
    if LANES >= 8:
        comms = tl.sum(tl.reshape(comms, [ROWS, 2, 4]), axis=1)
    if LANES >= 4:
        comms = tl.sum(tl.reshape(comms, [ROWS, 2, 2]), axis=1)
    return tl.div_rn(tl.sum(comms, axis=1), tl.full([ROWS], DIM, tl.float32))


@triton.jit
def new_row(w, first, second, total, cols, constants, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, DIM: tl.constexpr):
    """Weights and state after the step, given the summed gradient; `constants` as in `Step.constants`."""
    lr, eps, weight_decay, scale = constants[0], constants[1], constants[2], constants[3]
    one_minus_beta1, beta2, one_minus_beta2 = constants[4], constants[5], constants[6]
    step_size, sqrt_bias2 = constants[7], constants[8]
    g = total * scale
    if DECAY:
        g = g + w * weight_decay
    if OPTIMIZER == _SGD:
        w = w - g * lr
    elif OPTIMIZER == _ADAGRAD:
        first = first + g * g
        w = w - tl.div_rn(g, tl.sqrt_rn(first) + eps) * lr
    elif OPTIMIZER == _ROW_WISE:
        first = first + mean_of_squares(g, cols, DIM)
        rate = tl.div_rn(tl.zeros_like(first) + lr, tl.sqrt_rn(first) + eps)
        w = w - g * rate[:, None]
    else:
        first = first + (g - first) * one_minus_beta1
        second = second * beta2 + (g * one_minus_beta2) * g
        bias = tl.zeros_like(second) + sqrt_bias2
        w = w - tl.div_rn(first * step_size, tl.div_rn(tl.sqrt_rn(second), bias) + eps)
    return w, first, second


def new_rows_reference(
    weights: torch.Tensor, state: torch.Tensor | None, sums: torch.Tensor, step: Step
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and state of rows after the step, in plain torch: float32[rows, dim], float32[rows, state]."""
    w, dim = weights, weights.shape[1]
    g = sums * step.scale
    if step.weight_decay != 0:
        g = g + w * step.weight_decay
    if step.optimizer == SGD:
        return w - g * step.lr, state
    assert state is not None
    if step.optimizer == ADAGRAD:
        s = state + g * g
        return w - (g / (square_root(s) + step.eps)) * step.lr, s
    if step.optimizer == ROW_WISE_ADAGRAD:
        s = state + mean_of_squares_reference(g)[:, None]
        lr = torch.full_like(s, step.lr)
        return w - g * (lr / (square_root(s) + step.eps)), s
    m, v = state[:, :dim], state[:, dim:]
    m = m + (g - m) * step.one_minus_beta1
    v = v * step.beta2 + (g * step.one_minus_beta2) * g
    # A tensor, not a number: torch may multiply by the reciprocal of a number.
    bias = torch.full((), step.sqrt_bias2, dtype=torch.float32, device=v.device)
    w = w - (m * step.step_size) / (square_root(v) / bias + step.eps)
    return w, torch.cat([m, v], 1)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch's own is not on every CPU: the root in double is never too close to a tie."""
    return x.double().sqrt().float()


def mean_of_squares_reference(g: torch.Tensor) -> torch.Tensor:
    """As `mean_of_squares`."""
    rows, dim = g.shape
    squares = torch.zeros(rows, -(-dim // 16) * 16, dtype=torch.float32, device=g.device)
    squares[:, :dim] = g * g
    terms = squares.view(rows, -1, 16)
    comms = terms[:, 0]
    for nth in range(1, terms.shape[1]):
        comms = comms + terms[:, nth]
    while comms.shape[1] > 1:
        half = comms.shape[1] // 2
        comms = comms[:, :half] + comms[:, half:]
    return comms[:, 0] / torch.full((), dim, dtype=torch.float32, device=g.device)
