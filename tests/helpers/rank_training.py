"""One training over several ranks with any options, and `ReferenceRanks`, which trains all ranks in one process.

Two tables, three bags, a few keys that most ranks share, a small network with Adam. The gradients of a key are summed
within each rank, then over the ranks of a node in order, then over the nodes in order, then multiplied by 1 / ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from exact.run import BAGS, DIMS, WIDTH, recipe

import thermocline as tc
from helpers.admission import AdmissionReference, AdmissionReferenceBag
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
from thermocline.embedding.reference import sum_in_blocks
from thermocline.embedding.table_spec import LookAheadLimits

BATCHES = 150
AHEAD_BYTES = 64_000

ONE_RANK: Nodes = ((0,),)
PAIR: Nodes = ((0, 1),)
TWO_NODES: Nodes = ((0,), (1,))
TWO_BY_TWO: Nodes = ((0, 1), (2, 3))


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run that must not change its bits."""

    hops: Any = "two"
    memory: float | None = None
    """Share of each rank's rows that fits into memory, the others are on SSD; None: no SSD."""
    depth: int = 1
    pull_window: int = 1
    threads: int = 1
    hbm: float | None = None
    """Share of each rank's rows that fits into HBM; None: no HBM tier."""
    lookahead: int | str = 0
    """Batches loaded ahead at most, or "auto", in AHEAD_BYTES beside the memory for rows; 0: none."""

    def __str__(self) -> str:
        tiers = "memory" if self.memory is None else f"{self.memory:.0%}"
        tiers = tiers if self.hbm is None else f"hbm{self.hbm:.0%}-{tiers}"
        tiers = tiers if not self.lookahead else f"{tiers}-ahead{self.lookahead}"
        return f"{self.hops}-{tiers}-depth{self.depth}-window{self.pull_window}-threads{self.threads}"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The training: all fields change its bits."""

    nodes: Nodes
    optimizer: str = "adagrad"
    """A recipe of `exact.run`."""
    batches: tuple[int, ...] = ()
    """Number of batches of each rank; empty: BATCHES on each."""
    accumulate: int = 1
    admission: tc.Admission | None = None
    keys: int = 1 << 40
    """Range of the ids that are not shared by most ranks."""

    @property
    def world(self) -> int:
        return sum(map(len, self.nodes))

    def data(self, rank: int) -> list[tc.Batch]:
        return _data(rank, self.batches[rank] if self.batches else BATCHES, self.keys)


@functools.cache
def _data(rank: int, count: int, keys: int) -> list[tc.Batch]:
    """Return batches with 40 % of the ids from eight keys, shared by ranks in most steps; other ids rarely repeat."""
    batches = make_batches(count, examples=2, fields=8, keys=keys, max_ids=2, weighted=True, seed=70 + rank)
    rng = np.random.default_rng(rank)
    for batch in batches:
        hot = rng.random(len(batch.ids)) < 0.4
        batch.ids[hot] = rng.integers(0, 8, int(hot.sum()), dtype=np.uint64)
    return batches


@functools.cache
def keys_of(job: Job, name: str) -> np.ndarray[Any, Any]:
    """Return all keys that the job trains in one table."""
    fields = sorted({field for table, chosen, _ in BAGS if table == name for field in chosen})
    ids = [batch.select(fields)[0] for rank in range(job.world) for batch in job.data(rank)]
    return np.unique(np.concatenate(ids))


def probe_keys(job: Job) -> np.ndarray[Any, Any]:
    """Return all keys of the job and a few that it never trains."""
    ids = [all_keys(job.data(rank)) for rank in range(job.world) if job.data(rank)]
    return np.unique(np.concatenate([*ids, np.array([11, 2**63, 2**64 - 1], np.uint64)]))


# ---- the reference


def tree_sum(nodes: Nodes, values: Sequence[Any]) -> Any:
    """Add the values of the ranks of each node, then the nodes; ranks with None add nothing."""
    total = None
    for node in nodes:
        part = None
        for rank in node:
            value = values[rank]
            if value is not None:
                part = value if part is None else part + value
        if part is not None:
            total = part if total is None else total + part
    return total


class ReferenceRanks:
    """All ranks in one process: a dict of rows per table, one network, the gradients of one rank after the other."""

    def __init__(self, job: Job, device: str = "cpu") -> None:
        """`device` is the dense network's, whose bits depend on it."""
        self.job = job
        self.tables: dict[str, Reference] = {}
        for name, dim in DIMS.items():
            optimizer, precision, _ = recipe(job.optimizer)
            table = tc.Table(dim, optimizer, name=name, mem="1MB", precision=precision)
            if job.admission is None:
                self.tables[name] = Reference(table, seed=5)
            else:
                self.tables[name] = AdmissionReference(table, job.admission, seed=5)
        kind = ReferenceBag if job.admission is None else AdmissionReferenceBag
        self.bags: list[Any] = [kind(self.tables[name], fields, pooling) for name, fields, pooling in BAGS]  # type: ignore[arg-type]
        self.model = Net(self.bags, WIDTH)
        self.model.to(device)
        self.dense = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)
        self.steps = 0

    def train(self) -> None:
        data = [self.job.data(rank) for rank in range(self.job.world)]
        longest, accumulate = max(map(len, data)), self.job.accumulate
        for first in range(0, longest, accumulate):
            self.step([batches[first : first + accumulate] for batches in data])

    def step(self, batches: Sequence[Sequence[tc.Batch]]) -> None:
        self.steps += 1
        for rank_batches in batches if self.job.admission is not None else ():
            self.admit(rank_batches)
        parameters = list(self.model.dense.parameters())
        dense: list[Any] = []
        sparse: list[dict[str, dict[int, Any]]] = []
        for rank_batches in batches:
            self.dense.zero_grad()
            for batch in rank_batches:
                loss_of(self.model, batch).backward()
            dense.append([None if p.grad is None else p.grad.clone() for p in parameters])
            sparse.append({name: _key_sums(table) for name, table in self.tables.items()})
        scale = 1 / self.job.world / self.job.accumulate
        for name, table in self.tables.items():
            keys = sorted({key for rank in sparse for key in rank[name]})
            sums = {key: tree_sum(self.job.nodes, [rank[name].get(key) for rank in sparse]) for key in keys}
            table.table.apply_sums(sums, step=self.steps, lr=table.lr, scale=scale)
            table.table.rates[self.steps] = table.lr
        for i, parameter in enumerate(parameters):
            parameter.grad = tree_sum(self.job.nodes, [rank[i] for rank in dense]) * (1 / self.job.world)
            parameter.grad *= 1 / self.job.accumulate
        self.dense.step()

    def admit(self, rank_batches: Sequence[tc.Batch]) -> None:
        """Count the ids of one rank: before any rank trains, because all ranks' batches are one batch."""
        assert len(rank_batches) <= 1, "admission is decided per batch: accumulate must be 1"
        for batch in rank_batches:
            for table in self.tables.values():
                assert isinstance(table, AdmissionReference)
                table.plan(batch, [bag for bag in self.bags if bag.table is table])

    def result(self) -> dict[str, Any]:
        rows = {name: bits(table.table.read(probe_keys(self.job))) for name, table in self.tables.items()}
        stored = {name: len(table.table.rows) for name, table in self.tables.items()}
        return {**rows, "dense": weights_of(self.model), "stored": stored}


