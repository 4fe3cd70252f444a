"""Launches of an own training loop with rows in HBM, and CUDA graphs of the dense part beside a bag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.launches import count_launches
from helpers.train import all_keys

import thermocline as tc
from thermocline.kernels import INTERPRETED
from thermocline.tiers.hbm import bytes_for
from thermocline.tiers.hbm_backend import HbmBackend

DEVICE: Any = "interpreter" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def batches_of(count: int, examples: int, per_bag: int, keys: int) -> list[tc.Batch]:
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, keys, 2 * examples * per_bag).astype(np.uint64) for _ in range(count)]
    label = torch.from_numpy(rng.integers(0, 2, examples).astype(np.float32))
    return [tc.Batch(part, np.arange(0, len(part) + 1, per_bag), 2, label=label) for part in ids]


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize(
    ("per_bag", "keys", "step"),
    [(1, 100, ["_update_kernel"]), (3, 100, ["_update_kernel"]), (3, 2, ["_update_kernel", "_hot_kernel"])],
    ids=["one id", "several ids", "hot rows"],
)
def test_forward_backward_and_step_are_one_launch_each(
    per_bag: int, keys: int, step: list[str], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with more than 64 gradients need a second launch, which adds the sums of their blocks."""
    table = tc.Table(4, tc.Adagrad(lr=0.1), hbm=bytes_for(200, 8), mem="4MB", device=DEVICE)
    assert isinstance(table.backend, HbmBackend)
    table.backend.plan_graphs.enabled = recorded
    bag = tc.EmbeddingBag(table, 2)
    launched = count_launches(monkeypatch)

    def taken() -> list[str]:
        names = launched.copy()
        launched.clear()
        return names

    counts = []
    for batch in tc.prefetch(batches_of(5, 24, per_bag, keys), table, depth=2):
        launched.clear()  # planning on this thread
        pooled = bag(batch)
        forward = taken()
        pooled.backward(torch.ones_like(pooled))
        backward = taken()
        table.step()
        counts.append((forward, backward, taken()))
    assert counts == [(["_gather_kernel" if per_bag == 1 else "_pool_kernel"], [], step)] * 5


class Network(torch.nn.Module):
    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.bag = tc.EmbeddingBag(table, 2)
        self.net: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).cuda()


@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
def test_make_graphed_callables_of_the_dense_part_beside_a_bag() -> None:
    """Rows and parameters are close to those of a loop without graphs; both have misses and evictions."""
    batches = batches_of(30, 64, 2, 400)
    results = []
    for graphed in (False, True):
        table = tc.Table(4, tc.Adagrad(lr=0.1), hbm=bytes_for(300, 8), mem="4MB", device="cuda")
        model = Network(table)
        parameters = list(model.net.parameters())
        if graphed:
            sample = torch.randn(64, 8, device="cuda", requires_grad=True)
            model.net = torch.cuda.make_graphed_callables(model.net, (sample,))
        adam = torch.optim.Adam(parameters, lr=0.01, fused=True)
        for batch in tc.prefetch(batches, table, depth=3):
            logits = model.net(model.bag(batch).flatten(1)).squeeze(1)
            label = batch.label.cuda(non_blocking=True)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()  # type: ignore[no-untyped-call]
            table.step()
            adam.step()
            adam.zero_grad()  # not to zeros: a graphed backward writes into the same memory, which would count twice
        assert table.hbm is not None
        assert table.hbm.stats().evictions > 0
        rows = torch.from_numpy(table.read(all_keys(batches)))
        results.append((rows, torch.cat([p.detach().flatten().cpu() for p in parameters])))
    for plain, other in zip(*results, strict=True):
        assert torch.allclose(plain, other, rtol=1e-4, atol=1e-5)
