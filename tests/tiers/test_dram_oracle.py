"""Random sequences of `DramTier` calls compared with the reference table: after every call both hold the same bits.

Budgets hold hundreds to thousands of rows, so that most batches evict. The files of the store are tiny.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import dram
from helpers.ssd import SMALL
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import thermocline as tc
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table_spec import Policy

OPTIMIZERS: list[Optimizer] = [tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.RowWiseAdagrad(lr=0.1), tc.Adam(lr=0.01)]
PRECISIONS = [
    tc.Precision(),
    tc.Precision(),  # drawn twice as often
    tc.Precision(kind="int8"),
    tc.Precision(kind="int3", range=1.0),
    tc.Precision(kind="bf16", rounding="nearest"),
]
keys_near = st.one_of(st.integers(0, 300), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1]))
batches = st.tuples(st.integers(0, 2000), st.integers(0, 200), st.integers(0, 2**32))


class TierMachine(RuleBasedStateMachine):
    """Trains, reads, pushes and evicts; with a store also flushes, commits and restores the last commit."""

    store: tc.SsdStore | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="thermocline-tier-"))
        self.step = 0
        self.pinned: list[tuple[Any, Any]] = []
        self.seen: set[int] = set()

    @initialize(
        dim=st.sampled_from([1, 4, 7, 16]),
        optimizer=st.sampled_from(OPTIMIZERS),
        policy=st.sampled_from(["lru_lfu", "lru", "lfu"]),
        threads=st.integers(1, 4),
        shards=st.sampled_from([None, 1, 2, 16]),
        rows=st.sampled_from([300, 700, 3000]),
        with_store=st.booleans(),
        precision=st.sampled_from(PRECISIONS),
    )
    def create(
        self,
        dim: int,
        optimizer: Optimizer,
        policy: Policy,
        threads: int,
        shards: int | None,
        rows: int,
        with_store: bool,
        precision: tc.Precision,
    ) -> None:
        self.options: dict[str, Any] = {"policy": policy, "threads": threads, "shards": shards, "seed": 3, "table": 4}
        self.options["precision"] = precision
        self.table = tc.ReferenceTable(dim, optimizer, seed=3, table=4, precision=precision)
        self.floats = len(self.table.initial_row(0))
        self.row_bytes = precision.row_bytes(dim, optimizer)
        if with_store:
            self.options["budget"] = 40000 + rows * (self.row_bytes + 60)
            self.store = tc.SsdStore.open(self.folder / "s", row_bytes=self.row_bytes, **SMALL)
            self.store.commit()
            self.committed: tuple[dict[int, Any], dict[int, Any], int] = ({}, {}, 0)
        else:
            self.options["budget"] = "8MB"
        self.create_tier()

    def create_tier(self) -> None:
        self.tier = tc.DramTier(self.table.dim, self.table.optimizer, store=self.store, **self.options)

    def assert_same(self, keys: Any) -> None:
        got, want = self.tier.read(np.array(keys, np.uint64)), self.table.read(keys)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))

    def ids_of(self, batch: tuple[int, int, int]) -> Any:
        first, count, seed = batch
        random = np.random.default_rng(seed)
        ids = (first + random.zipf(1.5, count)) % 2500
        if count:
            ids[random.integers(0, count)] = 2**63 - 1
        ids = ids.astype(np.uint64)
        self.seen.update(ids.tolist())
        return ids

    @rule(batch=batches, pooling=st.sampled_from(["sum", "mean", "none"]), weighted=st.booleans())
    def train(self, batch: tuple[int, int, int], pooling: Pooling, weighted: bool) -> None:
        ids = self.ids_of(batch)
        random = np.random.default_rng(batch[2] + 1)
        weights = random.normal(size=len(ids)).astype(np.float32) if weighted else None
        offsets = None
        if pooling != "none":
            offsets = np.sort(np.concatenate([[0], random.integers(0, len(ids) + 1, 5), [len(ids)]]))
        lookup = dram.lookup(self.tier, ids, offsets, pooling=pooling, weights=weights)
        out = dram.pool(self.tier, lookup)
        np.testing.assert_array_equal(
            out.view(np.uint32), self.table.pool(ids, offsets, pooling, weights).view(np.uint32)
        )
        grad = random.normal(size=out.shape).astype(np.float32)
        self.step += 1
        dram.update(self.tier, lookup, grad, step=self.step)
        dram.release(self.tier, lookup)
        self.table.update(ids, grad, offsets, pooling, weights, step=self.step)

    @rule(keys=st.lists(keys_near, max_size=30))
    def read(self, keys: list[int]) -> None:
        self.assert_same(keys)

    @rule(keys=st.lists(keys_near, max_size=30), seed=st.integers(0, 2**32))
    def push(self, keys: list[int], seed: int) -> None:
        rows = np.random.default_rng(seed).normal(size=(len(keys), self.floats)).astype(np.float32) ** 2
        self.tier.push(np.array(keys, np.uint64), rows)
        self.table.push(keys, rows)
        self.seen.update(keys)

    @precondition(lambda self: len(self.pinned) < 3)
    @rule(keys=st.lists(keys_near, max_size=15, unique=True))
    def pin(self, keys: list[int]) -> None:
        self.pinned.append((keys, self.tier.pull(np.array(keys, np.uint64))))

    @precondition(lambda self: self.pinned)
    @rule(dirty=st.booleans())
    def unpin(self, dirty: bool) -> None:
        keys, slots = self.pinned.pop(0)
        want = self.table.read(keys)
        np.testing.assert_array_equal(self.tier.rows(slots).view(np.uint32), want.view(np.uint32))
        self.tier.unpin(slots, dirty=dirty)

    @rule()
    def exceed_budget(self) -> None:
        with pytest.raises(tc.BudgetError, match=f"holds {self.tier.capacity} rows"):
            self.tier.pull(np.arange(10**6, 10**6 + self.tier.capacity + 1, dtype=np.uint64))

    @rule(rows=st.integers(0, 400))
    def write_ahead(self, rows: int) -> None:
        self.tier.write_ahead(rows)

    @precondition(lambda self: self.store)
    @rule()
    def commit(self) -> None:
        assert self.store is not None
        self.tier.flush()
        assert self.tier.stats().dirty == 0
        self.store.commit()
        rows = {key: row.copy() for key, row in self.table.rows.items()}
        self.committed = (rows, dict(self.table.scales), self.step)

    @precondition(lambda self: self.store)
    @rule()
    def restore_last_commit(self) -> None:
        assert self.store is not None
        self.store.close()
        self.store = tc.SsdStore.open(self.folder / "s", **SMALL)
        rows, scales, self.step = self.committed
        self.table.scales = dict(scales)
        self.table.rows = {key: row.copy() for key, row in rows.items()}
        self.pinned.clear()
        self.create_tier()

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check(idle=not self.pinned)
            stats = self.tier.stats()
            assert stats.bytes_total <= stats.budget
            assert stats.free + stats.resident == stats.capacity

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            for _, slots in self.pinned:
                self.tier.unpin(slots)
            self.tier.check()
            self.assert_same(sorted(self.seen))
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder)


class TestTier(TierMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=25)


@pytest.mark.faults
class TestTierManyTimes(TierMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=25)
