"""A TorchRec model, ported: the imports change, and the tables get a budget and a folder on SSD.

The lines that differ from the program for TorchRec are marked with `# was:`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch
from thermocline.torchrec import (  # was: from torchrec import ...
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
)

STEPS = int(os.environ.get("STEPS", 200))
BATCH = 256


@dataclasses.dataclass
class Batch:
    """A batch of the data loader, as in TorchRec's examples."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor


class TwoTower(torch.nn.Module):
    """Scores the pair of a user and an item. Its code is the same for TorchRec."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection
        self.user = torch.nn.Sequential(torch.nn.Linear(16 + 16 + 4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.item = torch.nn.Linear(16 + 8, 16)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.collection(batch.sparse)
        user, item = KeyedTensor.regroup([pooled], [["user", "clicked"], ["item", "brand"]])
        score = (self.user(torch.cat([user, batch.dense], 1)) * self.item(item)).sum(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, batch.label)
        return loss[None], score.detach()


def batches(count: int) -> Iterator[Batch]:
    """Generate users who like the items whose number has the same remainder as theirs."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        user, item = (torch.randint(0, 2_000, (BATCH,), generator=draw) for _ in range(2))
        lengths = torch.randint(0, 5, (BATCH,), generator=draw)
        clicked = torch.repeat_interleave(user % 4, lengths) + 4 * torch.randint(
            0, 500, (int(lengths.sum()),), generator=draw
        )
        one = torch.ones(BATCH, dtype=torch.int64)
        sparse = KeyedJaggedTensor(
            keys=["user", "clicked", "item", "brand"],
            values=torch.cat([user, clicked, item, item % 100]),
            lengths=torch.cat([one, lengths, one, one]),
        )
        label = (user % 4 == item % 4).float()
        yield Batch(torch.rand(BATCH, 4, generator=draw), sparse, label)


torch.manual_seed(0)
items = EmbeddingBagConfig(
    name="t_item",
    num_embeddings=2_000,
    embedding_dim=16,
    feature_names=["item", "clicked"],  # a shared table
    pooling=PoolingType.MEAN,
)
users = EmbeddingBagConfig(name="t_user", num_embeddings=2_000, embedding_dim=16, feature_names=["user"])
brands = EmbeddingBagConfig(name="t_brand", num_embeddings=100, embedding_dim=8, feature_names=["brand"])
collection = EmbeddingBagCollection(
    tables=[items, users, brands],
    mem="400KB",  # was: no such argument; all rows were in memory
    ssd="runs/port_torchrec",
    table_options={"ssd_mem": "16MB"},
)
model = TwoTower(collection)
apply_optimizer_in_backward(torch.optim.Adagrad, model.collection.parameters(), {"lr": 0.2})
dense = torch.optim.Adam([*model.user.parameters(), *model.item.parameters()], lr=1e-2)
pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))  # was: after DistributedModelParallel(model)

metrics = tc.StreamingMetrics()
source, labels = iter(batches(STEPS)), batches(STEPS)
while True:
    try:
        scores = pipeline.progress(source)
    except StopIteration:
        break
    metrics.update(scores, next(labels).label)
for table in collection.tables.values():
    table.commit()
    print(f"{table.name}: step {table.step_count}, {sum(len(keys) for keys, _ in table.rows())} rows")
    table.close()
print(f"AUC {metrics.compute()['auc']:.3f} over {STEPS} steps")
