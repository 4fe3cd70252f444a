"""Optimizer updates of one row: the arithmetic of csrc/dram/kernels.h, operation by operation.

Square roots and divisions are correctly rounded. Launch with `launch.EXACT`, which excludes fused multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl

NONE, SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM, PARTIAL_ROW_WISE_ADAM = -1, 0, 1, 2, 3, 4
"""Codes of optimizers; NONE stores the sums of gradients without applying them."""
_SGD, _ADAGRAD, _ROW_WISE = tl.constexpr(SGD), tl.constexpr(ADAGRAD), tl.constexpr(ROW_WISE_ADAGRAD)
_ADAM, _PARTIAL = tl.constexpr(ADAM), tl.constexpr(PARTIAL_ROW_WISE_ADAM)
WHOLE_ROW = (ROW_WISE_ADAGRAD, PARTIAL_ROW_WISE_ADAM)
"""Optimizers with a mean over the row."""
BIAS_CORRECTED = (ADAM, PARTIAL_ROW_WISE_ADAM)
"""Optimizers whose constants depend on the step number."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Constants of one step, computed in double precision; each is rounded to fp32 once, at the launch."""

    optimizer: int
    """The `code` of an optimizer in thermocline.embedding.optimizers."""
    lr: float
    eps: float
    weight_decay: float
    scale: float
    """Factor of every summed gradient."""
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    sqrt_bias2: float
    number: int
    """Step number of the table, counted from 1."""

    @classmethod
    def of(cls, optimizer: Any, number: int, *, lr: float | None = None, scale: float = 1.0) -> OptimizerStep:
        """Constants of step `number` of an optimizer in thermocline.embedding.optimizers; `lr` overrides its own."""
        if number < 1:
            raise ValueError(f"step number is {number}: steps count from 1")
        lr = optimizer.lr if lr is None else lr
        beta1, beta2 = getattr(optimizer, "beta1", 0.0), getattr(optimizer, "beta2", 0.0)
        return cls(
            optimizer=optimizer.code,
            lr=lr,
            eps=getattr(optimizer, "eps", 0.0),
            weight_decay=optimizer.weight_decay,
            scale=scale,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            step_size=lr / (1.0 - math.pow(beta1, number)),
            sqrt_bias2=math.sqrt(1.0 - math.pow(beta2, number)),
            number=number,
        )

    @property
    def constants(self) -> tuple[float, ...]:
        """Arguments of kernels, in the order that `new_row` reads them."""
        return (
            self.lr, self.eps, self.weight_decay, self.scale, self.one_minus_beta1, self.beta2, self.one_minus_beta2,
            self.step_size, self.sqrt_bias2,
        )  # fmt: skip

    def words(self) -> Any:
        """int32[StoredStep.WORDS] in host memory: the content of `StoredStep.memory` for this step."""
        words = np.zeros(StoredStep.WORDS, np.int32)
        words[: len(self.constants)].view(np.float32)[:] = self.constants
        words[StoredStep.NUMBER :].view(np.int64)[0] = self.number
        return words


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """Constants of a step in device memory, for launches that are recorded once and replayed for every step.

    Takes the place of an `OptimizerStep` in launches. The results are the same: both are rounded to fp32 once.
    """

    WORDS: ClassVar[int] = 12
    NUMBER: ClassVar[int] = 10

    optimizer: int
    weight_decay: float
    """0 or not: kernels are compiled for either; the value is in `memory`."""
    memory: torch.Tensor
    """int32[WORDS]: the constants as fp32, then, from word NUMBER on, the step number as int64."""

    @property
    def constants(self) -> torch.Tensor:
        return self.memory.view(torch.float32)

    @property
    def number(self) -> torch.Tensor:
        return self.memory[self.NUMBER :].view(torch.int64)


def state_floats(optimizer: int, dim: int) -> int:
    """Number of floats of optimizer state per row."""
    sizes = {NONE: 0, SGD: 0, ADAGRAD: dim, ROW_WISE_ADAGRAD: 1, ADAM: 2 * dim, PARTIAL_ROW_WISE_ADAM: dim + 1}
    return sizes[optimizer]


@triton.jit
def step_constants(constants, number, STORED: tl.constexpr):
    """`OptimizerStep.constants` and the step number; loaded if STORED, from the memory of a `StoredStep`."""
    if STORED:
        values = (
            tl.load(constants), tl.load(constants + 1), tl.load(constants + 2), tl.load(constants + 3),
            tl.load(constants + 4), tl.load(constants + 5), tl.load(constants + 6), tl.load(constants + 7),
            tl.load(constants + 8),
        )  # fmt: skip
        step = tl.load(number)
    else:
        values = constants
        step = number
    return values, step