def _key_sums(table: Reference) -> dict[int, Any]:
    """Return the gradient sum of each key of one rank, occurrences added in example order."""
    keys: list[int] = []
    gradients: list[Any] = []
    for bag, batch, pooled in table.tape:
        if pooled.grad is not None:
            bag.collect_gradients(batch, pooled.grad.numpy(), keys, gradients)
    table.tape = []
    by_key: dict[int, list[Any]] = {}
    for key, gradient in zip(keys, gradients, strict=True):
        by_key.setdefault(key, []).append(gradient)
    return {key: sum_in_blocks(values) for key, values in by_key.items()}


@functools.cache
def reference(job: Job, device: str = "cpu") -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = ReferenceRanks(job, device)
    ranks.train()
    return ranks.result()


# ---- the ranks


def make_table(name: str, job: Job, options: RunOptions, groups: Groups | None, folder: str, **more: Any) -> Any:
    """Create a table of the job: sharded over the ranks of `groups`, or local if None."""
    optimizer, precision, _ = recipe(job.optimizer)
    arguments: dict[str, Any] = {"mem": "16MB"}
    if options.memory is not None:
        rows = int(options.memory * len(keys_of(job, name)) / job.world)
        ahead = AHEAD_BYTES if options.lookahead else 0
        budget = budget_for(rows, DIMS[name], optimizer, precision, reserved=ahead)
        arguments = {"mem": budget, "ssd": Path(folder) / name, "ssd_options": SMALL, "lookahead": 0}
    if options.lookahead:  # beside the memory for rows, which would be too little to share
        limits = LookAheadLimits(options.lookahead if isinstance(options.lookahead, int) else None, AHEAD_BYTES)
        with mock.patch.object(LookAheadLimits, "of", return_value=limits):
            return make_table(
                name, job, dataclasses.replace(options, lookahead=0), groups, folder, mem=arguments["mem"], **more
            )
    if options.hbm is not None:
        from thermocline.kernels import INTERPRETED
        from thermocline.tiers.hbm import bytes_for

        words = precision.row_bytes(DIMS[name], optimizer) // 4
        arguments["hbm"] = bytes_for(int(options.hbm * len(keys_of(job, name)) / job.world), words)
        arguments["device"] = "interpreter" if INTERPRETED else "cuda"
    arguments["precision"] = precision
    arguments |= {"admission": job.admission, "accumulate": job.accumulate}
    arguments |= {"name": name, "seed": 5, "threads": options.threads, **more}
    if groups is None:
        return tc.Table(DIMS[name], optimizer, **arguments)
    return ShardedTable(DIMS[name], optimizer, groups=groups, hops=options.hops, **arguments)


