"""torch.compile keeps bags in its graph, with fullgraph=True, and computes what the model computes without it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.backends import open_table, pinned, row_count
from helpers.train import one_torch_thread
from torch._dynamo.testing import CompileCounterWithBackend

import thermocline as tc
from thermocline.batch import batch_of_handle
from thermocline.embedding.graph_op import _graphs, outside_graphs

EXAMPLES, DIM = 16, 4


@pytest.fixture(autouse=True)
def _fresh() -> None:
    one_torch_thread()
    torch.compiler.reset()


def test_batches_made_before_torch_is_imported_are_outside_of_graphs() -> None:
    batch = batches(1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        early = tc.Batch(batch.ids, batch.offsets, 3, names=batch.names)
    assert early.handle is None
    bag = tc.EmbeddingBag(tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB"), 3)
    assert torch.equal(torch.compile(lambda b: bag(b) * 2, backend="eager")(early), bag(batch) * 2)


def batches(count: int = 4, examples: int = EXAMPLES, **more: Any) -> list[tc.Batch]:
    random = np.random.default_rng(3)
    made = []
    for n in range(count):
        sizes = random.integers(0, 4, examples * 3)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        made.append(tc.Batch(random.integers(0, 50, offsets[-1]), offsets, 3, names=("a", "b", "c"), **more))
        made[-1].dense = torch.from_numpy(random.integers(0, 50, (examples, 5)))
        made[-1].label = torch.full((examples,), n / count)
    return made


class Model(torch.nn.Module):
    """Two bags on one table, with sums and means, by number and by name; the modules of `tc.nn`; learned weights."""

    def __init__(self, backend: str = "dram") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = open_table(backend, dim=DIM, optimizer=tc.Adagrad(lr=0.5))
        self.bag = tc.EmbeddingBag(self.table, 3, pooling=["sum", "mean", "sum"])
        self.named = tc.EmbeddingBag(self.table, ["c", "a"])
        self.items = open_table(backend, dim=DIM, optimizer=tc.SGD(lr=0.5), name="items")
        self.plain = tc.nn.EmbeddingBag(self.items, "sum", padding_idx=7)
        self.largest = tc.nn.EmbeddingBag(self.items, "max", include_last_offset=True)
        self.embedding = tc.nn.Embedding(self.items, padding_idx=3)
        self.weights = torch.nn.Parameter(torch.linspace(0.5, 1.5, EXAMPLES * 5).view(EXAMPLES, 5))
        self.net = torch.nn.Sequential(torch.nn.Linear(5 * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        ids = batch.dense
        pooled = torch.cat([self.bag(batch), self.named(batch)], 1).flatten(1)
        plain = self.plain(ids, None, self.weights[: len(ids)])
        largest = self.largest(ids.flatten(), torch.arange(len(ids) + 1) * 5)
        more = (plain + largest + self.embedding(ids).sum(1)).sum(1)
        logits: torch.Tensor = self.net(pooled).squeeze(1) + 0.01 * more
        return logits


def train(run: Any, model: Model, data: list[tc.Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the losses, and dense parameters and rows."""
    optimizer = torch.optim.SGD([model.weights, *model.net.parameters()], lr=0.1)
    losses = []
    for batch in data:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(run(batch), batch.label)
        loss.backward()
        model.table.step()
        model.items.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    rows = [torch.from_numpy(table.read(np.arange(50))) for table in (model.table, model.items)]
    return torch.stack(losses), [p.detach() for p in (model.weights, *model.net.parameters())] + rows


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_trains_with_the_same_bits(backend: str) -> None:
    expected = Model()
    losses, state = train(expected, expected, batches())
    model = Model()
    counter = CompileCounterWithBackend(backend)
    compiled_losses, compiled_state = train(torch.compile(model, backend=counter, fullgraph=True), model, batches())
    assert torch.equal(losses, compiled_losses)
    assert all(torch.equal(a, b) for a, b in zip(state, compiled_state, strict=True))
    assert counter.frame_count == 1, "a new batch compiles nothing again"
    assert not _graphs
    assert pinned(model.table) == 0


def test_fullgraph_on_the_gpu_backend_has_the_same_bits() -> None:
    results = []
    for compiled in (False, True):
        table = open_table("hbm", dim=DIM, optimizer=tc.Adagrad(lr=0.5))
        bag = tc.EmbeddingBag(table, 3, pooling="mean")

        def model(batch: tc.Batch, bag: Any = bag) -> torch.Tensor:
            return bag(batch).tanh().sum()

        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for batch in batches(2, 4):
            run(batch).backward()
            table.step()
        results.append(table.read(np.arange(50)).tobytes())
    assert results[0] == results[1]


