"""Gradients of weights per id, on every backend, against torch and against finite differences."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.backends import BACKENDS, open_table
from helpers.train import all_keys, bits, make_batches, one_torch_thread
from torch.nn.functional import embedding_bag

import thermocline as tc

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread() -> None:
    one_torch_thread()


def learned(batch: tc.Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 2, len(batch.ids), dtype=dtype, requires_grad=True)


def with_weights(batch: tc.Batch, weights: Any) -> tc.Batch:
    return tc.Batch(batch.ids, batch.offsets, batch.fields, weights, label=batch.label)


def expected_gradient(table: tc.Table, batch: tc.Batch, weights: torch.Tensor, mode: str, out: torch.Tensor) -> Any:
    """Return the gradient of `weights` in plain torch, given that of the pooled vectors."""
    keys = all_keys([batch])
    rows = torch.from_numpy(table.read(keys)[:, : table.dim])
    indices, offsets = torch.from_numpy(np.searchsorted(keys, batch.ids)), torch.from_numpy(batch.offsets)
    weights = weights.detach().requires_grad_()
    if mode == "sum":
        pooled = embedding_bag(indices, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    else:  # torch has weights for sums only
        pooled = torch.segment_reduce(rows[indices] * weights[:, None], "sum", offsets=offsets, axis=0)
        pooled = pooled / torch.from_numpy(np.maximum(np.diff(batch.offsets), 1)).float()[:, None]
    pooled.backward(out.reshape(pooled.shape).cpu())
    return weights.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_equals_torch(backend: str, mode: Any) -> None:
    """Weights of a batch that require grad, prefetched or not; the rows are trained as with plain weights."""
    batches = make_batches(3, keys=60, examples=4)
    table, plain = open_table(backend), open_table(backend)
    bag, twin = tc.EmbeddingBag(table, 3, pooling=mode), tc.EmbeddingBag(plain, 3, pooling=mode)
    weights = [learned(batch) for batch in batches]
    weighted = [with_weights(batch, weight) for batch, weight in zip(batches, weights, strict=True)]
    for n, batch in enumerate(itertools.chain(tc.prefetch(weighted[:2], table, depth=2), weighted[2:])):
        pooled = bag(batch)
        pooled.retain_grad()
        pooled.pow(2).sum().backward()
        expected = expected_gradient(table, batch, weights[n], mode, pooled.grad)
        torch.testing.assert_close(weights[n].grad, expected, rtol=1e-5, atol=1e-8)
        twin(with_weights(batches[n], weights[n].detach().numpy())).pow(2).sum().backward()
        table.step()
        plain.step()
    keys = all_keys(batches)
    assert bits(table.read(keys)) == bits(plain.read(keys))


@pytest.mark.parametrize("dim", [1, 4, 19])
def test_bits_of_every_backend_are_equal(dim: int) -> None:
    (batch,) = make_batches(1, keys=30, examples=3)
    gradients = []
    for backend in BACKENDS:
        table = open_table(backend, dim=dim)
        weights = learned(batch)
        outputs = [
            tc.EmbeddingBag(table, [1], pooling="none")(batch, weights),
            tc.EmbeddingBag(table, 3, pooling=["sum", "mean", "sum"])(batch, weights),
        ]
        sum(output.exp().sum() for output in outputs).backward()  # type: ignore[union-attr]
        table.discard_gradients()
        gradients.append(bits(weights.grad))
    assert gradients[0] != bits(torch.zeros(len(batch.ids)))
    assert gradients == gradients[:1] * len(gradients)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_gradcheck(pooling: Any) -> None:
    """The pooled vectors are linear in the weights: differences over a large interval are exact but for rounding."""
    (batch,) = make_batches(1, examples=3)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB", initial=tc.Uniform(scale=1.0))
    bag = tc.EmbeddingBag(table, [1] if pooling == "none" else [2, 0], pooling=pooling)
    weights = learned(batch, torch.float64)
    assert torch.autograd.gradcheck(lambda w: bag(batch, w).double(), weights, eps=0.25, atol=1e-5, rtol=1e-5)
    table.discard_gradients()
    table.dram.check()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_quantized_rows(precision: Any) -> None:
    (batch,) = make_batches(1)
    table = tc.Table(6, tc.SGD(lr=0.1), mem="1MB", precision=precision)
    weights = learned(batch)
    pooled = tc.EmbeddingBag(table, 3)(batch, weights)
    pooled.retain_grad()
    pooled.pow(2).sum().backward()
    assert pooled.grad is not None
    expected = expected_gradient(table, batch, weights, "sum", pooled.grad)
    torch.testing.assert_close(weights.grad, expected, rtol=1e-5, atol=1e-8)


def test_repeated_fields_and_several_bags() -> None:
    """Contributions of a field that is read more than once are added."""
    (batch,) = make_batches(1)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    weights = learned(batch)
    once = tc.EmbeddingBag(table, 3)(batch, weights).sum([0, 2])
    (parts,) = torch.autograd.grad(once[1] * 3 + once[2], weights)
    again = tc.EmbeddingBag(table, [1, 2, 1])(batch, weights).sum() + tc.EmbeddingBag(table, [1])(batch, weights).sum()
    again.backward()
    torch.testing.assert_close(weights.grad, parts)
    table.discard_gradients()


def test_dtype_of_the_gradient_and_jagged_weights() -> None:
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    batch = tc.Batch.from_jagged(["a", "b"], [7, 8, 9], [1, 1, 1, 0], weights)
    scaled = torch.tensor([[[1.0], [10.0]], [[100.0], [1000.0]]])
    (tc.EmbeddingBag(table, 2)(batch) * scaled).sum().backward()
    rows = table.read([7, 8, 9])[:, :4].sum(1)
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float64
    np.testing.assert_allclose(weights.grad.numpy(), rows * [1, 100, 10], rtol=1e-5)


def test_changed_batch_keeps_its_learned_weights() -> None:
    (batch,) = make_batches(1)
    weights = learned(batch)
    changed = dataclasses.replace(with_weights(batch, weights), label=None)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    (ready,) = tc.prefetch([copy.copy(changed)], table, training=False)
    tc.EmbeddingBag(table, 3)(ready).sum().backward()
    assert weights.grad is not None
    table.discard_gradients()
    with pytest.raises(ValueError, match=rf"weights have shape \(1,\): expected \({len(batch.ids)},\)"):
        with_weights(batch, torch.ones(1, requires_grad=True))


def test_weights_of_a_model_are_learned() -> None:
    """Weights that share memory with a parameter, which torch's optimizer changes before `table.step()`."""
    batches = make_batches(20, examples=16, keys=40)
    table, plain = (tc.Table(4, tc.SGD(lr=0.2), mem="1MB", initial=tc.Uniform(scale=1.0)) for _ in range(2))
    bag, twin = tc.EmbeddingBag(table, 3), tc.EmbeddingBag(plain, 3)
    factors = torch.nn.Parameter(torch.ones(max(len(batch.ids) for batch in batches)))
    optimizer = torch.optim.SGD([factors], lr=1.0)
    for batch, same in zip(tc.prefetch(batches, table), batches, strict=True):
        weights = factors[: len(batch.ids)]
        twin(same, weights.detach().clone()).pow(2).mean().backward()
        bag(batch, weights).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.step()
        plain.step()
    assert (factors[:50] < 1).all()
    keys = all_keys(batches)
    assert bits(table.read(keys)) == bits(plain.read(keys))