def make_model(tables: dict[str, Any]) -> Net:
    return Net([tc.EmbeddingBag(tables[name], fields, pooling=pooling) for name, fields, pooling in BAGS], WIDTH)


def train_rank(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Train the job on this rank. Rows and weights of the result are equal on all ranks."""
    tables = {name: make_table(name, job, options, groups, folder) for name in DIMS}
    model = make_model(tables)
    for table in tables.values():
        if table.hbm is not None:
            model.to(table.hbm.device)
    parameters = list(model.dense.parameters())
    dense = torch.optim.Adam(parameters, lr=0.01)
    sync = DenseParameters.make(parameters, dense, groups, tc.DenseSync(exact=True))
    sync.begin()
    data = job.data(groups.topology.rank)
    batches = tc.prefetch(data, *tables.values(), depth=options.depth, pull_window=options.pull_window)
    count = empty = 0
    longest = max(len(job.data(rank)) for rank in range(job.world))
    for batch in batches:
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
    rows = {name: bits(table.read(probe_keys(job))) for name, table in tables.items()}
    stored = {name: sum(len(keys) for keys, _ in table.rows()) for name, table in tables.items()}
    stats = {name: table.dram.stats() for name, table in tables.items()}
    hbm = {name: table.hbm.stats() for name, table in tables.items() if table.hbm is not None}
    for table in tables.values():
        table.dram.check()
        if table.hbm is not None:
            table.hbm.check()
        table.close()
    traffic = {name: table.backend.traffic for name, table in tables.items()}
    early = {name: table.backend.early for name, table in tables.items()}
    exchanged = {
        name: None if rows is None else (rows.rows_early, rows.rows_late, rows.discarded)
        for name, rows in early.items()
    }
    hints = {name: table.backend.hints.stats for name, table in tables.items() if table.backend.hints is not None}
    return {
        **rows, "dense": weights_of(model), "count": count, "empty": empty, "stats": stats, "traffic": traffic,
        "hbm": hbm, "hints": hints, "early": exchanged, "stored": stored,
    }  # fmt: skip


def assert_matches_reference(job: Job, results: Sequence[dict[str, Any]], device: str = "cpu") -> None:
    expected = reference(job, device)
    for name, number in expected["stored"].items():
        stored = sum(result["stored"][name] for result in results)
        assert stored == number, f"{name} has {stored} rows, the reference {number}"
    for rank, result in enumerate(results):
        for name in (*DIMS, "dense"):
            ours, theirs = (np.frombuffer(x[name], np.uint32) for x in (result, expected))
            wrong = int((ours != theirs).sum())
            assert wrong == 0, f"rank {rank}: {wrong} of {len(theirs)} numbers of {name} differ from the reference"
