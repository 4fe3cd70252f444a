"""One training over several ranks, told every way, and `ReferenceRanks`, which plays all ranks in one process.

Two tables, three bags, a few keys that most ranks share, a small network with Adam. Gradients of one key: each rank's
own sum, then the ranks of a node in order, then the nodes in order, then one multiplication by 1 / ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact.run import BAGS, DIMS, WIDTH, recipe

import thermocline as tc
from helpers.ranks import Nodes
from helpers.ssd import SMALL
from helpers.train import (
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    bits,
    budget_for,
    loss_of,
    make_batches,
    weights_of,
)
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.sharded_table import ShardedTable
from thermocline.embedding.reference import optimize, sum_in_blocks

BATCHES = 150

ONE: Nodes = ((0,),)
PAIR: Nodes = ((0, 1),)
APART: Nodes = ((0,), (1,))
FOUR: Nodes = ((0, 1), (2, 3))


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """What a run may choose without changing its bits."""

    hops: Any = "two"
    memory: float | None = None
    """Share of each rank's rows that its memory holds, the rest on SSD; None: memory only."""
    depth: int = 1
    pull_window: int = 1
    threads: int = 1
    hbm: float | None = None
    """Share of each rank's rows that HBM holds; None: no such tier."""

    def __str__(self) -> str:
        where = "memory" if self.memory is None else f"{self.memory:.0%}"
        where = where if self.hbm is None else f"hbm{self.hbm:.0%}-{where}"
        return f"{self.hops}-{where}-depth{self.depth}-window{self.pull_window}-threads{self.threads}"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is trained: all that changes bits."""

    nodes: Nodes
    optimizer: str = "adagrad"
    """A recipe, as `exact.run` reads them."""
    batches: tuple[int, ...] = ()
    """Of each rank; empty: as many on each."""
    accumulate: int = 1

    @property
    def world(self) -> int:
        return sum(map(len, self.nodes))

    def data(self, rank: int) -> list[tc.Batch]:
        return _data(rank, self.batches[rank] if self.batches else BATCHES)


@functools.cache
def _data(rank: int, count: int) -> list[tc.Batch]:
    """Two of five ids are of eight keys, which so most steps find on several ranks; the others hardly ever repeat."""
    batches = make_batches(count, examples=2, fields=8, keys=1 << 40, max_ids=2, weighted=True, seed=70 + rank)
    rng = np.random.default_rng(rank)
    for batch in batches:
        hot = rng.random(len(batch.ids)) < 0.4
        batch.ids[hot] = rng.integers(0, 8, int(hot.sum()), dtype=np.uint64)
    return batches


@functools.cache
def keys_of(job: Job, name: str) -> np.ndarray[Any, Any]:
    fields = sorted({field for table, chosen, _ in BAGS if table == name for field in chosen})
    found = [batch.select(fields)[0] for rank in range(job.world) for batch in job.data(rank)]
    return np.unique(np.concatenate(found))


def probe(job: Job) -> np.ndarray[Any, Any]:
    every = [all_keys(job.data(rank)) for rank in range(job.world) if job.data(rank)]
    return np.unique(np.concatenate([*every, np.array([11, 2**63, 2**64 - 1], np.uint64)]))


# ---- the reference


def tree(nodes: Nodes, of_rank: Sequence[Any]) -> Any:
    """The one order of every sum over ranks; None: a rank has nothing to add."""
    total = None
    for node in nodes:
        part = None
        for rank in node:
            g = of_rank[rank]
            if g is not None:
                part = g if part is None else part + g
        if part is not None:
            total = part if total is None else total + part
    return total


class ReferenceRanks:
    """All ranks in one process: one dict of rows per table, one network, each rank's gradients one after the other."""

    def __init__(self, job: Job, device: str = "cpu") -> None:
        """device: of the dense network, whose bits depend on it."""
        self.job = job
        self.sides = {}
        for name, dim in DIMS.items():
            optimizer, precision, _ = recipe(job.optimizer)
            plain = tc.Table(dim, optimizer, name=name, mem="1MB", precision=precision)
            self.sides[name] = Reference(plain, seed=5)
        self.model = Net([ReferenceBag(self.sides[name], fields, pooling) for name, fields, pooling in BAGS], WIDTH)
        self.model.to(device)
        self.dense = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)
        self.steps = 0

    def train(self) -> None:
        data = [self.job.data(rank) for rank in range(self.job.world)]
        longest, together = max(map(len, data)), self.job.accumulate
        for first in range(0, longest, together):
            self.step([batches[first : first + together] for batches in data])

    def step(self, batches: Sequence[Sequence[tc.Batch]]) -> None:
        self.steps += 1
        parameters = list(self.model.dense.parameters())
        dense: list[Any] = []
        sparse: list[dict[str, dict[int, Any]]] = []
        for own in batches:
            self.dense.zero_grad()
            for batch in own:
                loss_of(self.model, batch).backward()
            dense.append([None if p.grad is None else p.grad.clone() for p in parameters])
            sparse.append({name: _sums(side) for name, side in self.sides.items()})
        scale = 1 / self.job.world / self.job.accumulate
        for name, side in self.sides.items():
            for key in sorted({key for rank in sparse for key in rank[name]}):
                g = tree(self.job.nodes, [rank[name].get(key) for rank in sparse])
                row = side.table.row(key)
                optimize(side.table.optimizer, row, g * np.float32(scale), self.steps, side.lr)
                side.table.store(key, row, self.steps)
        for i, parameter in enumerate(parameters):
            parameter.grad = tree(self.job.nodes, [rank[i] for rank in dense]) * (1 / self.job.world)
            parameter.grad *= 1 / self.job.accumulate
        self.dense.step()

    def result(self) -> dict[str, bytes]:
        rows = {name: bits(side.table.read(probe(self.job))) for name, side in self.sides.items()}
        return {**rows, "dense": weights_of(self.model)}


