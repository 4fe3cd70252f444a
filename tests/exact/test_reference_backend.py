"""Training through `tc.Trainer` on the reference backend, a dict of rows, gives the bits of the DRAM backend.

The reference backend shares no code with planning, deduplication or gradient sums, so the test covers the interface:
it fails if `Table`, `prefetch`, `Checkpoints` or `Trainer` depend on more than `RowBackend`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import bits

import thermocline as tc
from thermocline.config.lr_schedule import Schedule
from thermocline.embedding.reference_backend import ReferenceBackend

OPTIMIZERS = {
    "sgd": tc.SGD(lr=0.5),
    "adagrad": tc.Adagrad(lr=0.2),
    "rowwise": tc.RowWiseAdagrad(lr=0.2),
    "adam": tc.Adam(lr=0.02, weight_decay=1e-4),
    "partial": tc.PartialRowWiseAdam(lr=0.02),
    "catch_up": tc.Adam(lr=0.02, weight_decay=1e-2, lazy="catch_up", catch_up_steps=5),
}
ADS: dict[str, Any] = {"keys": 400, "fields": 3, "batch_size": 16, "examples": 16 * 12, "seed": 5}


class Model(torch.nn.Module):
    """Two bags on one table, one of them pooled by mean, and a small network."""

    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.all_fields = tc.EmbeddingBag(table, 3)
        self.last_field = tc.EmbeddingBag(table, [2], pooling="mean")
        torch.manual_seed(1)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(4 * table.dim, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        pooled = torch.cat([self.all_fields(batch), self.last_field(batch)], 1)
        return self.mlp(pooled.flatten(1)).squeeze(1)


def train(
    optimizer: str,
    backend: Any,
    run_dir: Path | None = None,
    *,
    steps: int | None = None,
    resume: bool = False,
    ssd: Path | None = None,
    **config: Any,
) -> tuple[tc.Table, Model, dict[str, Any]]:
    """Train two epochs with validation and clipping; return the table, the model and the last validation."""
    ads = tc.SyntheticAds(**ADS)
    table = tc.Table(8, OPTIMIZERS[optimizer], mem="4MB", ssd=ssd, seed=3, make_backend=backend)
    model = Model(table)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    settings = tc.TrainConfig(epochs=2, steps=steps, clip_norm=0.5, display=False, torch_threads=1, **config)
    trainer = tc.Trainer(model, dense, run_dir=run_dir, config=settings)
    result = trainer.fit(ads, valid=ads.split("valid", examples=50), resume=resume)
    return table, model, dict(result.progress.valid)


def state(table: tc.Table, model: Model) -> dict[str, Any]:
    """Return every row and every dense parameter as bytes."""
    rows = {int(key): row.tobytes() for keys, values in table.rows() for key, row in zip(keys, values, strict=True)}
    return {"rows": rows, "dense": [bits(parameter) for parameter in model.parameters()], "steps": table.step_count}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pipeline", [{"depth": 1}, {"depth": 4, "pull_window": 3, "accumulate": 2}], ids=str)
def test_trainer_gives_the_bits_of_the_dram_backend(optimizer: str, pipeline: dict[str, Any]) -> None:
    expected_table, expected_model, expected = train(optimizer, None, **pipeline)
    table, model, valid = train(optimizer, ReferenceBackend.make, **pipeline)
    assert isinstance(table.backend, ReferenceBackend)
    assert len(table.backend.table.rows) > 100
    assert state(table, model) == state(expected_table, expected_model)
    assert valid["auc"] == expected["auc"]
    assert valid["logloss"] == expected["logloss"]


def test_checkpoints_and_resume(tmp_path: Path) -> None:
    """Stop after 13 of 24 steps, resume with new objects, and end with the bits of an uninterrupted run."""
    expected = state(*train("adagrad", None)[:2])
    train("adagrad", ReferenceBackend.make, tmp_path, steps=13, checkpoint_every=5)
    table, model, _ = train("adagrad", ReferenceBackend.make, tmp_path, resume=True)
    assert state(table, model) == expected


@pytest.mark.parametrize("ssd", [False, True])
def test_rows_that_catch_up_resume_with_the_rates_of_earlier_steps(ssd: bool, tmp_path: Path) -> None:
    """The rate changes with every step: a resumed run replays the steps before it with their own rates."""
    schedule = Schedule(kind="cosine", warmup_steps=8, decay_steps=30)
    expected = state(*train("catch_up", ReferenceBackend.make, schedule=schedule)[:2])
    assert expected != state(*train("catch_up", ReferenceBackend.make)[:2])
    options = {"schedule": schedule, "checkpoint_every": 5, "ssd": tmp_path / "rows" if ssd else None}
    first = train("catch_up", None, tmp_path / "run", steps=13, **options)[0]
    first.close()
    table, model, _ = train("catch_up", None, tmp_path / "run", resume=True, **options)
    assert state(table, model) == expected


def test_a_reference_checkpoint_opens_on_the_dram_backend(tmp_path: Path) -> None:
    expected = state(*train("adam", None)[:2])
    train("adam", ReferenceBackend.make, tmp_path, steps=20, checkpoint_every=20)
    table, model, _ = train("adam", None, tmp_path, resume=True)
    assert state(table, model) == expected


def test_direct_loop_without_a_pipeline() -> None:
    """A bag prepares a batch itself, and backward after the step is refused as on every backend."""
    batch = next(iter(tc.SyntheticAds(**ADS)))
    table = tc.Table(8, tc.SGD(lr=0.1), make_backend=ReferenceBackend.make)
    bag = tc.EmbeddingBag(table, 3)
    pooled = bag(batch)
    pooled.sum().backward()
    table.step()
    assert np.abs(table.read(batch.ids) - tc.Table(8, tc.SGD(lr=0.1)).read(batch.ids)).max() > 0
    with pytest.raises(RuntimeError, match="released"):
        pooled.sum().backward()
    with pytest.raises(AttributeError, match="has no DRAM tier: its backend is ReferenceBackend"):
        _ = table.dram


def test_evaluation_plans_are_copies_and_empty_steps_have_norm_zero() -> None:
    """A plan read for evaluation keeps its values over a later step; both hold on every backend."""
    batch = next(iter(tc.SyntheticAds(**ADS)))
    empty = tc.Batch(np.empty(0, np.uint64), np.zeros(4, np.int64), 3)
    for backend in (None, ReferenceBackend.make):
        table = tc.Table(8, tc.SGD(lr=0.1), make_backend=backend)
        bag = tc.EmbeddingBag(table, 3)
        plan = table.prepare_read(batch)
        before = bits(table.backend.pool(plan, plan.bags[bag.specs[0]]))
        bag(batch).sum().backward()
        table.step()
        assert bits(table.backend.pool(plan, plan.bags[bag.specs[0]])) == before
        bag(empty).sum().backward()
        assert table.gradient_norm() == 0.0
        table.step()
        table.backend.require_idle()
