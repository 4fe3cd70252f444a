"""`tc.EmbeddingBag`: shapes, autograd, training, evaluation and use in custom loops."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import Net, Reference, ReferenceBag, all_keys, bits, loss_of, make_batches, one_torch_thread

import thermocline as tc

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread() -> None:
    one_torch_thread()


@pytest.fixture
def table() -> tc.Table:
    return tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")


def torch_bag(table: tc.Table, keys: Any, mode: str) -> torch.nn.EmbeddingBag:
    weights = torch.from_numpy(table.read(keys)[:, : table.dim])
    return torch.nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode=mode, include_last_offset=True)


# ---- values and gradients


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("mean", False), ("sum", True)])
def test_equals_torch_embedding_bag(mode: Any, weighted: bool) -> None:
    """Compare pooled vectors, their gradients and the sparse gradient of a step."""
    (batch,) = make_batches(1, weighted=weighted)
    keys = all_keys([batch])
    plain = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    bag, twin = tc.EmbeddingBag(plain, 3, pooling=mode), torch_bag(plain, keys, mode)
    factors = None if batch.weights is None else torch.from_numpy(batch.weights)
    pooled = bag(batch)
    indices = torch.from_numpy(np.searchsorted(keys, batch.ids))
    expected = twin(indices, torch.from_numpy(batch.offsets), factors).view(len(batch), 3, 4)
    torch.testing.assert_close(pooled, expected)
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    pooled.retain_grad()
    expected.retain_grad()
    head(pooled).pow(2).sum().backward()
    dense = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    head.zero_grad()
    head(expected).pow(2).sum().backward()
    torch.testing.assert_close(pooled.grad, expected.grad)
    for a, b in zip(dense, head.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)
    before = plain.read(keys)
    plain.step()
    assert twin.weight.grad is not None
    np.testing.assert_allclose(before - plain.read(keys), twin.weight.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_pooling_none_gives_a_vector_per_id(table: tc.Table) -> None:
    """It trains together with a pooled bag over the same field."""
    batches = make_batches(4, weighted=True, keys=50)
    reference = Reference(table)
    bags = tc.EmbeddingBag(table, [1], pooling="none"), tc.EmbeddingBag(table, 3, pooling="mean")
    twins = ReferenceBag(reference, [1], "none"), ReferenceBag(reference, 3, "mean")
    for prefetched, batch in zip(tc.prefetch(batches, table), batches, strict=True):
        ids = bags[0](prefetched)
        assert ids.shape == (len(batch.select([1])[0]), 4)
        (ids.exp().sum() + bags[1](prefetched).pow(2).sum()).backward()
        (twins[0](batch).exp().sum() + twins[1](batch).pow(2).sum()).backward()
        table.step()
        reference.step()
    reference.assert_equals(table, all_keys(batches))


def test_shapes_and_order_of_fields(table: tc.Table) -> None:
    (batch,) = make_batches(1, fields=4)
    mixed = tc.EmbeddingBag(table, [3, 1, 1, 0], pooling=["mean", "sum", "mean", "mean"])
    alone = [tc.EmbeddingBag(table, [f], pooling=k) for f, k in ((3, "mean"), (1, "sum"), (1, "mean"), (0, "mean"))]
    pooled = mixed(batch)
    assert pooled.shape == (8, 4, 4)
    assert pooled.dtype == torch.float32
    assert bits(pooled) == bits(torch.cat([bag(batch) for bag in alone], 1))
    table.discard_gradients()
    table.dram.check()


def test_empty_batch_and_empty_bags(table: tc.Table) -> None:
    bag = tc.EmbeddingBag(table, 3, pooling=["sum", "mean", "sum"])
    empty_batch = tc.Batch([], [0], 3)
    empty_bags = tc.Batch([], np.zeros(7, np.int64), 3)
    for batch, shape in ((empty_batch, (0, 3, 4)), (empty_bags, (2, 3, 4))):
        for source in ([batch], tc.prefetch([batch], table), tc.prefetch([batch, batch], table, pull_window=2)):
            for ready in source:
                pooled = bag(ready)
                assert pooled.shape == shape
                assert not pooled.any()
                pooled.sum().backward()
                table.step()
    assert table.step_count == 8
    assert table.dram.stats().resident == 0
    table.dram.check()


def test_vectors_can_be_changed_in_place() -> None:
    (batch,) = make_batches(1)
    keys, rows = all_keys([batch]), []
    for relu in (torch.relu, torch.relu_):
        table = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
        pooled = relu(tc.EmbeddingBag(table, 3)(batch))
        assert pooled.shape == (len(batch), 3, 4)
        pooled.square().sum().backward()
        table.step()
        rows.append(bits(table.read(keys)))
    assert rows[0] == rows[1] != bits(tc.Table(4, tc.SGD(lr=1.0), mem="1MB").read(keys))


def test_bag_used_twice_in_one_forward(table: tc.Table) -> None:
    batches = make_batches(3, keys=30)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    for prefetched, batch in zip(tc.prefetch(batches, table), batches, strict=True):
        (bag(prefetched).exp() * bag(prefetched)).sum().backward()
        (twin(batch).exp() * twin(batch)).sum().backward()
        table.step()
        reference.step()
    reference.assert_equals(table, all_keys(batches))


def test_gradients_are_summed_in_the_order_of_the_forwards() -> None:
    """The order of the backward passes changes no bit."""
    batches = make_batches(2, keys=20, examples=40)

    def train(order: list[int]) -> bytes:
        table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
        bag = tc.EmbeddingBag(table, 3)
        losses = [bag(batch).pow(2).sum() * 0.37 for batch in batches]
        for n in order:
            losses[n].backward()
        table.step()
        return bits(table.read(all_keys(batches)))

    assert train([0, 1]) == train([1, 0])


def test_backward_twice_through_one_graph() -> None:
    (batch,) = make_batches(1)
    sgd = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    keys = all_keys([batch])
    before = sgd.read(keys)
    loss = tc.EmbeddingBag(sgd, 3)(batch).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    sgd.step()
    uses = np.array([(batch.ids == key).sum() for key in keys], np.float32)
    np.testing.assert_allclose(before - sgd.read(keys), 2 * uses[:, None].repeat(4, 1), rtol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_gradient_shared_with_a_dense_parameter(shared: bool) -> None:
    """Clipping the parameter's gradient in place must not silently change the gradient of the table."""
    (batch,) = make_batches(1, examples=1)
    sgd = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    keys = all_keys([batch])
    before = sgd.read(keys)
    bias = torch.nn.Parameter(torch.zeros(1, 3, 4))
    ((bias.view(1, 3, 4) if shared else bias) + tc.EmbeddingBag(sgd, 3)(batch)).mul(1.0).sum().backward()
    torch.nn.utils.clip_grad_norm_([bias], 1e-6)
    if shared:  # the parameter's gradient is a view of the same tensor
        with pytest.raises(
            RuntimeError, match=r"changed in place between backward and step.*call table.step\(\) before"
        ):
            sgd.step()
        assert bits(sgd.read(keys)) == bits(before)
    else:
        sgd.step()
        uses = np.array([(batch.ids == key).sum() for key in keys], np.float32)
        assert bits(before - uses[:, None]) == bits(sgd.read(keys))
    sgd.dram.check()


