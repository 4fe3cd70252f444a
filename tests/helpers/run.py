"""A model that trains in milliseconds and has every kind of checkpoint state: two tables, dropout, Adam."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thermocline.batch import Batch
from thermocline.checkpoint.manager import Checkpoints
from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from thermocline.embedding.state_dict import dense_state_dict
from thermocline.embedding.table import Table
from thermocline.pipeline.prefetch import prefetch

KEYS = 600
EXAMPLES = 16
OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), SGD(lr=0.05, weight_decay=0.01)),
    "adagrad": (Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1)),
    "adam": (Adam(lr=0.01), Adagrad(lr=0.1, initial_accumulator=0.1)),
}


class Ads:
    """Batches by number: two fields of table "a", one of table "b". The label depends on the keys."""

    def __init__(self, batches: int, seed: int = 0) -> None:
        self.batches, self.seed = batches, seed

    def batch(self, n: int) -> Batch:
        rng = np.random.default_rng([self.seed, n])
        lengths = rng.integers(0, 4, EXAMPLES * 3)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = (rng.zipf(1.3, offsets[-1]) % KEYS).astype(np.uint64)
        score = np.array([(ids[b:e] % 3 == 0).sum() for b, e in zip(offsets[:-1:3], offsets[3::3], strict=True)])
        label = (score + rng.normal(0, 0.5, EXAMPLES) > 1.5).astype(np.float32)
        return Batch(ids, offsets, 3, label=torch.from_numpy(label), position={"batch": n + 1})

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(self.batches))

    def seek(self, position: Any) -> Iterator[Batch]:
        return map(self.batch, range(position["batch"], self.batches))


ADS = Ads(12)
STORAGES = ["memory", "ssd"]


class Model(torch.nn.Module):
    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        first, second = tables
        self.a = EmbeddingBag(first, [0, 1])
        self.b = EmbeddingBag(second, [2], pooling="mean")
        self.norm = torch.nn.BatchNorm1d(2 * first.dim + second.dim)
        self.drop = torch.nn.Dropout(0.2)
        self.out = torch.nn.Linear(2 * first.dim + second.dim, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.cat([self.a(batch).flatten(1), self.b(batch).flatten(1)], 1)
        logits: torch.Tensor = self.out(self.drop(self.norm(x))).squeeze(1)
        return logits


class World:
    """New tables, model and dense optimizer, as in a new process of a run."""

    def __init__(
        self, folder: Path | None, optimizers: str = "adagrad", *, mem: str = "2MB", seed: int = 0, **options: Any
    ) -> None:
        """options: further arguments of both tables."""
        torch.set_num_threads(1)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        stores = [None, None] if folder is None else [folder / "ssd-a", folder / "ssd-b"]
        self.tables = [
            Table(dim, optimizer, mem=mem, ssd=store, name=name, seed=seed, threads=1, ssd_mem="16MB", **options)
            for dim, optimizer, store, name in zip((4, 6), OPTIMIZERS[optimizers], stores, "ab", strict=True)
        ]
        self.model = Model(self.tables)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, batches: Any, *, depth: int = 1) -> None:
        with prefetch(batches, *self.tables, depth=depth) as prepared:
            for batch in prepared:
                self.step(batch)

    def step(self, batch: Batch) -> None:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        loss.backward()
        for table in self.tables:
            table.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, bytes]:
        """State that must be equal in a resumed and an uninterrupted run."""
        keys = np.arange(KEYS, dtype=np.uint64)
        bits = {f"table {table.name}": table.read(keys).tobytes() for table in self.tables}
        for table in self.tables:
            table.dram.check()
            bits[f"steps {table.name}"] = f"{table.step_count} {table.lr}".encode()
        for name, value in dense_state_dict(self.model).items():
            bits[name] = value.numpy().tobytes()
        for i, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                bits[f"adam {i} {name}"] = value.numpy().tobytes()
        bits["random"] = torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode()
        bits["numpy"] = np.random.get_state(legacy=False)["state"]["key"].tobytes()  # type: ignore[index,call-overload]
        return bits

    def close(self) -> None:
        for table in self.tables:
            table.close()
            if table.checkpoint_store is not None:
                table.checkpoint_store.close()


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Names of unequal entries; short, for assertion messages."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def folder_of(storage: str, path: Path) -> Path | None:
    return path if storage == "ssd" else None


def checkpoints_of(world: World, path: Path, **options: Any) -> Checkpoints:
    return Checkpoints(path / "run", world.tables, world.model, world.optimizer, **options)


def trained(folder: Path | None, steps: int, optimizers: str = "adagrad") -> dict[str, bytes]:
    """State of an uninterrupted run after `steps` steps."""
    world = World(folder, optimizers)
    world.train(ADS.batch(n) for n in range(steps))
    bits = world.bits()
    world.close()
    return bits


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **kwargs: Any) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()
