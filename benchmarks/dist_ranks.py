"""What a rank does in benchmarks/dist.py: each function is called with the groups, on every rank at once."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable

INPUTS, HIDDEN = 429, (840, 400)
"""429 numbers of an example (26 vectors of 16, 13 dense features), then two layers: 698,001 parameters."""


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise((INPUTS, *HIDDEN)):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1))


def link_bytes() -> int:
    """What this machine has sent over its link, headers included."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


# ---- dense parameters alone


def dense_speeds(groups: Groups, ways: Sequence[tc.DenseSync], batch: int, least: int) -> list[dict[str, Any]]:
    """Steps of the dense network alone, a whole number of periods of at least `least` steps per way, one by one."""
    return [_dense_speed(groups, sync, batch, least) for sync in ways]


def _dense_speed(groups: Groups, sync: tc.DenseSync, batch: int, least: int) -> dict[str, Any]:
    model = network()
    optimizer = tc.FrozenAdam(model.parameters())
    dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, sync)
    rng = torch.Generator().manual_seed(groups.topology.rank)
    x, y = torch.randn(batch, INPUTS, generator=rng), torch.rand(batch, generator=rng).round()
    steps = -(-least // sync.every) * sync.every

    def train(numbers: Iterable[int]) -> None:
        for step in numbers:
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            dense.after_backward()
            optimizer.step()
            dense.after_step(step)

    train((1, sync.every, 2 * sync.every))  # what happens only once happens here; then a period begins
    dist.barrier()
    sent, crossed, start = dense.sent.between, link_bytes(), time.perf_counter()
    train(range(2 * sync.every + 1, 2 * sync.every + steps + 1))
    dist.barrier()
    seconds = time.perf_counter() - start
    return {
        "every": sync.every,
        "way": sync.mode,
        "exact": sync.exact,
        "steps": steps,
        "examples_per_s": steps * batch * groups.topology.world / seconds,
        "sent_per_step": (dense.sent.between - sent) / steps,
        "link_per_step": (link_bytes() - crossed) / steps,
    }


# ---- rows of a table, exchanged


WARM = 5
"""Steps before the clock runs."""


def exchange_data(rank: int, world: int, batch: int, steps: int) -> Iterator[tc.Batch]:
    """A rank's batches: `WARM` and `steps`."""
    ads = tc.SyntheticAds(keys=1_000_000, fields=26, dense=13, batch_size=batch, threads=1)
    ads.seek(rank * (steps + WARM) * batch)
    return itertools.islice(iter(ads), steps + WARM)


Train = Callable[[torch.Tensor, tc.Batch, int], None]


def training(groups: Groups, table: ShardedTable, sync: tc.DenseSync) -> Train:
    """A step of the network over a batch's vectors: loss, gradients, rows and dense parameters updated on all ranks."""
    model = network()
    optimizer = tc.FrozenAdam(model.parameters())
    dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, sync)

    def train(vectors: torch.Tensor, found: tc.Batch, step: int) -> None:
        x = torch.cat([vectors.flatten(1), torch.as_tensor(found.dense)], 1)
        label = torch.as_tensor(found.label, dtype=torch.float32)
        torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), label).backward()
        table.step()
        dense.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        dense.after_step(step)

    return train


def exchange_speed(groups: Groups, hops: str, batch: int, steps: int, every: int) -> dict[str, Any]:
    """A model over a table on all ranks: rows by `hops`, dense parameters every step or merged every `every` steps."""
    t = groups.topology
    table = ShardedTable(16, tc.Adagrad(lr=0.05), groups=groups, hops=hops, mem="256MB", threads=1)  # type: ignore[arg-type]
    emb, train = tc.EmbeddingBag(table, 26), training(groups, table, tc.DenseSync(every=every))
    figures: dict[str, Any] = {}
    begin: tuple[float, int, Any] = (0.0, 0, None)
    with tc.prefetch(exchange_data(t.rank, t.world, batch, steps), table, depth=2) as source:
        for step, found in enumerate(source, 1):
            train(emb(found), found, step)
            if step == WARM:  # before the next batch asks for rows
                dist.barrier()
                begin = time.perf_counter(), link_bytes(), dataclasses.asdict(table.ranks.traffic)
        dist.barrier()
        seconds = time.perf_counter() - begin[0]
        after = dataclasses.asdict(table.ranks.traffic)
        for kind in ("keys", "rows", "gradients"):
            for figure in ("items_between", "bytes_between"):
                figures[f"{kind}_{figure}"] = after[kind][figure] - begin[2][kind][figure]
        figures["link"] = link_bytes() - begin[1]
    table.close()
    return {
        "hops": hops, "every": every, "steps": steps, "examples_per_s": steps * batch * t.world / seconds, **figures,
    }  # fmt: skip
