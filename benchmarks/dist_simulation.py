"""Accuracy of dense synchronization, for benchmarks/dist.py: the dense models of all ranks in one process, one table.

The simulation has the batches, the `FrozenAdam` and the `DenseParameters` of every rank, with `ThreadAllReduce` instead
of torch.distributed. Rows step by the mean of all ranks' gradients, which is rounded differently. tests/distributed
proves that dense parameters of ranks have the bits of a simulation. It takes a fraction of their processor time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accuracy import FEATURES, Examples

import thermocline as tc
from thermocline.distributed.hierarchical_allreduce import HierarchicalAllReduce, Level, tree_sum
from thermocline.models import ModelConfig, build, parameter_groups, row_dim

Nodes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """Training data: synthetic ads, or the CSV files of a folder (benchmarks/accuracy.py)."""

    folder: str | None
    fields: int
    batch: int
    epochs: int
    steps: int
    """Per epoch and rank; unused with files."""
    lr: float
    """Learning rate of rows."""
    dense_lr: float
    seed: int

    def batches(self, rank: int, world: int, epoch: int) -> Iterator[tc.Batch]:
        """Return a rank's shard of an epoch."""
        if self.folder is None:
            ads = self._ads("train", None)
            ads.seek((epoch * world + rank) * self.steps * self.batch)
            return itertools.islice(iter(ads), self.steps)
        examples = _examples(self.folder, "train", self.batch, self.seed)
        examples.set_epoch(epoch)
        return itertools.islice(iter(examples), rank, len(examples) // world * world, world)

    def held_out(self, split: str) -> Iterator[tc.Batch]:
        if self.folder is None:
            return iter(self._ads(split, 100_000))
        return iter(_examples(self.folder, split, 2500, None))

    def _ads(self, split: Any, examples: int | None) -> tc.SyntheticAds:
        batch = self.batch if split == "train" else 5000
        ads = tc.SyntheticAds(keys=100_000, fields=self.fields, batch_size=batch, threads=1, seed=self.seed)
        return ads if split == "train" else ads.split(split, examples=examples)


@functools.cache
def _parsed(path: Path) -> Examples:
    return Examples(path, 1)


def _examples(folder: str, split: str, batch: int, seed: int | None) -> Examples:
    """Return a view of a file that is parsed once: parsing takes longer than an epoch."""
    examples = copy.copy(_parsed(Path(folder) / f"{split}.csv"))
    examples.batch_size, examples.seed = batch, seed
    return examples


class ThreadAllReduce(HierarchicalAllReduce):
    """All-reduce between threads of this process: each calls it with its rank's buffer."""

    def __init__(self, buffers: list[Any], barrier: threading.Barrier, groups: Any, exact: bool, level: Level) -> None:
        super().__init__(groups, exact=exact, level=level)
        self._buffers, self._barrier = buffers, barrier
        nodes = self.topology.nodes
        self._members: Nodes = {
            "world": nodes,
            "node": (nodes[self.topology.node],),
            "nodes": tuple((node[0],) for node in nodes),
        }[level]

    def average(self, buffer: torch.Tensor) -> None:
        self._buffers[self.topology.rank] = buffer.clone()
        self._barrier.wait()
        buffer.copy_(tree_sum(self._buffers, self._members) * (1 / self.members))
        self._barrier.wait()  # all ranks have read the buffers

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self.topology.rank == 0:
            self._buffers[0] = buffer.clone()
        self._barrier.wait()
        buffer.copy_(self._buffers[0])
        self._barrier.wait()


class SimulatedRanks:
    """Model, optimizer and synchronization of every rank."""

    def __init__(self, nodes: Nodes, config: ModelConfig, table: tc.Table, fields: int, task: Task, sync: tc.DenseSync):
        self.world = sum(map(len, nodes))
        self.models = [build(config, table, fields) for _ in range(self.world)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers = [tc.FrozenAdam(parameter_groups(config, m), lr=task.dense_lr) for m in self.models]
        self._threads = ThreadPoolExecutor(self.world)
        buffers: list[Any] = [None] * self.world
        barrier = threading.Barrier(self.world, timeout=60)
        make_allreduce = functools.partial(ThreadAllReduce, buffers, barrier)
        self.syncs = []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            groups: Any = types.SimpleNamespace(topology=tc.Topology(self.world, rank, nodes), train=None)
            dense = tc.DenseParameters.make(
                model.parameters(), optimizer, groups, sync, buffers=model.buffers(), make_allreduce=make_allreduce
            )
            self.syncs.append(dense)
        self.run_all(lambda sync: sync.begin())

    def run_all(self, call: Callable[[tc.DenseParameters], object]) -> None:
        """Call the function for all ranks concurrently, as collectives require."""
        list(self._threads.map(call, self.syncs))

    def close(self) -> None:
        self._threads.shutdown()


def accuracy_of(nodes: Nodes, task: Task, sync: tc.DenseSync) -> dict[str, Any]:
    """Train, and return the test AUC of the epoch with the best validation AUC."""
    torch.set_num_threads(1)
    fields = len(FEATURES) if task.folder else task.fields
    config = ModelConfig(name="dnn", hidden=(128, 64), dropout=0.0, embedding_l2=1e-5).resolve()
    if task.folder:
        config = ModelConfig(name="dnn", hidden=(128, 64)).resolve()
    torch.manual_seed(task.seed)
    rows = tc.Adam(lr=task.lr, weight_decay=config.embedding_l2 or 0.0)
    initial = tc.Normal(scale=config.initial)
    table = tc.Table(row_dim(config), rows, mem="128MB", seed=task.seed, initial=initial, threads=1)
    ranks = SimulatedRanks(nodes, config, table, fields, task, sync)
    step, history = 0, []
    for epoch in range(task.epochs):
        for model in ranks.models:
            model.train()
        parts = [task.batches(rank, ranks.world, epoch) for rank in range(ranks.world)]
        interleaved = itertools.chain.from_iterable(zip(*parts, strict=True))
        with tc.prefetch(interleaved, table, depth=2) as batches:
            for count, batch in enumerate(batches, 1):
                model = ranks.models[(count - 1) % ranks.world]
                label = torch.as_tensor(batch.label, dtype=torch.float32)
                torch.nn.functional.binary_cross_entropy_with_logits(model(batch), label).backward()
                if count % ranks.world == 0:
                    step += 1
                    _step(ranks, table, step)
        ranks.run_all(lambda sync: sync.merge_now())
        history.append([_auc(ranks.models[0], table, task.held_out(split)) for split in ("valid", "test")])
    ranks.close()
    table.close()
    best = max(range(len(history)), key=lambda n: history[n][0])
    return {"auc": history[best][1], "valid_auc": history[best][0], "epoch": best + 1, "steps": step}


def _step(ranks: SimulatedRanks, table: tc.Table, step: int) -> None:
    table.step(scale=1 / ranks.world, max_norm=10.0)
    ranks.run_all(lambda sync: sync.after_backward())
    for sync, optimizer in zip(ranks.syncs, ranks.optimizers, strict=True):
        torch.nn.utils.clip_grad_norm_(sync.parameters, 10.0)
        optimizer.step()
        optimizer.zero_grad()
    ranks.run_all(lambda sync: sync.after_step(step))


def _auc(model: torch.nn.Module, table: tc.Table, data: Iterator[tc.Batch]) -> float:
    model.eval()
    scores, labels = [], []
    with torch.no_grad(), tc.prefetch(data, table, depth=2, training=False) as batches:
        for batch in batches:
            scores.append(model(batch))
            labels.append(torch.as_tensor(batch.label, dtype=torch.float32))
    auc = tc.auc(torch.cat(scores), torch.cat(labels))
    assert math.isfinite(auc)
    return float(auc)
