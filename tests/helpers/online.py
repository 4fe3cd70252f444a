"""Helpers of the tests of row statistics and expiry: a stream whose keys drift, tables in any tiers, one training loop.

Gradients are small integers, so that their sums are exact in any order, over ranks too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline as tc
from helpers.ssd import SMALL
from helpers.train import bits
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable
from thermocline.embedding.reference_backend import ReferenceBackend

ALL = ("frequency", "last_step", "last_time", "show", "click")
KEYS = np.arange(400, dtype=np.uint64)
"""All keys of `stream`, and a few that it never has."""
DIM = 3


def stream(steps: int, seed: int = 0, fields: int = 2) -> list[tc.Batch]:
    """Make batches whose frequent keys move on, with empty bags, labels between 0 and 1, and out-of-order times."""
    rng = np.random.default_rng(seed)
    batches = []
    for step in range(steps):
        examples = int(rng.integers(1, 9))
        sizes = rng.integers(0, 4, examples * fields)
        ids = (2 * step + rng.geometric(0.03, int(sizes.sum()))) % 380
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        batches.append(
            tc.Batch(
                ids.astype(np.uint64), offsets, fields,
                dense=rng.integers(-2, 3, (examples, fields)).astype(np.float32),
                label=rng.choice(np.array([0, 0, 1, 0.25], np.float32), examples),
                time=1_700_000_000 + 60 * step + rng.integers(-90, 90, examples),
            )
        )  # fmt: skip
    return batches


def make_table(tiers: str, folder: Path | str, **options: Any) -> tc.Table:
    """Make a table: "reference", or in the tiers "mem", "ssd", "hbm" or "hbm-ssd", with room for a part of the rows."""
    options = {"optimizer": tc.Adagrad(lr=0.5), "name": "t", "seed": 3, "statistics": ALL, "threads": 2} | options
    optimizer, dim = options.pop("optimizer"), options.pop("dim", DIM)
    if tiers == "reference":
        return tc.Table(dim, optimizer, make_backend=ReferenceBackend.make, mem="1MB", **options)
    if "ssd" in tiers:
        options |= {"ssd": Path(folder) / tiers, "ssd_options": SMALL}
    if "hbm" in tiers:
        from thermocline.kernels import INTERPRETED

        options |= {"hbm": 20_000, "device": "interpreter" if INTERPRETED else "cuda"}
    return tc.Table(dim, optimizer, mem=34_000 if "ssd" in tiers else "1MB", **options)


def train(table: Any, bag: Any, batches: Iterable[tc.Batch], *, scale: float = 1.0, accumulate: int = 1) -> None:
    """Train batches that `tc.prefetch` yields."""
    for number, batch in enumerate(batches, 1):
        if batch.examples:
            (bag(batch) * torch.from_numpy(batch.dense)[:, :, None].to(table.device)).sum().backward()
        if number % accumulate == 0:
            table.step(scale=scale)


def fit(table: tc.Table, data: Sequence[tc.Batch], depth: int = 1, pull_window: int = 1) -> dict[str, Any]:
    """Train a table through a bag and return its state."""
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    with tc.prefetch(data, table, depth=depth, pull_window=pull_window) as batches:
        train(table, bag, batches)
    return state_of(table)


def state_of(table: Any) -> dict[str, Any]:
    """Return the bits of all rows and statistics, the keys that exist, and the counters of expiry."""
    live = np.sort(np.concatenate([np.empty(0, np.uint64), *(keys.copy() for keys, _ in table.rows())]))
    statistics = {name: values.tolist() for name, values in table.read_statistics(KEYS).items()}
    expired = (table.expired.runs, table.expired.rows, table.expired.last_rows, table.expired.last_kept)
    return {"rows": bits(table.read(KEYS)), "live": live.tolist(), "expired": expired, **statistics}


def train_rank(groups: Groups, steps: Sequence[int], folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train `stream(steps[rank], rank)` on each rank; return the state, whose `live` and `expired` are the rank's."""
    rank = groups.topology.rank
    table = ShardedTable(
        DIM, tc.Adagrad(lr=0.5), groups=groups, name="t", seed=3, statistics=ALL, mem=34_000, threads=1,
        ssd=Path(folder) / "t", ssd_options=SMALL, **options,
    )  # fmt: skip
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    with tc.prefetch(stream(steps[rank], rank), table, depth=3, pull_window=2) as batches:
        train(table, bag, batches)
    state = state_of(table)
    table.dram.check()
    table.close()
    return state
