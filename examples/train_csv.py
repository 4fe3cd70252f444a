"""CSV with dense features, and two tables in one model: wide rows for users, narrow rows for the other fields."""

from __future__ import annotations

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch

train = tc.Reader(
    "data/csv/train.csv", label="click", numeric=("price", "age"), batch_size=256, shuffle=True,
    numeric_features=tc.Numeric(log=True),
)  # fmt: skip
valid = tc.Reader("data/csv/valid.csv", train.data, features=train.features, batch_size=256)
print("fields", *train.field_names, "- dense", *train.features.dense)


class Clicks(torch.nn.Module):
    def __init__(self, users: tc.Table, others: tc.Table) -> None:
        super().__init__()
        user = train.field_names.index("user")
        rest = [field for field in range(train.fields) if field != user]
        self.user = tc.EmbeddingBag(users, [user])
        self.others = tc.EmbeddingBag(others, rest)
        width = users.dim + len(rest) * others.dim + train.dense
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        parts = [self.user(batch).flatten(1), self.others(batch).flatten(1), batch.dense]
        return self.mlp(torch.cat(parts, 1)).squeeze(1)


torch.manual_seed(0)
users = tc.Table(32, tc.RowWiseAdagrad(lr=0.1), mem="16MB", name="users", initial=tc.Normal(scale=0.05))
others = tc.Table(8, tc.Adam(lr=3e-3), mem="16MB", name="others", initial=tc.Normal(scale=0.05))
model = Clicks(users, others)
trainer = tc.Trainer(
    model, torch.optim.Adam(model.parameters(), lr=3e-3), config=tc.TrainConfig(epochs=3, log_every=20)
)
trainer.fit(train, valid)
