"""Learning-rate schedules, plateaus and gradient clipping, for dense parameters and tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.run import Ads, Model, World

import thermocline as tc
from thermocline.config.lr_schedule import Schedule
from thermocline.training.callbacks import Callback
from thermocline.training.trainer import TrainConfig, Trainer


def test_schedule_values_and_errors() -> None:
    assert [Schedule()(n) for n in (0, 10)] == [1, 1]
    warm = Schedule(warmup_steps=4)
    assert [warm(n) for n in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    steps = Schedule(kind="step", decay_steps=3, factor=0.5, floor=0.2, warmup_steps=1)
    assert [steps(n) for n in range(12)] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2]
    cosine = Schedule(kind="cosine", decay_steps=8, floor=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * min(n, 8) / 8)) / 2 for n in range(12)]
    assert [cosine(n) for n in range(12)] == pytest.approx(expected)
    for wrong in ({"kind": "linear"}, {"kind": "cosine"}, {"warmup_steps": -1}, {"factor": 2.0}, {"floor": -1.0}):
        with pytest.raises(ValueError, match=rf"Schedule\.({next(iter(wrong))}|decay_steps) is"):
            Schedule(**wrong)  # type: ignore[arg-type]


def test_schedule_multiplies_dense_and_sparse_rates() -> None:
    world = World(None)
    seen: list[tuple[float, ...]] = []

    class RecordRates(Callback):
        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            dense = world.optimizer.param_groups[0]["lr"] / 0.01
            seen.append((dense, *(table.lr / table.optimizer.lr for table in world.tables)))

    schedule = Schedule(kind="step", warmup_steps=2, decay_steps=2)
    config = TrainConfig(schedule=schedule, display=False)
    Trainer(world.model, world.optimizer, config=config, callbacks=[RecordRates()]).fit(Ads(7))
    for step, rates in enumerate(seen):
        assert rates == pytest.approx((schedule(step),) * 3)


def test_plateau_lowers_all_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(None)
    seen: list[tuple[float, ...]] = []
    logged: list[float] = []

    class RecordRates(Callback):
        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            dense = world.optimizer.param_groups[0]["lr"] / 0.01
            seen.append((dense, *(table.lr / table.optimizer.lr for table in world.tables)))

        def on_log(self, trainer: Trainer, row: Any) -> None:
            logged.append(row["rate"])

    aucs = iter([0.6, 0.5, 0.7, 0.7, 0.8])
    config = TrainConfig(epochs=5, plateau_factor=0.1, schedule=Schedule(warmup_steps=2), log_every=1, display=False)
    trainer = Trainer(world.model, world.optimizer, config=config, callbacks=[RecordRates()])
    monkeypatch.setattr(trainer, "evaluate", lambda data: {"auc": next(aucs)})
    trainer.fit(Ads(2), Ads(1))
    expected = [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01]  # equal is not better
    assert logged == pytest.approx(expected)
    assert seen == [pytest.approx((rate,) * 3) for rate in expected]


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clipping_matches_torch(clip: float) -> None:
    table = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    before = table.read(np.arange(50, dtype=np.uint64))

    class Net(torch.nn.Module):
        def __init__(self, bag: torch.nn.Module) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.bag, self.out = bag, torch.nn.Linear(4, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            logits: torch.Tensor = self.out(self.bag(batch).reshape(-1, 4)).squeeze(1)
            return logits

    rng = np.random.default_rng(0)
    batch = tc.Batch(rng.integers(0, 50, 32), np.arange(0, 33, 4), 1, label=np.ones(8, np.float32))
    net = Net(tc.EmbeddingBag(table, 1))
    start = net.out.weight.detach().clone(), net.out.bias.detach().clone()
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=1.0), config=TrainConfig(clip_norm=clip, display=False))
    trainer.fit([batch])

    peer_bag = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(before.copy()), freeze=False, mode="sum")
    peer = Net(peer_bag)
    logits = peer.out(peer_bag(torch.from_numpy(batch.ids.astype(np.int64)), torch.arange(0, 32, 4))).squeeze(1)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(8)).backward()
    torch.nn.utils.clip_grad_norm_(peer.parameters(), clip)  # one norm over rows and network
    torch.optim.SGD(peer.parameters(), lr=1.0).step()
    after = table.read(np.arange(50, dtype=np.uint64))
    np.testing.assert_allclose(after, peer_bag.weight.detach().numpy(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(net.out.weight, peer.out.weight)
    changes = [after - before, net.out.weight.detach() - start[0], net.out.bias.detach() - start[1]]
    distance = np.linalg.norm([np.linalg.norm(change) for change in changes])
    assert (distance == pytest.approx(clip, rel=1e-3)) == (clip < 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_spans_tables_and_batches(accumulate: int) -> None:
    """`clip_norm` bounds the norm of the mean gradient over two tables and a dense network."""
    tables = [tc.Table(dim, tc.SGD(lr=1.0), mem="1MB", name=name) for dim, name in ((4, "a"), (6, "b"))]
    model = Model(tables)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    keys = np.arange(600, dtype=np.uint64)
    before = [table.read(keys) for table in tables]
    start = [parameter.detach().clone() for parameter in model.parameters()]
    config = TrainConfig(clip_norm=0.01, accumulate=accumulate, steps=1, display=False)
    Trainer(model, sgd, config=config).fit(Ads(4))
    changes = [table.read(keys) - rows for table, rows in zip(tables, before, strict=True)]
    changes += [(p.detach() - was).numpy() for p, was in zip(model.parameters(), start, strict=True)]
    norms = [float(np.linalg.norm(change)) for change in changes]
    assert min(norms[:2]) > 0
    assert max(norms[2:]) > 0
    assert np.linalg.norm(norms) == pytest.approx(0.01, rel=1e-3)


class SharedGradient(torch.nn.Module):
    """One example whose pooled vectors and dense parameter share one gradient tensor."""

    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.bag, self.bias = tc.EmbeddingBag(table, 1), torch.nn.Parameter(torch.zeros(1, 4))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return (self.bias.view(1, 1, 4) + self.bag(batch)).mul(1.0).sum((1, 2))


def test_clipping_with_a_shared_gradient_tensor() -> None:
    table = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    model = SharedGradient(table)
    before = table.read([5])
    config = TrainConfig(clip_norm=1e-3, display=False)
    batch = tc.Batch.from_lists([[[5]]], label=np.ones(1, np.float32))
    Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), config=config).fit([batch])
    distance = np.linalg.norm([np.linalg.norm(table.read([5]) - before), np.linalg.norm(model.bias.detach())])
    assert distance == pytest.approx(1e-3, rel=1e-3)


def test_gradients_with_nan_norm_are_not_applied() -> None:
    table = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    model = SharedGradient(table)
    before = table.read([5])
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        config=TrainConfig(clip_norm=1.0, display=False),
        loss=lambda logits, label: (logits - logits.detach()).abs().sqrt().sum(),  # loss 0, infinite gradient
    )
    with pytest.raises(FloatingPointError, match="the gradient norm of step 0 is nan: the step was not applied"):
        trainer.fit([tc.Batch.from_lists([[[5]]], label=np.ones(1, np.float32))])
    assert (table.read([5]) == before).all()
    assert (model.bias == 0).all()
