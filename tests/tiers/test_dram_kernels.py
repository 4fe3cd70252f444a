"""The fused CPU kernels give the bits of the reference table for every dim, optimizer, pooling and thread count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import dram
from hypothesis import given, strategies as st

import thermocline as tc
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.initializers import Initial
from thermocline.embedding.optimizers import Optimizer

OPTIMIZERS: list[Optimizer] = [
    tc.SGD(lr=0.1),
    tc.Adagrad(lr=0.1, initial_accumulator=0.1),
    tc.RowWiseAdagrad(lr=0.1),
    tc.Adam(lr=0.01, weight_decay=0.01),
    tc.PartialRowWiseAdam(lr=0.01, weight_decay=0.01),
]
# Code paths: fixed sizes, sizes with a vector and a tail, sizes below a vector.
DIMS = [1, 2, 3, 4, 7, 8, 10, 16, 19, 32, 64, 100, 128, 130]
POOLINGS: list[Pooling] = ["sum", "mean", "none"]


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


class Pair:
    """A tier and a reference table that train on the same batches; every result is compared."""

    def __init__(self, dim: int, optimizer: Optimizer, *, threads: int = 2, initial: Initial | None = None) -> None:
        self.tier = tc.DramTier(dim, optimizer, budget="4MB", threads=threads, seed=5, table=6, initial=initial)
        self.table = tc.ReferenceTable(dim, optimizer, seed=5, table=6, initial=initial)
        self.random = np.random.default_rng(dim)
        self.step = 0

    def train(
        self,
        ids: Any,
        offsets: Any,
        pooling: Pooling,
        weighted: bool,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        fused: bool = True,
    ) -> None:
        ids = np.array(ids, np.uint64)
        weights = self.random.normal(size=len(ids)).astype(np.float32) if weighted else None
        self.step += 1
        same_bits(
            dram.evaluate(self.tier, ids, offsets, pooling=pooling, weights=weights),
            self.pooled(ids, offsets, pooling, weights),
        )
        lookup = dram.lookup(self.tier, ids, offsets, pooling=pooling, weights=weights)
        out = dram.pool(self.tier, lookup)
        same_bits(out, self.pooled(ids, offsets, pooling, weights))
        grad = self.random.normal(size=out.shape).astype(np.float32)
        expected = self.table.weight_gradient(ids, grad, offsets, pooling)
        same_bits(dram.weight_gradient(self.tier, lookup, grad), expected)
        rows = self.tier.read(lookup.working_set.keys)
        same_bits(dram.weight_gradient(self.tier, lookup, grad, rows), expected)
        if fused:
            dram.update(self.tier, lookup, grad, step=self.step, lr=lr, scale=scale)
        else:
            sums = dram.sum_gradients(self.tier, lookup, grad)
            self.tier.apply_gradients(lookup.slots, sums, step=self.step, lr=lr, scale=scale)
        dram.release(self.tier, lookup)
        self.table.update(ids, grad, offsets, pooling, weights, step=self.step, lr=lr, scale=scale)
        keys = [*np.unique(ids), 2**63]
        same_bits(self.tier.read(np.array(keys, np.uint64)), self.table.read(keys))

    def pooled(self, ids: Any, offsets: Any, pooling: Pooling, weights: Any) -> Any:
        return self.table.pool(ids, offsets, pooling, weights)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_dim_and_optimizer(dim: int, optimizer: Optimizer) -> None:
    pair = Pair(dim, optimizer)
    for pooling in POOLINGS:
        for weighted in (False, True):
            ids = pair.random.integers(0, 20, 60)
            offsets = None if pooling == "none" else [0, 0, 5, 6, 6, 31, 60, 60]
            pair.train(ids, offsets, pooling, weighted, fused=not weighted)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 200, 5000])
def test_block_boundaries(count: int) -> None:
    # The batch has one key; the last count is split over threads.
    pair = Pair(6, tc.Adagrad(lr=0.1), threads=3)
    pair.train([9] * count, None, "none", False)
    pair.train([9] * count, [0, count // 2, count], "mean", True, fused=False)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_hot_and_cold_keys_together(threads: int) -> None:
    pair = Pair(16, tc.RowWiseAdagrad(lr=0.1), threads=threads)
    ids = pair.random.zipf(1.2, 12000) % 500
    offsets = np.sort(np.concatenate([[0], pair.random.integers(0, 12000, 999), [12000]]))
    pair.train(ids, offsets, "sum", False)
    pair.train(ids[:9000], None, "none", True)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_empty_batches(pooling: Pooling) -> None:
    pair = Pair(4, tc.Adam())
    pair.train([], None if pooling == "none" else [0], pooling, False)
    if pooling != "none":
        pair.train([], [0, 0, 0], pooling, True)


@pytest.mark.parametrize("initial", [tc.Uniform(scale=0.3), tc.Normal(scale=2.0), tc.Constant(value=-1.5)])
def test_initial_rows(initial: Initial) -> None:
    keys = np.array([0, 1, 2**32, 2**63, 2**64 - 1], np.uint64)
    for seed, table in ((0, 0), (2**64 - 1, 7), (3, 2**64 - 1)):
        optimizer = tc.Adagrad(initial_accumulator=0.25)
        tier = tc.DramTier(13, optimizer, budget="1MB", seed=seed, table=table, initial=initial)
        want = tc.ReferenceTable(13, optimizer, seed=seed, table=table, initial=initial).read(keys)
        same_bits(tier.initial_rows(keys), want)
        same_bits(tier.read(keys), want)
        slots = tier.pull(keys)
        same_bits(tier.rows(slots), want)
        tier.unpin(slots)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-45, 1e-38, 3e38, np.inf, np.nan])
def test_special_values(special: float) -> None:
    # Zeros of both signs, denormals, overflow, infinities and NaN.
    for optimizer in OPTIMIZERS:
        pair = Pair(17, optimizer, initial=tc.Constant(value=-0.0))
        ids = np.array([1, 2, 1, 3], np.uint64)
        grad = np.full((2, 17), special, np.float32)
        grad[1] = -grad[1]
        lookup = dram.lookup(pair.tier, ids, [0, 2, 4])
        dram.update(pair.tier, lookup, grad)
        dram.release(pair.tier, lookup)
        with np.errstate(all="ignore"):
            pair.table.update(ids, grad, [0, 2, 4])
        got, want = pair.tier.read(ids), pair.table.read(ids)
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)  # the bits of a NaN depend on the instruction set
        np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@given(data=st.data())
def test_any_batches(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 40), "dim")
    optimizer = data.draw(st.sampled_from(OPTIMIZERS), "optimizer")
    pair = Pair(dim, optimizer, threads=data.draw(st.integers(1, 4), "threads"))
    key = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))
    for _ in range(data.draw(st.integers(1, 3), "batches")):
        ids = data.draw(st.lists(key, max_size=90), "ids")
        pooling = data.draw(st.sampled_from(POOLINGS), "pooling")
        cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8), "cuts")
        offsets = None if pooling == "none" else [0, *sorted(cuts), len(ids)]
        pair.train(
            ids,
            offsets,
            pooling,
            data.draw(st.booleans(), "weighted"),
            lr=data.draw(st.sampled_from([None, 0.3]), "lr"),
            scale=data.draw(st.sampled_from([1.0, 0.125, 0.1]), "scale"),
            fused=data.draw(st.booleans(), "fused"),
        )
    pair.tier.check()


def test_every_instruction_set_gives_the_same_bits() -> None:
    # A process selects its instruction set once, by THERMOCLINE_ISA.
    program = """
