"""Rows in reduced precision: pooling and updates equal plain torch and the DRAM tier, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import dram
from helpers.kernels import exact_segments, floats, random_offsets, same_bits, slots_of_sizes

import thermocline as tc
from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from thermocline.embedding.precision import Kind, Precision
from thermocline.kernels.codec import Codec
from thermocline.kernels.optimizer_rules import OptimizerStep
from thermocline.kernels.pool import pool_rows, pool_rows_reference
from thermocline.kernels.random import table_mix
from thermocline.kernels.update import apply_gradients, sum_gradients, update_rows, update_rows_reference

SEED, TABLE = 3, 2**63 + 9
SLOTS = 24
CASES: list[tuple[Kind, float | None, str, int, Optimizer]] = [
    ("int2", 0.5, "stochastic", 1, SGD(lr=0.1)),
    ("int2", None, "nearest", 16, RowWiseAdagrad(lr=0.1)),
    ("int3", 0.5, "nearest", 11, Adagrad(lr=0.1)),
    ("int3", None, "stochastic", 40, Adam(lr=0.01)),
    ("int4", 0.5, "stochastic", 32, RowWiseAdagrad(lr=0.1)),
    ("int5", 0.5, "stochastic", 70, Adam(lr=0.01)),
    ("int5", None, "stochastic", 7, SGD(lr=0.1)),
    ("int6", 0.5, "stochastic", 33, Adagrad(lr=0.1)),
    ("int7", 0.5, "nearest", 64, SGD(lr=0.1)),
    ("int7", None, "stochastic", 31, RowWiseAdagrad(lr=0.1)),
    ("int8", 0.5, "stochastic", 65, Adam(lr=0.01)),
    ("int8", None, "stochastic", 16, Adagrad(lr=0.1)),
    ("int8", None, "nearest", 3, Adam(lr=0.01)),
    ("int16", 0.5, "stochastic", 5, RowWiseAdagrad(lr=0.1)),
    ("int16", None, "stochastic", 40, SGD(lr=0.1)),
    ("fp16", None, "stochastic", 5, Adam(lr=0.01)),
    ("bf16", None, "nearest", 9, RowWiseAdagrad(lr=0.1)),
    ("bf16", None, "stochastic", 33, Adagrad(lr=0.1)),
]


class Rows:
    """Equal rows in a DRAM tier and in an arena, where a constant follows each row."""

    def __init__(self, case: tuple[Kind, float | None, str, int, Optimizer], device: str) -> None:
        kind, limit, rounding, self.dim, self.optimizer = case
        precision = Precision(kind=kind, range=limit, rounding=rounding)  # type: ignore[arg-type]
        self.random = np.random.default_rng(self.dim)
        self.keys = self.random.integers(0, 2**64, SLOTS, dtype=np.uint64)
        self.tier = tc.DramTier(
            self.dim, self.optimizer, precision=precision, seed=SEED, table=TABLE, budget="1MB", threads=1
        )
        rows = self.random.normal(size=(SLOTS, self.dim + self.optimizer.state_floats(self.dim))) * 0.2
        rows[:, self.dim :] **= 2
        rows[3, : self.dim] = 0  # gives a row scale of zero
        self.tier.push(self.keys, rows.astype(np.float32))
        stored = self.tier.read_stored(self.keys)
        self.arena = torch.full((SLOTS, stored.shape[1] + 1), 7.25, device=device)
        self.arena[:, :-1] = torch.from_numpy(stored).to(device)
        keys = torch.from_numpy(self.keys.view(np.int64)).to(device)
        self.codec = Codec.of(precision, self.dim, keys, table_mix(SEED, TABLE))

    def parts(self, arena: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = self.codec.state(arena[:, :-1])
        return self.codec.weights(arena), state

    def check_tier(self) -> None:
        stored = torch.from_numpy(self.tier.read_stored(self.keys)).to(self.arena.device)
        same_bits(self.arena[:, :-1].contiguous(), stored)
        assert (self.arena[:, -1] == 7.25).all()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}")
def test_pooling(case: tuple[Kind, float | None, str, int, Optimizer], device: str) -> None:
    rows = Rows(case, device)
    weights, _ = rows.parts(rows.arena)
    slots = torch.from_numpy(rows.random.integers(0, SLOTS, 30).astype(np.int32)).to(device)
    offsets = random_offsets(30, rows.random, device)
    factors = floats((30,), rows.random, device)
    ids = rows.keys[slots.cpu().numpy()]
    for bag_offsets, id_weights, mean in [(offsets, factors, True), (offsets, None, False), (None, factors, False)]:
        pooled = pool_rows(weights, slots, bag_offsets, id_weights, mean=mean, codec=rows.codec)
        same_bits(pooled, pool_rows_reference(weights, slots, bag_offsets, id_weights, mean=mean, codec=rows.codec))
        kind = "none" if bag_offsets is None else "mean" if mean else "sum"
        lookup = dram.lookup(rows.tier, ids, None if bag_offsets is None else bag_offsets.cpu().numpy(), pooling=kind,
                                  weights=None if id_weights is None else id_weights.cpu().numpy())  # fmt: skip
        same_bits(pooled, torch.from_numpy(dram.pool(rows.tier, lookup)).to(device))
        dram.release(rows.tier, lookup, dirty=False)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}")
def test_steps(case: tuple[Kind, float | None, str, int, Optimizer], device: str) -> None:
    """One step by `update_rows` and one by its two halves, with a hot key."""
    rows = Rows(case, device)
    twin = rows.arena.clone()
    sizes = [1, 2, 3, 66, 1]
    slots = slots_of_sizes(sizes, rows.random, device) % SLOTS
    segments = exact_segments(slots)
    ids = rows.keys[slots.cpu().numpy()]
    for number in (1, 2):
        grads = floats((len(slots), rows.dim), rows.random, device)
        step = OptimizerStep.of(rows.optimizer, number)
        if number < 2:
            update_rows(*rows.parts(rows.arena), segments, grads, None, None, step, rows.codec)
        else:
            sums = sum_gradients(segments, grads, None, None)
            apply_gradients(*rows.parts(rows.arena), segments.slots[: len(sums)], sums, step, rows.codec)
        update_rows_reference(*rows.parts(twin), segments, grads, None, None, step, rows.codec)
        same_bits(rows.arena, twin)
        lookup = dram.lookup(rows.tier, ids)
        dram.update(rows.tier, lookup, grads.cpu().numpy(), step=number)
        dram.release(rows.tier, lookup)
        rows.check_tier()


def test_gradient_of_a_learned_scale(device: str) -> None:
    """Weights inside and outside the range: the kernels, plain torch and the DRAM tier give the same integer."""
    keys = np.arange(40, dtype=np.uint64)
    precision = Precision(kind="int4", range=0.3, scale_lr=0.01)
    tier = tc.DramTier(12, SGD(lr=0.1), precision=precision, seed=SEED, table=TABLE, budget="1MB", threads=1)
    random = np.random.default_rng(1)
    tier.push(keys, random.normal(size=(40, 12)).astype(np.float32))
    arena = torch.from_numpy(tier.read_stored(keys)).to(device)
    twin = arena.clone()
    of_slot = torch.from_numpy(keys.view(np.int64)).to(device)
    codec, other = (Codec.of(precision, 12, of_slot, table_mix(SEED, TABLE)) for _ in range(2))
    slots = slots_of_sizes([1, 2, 3, 70, 1], random, device)
    grads = floats((len(slots), 12), random, device)
    step = OptimizerStep.of(SGD(lr=0.1), 4, scale=0.5)
    update_rows(codec.weights(arena), None, exact_segments(slots), grads, None, None, step, codec)
    update_rows_reference(other.weights(twin), None, exact_segments(slots), grads, None, None, step, other)
    lookup = dram.lookup(tier, slots.cpu().numpy().astype(np.uint64))
    summed = dram.sum_gradients(tier, lookup, grads.cpu().numpy())
    total = tier.core.apply_gradients(lookup.slots, summed, tier.step(4, None, 0.5))
    assert codec.gradient is not None
    assert other.gradient is not None
    assert int(codec.gradient) == int(other.gradient) == total != 0


def test_weights_of_another_type_raise(device: str) -> None:
    rows = Rows(CASES[0], device)
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"weights are torch.int32: pass the codec"):
        pool_rows(rows.codec.weights(rows.arena), slots)
    with pytest.raises(ValueError, match=r"weights are torch.float32: this codec needs torch.int32"):
        pool_rows(rows.arena, slots, codec=rows.codec)
