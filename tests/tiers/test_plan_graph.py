"""Recorded planning against planning without recordings: the same slots, rows and bits, with misses and evictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import all_keys, bits

import thermocline as tc
from thermocline.kernels import INTERPRETED
from thermocline.tiers.hbm import bytes_for
from thermocline.tiers.hbm_backend import HbmBackend

DEVICE: Any = "interpreter" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def equal_batches(count: int, sizes: list[int], *, keys: int = 60, weighted: bool = False) -> list[tc.Batch]:
    """Batches of 2 fields with equal numbers of ids, distributed over the bags differently."""
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(count):
        offsets = np.concatenate([[0], np.cumsum(rng.permutation(sizes))])
        ids = rng.integers(0, keys, offsets[-1]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        weights = rng.normal(size=offsets[-1]).astype(np.float32) if weighted else None
        batches.append(tc.Batch(ids, offsets, 2, weights))
    return batches


def train(
    batches: list[tc.Batch],
    bags: list[tuple[Any, Any]],
    *,
    recorded: bool,
    rows: int = 40,
    inline: bool = False,
    depth: int = 2,
    **options: Any,
) -> tuple[tc.Table, HbmBackend]:
    table = tc.Table(4, tc.Adam(lr=0.01), hbm=bytes_for(rows, 12), mem="4MB", device=DEVICE, **options)
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    backend.plan_graphs.enabled = recorded
    backend.plans_on_device = inline
    modules = [tc.EmbeddingBag(table, fields, pooling=pooling) for fields, pooling in bags]
    for batch in tc.prefetch(batches, table, depth=depth, pull_window=2):
        loss = sum((module(batch) ** 2).sum() * (n + 1) for n, module in enumerate(modules))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        table.step()
    return table, backend


@pytest.mark.parametrize(
    ("sizes", "bags", "weighted"),
    [
        ([1] * 8, [(2, "sum")], False),  # one id per bag: no offsets
        ([0, 1, 2, 3, 1, 5], [(2, "mean")], True),
        ([2] * 6, [([0], "mean"), ([1], "none")], False),  # 6 ids each
    ],
)
def test_equal_to_planning_without_recordings(sizes: list[int], bags: Any, weighted: bool) -> None:
    batches = equal_batches(9, sizes, weighted=weighted)  # the last window has one batch
    keys = all_keys(batches)
    plain, _ = train(batches, bags, recorded=False)
    table, backend = train(batches, bags, recorded=True)
    (graph,) = backend.plan_graphs._graphs.values()
    assert any(recording is not None for recording in graph._recordings.values())
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    assert plain.hbm is not None
    table.hbm.check()
    stats, expected = table.hbm.stats(), plain.hbm.stats()
    assert (stats.ids, stats.rows, stats.resident) == (expected.ids, expected.rows, expected.resident)
    assert stats.evictions > 0


@pytest.mark.parametrize("rows", [40, 120])
def test_planning_on_the_callers_thread(rows: int) -> None:
    """The stages run ahead on the caller's thread; a window that does not fit yet waits; rows load on a thread."""
    batches = equal_batches(12, [1, 0, 2, 3], keys=200)
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=rows)
    table, _ = train(batches, [(2, "sum")], recorded=True, rows=rows, inline=True, depth=6)
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    table.hbm.check()


def test_batches_of_other_shapes_are_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than recordings, and shapes that occur once."""
    monkeypatch.setattr("thermocline.tiers.plan_graph._MAX_GRAPHS", 1)
    batches = [*equal_batches(4, [1] * 8), *equal_batches(4, [3] * 4), *equal_batches(2, [1] * 6)]
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=60)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=60)
    assert len(backend.plan_graphs._graphs) == 1
    assert bits(table.read(keys)) == bits(plain.read(keys))


def test_a_full_index_is_rebuilt() -> None:
    """A window whose keys the index has no entry for is planned again after a rebuild."""
    batches = equal_batches(30, [1] * 8, keys=4000)
    table, _ = train(batches, [(2, "sum")], recorded=True, rows=20)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=20)
    assert table.hbm is not None
    assert table.hbm.stats().rebuilds > 0
    assert bits(table.read(all_keys(batches))) == bits(plain.read(all_keys(batches)))


def test_a_window_over_budget_changes_nothing() -> None:
    batches = equal_batches(6, [1] * 8, keys=8)
    wide = equal_batches(5, [1] * 8, keys=10**6)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=18)
    bag = tc.EmbeddingBag(table, 2)
    assert table.hbm is not None
    for batch in wide[:3]:  # the recording of windows of one batch
        table.prepare(batch)
    assert len(backend.plan_graphs._graphs) == 2
    keys = all_keys([*batches, *wide])
    before = bits(table.read(keys))
    held = [table.prepare(batch) for batch in wide[:2]]
    with pytest.raises(tc.BudgetError, match="holds 18 rows"):
        table.prepare(wide[4])
    del held
    table.hbm.check()
    assert bits(table.read(keys)) == before
    assert bag(wide[4]).shape == (4, 2, 4)