import sys; sys.path.append(sys.argv[1])
import numpy as np, thermocline as tc, hashlib
from helpers import dram
digest = hashlib.sha256()
for dim in (1, 4, 8, 10, 16, 37, 64, 128):
    for optimizer in (tc.SGD(), tc.Adagrad(), tc.RowWiseAdagrad(), tc.Adam(), tc.PartialRowWiseAdam()):
        tier = tc.DramTier(dim, optimizer, budget="4MB")
        random = np.random.default_rng(dim)
        for step in range(1, 4):
            ids = random.integers(0, 300, 2000).astype(np.uint64)
            lookup = dram.lookup(tier, ids, np.arange(0, 2001, 20), pooling="mean")
            out = dram.pool(tier, lookup)
            dram.update(tier, lookup, random.normal(size=out.shape).astype(np.float32), step=step)
            dram.release(tier, lookup)
            digest.update(out.tobytes())
        digest.update(tier.read(np.arange(300, dtype=np.uint64)).tobytes())
print(tier.stats().kernels, digest.hexdigest())
"""
    seen = {}
    for isa in ("base", "avx2", "avx512"):
        result = subprocess.run(
            [sys.executable, "-c", program, str(Path(__file__).parents[1])],
            env={**os.environ, "THERMOCLINE_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        )
        name, digest = result.stdout.split()
        seen[name] = digest
    assert "base" in seen
    assert len(set(seen.values())) == 1, seen