def _sums(side: Reference) -> dict[int, Any]:
    """What one rank's backward left: each key's occurrences in example order."""
    keys: list[int] = []
    gradients: list[Any] = []
    for bag, batch, pooled in side.tape:
        if pooled.grad is not None:
            bag.spread(batch, pooled.grad.numpy(), keys, gradients)
    side.tape = []
    of_key: dict[int, list[Any]] = {}
    for key, gradient in zip(keys, gradients, strict=True):
        of_key.setdefault(key, []).append(gradient)
    return {key: sum_in_blocks(found) for key, found in of_key.items()}


@functools.cache
def reference(job: Job, device: str = "cpu") -> dict[str, bytes]:
    torch.set_num_threads(1)
    played = ReferenceRanks(job, device)
    played.train()
    return played.result()


# ---- the ranks


def make_table(name: str, job: Job, way: Way, groups: Groups | None, folder: str, **more: Any) -> Any:
    """Over ranks; without groups, of this process alone."""
    chosen, precision, _ = recipe(job.optimizer)
    options: dict[str, Any] = {"mem": "16MB"}
    if way.memory is not None:
        rows = int(way.memory * len(keys_of(job, name)) / job.world)
        budget = budget_for(rows, DIMS[name], chosen, precision)
        options = {"mem": budget, "ssd": Path(folder) / name, "ssd_options": SMALL}
    if way.hbm is not None:
        from thermocline.kernels import INTERPRETED
        from thermocline.tiers.hbm import bytes_for

        words = precision.row_bytes(DIMS[name], chosen) // 4
        options["hbm"] = bytes_for(int(way.hbm * len(keys_of(job, name)) / job.world), words)
        options["device"] = "interpreter" if INTERPRETED else "cuda"
    options["precision"] = precision
    options |= {"name": name, "seed": 5, "threads": way.threads, **more}
    if groups is None:
        return tc.Table(DIMS[name], chosen, **options)
    return ShardedTable(DIMS[name], chosen, groups=groups, hops=way.hops, **options)


def make_model(tables: dict[str, Any]) -> Net:
    return Net([tc.EmbeddingBag(tables[name], fields, pooling=pooling) for name, fields, pooling in BAGS], WIDTH)


def train_rank(groups: Groups, job: Job, way: Way, folder: str) -> dict[str, Any]:
    """One rank's side of the training; its result is the same on every rank."""
    tables = {name: make_table(name, job, way, groups, folder) for name in DIMS}
    model = make_model(tables)
    for table in tables.values():
        if table.hbm is not None:
            model.to(table.hbm.device)
    parameters = list(model.dense.parameters())
    dense = torch.optim.Adam(parameters, lr=0.01)
    sync = DenseParameters.make(parameters, dense, groups, tc.DenseSync(exact=True))
    source = tc.prefetch(job.data(groups.topology.rank), *tables.values(), depth=way.depth, pull_window=way.pull_window)
    count = empty = 0
    longest = max(len(job.data(rank)) for rank in range(job.world))
    for batch in source:
        count += 1
        empty += batch.examples == 0
        if batch.examples:
            loss_of(model, batch).backward()
        if count % job.accumulate and count < longest:
            continue
        for table in tables.values():
            table.step(scale=1 / job.accumulate)
        sync.after_backward()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= 1 / job.accumulate
        dense.step()
        dense.zero_grad()
    rows = {name: bits(table.read(probe(job))) for name, table in tables.items()}
    stats = {name: table.dram.stats() for name, table in tables.items()}
    hbm = {name: table.hbm.stats() for name, table in tables.items() if table.hbm is not None}
    for table in tables.values():
        table.dram.check()
        if table.hbm is not None:
            table.hbm.check()
        table.close()
    traffic = {name: table.backend.traffic for name, table in tables.items()}
    return {
        **rows, "dense": weights_of(model), "count": count, "empty": empty, "stats": stats, "traffic": traffic,
        "hbm": hbm,
    }  # fmt: skip


def assert_reference(job: Job, results: Sequence[dict[str, Any]], device: str = "cpu") -> None:
    expected = reference(job, device)
    for rank, result in enumerate(results):
        for name in (*DIMS, "dense"):
            mine, its = (np.frombuffer(x[name], np.uint32) for x in (result, expected))
            wrong = int((mine != its).sum())
            assert wrong == 0, f"rank {rank}: {wrong} of {len(its)} numbers of {name} differ from the reference"
