"""Trainings that benchmarks/train.py compares: ours, and the same models in plain PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import thermocline as tc
from thermocline.data.synthetic import SyntheticAds
from thermocline.pipeline.executor import StageStats

LR = 0.05
CHUNK = 1 << 18
"""Keys per call while tables are filled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lap:
    """Timed steps of one side."""

    steps: int
    examples: int
    seconds: float
    cpu_seconds: float
    loss: float
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    """Busy seconds per pipeline stage."""

    @property
    def rate(self) -> float:
        return self.examples / self.seconds


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---- models: float32[examples, fields, dim] -> one logit each


class Mlp(torch.nn.Module):
    def __init__(self, fields: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise((fields * dim, *hidden)):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(hidden[-1], 1))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.layers(pooled.flatten(1)).squeeze(1)


class Fm(torch.nn.Module):
    """Factorization machine: the first weight of a row is linear, the others are factors."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        factors = pooled[:, :, 1:]
        pairs = factors.sum(1).square() - factors.square().sum(1)
        return self.bias + pooled[:, :, 0].sum(1) + 0.5 * pairs.sum(1)


# ---- keys


def all_keys(ads: SyntheticAds) -> np.ndarray:
    """All keys of the data, field by field."""
    return ads.some_keys(0, sum(ads.keys))


def pieces(keys: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(keys), CHUNK):
        yield keys[first : first + CHUNK]


# ---- sides


class Ours:
    """A table of thermocline and a model on it."""

    def __init__(self, table: tc.Table, fields: int, top: torch.nn.Module, *, depth: int = 4) -> None:
        self.table, self.top, self.depth = table, top, depth
        self.bag = tc.EmbeddingBag(table, fields)
        self.dense = torch.optim.Adagrad(top.parameters(), lr=LR)

    def fill(self, keys: np.ndarray) -> None:
        """Insert the initial rows of `keys`: into the store, or into memory without a store."""
        for piece in pieces(keys):
            rows = self.table.dram.initial_rows(piece)
            if self.table.store is None:
                self.table.dram.push(piece, rows)
            else:
                self.table.store.put(piece, rows.view(np.uint8).reshape(len(piece), -1))
        if self.table.store is not None:
            self.table.store.merge()

    def run(self, batches: Iterable[tc.Batch], after_step: Callable[[int, tc.Batch], None] | None = None) -> Lap:
        start, used, losses, examples = time.perf_counter(), cpu(), [], 0
        with tc.prefetch(batches, self.table, depth=self.depth) as prepared:
            for batch in prepared:
                losses.append(float(train_step(self.top(self.bag(batch)), batch.label)))
                self.table.step()
                self.dense.step()
                self.dense.zero_grad()
                examples += batch.examples
                if after_step is not None:
                    after_step(len(losses), batch)
            stats: list[StageStats] = prepared.stats
        seconds, used = time.perf_counter() - start, cpu() - used
        busy = {stage.name: stage.busy_seconds for stage in stats}
        return Lap(len(losses), examples, seconds, used, float(np.mean(losses)), busy)

    def close(self) -> None:
        self.table.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Indexed:
    """Batch for nn.EmbeddingBag: row numbers instead of keys."""

    rows: torch.Tensor
    offsets: torch.Tensor
    label: torch.Tensor


class Plain:
    """nn.EmbeddingBag with sparse gradients and torch.optim.Adagrad: a row per key, addressed by number."""

    def __init__(self, initial: Any, keys: np.ndarray, fields: int, dim: int, top: torch.nn.Module) -> None:
        self.keys = np.sort(keys)  # keys are hashed: adjacent rows differ in popularity
        self.fields, self.dim, self.top = fields, dim, top
        weights = torch.empty(len(keys), dim)
        for first in range(0, len(keys), CHUNK):
            rows = initial(self.keys[first : first + CHUNK])
            weights[first : first + CHUNK] = torch.from_numpy(rows[:, :dim])
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights, freeze=False, mode="sum", sparse=True, include_last_offset=True
        )
        self.sparse = torch.optim.Adagrad(self.bag.parameters(), lr=LR)
        self.dense = torch.optim.Adagrad(top.parameters(), lr=LR)

    def indexed(self, batches: Iterable[tc.Batch]) -> list[Indexed]:
        return [
            Indexed(
                torch.from_numpy(np.searchsorted(self.keys, batch.ids)), torch.from_numpy(batch.offsets), batch.label
            )
            for batch in batches
        ]

    def run(self, batches: list[Indexed]) -> Lap:
        start, used, losses, examples = time.perf_counter(), cpu(), [], 0
        for batch in batches:
            pooled = self.bag(batch.rows, batch.offsets).view(-1, self.fields, self.dim)
            losses.append(float(train_step(self.top(pooled), batch.label)))
            for optimizer in (self.sparse, self.dense):
                optimizer.step()
                optimizer.zero_grad()
            examples += len(batch.label)
        seconds, used = time.perf_counter() - start, cpu() - used
        return Lap(len(losses), examples, seconds, used, float(np.mean(losses)))


def train_step(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
    loss.backward()
    return loss.detach()


def same_start(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Model with equal initial weights at every call."""
    torch.manual_seed(0)
    return make()
