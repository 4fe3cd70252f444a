"""`tc.EmbeddingBags`: outputs of several bags side by side, without a copy where tables are stored together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thermocline.batch import Batch
from thermocline.embedding.bag import EmbeddingBag, _in_order, _make_plan, _Pool


class EmbeddingBags(torch.nn.ModuleList):
    """Bags that read one batch: Batch -> float32[examples, columns], their outputs side by side.

        bags = tc.EmbeddingBags([tc.EmbeddingBag(tiers.table(name, 16, tc.Adagrad(lr=0.1)), [name]) for name in names])
        vectors = bags(batch)

    Equal to torch.cat([bag(batch).flatten(1) for bag in bags], 1). Bags of tables that are stored together
    (`tc.Tiers`) are pooled in one pass, without a copy if they are all of them, in the order in which they were made.
    """

    def forward(self, batch: Batch, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs of all bags; `weights`: see `EmbeddingBag.forward`."""
        return pool_side_by_side(self._bags, batch, weights)

    @property
    def _bags(self) -> list[EmbeddingBag]:
        return list(self)  # type: ignore[arg-type]


def pool_side_by_side(bags: Sequence[EmbeddingBag], batch: Batch, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the outputs of bags on one batch side by side: see `EmbeddingBags`."""
    if torch.compiler.is_compiling():  # each bag is an op of the graph, or ends it
        return torch.cat([bag(batch, weights).flatten(1) for bag in bags], 1)
    outputs: list[torch.Tensor] = []
    left = list(bags)
    while left:
        wide = _pool_run(left, batch, weights)
        if wide is None:
            outputs.append(left.pop(0)(batch, weights).flatten(1))
        else:
            vectors, count = wide
            outputs.append(vectors)
            left = left[count:]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _pool_run(
    bags: Sequence[EmbeddingBag], batch: Batch, weights: torch.Tensor | None
) -> tuple[torch.Tensor, int] | None:
    """Pool the joined spec of the first bags; return the vectors and the number of bags. None: they are not joined."""
    storage = bags[0].table.storage
    whole = storage.joined(bags[0].specs[0])
    if whole is None or len(bags[0].specs) > 1:
        return None
    run = bags[: len(whole.parts)]
    if whole.parts != tuple(spec for bag in run for spec in bag.specs) or len({_mode(bag) for bag in run}) > 1:
        return None
    table, training = run[0]._begin(batch, weights)
    for bag in run[1:]:
        bag._check_names(batch)
    plan = _make_plan(table, batch, run[0].specs, training)
    if whole not in plan.bags:
        return None
    anchor = run[0]._anchor if table.trains(run[0]) else None
    learned = _in_order(batch, weights)
    vectors = _Pool.apply(anchor, learned, table, batch, plan, whole, training)  # type: ignore[no-untyped-call]
    return vectors.view(-1, len(whole.fields) * table.dim), len(run)


def _mode(bag: EmbeddingBag) -> tuple[bool, bool]:
    return bag.training, bag.table.storage.trains(bag)