def test_no_gradient_is_computed_unless_required(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = make_batches(1, weighted=True)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")

    def refuse(*_: object) -> Callable[..., Any]:
        raise AssertionError("called")

    monkeypatch.setattr(table.backend, "weight_gradient", refuse)
    monkeypatch.setattr(table.backend, "with_weights", refuse)
    tc.EmbeddingBag(table, 3)(batch).sum().backward()
    table.step()


def test_errors() -> None:
    (batch,) = make_batches(1)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    bag, weights = tc.EmbeddingBag(table, 3), learned(batch)
    with pytest.raises(ValueError, match=rf"weights have shape \(2,\): expected \({len(batch.ids)},\), one per id"):
        bag(batch, torch.ones(2))
    pooled = bag(batch, weights)
    (twice,) = torch.autograd.grad(pooled.pow(2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        twice.sum().backward()
    late = bag(batch, weights).sum()
    table.step()
    with pytest.raises(RuntimeError, match=r"backward to weights per id after table.step\(\).*before the step"):
        late.backward()
    table.dram.check()


def test_weights_of_a_jagged_batch_are_in_the_order_of_its_values() -> None:
    """Field-major, as in a KeyedJaggedTensor: given to the batch or to the bag, in outputs and gradients."""
    keys, values, lengths = ["a", "b"], [7, 8, 9, 10, 11], [2, 1, 0, 2]  # a: [7, 8], [9]; b: [], [10, 11]
    outputs, gradients = [], []
    for to_bag in (False, True):
        table = tc.Table(2, tc.SGD(lr=0.1), mem="1MB", initial=tc.Uniform(scale=1.0))
        bag = tc.EmbeddingBag(table, ["b", "a"])
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
        batch = tc.Batch.from_jagged(keys, values, lengths, None if to_bag else weights)
        assert batch.order is not None
        assert batch.ids.tolist() == [values[i] for i in batch.order] == [7, 8, 9, 10, 11]
        pooled = bag(batch, weights) if to_bag else bag(batch)
        (pooled * torch.arange(8.0).view(2, 2, 2)).sum().backward()
        assert weights.grad is not None
        outputs.append(pooled.detach())
        gradients.append(weights.grad)
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    rows = torch.from_numpy(table.read([7, 8, 9, 10, 11])[:, :2])  # before the step
    assert torch.allclose(outputs[1][0, 1], 1 * rows[0] + 2 * rows[1])
    assert torch.allclose(outputs[1][1, 0], 4 * rows[3] + 5 * rows[4])
    assert torch.allclose(gradients[1], (rows * torch.tensor([[2.0, 3], [2, 3], [6, 7], [4, 5], [4, 5]])).sum(1))