@triton.jit
def load_state(state, slot, live, cols, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr):
    """Optimizer state of rows as two tiles; `slot` in place of a tile that the optimizer does not have."""
    inside = live[:, None] & (cols[None, :] < DIM)
    pointer = state + slot[:, None] * STRIDE + cols[None, :]
    first = slot
    second = slot
    if OPTIMIZER == _ADAGRAD:
        first = tl.load(pointer, mask=inside, other=0.0)
    elif OPTIMIZER == _ROW_WISE:
        first = tl.load(state + slot * STRIDE, mask=live, other=0.0)
    elif OPTIMIZER == _ADAM:
        first = tl.load(pointer, mask=inside, other=0.0)
        second = tl.load(pointer + DIM, mask=inside, other=0.0)
    elif OPTIMIZER == _PARTIAL:
        first = tl.load(pointer, mask=inside, other=0.0)
        second = tl.load(state + slot * STRIDE + DIM, mask=live, other=0.0)
    return first, second


@triton.jit
def store_state(
    state, slot, live, cols, first, second, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr
):
    inside = live[:, None] & (cols[None, :] < DIM)
    pointer = state + slot[:, None] * STRIDE + cols[None, :]
    if OPTIMIZER == _ADAGRAD:
        tl.store(pointer, first, mask=inside)
    elif OPTIMIZER == _ROW_WISE:
        tl.store(state + slot * STRIDE, first, mask=live)
    elif OPTIMIZER == _ADAM:
        tl.store(pointer, first, mask=inside)
        tl.store(pointer + DIM, second, mask=inside)
    elif OPTIMIZER == _PARTIAL:
        tl.store(pointer, first, mask=inside)
        tl.store(state + slot * STRIDE + DIM, second, mask=live)


@triton.jit
def sum_of_products(a, b, cols, DIM: tl.constexpr):
    """float32[rows]: lane j of 16 adds products j, j + 16, ... in that order, beginning with 0; then halves are added.

    tl.sum has no fixed order. It is exact where all terms but one are zero: so the n-th term of each lane is selected.
    """
    ROWS: tl.constexpr = a.shape[0]
    LANES: tl.constexpr = 16 if a.shape[1] > 16 else a.shape[1]
    TERMS: tl.constexpr = a.shape[1] // LANES
    products = tl.where(cols[None, :] < DIM, a * b, 0.0)
    products = tl.reshape(products, [ROWS, TERMS, LANES])
    nth = tl.arange(0, TERMS)[None, :, None]
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for term in tl.static_range(TERMS):
        lanes = lanes + tl.sum(tl.where(nth == term, products, 0.0), axis=1)
    if LANES >= 16:
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 8]), axis=1)
    if LANES >= 8:
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 4]), axis=1)
    if LANES >= 4:
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def mean_of_squares(g, cols, DIM: tl.constexpr):
    """float32[rows]: the mean, summed as in `sum_of_products`."""
    ROWS: tl.constexpr = g.shape[0]
    return tl.div_rn(sum_of_products(g, g, cols, DIM), tl.full([ROWS], DIM, tl.float32))


@triton.jit
def new_row(w, first, second, total, cols, constants, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, DIM: tl.constexpr):
    """Weights and state after the step for gradient sums `total`; `constants` is `OptimizerStep.constants`."""
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
    elif OPTIMIZER == _PARTIAL:
        first = first + (g - first) * one_minus_beta1
        second = second * beta2 + mean_of_squares(g, cols, DIM) * one_minus_beta2
        divisor = tl.div_rn(tl.sqrt_rn(second), tl.zeros_like(second) + sqrt_bias2) + eps
        w = w - tl.div_rn(first * step_size, tl.zeros_like(first) + divisor[:, None])
    else:
        first = first + (g - first) * one_minus_beta1
        second = second * beta2 + (g * one_minus_beta2) * g
        bias = tl.zeros_like(second) + sqrt_bias2
        w = w - tl.div_rn(first * step_size, tl.div_rn(tl.sqrt_rn(second), bias) + eps)
    return w, first, second


def new_rows_reference(
    weights: torch.Tensor, state: torch.Tensor | None, sums: torch.Tensor, step: OptimizerStep
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`new_row` in plain torch: float32[rows, dim] weights and float32[rows, state floats] state."""
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
    if step.optimizer == PARTIAL_ROW_WISE_ADAM:
        v = v * step.beta2 + mean_of_squares_reference(g)[:, None] * step.one_minus_beta2
    else:
        v = v * step.beta2 + (g * step.one_minus_beta2) * g
    # A tensor, because torch may replace the division by a number by a multiplication with its reciprocal.
    bias = torch.full((), step.sqrt_bias2, dtype=torch.float32, device=v.device)
    w = w - (m * step.step_size) / (square_root(v) / bias + step.eps)
    return w, torch.cat([m, v], 1)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root, unlike torch.sqrt on some CPUs. A root in double is never near a tie."""
    return x.double().sqrt().float()


def sum_of_products_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`sum_of_products` in plain torch."""
    rows, dim = a.shape
    products = torch.zeros(rows, -(-dim // 16) * 16, dtype=torch.float32, device=a.device)
    products[:, :dim] = a * b
    terms = products.view(rows, -1, 16)
    lanes = torch.zeros_like(terms[:, 0])
    for nth in range(terms.shape[1]):
        lanes = lanes + terms[:, nth]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def mean_of_squares_reference(g: torch.Tensor) -> torch.Tensor:
    """`mean_of_squares` in plain torch."""
    return sum_of_products_reference(g, g) / torch.full((), g.shape[1], dtype=torch.float32, device=g.device)
