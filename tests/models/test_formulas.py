"""Each model against a reference in NumPy: logits, and gradients of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.model import REFERENCES, make_batch, reference, small_model

import thermocline as tc
from thermocline.models import NAMES

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no dense": {"dense": 0},
    "mean, no batch norm": {"pooling": "mean", "batch_norm": False},
    "no hidden layers": {"hidden": (), "bottom": ()},
    "two fields": {"fields": 2, "dense": 0},
    "cat": {"interaction": "cat"},
}


def test_every_model_has_a_reference() -> None:
    assert tuple(REFERENCES) == NAMES


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_match_the_reference(name: str, variant: str, training: bool) -> None:
    settings = VARIANTS[variant]
    model = small_model(name, **settings)
    batch = make_batch(fields=settings.get("fields", 4), dense=settings.get("dense", 3))
    expected = reference(model, batch, training=training)
    model.train(training)
    logits = model(batch)
    assert (logits.shape, logits.dtype) == ((len(batch),), torch.float32)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_row_gradients_match_the_reference(name: str) -> None:
    """An SGD step with lr=1 subtracts the gradient: the finite difference of the reference loss."""
    model = small_model(name)
    table = model.features.bag.table
    batch = make_batch()
    key = int(np.bincount(batch.ids.astype(int)).argmax())

    def loss_at(element: int, by: float) -> float:
        logits = reference(model, batch, training=True, change=(key, element, by))
        return float(np.mean(np.logaddexp(0, logits) - batch.label.numpy() * logits))

    delta = 1e-4
    slopes = [(loss_at(e, delta) - loss_at(e, -delta)) / (2 * delta) for e in range(table.dim)]
    keys = np.unique(batch.ids)
    before = table.read(keys)
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    table.step()
    change = before - table.read(keys)
    np.testing.assert_allclose(change[keys == key][0], slopes, rtol=1e-2, atol=1e-5)
    assert (np.abs(change) > 0).any(1).all(), "every row of the batch has a gradient"
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert name.endswith("bias") or parameter.grad.abs().sum() > 0, name  # batch norm cancels the biases before it


def test_dropout_is_active_only_in_training() -> None:
    for name in NAMES:
        model = small_model(name, dropout=0.5)
        batch = make_batch(64)
        torch.manual_seed(0)
        first, second = model(batch), model(batch)
        assert torch.equal(first, second) == (name in ("lr", "fm"))
        model.eval()
        assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str) -> None:
    model = small_model(name)
    batch = make_batch(16)
    exact = model(batch).detach()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.3)
    torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label).backward()
    table: tc.Table = model.features.bag.table
    assert table.pending_gradients == 1
    table.discard_gradients()
