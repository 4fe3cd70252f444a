"""The public DLRM program, ported: nn.EmbeddingBag becomes tc.nn.EmbeddingBag, and rows get their optimizer.

Trains both versions from the same rows and prints how far their losses differ. The lines that a port changes are marked
with `# was:`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import thermocline as tc  # before torch: idle OpenMP threads then sleep instead of spinning
import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", 200))
SIZES = [2_000, 500, 100, 30]  # rows per table: DLRM's arch-embedding-size
DIM, DENSE, BATCH, LR = 8, 13, 128, 0.5
Bags = Callable[[int, int], nn.Module]


class DLRM(nn.Module):
    """Bottom perceptron, bags, dot products of all pairs, top perceptron: the structure of DLRM_Net."""

    def __init__(self, make_bag: Bags, module_list: type[nn.ModuleList] = nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bot_l = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        vectors = 1 + len(SIZES)
        self.top_l = nn.Sequential(nn.Linear(DIM + vectors * (vectors - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1))
        self.emb_l = module_list(make_bag(table, size) for table, size in enumerate(SIZES))

    def apply_emb(self, lS_o: list[torch.Tensor], lS_i: list[torch.Tensor]) -> list[torch.Tensor]:
        return [bag(ids, offsets) for bag, ids, offsets in zip(self.emb_l, lS_i, lS_o, strict=True)]

    def forward(self, dense: torch.Tensor, lS_o: list[torch.Tensor], lS_i: list[torch.Tensor]) -> torch.Tensor:
        x = self.bot_l(dense)
        vectors = [x, *self.apply_emb(lS_o, lS_i)]
        stacked = torch.stack(vectors, 1)
        first, second = torch.tril_indices(len(vectors), len(vectors), -1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, first, second]
        return self.top_l(torch.cat([x, products], 1)).squeeze(1)


class PortedDLRM(DLRM):
    """Calls all bags together: one plan and one update per step instead of one per table. The loop works as well."""

    def apply_emb(self, lS_o: list[torch.Tensor], lS_i: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.emb_l(lS_i, lS_o)  # was: a loop over self.emb_l


def batches(count: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor]]:
    """Generate dense features, offsets and ids per table, and labels, in the form of DLRM's data loader."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        dense = torch.rand(BATCH, DENSE, generator=draw)
        lS_o, lS_i = [], []
        for size in SIZES:
            lengths = torch.randint(1, 4, (BATCH,), generator=draw)
            lS_o.append(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]]))
            lS_i.append((torch.rand(int(lengths.sum()), generator=draw) ** 3 * size).long())
        likes = (lS_i[3][lS_o[3]] % 2 == 0) | (dense[:, 0] > 0.7)  # the first id of the last table
        yield dense, lS_o, lS_i, likes.float()


def train(model: DLRM, *optimizers: torch.optim.Optimizer) -> tuple[list[float], float]:
    """Return the losses, and the AUC of the scores before each step."""
    losses, metrics = [], tc.StreamingMetrics()
    for dense, lS_o, lS_i, label in batches(STEPS):
        scores = model(dense, lS_o, lS_i)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        metrics.update(scores.detach(), label)
    return losses, metrics.compute()["auc"]


def original_bag(table: int, size: int) -> nn.Module:
    bag = nn.EmbeddingBag(size, DIM, mode="sum", sparse=True)
    nn.init.uniform_(bag.weight, -((1 / size) ** 0.5), (1 / size) ** 0.5)
    return bag


tiers = tc.Tiers(mem="8MB")  # one budget for all tables


def ported_bag(table: int, size: int) -> nn.Module:
    rows = tiers.table(  # was: nn.EmbeddingBag(size, DIM, mode="sum", sparse=True)
        f"emb_{table}", DIM, tc.SGD(lr=LR), rows=size, initial=tc.Uniform(scale=(1 / size) ** 0.5)
    )
    return tc.nn.EmbeddingBag(rows, mode="sum")


original = DLRM(original_bag)
ported = PortedDLRM(ported_bag, tc.nn.EmbeddingBags)  # was: nn.ModuleList
for theirs, bag in zip(original.emb_l, ported.emb_l, strict=True):
    bag.table.load_rows(torch.arange(len(theirs.weight)), theirs.weight.detach())  # a trained model, or the same start

before, _ = train(original, torch.optim.SGD(original.parameters(), lr=LR))
after, auc = train(
    ported,
    torch.optim.SGD(ported.parameters(), lr=LR),  # of the dense part: rows are not parameters
    tc.RowOptimizer(tiers),  # was: the line above did both
)
difference = max(abs(a - b) for a, b in zip(before, after, strict=True))
print(f"AUC {auc:.3f} over {STEPS} steps; losses differ by at most {difference:.1e}")
tiers.close()
