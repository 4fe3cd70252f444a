"""Pins and gradients of the training loop: pins end with the autograd graph, and a missing step is reported."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.backends import BACKENDS, open_table, pinned
from helpers.ranks import run_ranks
from helpers.ssd import SMALL
from helpers.train import Reference, ReferenceBag, all_keys, budget_for, make_batches, one_torch_thread

import thermocline as tc
from thermocline.tiers.hbm import bytes_for

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread() -> None:
    one_torch_thread()


def small_table(backend: str, rows: int, folder: Path) -> tc.Table:
    """Open a table whose top tier holds `rows` rows, above a store."""
    optimizer = tc.SGD(lr=0.1)
    options: dict[str, Any] = {"ssd": folder / "rows", "ssd_mem": "32MB", "ssd_options": SMALL}
    if backend == "hbm":
        return open_table(backend, optimizer=optimizer, hbm=bytes_for(rows, 4), mem="1MB", **options)
    return open_table(backend, optimizer=optimizer, mem=budget_for(rows, 4, optimizer), **options)


def run_passes(
    bag: tc.EmbeddingBag, batches: Iterable[tc.Batch], kept: list[torch.Tensor] | None = None, *, backward: bool = False
) -> None:
    """Run forward passes, keep their outputs in `kept`, and run backward, without a step."""
    for batch in batches:
        pooled = bag(batch)
        if kept is not None:
            kept.append(pooled)
        if backward:
            pooled.sum().backward()


# ---- pins


@pytest.mark.parametrize("backend", BACKENDS)
def test_pins_end_with_the_graph(backend: str) -> None:
    """And the rows of a later batch are trained as if the pass had not been."""
    batches = make_batches(3)
    table = open_table(backend)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    loss = bag(batches[0]).pow(2).sum()
    assert pinned(table) > 0
    del loss
    if backend == "sharded":  # released by the next collective call
        bag(batches[2])
    bag(batches[1]).pow(2).sum().backward()
    twin(batches[1]).pow(2).sum().backward()
    table.step()
    reference.step()
    assert pinned(table) == 0
    reference.assert_equals(table, all_keys(batches))


@pytest.mark.parametrize("backend", ["dram", "hbm", "sharded"])
def test_forward_passes_without_backward_do_not_fill_the_budget(backend: str, tmp_path: Path) -> None:
    """A validation loop that forgets `torch.no_grad()`, far beyond the budget."""
    batches = make_batches(6, keys=3000, examples=5)
    rows = 3 * max(len(all_keys([batch])) for batch in batches)
    table = small_table(backend, rows, tmp_path)
    bag = tc.EmbeddingBag(table, 3)
    run_passes(bag, batches)
    table.step() if backend != "sharded" else table.discard_gradients()
    assert pinned(table) == 0
    table.close()


@pytest.mark.parametrize("backend", ["dram", "hbm", "sharded"])
def test_budget_error_names_live_graphs(backend: str, tmp_path: Path) -> None:
    batches = make_batches(6, keys=3000, examples=5)
    rows = 3 * max(len(all_keys([batch])) for batch in batches)
    table = small_table(backend, rows, tmp_path)
    bag = tc.EmbeddingBag(table, 3)
    kept: list[torch.Tensor] = []
    with pytest.raises(
        tc.BudgetError,
        match=r"table 'table': the rows of \d batches are pinned by autograd graphs of forward passes in training mode "
        r"without backward: evaluate under torch.no_grad\(\) or after bag.eval\(\), or drop the outputs and losses",
    ) as error:
        run_passes(bag, batches, kept)
    assert f"rows of {len(kept)} batches" in str(error.value)
    assert "Raise" not in str(error.value)
    del kept[:2], error
    gc.collect()
    bag(batches[-1]).sum().backward()
    table.step()
    assert pinned(table) == 0
    table.close()


def test_budget_error_of_a_pipeline_names_waiting_gradients(tmp_path: Path) -> None:
    batches = make_batches(6, keys=3000, examples=5)
    rows = 3 * max(len(all_keys([batch])) for batch in batches)
    table = small_table("dram", rows, tmp_path)
    table.accumulate = 6
    bag = tc.EmbeddingBag(table, 3)
    with pytest.raises(
        tc.BudgetError, match=r"rows of \d batches are pinned by gradients that wait for table.step\(\)"
    ):
        run_passes(bag, tc.prefetch(batches, table, depth=1), backward=True)
    table.discard_gradients()
    assert pinned(table) == 0
    table.close()


def test_budget_error_of_a_batch_that_is_too_large_is_unchanged() -> None:
    (small, large) = make_batches(1, keys=3000, examples=4) + make_batches(1, keys=3000, examples=200)
    optimizer = tc.SGD(lr=0.1)
    table = tc.Table(4, optimizer, mem=budget_for(60, 4, optimizer))
    bag = tc.EmbeddingBag(table, 3)
    kept = bag(small)
    with pytest.raises(tc.BudgetError, match=r"^DRAM tier.*needs a budget of about \d+ bytes \(tiers.mem\)"):
        bag(large)
    assert kept.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_dropped_by_other_threads(backend: str) -> None:
    table = open_table(backend)
    bag = tc.EmbeddingBag(table, 3)
    graphs = [[bag(batch)] for batch in make_batches(3)]
    threads = [threading.Thread(target=graph.clear) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if backend == "sharded":
        bag(make_batches(1)[0])
        table.backend._close_unused()  # type: ignore[attr-defined]
    assert pinned(table) == 0


def test_two_bags_share_one_plan_of_a_batch_without_pipeline() -> None:
    (batch,) = make_batches(1)
    table = open_table("dram")
    bags = tc.EmbeddingBag(table, 3), tc.EmbeddingBag(table, [1], pooling="mean")
    losses = [bag(batch).sum() for bag in bags]
    assert table.dram.stats().hits + table.dram.stats().misses == len(all_keys([batch]))
    for loss in losses:
        loss.backward()
    table.step()
    table.dram.check()


def forward_on_rank(groups: Any, folder: str) -> list[int]:
    """Run passes without backward on all ranks, then with backward on rank 0 only."""
    one_torch_thread()
    rank = groups.topology.rank
    batches = make_batches(8, keys=2000, examples=10, seed=rank)
    optimizer = tc.SGD(lr=0.1)
    options: dict[str, Any] = {"ssd": Path(folder) / "rows", "ssd_mem": "32MB", "ssd_options": SMALL}
    table = tc.ShardedTable(4, optimizer, mem=budget_for(250, 4, optimizer), groups=groups, **options)
    bag = tc.EmbeddingBag(table, 3)
    for batch in batches:
        bag(batch)
    after_own = table.dram.stats().pinned
    for batch in tc.prefetch(batches, table, depth=1):
        bag(batch)
    table.discard_gradients()
    first = bag(batches[0]).sum()
    if rank == 0:
        first.backward()
    del first
    bag(batches[1])
    keys = all_keys(make_batches(1, keys=2000, examples=10, seed=0))
    before = table.read(keys)
    table.step()
    changed = int((table.read(keys) != before).any(1).sum())
    table.dram.check()
    table.close()
    return [after_own, changed, len(keys)]


def test_graphs_over_ranks(tmp_path: Path) -> None:
    """Ranks agree on the batches that none of them uses; a batch that one rank trains stays open on all."""
    for pinned_rows, changed, keys in run_ranks(((0, 1),), forward_on_rank, str(tmp_path)):
        assert 0 < pinned_rows < 100
        assert changed == keys


# ---- the missing step


@pytest.mark.parametrize("prefetched", [False, True])
def test_missing_step_warns_once(prefetched: bool) -> None:
    batches = make_batches(6)
    table = open_table("dram")
    bag = tc.EmbeddingBag(table, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n, batch in enumerate(tc.prefetch(batches, table) if prefetched else batches):
            bag(batch).sum().backward()
            bag(batch).sum().backward()
            assert len(caught) == (n >= 2)
    assert caught[0].filename == __file__
    assert "table 'table': the gradients of 2 batches wait for table.step()" in str(caught[0].message)
    assert "set table.accumulate to the batches per step (it is 1)" in str(caught[0].message)


@pytest.mark.parametrize("accumulate", [1, 5])
def test_missing_step_warns_when_one_batch_is_used_again(accumulate: int) -> None:
    """The loop of a benchmark: the same Batch object in every iteration. Two passes per step are normal."""
    batch = make_batches(1)[0]
    table = open_table("dram", accumulate=accumulate)
    bags = [tc.EmbeddingBag(table, 3), tc.EmbeddingBag(table, 3)]
    passes = max(accumulate, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):  # with steps
            for _ in range(2):
                sum(bag(batch).sum() for bag in bags).backward()  # type: ignore[union-attr]
            table.step()
        assert not caught
        for n in range(passes + 3):
            sum(bag(batch).sum() for bag in bags).backward()  # type: ignore[union-attr]
            assert len(caught) == (n > passes)
    text = f"the gradients of {passes + 1} passes over one batch wait for table.step(), and another pass"
    assert text in str(caught[0].message)
    assert caught[0].filename == __file__
    table.discard_gradients()


@pytest.mark.parametrize("how", ["argument", "attribute", "step", "evaluation", "late"])
def test_no_warning(how: str) -> None:
    table = open_table("dram", accumulate=4 if how == "argument" else 1)
    if how == "attribute":
        table.accumulate = 4
    bag = tc.EmbeddingBag(table, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n, batch in enumerate(make_batches(9)):
            if how == "late" and n:
                table.step()
            loss = bag(batch).sum()
            if how != "evaluation":
                loss.backward()
            if how == "step" or n % 4 == 3:
                table.step()


def test_declared_accumulation_is_exceeded() -> None:
    table = open_table("dram", accumulate=3)
    bag = tc.EmbeddingBag(table, 3)
    with pytest.warns(UserWarning, match=r"gradients of 3 batches wait.*\(it is 3\)"):
        run_passes(bag, make_batches(4), backward=True)
    for wrong in (0, 1.5):
        with pytest.raises((ValueError, TypeError), match=rf"accumulate is {wrong}"):
            table.accumulate = wrong  # type: ignore[assignment]
    table.discard_gradients()


def test_the_trainer_declares_its_accumulation() -> None:
    ads = tc.SyntheticAds(keys=100, fields=3, batch_size=8, examples=80)
    table = open_table("dram")
    model = torch.nn.Sequential(tc.EmbeddingBag(table, 3), torch.nn.Flatten(0), torch.nn.Unflatten(0, (8, 12)))
    head = torch.nn.Sequential(*model, torch.nn.Linear(12, 1), torch.nn.Flatten(0))
    config = tc.TrainConfig(accumulate=5, display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tc.Trainer(head, torch.optim.SGD(head.parameters(), lr=0.1), config=config).fit(ads)
    assert table.accumulate == 5
    assert table.step_count == 2
