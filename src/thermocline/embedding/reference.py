"""`ReferenceTable`: a table as a dict of rows. Slow; the oracle of the tests, whose bits every tier must reproduce.

It follows csrc/dram/kernels.h and csrc/dram/initial.h: all arithmetic is np.float32, one operation at a time, in the
order defined there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats
from thermocline.embedding.initializers import Constant, Initial, Uniform
from thermocline.embedding.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    initial_state,
)
from thermocline.embedding.precision import FP32, Precision
from thermocline.embedding.quant_scale import UNIT, LearnedScale
from thermocline.embedding.reference_codec import (
    counter_bits,
    encode,
    rounding_bits,
    row_mix,
    scale_gradient,
    table_mix,
)

Pooling = Literal["sum", "mean", "none"]

BLOCK = 64
"""Gradients of one key are added in blocks of this many occurrences."""


def initial_weights(initial: Initial, seed: int, table: int, key: int, dim: int) -> Floats:
    """Return the initial weights of a key."""
    scale = np.float32(initial.scale)
    if isinstance(initial, Constant):
        return np.full(dim, scale, np.float32)
    mix = row_mix(table_mix(seed, table), key)

    weights = np.empty(dim, np.float32)
    for i in range(dim):
        if isinstance(initial, Uniform):
            weights[i] = np.float32(2 * (counter_bits(mix, i) >> 40) - (2**24 - 1)) * (scale * np.float32(2.0**-24))
        else:
            words = [counter_bits(mix, 3 * i + j) >> shift & 0xFFFF for j in range(3) for shift in (0, 16, 32, 48)]
            weights[i] = np.float32(sum(words) - 6 * 65535) * (scale * np.float32(2.0**-16))
    return weights


def sum_of_products(a: Floats, b: Floats) -> np.float32:
    """Sum in sixteen lanes, then fold them in halves: the order of csrc/dram/kernels.h."""
    products = np.zeros((1 + -(-len(a) // 16), 16), np.float32)  # the lanes begin with zero
    products[1:].reshape(-1)[: len(a)] = a * b
    lanes = products[0]
    for row in products[1:]:
        lanes = lanes + row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return np.float32(lanes[0])


def mean_of_squares(g: Floats) -> np.float32:
    """Return the mean, summed as in `sum_of_products`."""
    return np.float32(sum_of_products(g, g) / np.float32(len(g)))


def sum_in_blocks(gradients: Sequence[Floats]) -> Floats:
    """Sum each block of 64 from left to right, then the block sums from left to right."""
    total: Floats | None = None
    for begin in range(0, len(gradients), BLOCK):
        block = gradients[begin].copy()
        for g in gradients[begin + 1 : begin + BLOCK]:
            block = block + g
        total = block if total is None else total + block
    assert total is not None
    return total


def optimize(optimizer: Optimizer, row: Floats, g: Floats, step: int, lr: float) -> None:
    """Apply the gradient of one key to its row, in place."""
    f = np.float32
    dim = len(g)
    w, state = row[:dim], row[dim:]
    if optimizer.weight_decay != 0:
        g = g + w * f(optimizer.weight_decay)
    match optimizer:
        case SGD():
            w[:] = w - g * f(lr)
        case Adagrad():
            state[:] = state + g * g
            w[:] = w - (g / (np.sqrt(state) + f(optimizer.eps))) * f(lr)
        case RowWiseAdagrad():
            state[0] = state[0] + mean_of_squares(g)
            w[:] = w - g * (f(lr) / (np.sqrt(state[0]) + f(optimizer.eps)))
        case Adam() | PartialRowWiseAdam():
            m, v = state[:dim], state[dim:]
            bias1, sqrt_bias2 = optimizer.corrections(step)
            m[:] = m + (g - m) * f(1.0 - optimizer.beta1)
            beta2, rest = f(optimizer.beta2), f(1.0 - optimizer.beta2)
            row_wise = isinstance(optimizer, PartialRowWiseAdam)
            v[:] = v * beta2 + (mean_of_squares(g) * rest if row_wise else (g * rest) * g)
            w[:] = w - (m * f(lr / bias1)) / (np.sqrt(v) / f(sqrt_bias2) + f(optimizer.eps))


class ReferenceTable:
    """Rows by key in a dict. `ids`, `offsets` and optional `weights` describe bags in CSR form."""

    def __init__(
        self,
        dim: int,
        optimizer: Optimizer,
        *,
        seed: int = 0,
        table: int = 0,
        initial: Initial | None = None,
        precision: Precision = FP32,
    ) -> None:
        self.dim = dim
        self.optimizer = optimizer
        self.seed = seed
        self.table = table
        self.initial = Uniform() if initial is None else initial
        self.precision = precision
        self.rows: dict[int, Floats] = {}
        """Units of the weights (reference_codec.py; for fp32 the weights), then optimizer state."""
        self.scales: dict[int, np.float32] = {}
        """Scale of each row, if rows have their own."""
        self.scale = np.float32(precision.scale if precision.integer else 1)
        """Scale of the table otherwise."""
        self.learned = LearnedScale(precision.scale) if precision.scale_lr else None
        self.rates: dict[int, float] = {}
        """Learning rate of each step so far, for rows that catch up."""
        self._initial: dict[int, tuple[Floats, np.float32]] = {}
        """Cache of initial rows: units and scale."""

    def initial_row(self, key: int) -> Floats:
        """Return the initial row of a key."""
        if key not in self._initial:
            weights = initial_weights(self.initial, self.seed, self.table, key, self.dim)
            self._initial[key] = self._encode(key, weights, np.float32(self.precision.scale), 0)
        units, scale = self._initial[key]
        return np.concatenate([units * (scale if self.precision.row_scaled else self.scale), self._initial_state()])

    def _initial_state(self) -> Floats:
        state = np.full(self.optimizer.state_floats(self.dim), initial_state(self.optimizer), np.float32)
        if self.optimizer.catches_up:
            state[-1] = 0  # as of step 0
        return state

    def _encode(self, key: int, weights: Floats, scale: np.float32, step: int | None) -> tuple[Floats, np.float32]:
        """Return units and scale, rounded as in training step `step`; None rounds to nearest."""
        random = None
        if step is not None and self.precision.stochastic:
            random = rounding_bits(self.seed, self.table, key, step, self.dim)
        return encode(self.precision, weights, scale, random)

    def row(self, key: int) -> Floats:
        """Return the row without inserting it."""
        if key not in self.rows:
            return self.initial_row(key)
        row = self.rows[key].copy()
        row[: self.dim] *= self.scales.get(key, self.scale)
        return row

    # ---- rows that catch up; the last word of a row is the number of the last step that it includes

    def caught_up(self, key: int) -> Floats:
        """Return the row as of the last step; that of another optimizer as it is."""
        row = self.row(key)
        if self.optimizer.catches_up:
            self._catch_up(row, max(self.rates, default=0))
        return row

    def _catch_up(self, row: Floats, step: int) -> None:
        """Replay the missed steps up to `step`, at most the last `catch_up_steps` of them."""
        last = row[-1:].view(np.uint32)
        missed = range(int(last[0]) + 1, step + 1)[-self.optimizer.catch_up_steps :]
        for number in missed:
            optimize(self.optimizer, row[:-1], np.zeros(self.dim, np.float32), number, self.rates[number])
        last[0] = max(last[0], step)

    def touch(self, keys: Sequence[int] | npt.NDArray[Any]) -> None:
        """Catch up the rows that a training batch reads, in place."""
        if self.optimizer.catches_up:
            for key in keys:
                self.rows[int(key)] = self.caught_up(int(key))

    def store(self, key: int, row: Floats, step: int | None) -> Floats:
        """Store a row, rounded as in training step `step`; None rounds to nearest. Return its units."""
        units, scale = self._encode(key, row[: self.dim], self.scale, step)
        self.rows[key] = np.concatenate([units, row[self.dim :]])
        if self.precision.row_scaled:
            self.scales[key] = scale
        return units

    def read(self, keys: Sequence[int] | npt.NDArray[Any]) -> Floats:
        """Return rows as evaluation reads them. Inserts nothing."""
        rows = [self.caught_up(int(key)) for key in keys]
        return np.stack(rows) if rows else np.empty((0, len(self.initial_row(0))), np.float32)

    def push(self, keys: Sequence[int] | npt.NDArray[Any], rows: Floats) -> None:
        """Replace rows, rounded to nearest."""
        for key, row in zip(keys, rows, strict=True):
            self.store(int(key), np.array(row, np.float32), None)

    def pool(
        self,
        ids: Sequence[int] | npt.NDArray[Any],
        offsets: Sequence[int] | npt.NDArray[Any] | None = None,
        pooling: Pooling = "sum",
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> Floats:
        """Return one vector per bag; without offsets (pooling "none"), one per id."""
        bags = _bags(len(ids), offsets, pooling)
        out = np.zeros((len(bags), self.dim), np.float32)
        for b, positions in enumerate(bags):
            for n, p in enumerate(positions):
                x = self.caught_up(int(ids[p]))[: self.dim]
                if weights is not None:
                    x = x * np.float32(weights[p])
                out[b] = x if n == 0 else out[b] + x
            if pooling == "mean" and len(positions) > 0:
                out[b] = out[b] / np.float32(len(positions))
        return out

    def weight_gradient(
        self,
        ids: Sequence[int] | npt.NDArray[Any],
        grad: Floats,
        offsets: Sequence[int] | npt.NDArray[Any] | None = None,
        pooling: Pooling = "sum",
    ) -> Floats:
        """Return the gradient of the weight of each id; `grad` has one row per bag."""
        out = np.zeros(len(ids), np.float32)
        for b, positions in enumerate(_bags(len(ids), offsets, pooling)):
            for p in positions:
                dot = sum_of_products(self.caught_up(int(ids[p]))[: self.dim], grad[b])
                out[p] = dot / np.float32(len(positions)) if pooling == "mean" else dot
        return out

    def update(
        self,
        ids: Sequence[int] | npt.NDArray[Any],
        grad: Floats,
        offsets: Sequence[int] | npt.NDArray[Any] | None = None,
        pooling: Pooling = "sum",
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
        *,
        step: int = 1,
        lr: float | None = None,
        scale: float = 1.0,
    ) -> None:
        """Run one optimizer step; `grad` has one row per bag."""
        occurrences: dict[int, list[Floats]] = {}
        self.collect_gradients(occurrences, ids, grad, offsets, pooling, weights)
        sums = {key: sum_in_blocks(gradients) for key, gradients in occurrences.items()}
        self.apply_sums(sums, step=step, lr=lr, scale=scale)

    @staticmethod
    def collect_gradients(
        occurrences: dict[int, list[Floats]],
        ids: Sequence[int] | npt.NDArray[Any],
        grad: Floats,
        offsets: Sequence[int] | npt.NDArray[Any] | None,
        pooling: Pooling,
        weights: Sequence[float] | npt.NDArray[Any] | None,
    ) -> None:
        """Append to `occurrences` the gradient of each id, in order, under its key."""
        for b, positions in enumerate(_bags(len(ids), offsets, pooling)):
            for p in positions:
                g = np.array(grad[b], np.float32)
                if weights is not None or pooling == "mean":
                    coefficient = np.float32(1.0 if weights is None else weights[p])
                    if pooling == "mean":
                        coefficient = coefficient / np.float32(len(positions))
                    g = g * coefficient
                occurrences.setdefault(int(ids[p]), []).append(g)

    def apply_sums(self, sums: dict[int, Floats], *, step: int, lr: float | None = None, scale: float = 1.0) -> None:
        """Apply one optimizer step per key to summed gradients."""
        total = 0
        rate = self.optimizer.lr if lr is None else lr
        for key, summed in sums.items():
            row = self.caught_up(key)
            g = summed * np.float32(scale)
            if self.optimizer.catches_up:
                optimize(self.optimizer, row[:-1], g, step, rate)
                row[-1:].view(np.uint32)[0] = step
            else:
                optimize(self.optimizer, row, g, step, rate)
            units = self.store(key, row, step)
            if self.learned is not None:
                total += scale_gradient(self.precision, row[: self.dim], units, self.scale, g)
        if self.learned is not None:
            self.learned = self.learned.after(total * UNIT, step, self.precision.scale_lr)
            self.scale = np.float32(self.learned.scale)


def _bags(ids: int, offsets: Sequence[int] | npt.NDArray[Any] | None, pooling: Pooling) -> list[range]:
    if (offsets is None) != (pooling == "none"):
        raise ValueError(f"pooling is {pooling!r}: 'none' takes no offsets, 'sum' and 'mean' need them")
    if offsets is None:
        return [range(i, i + 1) for i in range(ids)]
    return [range(int(offsets[b]), int(offsets[b + 1])) for b in range(len(offsets) - 1)]
