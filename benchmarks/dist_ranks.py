"""What a rank does in benchmarks/dist.py: each function is called with the groups, on every rank at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accuracy import FEATURES, Examples

import thermocline as tc
from thermocline.dist.groups import Groups
from thermocline.dist.sharded import ShardedTable
from thermocline.models import ModelConfig, build, parameter_groups, row_dim

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
        "way": sync.way,
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


def exchange_speed(groups: Groups, hops: str, batch: int, steps: int, every: int) -> dict[str, Any]:
    """A model over a table on all ranks: rows by `hops`, dense parameters every step or merged every `every` steps."""
    t = groups.topology
    table = ShardedTable(16, tc.Adagrad(lr=0.05), groups=groups, hops=hops, mem="256MB", threads=1)  # type: ignore[arg-type]
    emb, model = tc.EmbeddingBag(table, 26), network()
    optimizer = tc.FrozenAdam(model.parameters())
    dense = tc.DenseParameters.make(model.parameters(), optimizer, groups, tc.DenseSync(every=every))
    figures: dict[str, Any] = {}
    begin: tuple[float, int, Any] = (0.0, 0, None)
    with tc.prefetch(exchange_data(t.rank, t.world, batch, steps), table, depth=2) as source:
        for step, found in enumerate(source, 1):
            vectors = torch.as_tensor(emb(found)).reshape(found.examples, -1)
            logits = model(torch.cat([vectors, torch.as_tensor(found.dense)], 1)).squeeze(1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.as_tensor(found.label)).backward()
            table.step()
            dense.after_backward()
            optimizer.step()
            optimizer.zero_grad()
            dense.after_step(step)
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


# ---- accuracy


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn: `ads`, made up, or the CSV files of a folder (benchmarks/accuracy.py)."""

    folder: str | None
    fields: int
    batch: int
    epochs: int
    steps: int
    """Per epoch and rank; of files, as many as there are."""
    lr: float
    """Of rows."""
    dense_lr: float
    seed: int

    def batches(self, groups: Groups, epoch: int) -> Iterator[tc.Batch]:
        """This rank's part of an epoch."""
        rank, world = groups.topology.rank, groups.topology.world
        if self.folder is None:
            ads = self._ads("train", None)
            ads.seek((epoch * world + rank) * self.steps * self.batch)
            return itertools.islice(iter(ads), self.steps)
        examples = Examples(Path(self.folder) / "train.csv", self.batch, seed=self.seed)
        examples.set_epoch(epoch)
        return itertools.islice(iter(examples), rank, len(examples) // world * world, world)

    def held_out(self, groups: Groups, split: str) -> Iterator[tc.Batch]:
        rank, world = groups.topology.rank, groups.topology.world
        if self.folder is None:
            return itertools.islice(iter(self._ads(split, 100_000)), rank, None, world)
        return itertools.islice(iter(Examples(Path(self.folder) / f"{split}.csv", 2500)), rank, None, world)

    def _ads(self, split: Any, examples: int | None) -> tc.SyntheticAds:
        batch = self.batch if split == "train" else 5000
        ads = tc.SyntheticAds(keys=100_000, fields=self.fields, batch_size=batch, threads=1, seed=self.seed)
        return ads if split == "train" else ads.split(split, examples=examples)


def accuracy_of(groups: Groups, task: Task, sync: tc.DenseSync) -> dict[str, Any]:
    """Test AUC of the epoch with the best validation AUC."""
    fields = len(FEATURES) if task.folder else task.fields
    config = ModelConfig(name="dnn", hidden=(128, 64), dropout=0.0, embedding_l2=1e-5).resolve()
    if task.folder:
        config = ModelConfig(name="dnn").resolve()
    torch.manual_seed(task.seed)
    rows = tc.Adam(lr=task.lr, weight_decay=config.embedding_l2 or 0.0)
    initial = tc.Normal(scale=config.initial)
    table = ShardedTable(row_dim(config), rows, groups=groups, mem="128MB", seed=task.seed, initial=initial, threads=1)
    model = build(config, table, fields)
    optimizer = tc.FrozenAdam(parameter_groups(config, model), lr=task.dense_lr)
    parameters = list(model.parameters())
    dense = tc.DenseParameters.make(parameters, optimizer, groups, sync, buffers=model.buffers())
    torch.manual_seed(task.seed * 1000 + groups.topology.rank)  # of dropout
    step, history = 0, []
    for epoch in range(task.epochs):
        model.train()
        with tc.prefetch(task.batches(groups, epoch), table, depth=2) as batches:
            for batch in batches:
                label = torch.as_tensor(batch.label, dtype=torch.float32)
                torch.nn.functional.binary_cross_entropy_with_logits(model(batch), label).backward()
                table.step(max_norm=10.0)
                dense.after_backward()
                torch.nn.utils.clip_grad_norm_(parameters, 10.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                dense.after_step(step)
        dense.merge_now()
        history.append([_auc(groups, model, table, task.held_out(groups, split)) for split in ("valid", "test")])
    table.close()
    best = max(range(len(history)), key=lambda n: history[n][0])
    return {"auc": history[best][1], "valid_auc": history[best][0], "epoch": best + 1, "steps": step}


def _auc(groups: Groups, model: torch.nn.Module, table: ShardedTable, data: Iterator[tc.Batch]) -> float:
    model.eval()
    scores, labels = [], []
    with torch.no_grad(), tc.prefetch(data, table, depth=2, training=False) as batches:
        for batch in batches:
            if batch.examples:
                scores.append(model(batch))
                labels.append(torch.as_tensor(batch.label, dtype=torch.float32))
    mine = (torch.cat(scores), torch.cat(labels)) if scores else (torch.empty(0), torch.empty(0))
    every = groups.train.all_gather_object(mine, "gathered scores")
    found = tc.auc(torch.cat([score for score, _ in every]), torch.cat([label for _, label in every]))
    assert math.isfinite(found)
    return float(found)
