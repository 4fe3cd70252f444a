"""LibSVM with your own module and `tc.Trainer`: epochs, validation, early stopping, metrics, checkpoints."""

from __future__ import annotations

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch


class TwoTowers(torch.nn.Module):
    """The dot product of two towers. The trainer takes any module that maps a Batch to one logit per example."""

    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.left = tc.EmbeddingBag(table, [0, 1, 2, 3])
        self.right = tc.EmbeddingBag(table, [4, 5, 6, 7])
        self.towers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4 * table.dim, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
            for _ in range(2)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        left, right = self.towers[0](self.left(batch).flatten(1)), self.towers[1](self.right(batch).flatten(1))
        return (left * right).sum(1) + self.bias


torch.manual_seed(0)
options = {"format": "libsvm", "raw_keys": True, "batch_size": 256}
train = tc.Reader("data/libsvm/train.libsvm", shuffle=True, **options)
valid = tc.Reader("data/libsvm/valid.libsvm", features=train.features, **options)
test = tc.Reader("data/libsvm/test.libsvm", features=train.features, **options)

table = tc.Table(8, tc.Adam(lr=3e-3), mem="32MB", initial=tc.Normal(scale=0.1))
model = TwoTowers(table)
dense = torch.optim.Adam(model.parameters(), lr=3e-3)
config = tc.TrainConfig(epochs=3, patience=1, log_every=20, tensorboard=False)
trainer = tc.Trainer(model, dense, run_dir="runs/two_towers", config=config)
result = trainer.fit(train, valid, test, resume=True)
assert result.test is not None
print(f"test AUC {result.test['auc']:.4f} after {result.progress.step} steps")
