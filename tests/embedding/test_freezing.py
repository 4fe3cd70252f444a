"""`requires_grad_(False)` of bags and tables: no update, no insertion, on every backend and in every order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.backends import BACKENDS, open_table, pinned, row_count
from helpers.ranks import run_ranks
from helpers.ssd import SMALL
from helpers.train import Reference, ReferenceBag, all_keys, bits, budget_for, make_batches, one_torch_thread

import thermocline as tc

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread() -> None:
    one_torch_thread()


def train_first(table: tc.Table, bag: tc.EmbeddingBag, batch: tc.Batch) -> None:
    bag(batch).pow(2).sum().backward()
    table.step()


@pytest.mark.parametrize(
    ("backend", "prefetched", "how"),
    [
        *itertools.product(["dram", "sharded"], [False, True], ["bag", "table", "eval"]),
        *itertools.product(["hbm", "reference"], [False, True], ["bag"]),
    ],
)
def test_frozen_rows_are_only_read(backend: str, prefetched: bool, how: str) -> None:
    """Dense layers behind a frozen bag are trained; unseen keys read as their initial row and are not inserted."""
    batches = make_batches(3, keys=200)
    table = open_table(backend)
    bag, reference = tc.EmbeddingBag(table, 3, pooling="mean"), Reference(table)
    twin = ReferenceBag(reference, 3, "mean")
    train_first(table, bag, batches[0])
    twin(batches[0]).pow(2).sum().backward()
    reference.step()
    keys = all_keys(batches)
    before, rows = table.read(keys), row_count(table)
    if how == "eval":
        bag.eval()
    else:
        frozen: Any = bag if how == "bag" else table
        assert frozen.requires_grad_(False) is frozen
    dense = torch.nn.Linear(4, 1)
    for n, batch in enumerate(tc.prefetch(batches, table, depth=3, training=how != "eval") if prefetched else batches):
        with torch.set_grad_enabled(how != "eval"):
            pooled = bag(batch)
        assert bits(pooled) == bits(twin(batches[n]))
        assert not pooled.requires_grad
        dense(pooled).sum().backward()
        assert how == "eval" or table.step(max_norm=1.0) == 0.0
    assert dense.weight.grad is not None
    assert dense.weight.grad.abs().sum() > 0
    assert bits(table.read(keys)) == bits(before)
    assert row_count(table) == rows
    assert pinned(table) == 0
    assert table.step_count == 1
    assert sum(len(saved) for saved, _ in table.rows()) == rows


@pytest.mark.parametrize(("backend", "depth"), [("dram", 1), *((backend, 4) for backend in BACKENDS)])
def test_one_frozen_and_one_trained_bag(backend: str, depth: int) -> None:
    """The frozen bag sees what the trained one wrote up to the preceding step, however far the pipeline is ahead."""
    batches = make_batches(4, keys=40)
    table = open_table(backend)
    reference = Reference(table)
    frozen, trained = tc.EmbeddingBag(table, [0, 1]).requires_grad_(False), tc.EmbeddingBag(table, [1, 2])
    twins = ReferenceBag(reference, [0, 1]), ReferenceBag(reference, [1, 2])
    for batch, plain in zip(tc.prefetch(batches, table, depth=depth), batches, strict=True):
        still = frozen(batch)
        assert bits(still) == bits(twins[0](plain))
        (trained(batch).exp() * still).sum().backward()
        (twins[1](plain).exp() * twins[0](plain).detach()).sum().backward()
        table.step()
        reference.step()
    keys = all_keys(batches)
    reference.assert_equals(table, keys)
    trained_keys = {int(key) for batch in batches for key in batch.select([1, 2])[0]}
    assert row_count(table) == len(trained_keys) < len(keys)


@pytest.mark.parametrize(("backend", "depth"), [("dram", 1), ("dram", 5), ("hbm", 5), ("reference", 5)])
def test_changes_while_batches_are_in_flight(backend: str, depth: int) -> None:
    """A call counts for the forward passes after it, whatever was planned before: no bit depends on the depth."""
    batches = make_batches(12, keys=60)
    table = open_table(backend)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    other, other_twin = tc.EmbeddingBag(table, [2], pooling="mean"), ReferenceBag(reference, [2], "mean")
    for n, (batch, plain) in enumerate(zip(tc.prefetch(batches, table, depth=depth), batches, strict=True)):
        if n % 3 == 0:
            bag.requires_grad_(n % 2 == 1)
        if n == 7:
            table.requires_grad_(False)
        if n == 9:
            table.requires_grad_(True)
        pooled, expected = [bag(batch), other(batch)], [twin(plain), other_twin(plain)]
        assert [bits(p) for p in pooled] == [bits(e) for e in expected]
        if n in (7, 8):
            assert not any(p.requires_grad for p in pooled)
            table.step()
            continue
        if not bag.requires_grad:
            expected[0] = expected[0].detach()
        sum(p.pow(2).sum() for p in pooled).backward()  # type: ignore[union-attr]
        sum(e.pow(2).sum() for e in expected).backward()  # type: ignore[union-attr]
        table.step()
        reference.step()
    reference.assert_equals(table, all_keys(batches))
    assert {int(key) for keys, _ in table.rows() for key in keys} == set(reference.table.rows)
    assert pinned(table) == 0
    assert table.step_count == 10


def test_frozen_rows_on_ssd_are_read_ahead(tmp_path: Path) -> None:
    """More rows than fit DRAM: a frozen table pins none of them."""
    batches = make_batches(8, keys=400, examples=20)
    optimizer = tc.SGD(lr=0.1)
    table = tc.Table(
        4, optimizer, mem=budget_for(110, 4, optimizer), ssd=tmp_path / "rows", ssd_mem="32MB", ssd_options=SMALL
    )
    bag = tc.EmbeddingBag(table, 3)
    for batch in tc.prefetch(batches[:4], table):
        train_first(table, bag, batch)
    bag.requires_grad_(False)
    expected = [bits(bag(batch)) for batch in batches]
    stats = table.dram.stats()
    with tc.prefetch(batches, table, depth=3) as source:
        for n, batch in enumerate(source):
            assert ("frozen", table) in batch.prepared
            assert bits(bag(batch)) == expected[n]
    after = table.dram.stats()
    assert (after.misses, after.evictions, after.pinned) == (stats.misses, stats.evictions, 0)
    table.close()


def test_weights_learn_behind_a_frozen_bag() -> None:
    (batch,) = make_batches(1)
    table = open_table("dram")
    bag = tc.EmbeddingBag(table, 3).requires_grad_(False)
    weights = torch.ones(len(batch.ids), requires_grad=True)
    bag(batch, weights).sum().backward()
    keys = all_keys([batch])
    sums = table.read(keys)[:, :4].sum(1)
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad.numpy(), sums[np.searchsorted(keys, batch.ids)], rtol=1e-5, atol=1e-7)
    assert table.pending_gradients == row_count(table) == 0


def test_gradients_of_a_deleted_bag_are_applied() -> None:
    (batch,) = make_batches(1)
    table = open_table("dram")
    frozen = tc.EmbeddingBag(table, [0]).requires_grad_(False)
    tc.EmbeddingBag(table, 3)(batch).sum().backward()
    assert table.frozen
    assert not frozen.requires_grad
    table.step()
    assert table.step_count == 1
    assert table.dram.stats().dirty == len(all_keys([batch]))


def test_freezing_with_pending_gradients_is_an_error() -> None:
    (batch,) = make_batches(1)
    table = open_table("dram")
    bag = tc.EmbeddingBag(table, 3)
    bag(batch).sum().backward()
    for target in (bag, table):
        with pytest.raises(tc.ThermoclineError, match=r"gradients that no step has applied: call table.step\(\) or"):
            target.requires_grad_(False)  # type: ignore[attr-defined]
    table.step()
    assert not bag.requires_grad_(False).requires_grad


def freeze_on_rank(groups: Any) -> dict[str, Any]:
    """Train one bag and read another, with one rank that has fewer batches; then freeze all."""
    one_torch_thread()
    rank = groups.topology.rank
    batches = make_batches(4 - 2 * rank, keys=40, seed=rank)
    table = tc.ShardedTable(4, tc.Adagrad(lr=0.1), mem="1MB", groups=groups)
    frozen, trained = tc.EmbeddingBag(table, [0]).requires_grad_(False), tc.EmbeddingBag(table, [1, 2])
    refused, reads = "", []
    for batch in tc.prefetch(batches, table, depth=3):
        if batch.examples:  # the other rank still takes part in the collective read
            reads.append(bits(frozen(batch)))
            trained(batch).pow(2).sum().backward()
        table.step()
    trained.requires_grad_(False)
    steps, rows = table.step_count, table.dram.stats().resident
    keys = all_keys([batch for r in range(2) for batch in make_batches(4, keys=40, seed=r)])
    before = bits(table.read(keys))
    for batch in tc.prefetch(batches, table, depth=3):
        if batch.examples:
            assert not trained(batch).requires_grad
        table.step()
    assert table.step_count == steps == 4
    assert table.dram.stats().resident == rows
    assert bits(table.read(keys)) == before
    try:
        with tc.prefetch(batches, table):
            trained.requires_grad_(True)
    except tc.ThermoclineError as error:
        refused = str(error)
    table.dram.check()
    table.close()
    return {"refused": refused, "reads": len(reads), "rows": before}


def test_frozen_bags_over_ranks() -> None:
    results = run_ranks(((0, 1),), freeze_on_rank)
    assert [result["reads"] for result in results] == [4, 2]
    assert results[0]["rows"] == results[1]["rows"]
    for result in results:
        assert "requires_grad_() while a pipeline over ranks is open" in result["refused"]
