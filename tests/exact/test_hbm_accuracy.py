"""Training on a GPU gives the AUC of training on a CPU, although the bits of the dense network differ."""

from __future__ import annotations

import pytest
import torch

import thermocline as tc

FIELDS, DIM = 8, 8


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = tc.EmbeddingBag(table, FIELDS)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.mlp(self.bag(batch).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def auc_of(table: tc.Table, device: str) -> float:
    ads = tc.SyntheticAds(keys=200_000, fields=FIELDS, batch_size=2048, examples=2048 * 400)
    model = Model(table).to(device)
    config = tc.TrainConfig(display=False, tensorboard=False)
    trainer = tc.Trainer(model, torch.optim.Adam(model.mlp.parameters(), lr=1e-3), config=config)
    result = trainer.fit(ads, test=ads.split("test", examples=200_000))
    assert result.test is not None
    return float(result.test["auc"])


@pytest.mark.gpu
def test_auc_equals_that_of_the_cpu() -> None:
    optimizer = tc.Adagrad(lr=0.05)
    on_cpu = auc_of(tc.Table(DIM, optimizer, mem="256MB"), "cpu")
    on_gpu = auc_of(tc.Table(DIM, optimizer, hbm="3MB", mem="256MB", device="cuda"), "cuda")
    assert on_cpu > 0.7
    assert abs(on_cpu - on_gpu) < 0.0005, (on_cpu, on_gpu)