# ---- evaluation


@pytest.mark.parametrize("prefetched", [False, True])
def test_evaluation_inserts_nothing_and_reads_unseen_keys_as_initial(table: tc.Table, prefetched: bool) -> None:
    batches = make_batches(4)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3, pooling="mean"), ReferenceBag(reference, 3, "mean")
    bag(batches[0]).sum().backward()
    twin(batches[0]).sum().backward()
    table.step()
    reference.step()
    before = table.dram.stats()
    bag.eval()
    seen = set(batches[0].ids.tolist())
    source = tc.prefetch(batches, table, training=False, pull_window=2) if prefetched else batches
    with torch.no_grad():
        for n, batch in enumerate(source):
            assert n == 0 or set(batch.ids.tolist()) - seen
            assert bits(bag(batch)) == bits(twin(batches[n]))
            assert (table in batch.prepared) == prefetched
    after = table.dram.stats()
    assert (after.resident, after.misses, after.pinned) == (before.resident, before.misses, 0)
    assert after.initialised == before.initialised
    table.dram.check()


@pytest.mark.parametrize("how", ["by hand", "for evaluation", "for training"])
def test_backward_in_evaluation_is_an_error(table: tc.Table, how: str) -> None:
    (batch,) = make_batches(1)
    bag = tc.EmbeddingBag(table, 3).eval()
    source = iter([batch]) if how == "by hand" else tc.prefetch([batch], table, training=how == "for training")
    batch = next(source)
    loss = bag(batch).sum()
    with pytest.raises(RuntimeError, match=r"rows read for evaluation: call model.train\(\)"):
        loss.backward()
    before = table.read(all_keys([batch]))
    table.step()
    assert bits(table.read(all_keys([batch]))) == bits(before)


def test_no_grad_in_training_mode_only_reads(table: tc.Table) -> None:
    (batch,) = make_batches(1)
    bag = tc.EmbeddingBag(table, 3)
    with torch.no_grad():
        pooled = bag(batch)
    assert table.dram.stats().resident == 0
    assert bits(pooled) == bits(bag(batch))


def test_training_on_a_batch_prefetched_for_evaluation(table: tc.Table) -> None:
    batches = make_batches(3)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    for n, batch in enumerate(tc.prefetch(batches, table, training=False)):
        bag(batch).pow(2).sum().backward()
        twin(batches[n]).pow(2).sum().backward()
        table.step()
        reference.step()
    reference.assert_equals(table, all_keys(batches[:1]))
    table.dram.check()


