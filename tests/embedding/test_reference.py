"""`tc.ReferenceTable`: small cases computed by hand, and comparison with torch.optim."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import thermocline as tc
from thermocline.embedding import reference, reference_codec
from thermocline.embedding.optimizers import Optimizer


def test_mix64_is_the_published_murmur3_finaliser() -> None:
    assert reference_codec.mix64(0) == 0
    assert reference_codec.mix64(1) == 0xB456BCFC34C2CB2C
    assert reference_codec.mix64(2**64 - 1) == 0x64B5720B4B825F21


def test_initial_rows_never_change() -> None:
    # Rows that are not stored are computed from the key: a change would break every existing table.
    uniform = reference.initial_weights(tc.Uniform(scale=1.0), 1, 2, 3, 3)
    normal = reference.initial_weights(tc.Normal(scale=1.0), 1, 2, 3, 3)
    assert uniform.tobytes().hex() == "823adfbe9a26c9be2856e7bd"
    assert normal.tobytes().hex() == "00ec6a3f805ccabf004663bf"
    assert reference.initial_weights(tc.Constant(value=0.5), 1, 2, 3, 2).tolist() == [0.5, 0.5]


def test_blocks_of_64_are_summed_separately() -> None:
    # 1 + 2**-24 rounds to 1: added one by one the small terms are lost, summed as a block they are not.
    small = np.float32(2.0**-24)
    gradients = [np.ones(1, np.float32)] + [np.zeros(1, np.float32)] * 63 + [np.full(1, small)] * 64
    assert reference.sum_in_blocks(gradients)[0] == np.float32(1 + 64 * 2.0**-24)
    assert reference.sum_in_blocks(gradients[:1] + gradients[64:])[0] == np.float32(1 + 2.0**-24)


def test_mean_of_squares() -> None:
    for dim in (1, 2, 15, 16, 17, 40):
        g = np.arange(1, dim + 1, dtype=np.float32)
        assert reference.mean_of_squares(g) == pytest.approx(sum(i * i for i in range(1, dim + 1)) / dim, rel=1e-6)


def test_pooling_by_hand() -> None:
    table = tc.ReferenceTable(2, tc.SGD())
    table.push([1, 2, 3], np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    ids = [1, 2, 1, 3]
    assert table.pool(ids, [0, 3, 3, 4]).tolist() == [[5, 8], [0, 0], [5, 6]]
    assert table.pool(ids, [0, 2, 2, 4], "mean").tolist() == [[2, 3], [0, 0], [3, 4]]
    assert table.pool(ids, None, "none", [1, 2, 3, 4]).tolist() == [[1, 2], [6, 8], [3, 6], [20, 24]]
    assert table.pool(ids, [0, 2, 4], "mean", [2, 2, 4, 2]).tolist() == [[4, 6], [7, 10]]


def test_update_by_hand() -> None:
    table = tc.ReferenceTable(1, tc.SGD(lr=0.5), initial=tc.Constant(value=10))
    table.update([7, 8, 7], np.array([[2], [4]], np.float32), [0, 2, 3])
    assert table.read([7, 8, 9]).tolist() == [[7], [9], [10]]  # 7 has gradients 2 + 4
    table.update([7, 8], np.array([[4]], np.float32), [0, 2], "mean", lr=1.0)
    assert table.read([7, 8]).tolist() == [[5], [7]]
    table.update([7, 7], np.array([[1], [1]], np.float32), None, "none", [1, 3], lr=1.0, scale=0.5)
    assert table.read([7]).tolist() == [[3]]
    assert sorted(table.rows) == [7, 8]  # 9 was only read


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tc.SGD(lr=0.1), {}),
        (tc.SGD(lr=0.1, weight_decay=0.01), {"weight_decay": 0.01}),
        (tc.Adagrad(lr=0.1), {}),
        (
            tc.Adagrad(lr=0.1, eps=1e-6, initial_accumulator=0.3, weight_decay=0.01),
            {"eps": 1e-6, "initial_accumulator_value": 0.3, "weight_decay": 0.01},
        ),
        (tc.Adam(lr=0.01), {}),
        (
            tc.Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.02),
            {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.02},
        ),
    ],
    ids=["sgd", "sgd-decay", "adagrad", "adagrad-options", "adam", "adam-options"],
)
def test_optimizers_equal_torch(ours: Optimizer, theirs: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: optimizers are NOT compared with torch.optim")
    dim, keys = 5, list(range(6))
    table = tc.ReferenceTable(dim, ours)
    weights = torch.tensor(table.read(keys)[:, :dim].copy(), requires_grad=True)
    optimizer = getattr(torch.optim, type(ours).__name__)([weights], lr=ours.lr, **theirs)
    random = np.random.default_rng(0)
    for step in range(1, 30):
        grad = random.normal(size=(len(keys), dim)).astype(np.float32)
        table.update(keys, grad, None, "none", step=step)
        weights.grad = torch.tensor(grad)
        optimizer.step()
    np.testing.assert_allclose(table.read(keys)[:, :dim], weights.detach().numpy(), rtol=2e-5, atol=1e-6)


def test_rowwise_adagrad_formula() -> None:
    table = tc.ReferenceTable(3, tc.RowWiseAdagrad(lr=0.1, eps=0.01, initial_accumulator=0.5))
    w, s = table.read([1])[0, :3].astype(np.float64), 0.5
    for grad in ([1.0, 2.0, 3.0], [0.5, 0.0, -1.0]):
        table.update([1], np.array([grad], np.float32), None, "none")
        s += sum(g * g for g in grad) / 3
        w -= 0.1 / (math.sqrt(s) + 0.01) * np.array(grad)
    np.testing.assert_allclose(table.read([1])[0], [*w, s], rtol=1e-6)


def test_partial_row_wise_adam_formula() -> None:
    """The update of FBGEMM's PARTIAL_ROWWISE_ADAM, in double precision."""
    table = tc.ReferenceTable(3, tc.PartialRowWiseAdam(lr=0.1, beta1=0.8, beta2=0.9, eps=0.01))
    w, m, v = table.read([1])[0, :3].astype(np.float64), np.zeros(3), 0.0
    for step, grad in enumerate(([1.0, 2.0, 3.0], [0.5, 0.0, -1.0], [-2.0, 0.25, 0.0]), 1):
        table.update([1], np.array([grad], np.float32), None, "none", step=step)
        m = 0.8 * m + 0.2 * np.array(grad)
        v = 0.9 * v + 0.1 * sum(g * g for g in grad) / 3
        w -= 0.1 * (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.9**step)) + 0.01)
    np.testing.assert_allclose(table.read([1])[0], [*w, *m, v], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: tc.SGD(lr=-1.0), "SGD.lr"),
        (lambda: tc.SGD(lr=True), "SGD.lr"),
        (lambda: tc.Adagrad(eps=math.nan), "Adagrad.eps"),
        (lambda: tc.RowWiseAdagrad(weight_decay=math.inf), "RowWiseAdagrad.weight_decay"),
        (lambda: tc.Adam(beta2=1.0), "Adam.beta2"),
        (lambda: tc.Uniform(scale=math.inf), "Uniform.scale"),
        (lambda: tc.Constant(value="1"), "Constant.value"),  # type: ignore[arg-type]
    ],
)
def test_invalid_options_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        make()