def test_inductor_is_close() -> None:
    """With bags that share a table and memory that inductor reuses between the backward passes of two bags."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        table = tc.Table(DIM, tc.Adagrad(lr=0.5), mem="1MB")
        bags = [tc.EmbeddingBag(table, 3), tc.EmbeddingBag(table, ["c", "a", "b"], pooling="mean")]

        def model(batch: tc.Batch, bags: list[Any] = bags) -> torch.Tensor:
            return (bags[0](batch).tanh() * 3 + bags[1](batch).cos()).sum((1, 2))

        run = torch.compile(model, fullgraph=True) if compiled else model
        for batch in batches():
            run(batch).square().mean().backward()
            table.step()
        results.append(torch.from_numpy(table.read(np.arange(50))))
        assert pinned(table) == 0
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_equal_calls_add_their_gradients() -> None:
    results = []
    for compiled in (False, True):
        table = tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB")
        bag = tc.EmbeddingBag(table, 3)

        def model(batch: tc.Batch, bag: Any = bag) -> torch.Tensor:
            return bag(batch).square().sum() + bag(batch).sin().sum()

        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(batches(1)[0]).backward()
        table.step()
        results.append(torch.from_numpy(table.read(np.arange(50))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_batches_of_other_sizes_and_evaluation() -> None:
    model = Model()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for examples in (EXAMPLES, 5, 9):
        batch = batches(1, examples)[0]
        assert torch.equal(run(batch), model(batch))
    model.eval()
    rows = row_count(model.table)
    for context in (torch.no_grad, torch.inference_mode):
        for batch in batches(2):
            with context():
                assert torch.equal(run(batch), model(batch))
    assert row_count(model.table) == rows
    out = run(batches(1)[0])
    with pytest.raises(RuntimeError, match="rows read for evaluation"):
        out.sum().backward()
    del out
    gc.collect()
    assert not _graphs


def test_pins_end_with_the_graph_and_a_graph_may_be_retained() -> None:
    model = Model()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = run(batches(1)[0])
    assert pinned(model.table) > 0
    del out
    gc.collect()
    assert pinned(model.table) == 0
    assert not _graphs

    out = run(batches(1)[0])
    calls = len(_graphs)
    out.sum().backward(retain_graph=True)
    once = model.table.pending_gradients
    out.sum().backward()
    assert (once, calls) == (3, 5)
    assert model.table.pending_gradients == 6


def test_frozen_bags_stay_frozen() -> None:
    table = tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB")
    bag = tc.EmbeddingBag(table, 3)
    run = torch.compile(lambda batch: bag(batch).square(), backend="eager", fullgraph=True)
    batch = batches(1)[0]
    run(batch).sum().backward()
    table.step()
    before = table.read(np.arange(50)).tobytes()
    bag.requires_grad_(False)
    other = batches(2)[1]
    assert torch.equal(run(other).detach(), bag(other).square())
    run(other).sum().backward()
    assert table.pending_gradients == 0
    assert table.read(np.arange(50)).tobytes() == before


def test_one_vector_per_id() -> None:
    table = tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB")
    bag = tc.EmbeddingBag(table, 1, pooling="none")
    run = torch.compile(lambda batch: bag(batch) * 2, backend="aot_eager", fullgraph=True)
    for ids in (6, 3, 9):
        batch = tc.Batch(np.arange(ids), [0, 2, ids], 1)
        assert torch.equal(run(batch), bag(batch) * 2)


def number_of(batch: tc.Batch) -> int:
    assert batch.handle is not None
    return int(batch.handle.number)


def test_copies_of_batches_are_batches_of_their_own() -> None:
    batch = batches(1)[0]
    copies = [copy.copy(batch), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)]
    assert len({number_of(each) for each in [batch, *copies]}) == 4
    for each in [batch, *copies]:
        assert batch_of_handle(number_of(each)) is each


def test_a_copied_bag_is_a_module_of_its_own() -> None:
    table = tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB")
    bag = tc.EmbeddingBag(table, 3)
    other = copy.copy(bag)
    assert other.graph_number != bag.graph_number


def test_graphs_end_before_bags_where_asked_or_where_weights_of_the_batch_are_learned() -> None:
    model = Model()
    data = batches(1)[0]
    run = torch.compile(model, backend="eager", fullgraph=True)
    with outside_graphs(), pytest.raises(torch._dynamo.exc.Unsupported):
        run(data)
    with outside_graphs():
        assert torch.equal(torch.compile(model, backend="eager")(data), model(data))

    learned = torch.ones(len(data.ids), requires_grad=True)
    weighted = tc.Batch(data.ids, data.offsets, 3, learned)
    bag = tc.EmbeddingBag(tc.Table(DIM, tc.SGD(lr=0.5), mem="1MB"), 3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda batch: bag(batch).sum(), backend="eager", fullgraph=True)(weighted)
    torch.compile(lambda batch: bag(batch).sum(), backend="eager")(weighted).backward()
    assert learned.grad is not None
    assert learned.grad.abs().sum() > 0