def test_evaluation_in_the_middle_of_training(table: tc.Table) -> None:
    """Evaluating other batches while the training pipeline is ahead changes no bit."""
    batches, others = make_batches(8), make_batches(8, seed=1)

    def train(own: tc.Table, evaluate: bool) -> None:
        model = Net([tc.EmbeddingBag(own, 3)], 12)
        for n, batch in enumerate(tc.prefetch(batches, own, depth=4)):
            loss_of(model, batch).backward()
            if evaluate and n % 2:
                model.eval()
                with torch.no_grad():
                    for other in tc.prefetch(others[n : n + 1], own, training=False):
                        model(other)
                model.train()
            own.step()

    twin = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
    train(table, True)
    train(twin, False)
    keys = all_keys([*batches, *others])
    assert bits(table.read(keys)) == bits(twin.read(keys))
    assert table.dram.stats().resident == len(all_keys(batches))


# ---- custom loops


def test_backward_after_the_next_batch_is_an_error(table: tc.Table) -> None:
    bag = tc.EmbeddingBag(table, 3)
    kept = [bag(batch).sum() for batch in tc.prefetch(make_batches(3), table, depth=1)]
    for loss in kept:
        with pytest.raises(RuntimeError, match="released: call it before the loop requests the next batch"):
            loss.backward()
    table.dram.check()


def test_batch_of_an_earlier_iteration_can_be_reused(table: tc.Table) -> None:
    batches = make_batches(3)
    reference = Reference(table)
    bag, twin = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    kept: list[tc.Batch] = []
    for batch in tc.prefetch(batches, table):
        kept.append(batch)
        bag(kept[0]).pow(2).sum().backward()
        twin(batches[0]).pow(2).sum().backward()
        table.step()
        reference.step()
    reference.assert_equals(table, all_keys(batches))
    table.dram.check()


def test_bag_created_while_the_pipeline_runs(table: tc.Table) -> None:
    batches = make_batches(4)
    reference = Reference(table)
    bags, twins = [tc.EmbeddingBag(table, [0])], [ReferenceBag(reference, [0])]
    for prefetched, batch in zip(tc.prefetch(batches, table, depth=4), batches, strict=True):
        sum(bag(prefetched).pow(2).sum() for bag in bags).backward()  # type: ignore[union-attr]
        sum(twin(batch).pow(2).sum() for twin in twins).backward()  # type: ignore[union-attr]
        table.step()
        reference.step()
        bags.append(tc.EmbeddingBag(table, [1, 2], pooling="mean"))
        twins.append(ReferenceBag(reference, [1, 2], "mean"))
    reference.assert_equals(table, all_keys(batches))
    table.dram.check()


def test_deleted_bag_is_not_planned(table: tc.Table) -> None:
    (batch,) = make_batches(1)
    bag, other = tc.EmbeddingBag(table, [0]), tc.EmbeddingBag(table, [1])
    assert len(table.inputs(batch)) == 2
    del other
    gc.collect()
    assert [spec.fields for spec in table.inputs(batch)] == [bag.fields]


def test_custom_module_with_torch_optimizers() -> None:
    """A table is not a parameter: dense optimizers and state dicts do not contain it."""

    class TwoTowers(torch.nn.Module):
        def __init__(self, users: tc.Table, items: tc.Table) -> None:
            super().__init__()
            self.user = torch.nn.Sequential(tc.EmbeddingBag(users, [0, 1]), torch.nn.Flatten(), torch.nn.Linear(8, 3))
            self.item = torch.nn.Sequential(tc.EmbeddingBag(items, [2]), torch.nn.Flatten(), torch.nn.Linear(6, 3))

        def forward(self, batch: tc.Batch) -> torch.Tensor:
            return (self.user(batch) * self.item(batch)).sum(1)

    tables = tc.Table(4, tc.Adam(lr=0.05), mem="1MB", name="u"), tc.Table(6, tc.SGD(lr=0.5), mem="1MB", name="i")
    model = TwoTowers(*tables)
    assert len(list(model.parameters())) == 4
    assert all("table" not in name for name in model.state_dict())
    dense = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(dense, 20, 0.5)
    batches = make_batches(1, examples=64)
    losses = []
    for batch in tc.prefetch(batches * 40, *tables):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for table in tables:
            table.step()
        dense.step()
        schedule.step()
        dense.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


def test_invalid_arguments(table: tc.Table) -> None:
    for fields, pooling, match in (
        ([], "sum", "0 fields"),
        (2, ["sum"], "2 fields with 1 poolings"),
        (1, "max", "'max'"),
        (2, "none", "use a separate bag for each"),
    ):
        with pytest.raises(ValueError, match=match):
            tc.EmbeddingBag(table, fields, pooling=pooling)  # type: ignore[arg-type]
    assert "table='table', fields=2, dim=4" in repr(tc.EmbeddingBag(table, [3, 1]))
    (batch,) = make_batches(1)
    with pytest.raises(IndexError, match="field 9 is out of range: the batch has 3 fields"):
        tc.EmbeddingBag(table, [9])(batch)
    table.dram.check()
