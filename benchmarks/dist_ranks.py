"""Functions that benchmarks/dist.py runs on every rank, with the groups as first argument."""

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
"""429 inputs (26 vectors of 16 and 13 dense features) and two hidden layers: 698,001 parameters."""


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise((INPUTS, *HIDDEN)):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1))


def link_bytes() -> int:
    """Return the bytes that this machine has sent over its link, headers included."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


# ---- dense parameters


def dense_speeds(groups: Groups, settings: Sequence[tc.DenseSync], batch: int, min_steps: int) -> list[dict[str, Any]]:
    """Time the dense network for each setting, over whole periods of at least `min_steps` steps."""
    return [_dense_speed(groups, sync, batch, min_steps) for sync in settings]


def _dense_speed(groups: Groups, sync: tc.DenseSync, batch: int, min_steps: int) -> dict[str, Any]:
    model = network()
    optimizer = tc.FrozenAdam(model.parameters())
    dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, sync)
    dense.begin()
    rng = torch.Generator().manual_seed(groups.topology.rank)
    x, y = torch.randn(batch, INPUTS, generator=rng), torch.rand(batch, generator=rng).round()
    steps = -(-min_steps // sync.every) * sync.every

    def train(numbers: Iterable[int]) -> None:
        for step in numbers:
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            dense.after_backward()
            optimizer.step()
            dense.after_step(step)

    train((1, sync.every, 2 * sync.every))  # warm-up; then a period begins
    dist.barrier()
    sent, crossed, start = dense.traffic.between, link_bytes(), time.perf_counter()
    train(range(2 * sync.every + 1, 2 * sync.every + steps + 1))
    dist.barrier()
    seconds = time.perf_counter() - start
    return {
        "every": sync.every,
        "way": sync.mode,
        "exact": sync.exact,
        "steps": steps,
        "examples_per_s": steps * batch * groups.topology.world / seconds,
        "sent_per_step": (dense.traffic.between - sent) / steps,
        "link_per_step": (link_bytes() - crossed) / steps,
    }


def dense_bytes(groups: Groups, settings: Sequence[tc.DenseSync], steps: int) -> list[dict[str, float]]:
    """Return the bytes of dense parameters that this rank sends per step, after the first k, for each setting."""
    figures = []
    for sync in settings:
        model = network()
        optimizer = tc.FrozenAdam(model.parameters())
        dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, sync)
        dense.begin()
        before = (0, 0)
        for step in range(1, sync.every + steps + 1):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            dense.after_backward()
            optimizer.step()
            dense.after_step(step)
            if step == sync.every:
                before = dense.traffic.within, dense.traffic.between
        within, between = dense.traffic.within - before[0], dense.traffic.between - before[1]
        figures.append({"within": within / steps, "between": between / steps})
    return figures


# ---- rows of a table


WARM = 5
"""Warm-up steps before the measurement."""


def exchange_data(rank: int, world: int, batch: int, steps: int) -> Iterator[tc.Batch]:
    """Return a rank's `WARM + steps` batches."""
    ads = tc.SyntheticAds(keys=1_000_000, fields=26, dense=13, batch_size=batch, threads=1)
    ads.seek(rank * (steps + WARM) * batch)
    return itertools.islice(iter(ads), steps + WARM)


Train = Callable[[torch.Tensor, tc.Batch, int], None]


def training(groups: Groups, table: ShardedTable, sync: tc.DenseSync) -> Train:
    """Return a function that trains one step: backward, update of rows and of dense parameters on all ranks."""
    model = network()
    optimizer = tc.FrozenAdam(model.parameters())
    dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, sync)
    dense.begin()

    def train(vectors: torch.Tensor, batch: tc.Batch, step: int) -> None:
        x = torch.cat([vectors.flatten(1), torch.as_tensor(batch.dense)], 1)
        label = torch.as_tensor(batch.label, dtype=torch.float32)
        torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), label).backward()
        table.step()
        dense.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        dense.after_step(step)

    return train


def exchange_speed(
    groups: Groups, hops: str, batch: int, steps: int, every: int, depth: int = 2, overlap: bool = False
) -> dict[str, Any]:
    """Time a model over a sharded table: rows exchanged by `hops`, dense parameters merged every `every` steps."""
    if overlap:
        with Groups.make(groups.topology, timeout=groups.timeout, overlap=True) as made:
            return exchange_speed(made, hops, batch, steps, every, depth)
    t = groups.topology
    table = ShardedTable(16, tc.Adagrad(lr=0.05), groups=groups, hops=hops, mem="256MB", threads=1)  # type: ignore[arg-type]
    emb, train = tc.EmbeddingBag(table, 26), training(groups, table, tc.DenseSync(every=every))
    figures: dict[str, Any] = {}
    begin: tuple[float, int, Any] = (0.0, 0, None)
    with tc.prefetch(exchange_data(t.rank, t.world, batch, steps), table, depth=depth) as batches:
        for step, ready in enumerate(batches, 1):
            train(emb(ready), ready, step)
            if step == WARM:  # before the next batch requests rows
                dist.barrier()
                begin = time.perf_counter(), link_bytes(), dataclasses.asdict(table.backend.traffic)
        dist.barrier()
        seconds = time.perf_counter() - begin[0]
        after = dataclasses.asdict(table.backend.traffic)
        for kind in ("keys", "rows", "early_rows", "gradients"):
            for figure in ("items_between", "bytes_between"):
                figures[f"{kind}_{figure}"] = after[kind][figure] - begin[2][kind][figure]
        figures["link"] = link_bytes() - begin[1]
    table.close()
    return {
        "hops": hops, "every": every, "overlap": groups.early is not None, "steps": steps,
        "examples_per_s": steps * batch * t.world / seconds, **figures,
    }  # fmt: skip
