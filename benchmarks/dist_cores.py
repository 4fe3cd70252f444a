"""Scaling of rows over ranks: one rank on one core against four ranks on four cores.

    python benchmarks/dist_cores.py --quick
    python benchmarks/dist_cores.py --json FILE          at least four cores; a minute

Every rank, with all its threads, is bound to its own core and has its own batches, so four ranks do four times the work
of one. `rows`: batches pull and pool their rows and push constant gradients; rows per second, each row of a batch
counted once. `training`: the same with a network of 7e5 parameters whose gradients are averaged every step; examples
per second. Runs of both sides alternate. Rows are in memory, in tables of equal size per rank; ranks use shared memory
and Gloo over loopback. The paper reports 3.57 for four machines against one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch
import torch.distributed as dist
from common import Claim, console, environment, print_claims, spread, write_json
from dist_ranks import Train, training
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable

FIELDS, DIM = 26, 16
RANKS = 4
PAPER = 3.57
WARM = 4


def measure(groups: Groups, cores: Sequence[int], part: str, batch: int, steps: int, keys: int) -> dict[str, float]:
    """Run one measurement on this rank. Returns examples and rows per second of all ranks."""
    t = groups.topology
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cores[t.rank]})
    ads = tc.SyntheticAds(keys=keys * t.world, fields=FIELDS, dense=13, batch_size=batch, threads=1)
    ads.seek(t.rank * batch * (steps + WARM))
    batches = list(itertools.islice(iter(ads), steps + WARM))
    rows = sum(len(np.unique(batch.ids)) for batch in batches[WARM:])
    table = ShardedTable(DIM, tc.RowWiseAdagrad(lr=0.05), groups=groups, mem="512MB", threads=1)
    bag = tc.EmbeddingBag(table, FIELDS)
    train = training(groups, table, tc.DenseSync()) if part == "training" else _constant_gradients(table, batch)
    start = 0.0
    with tc.prefetch(batches, table, depth=2) as ready:
        for step, current in enumerate(ready, 1):
            train(bag(current), current, step)
            if step == WARM:  # before the next batch requests rows
                dist.barrier()
                start = time.perf_counter()
        dist.barrier()
        seconds = time.perf_counter() - start
    table.close()
    rows_by_rank = groups.train.all_gather(np.array([rows]), "gathering row counts")
    return {"examples_per_s": steps * batch * t.world / seconds, "rows_per_s": int(rows_by_rank.sum()) / seconds}


def _constant_gradients(table: ShardedTable, batch: int) -> Train:
    gradient = torch.randn(batch, FIELDS, DIM) * 0.01

    def train(vectors: torch.Tensor, batch: tc.Batch, step: int) -> None:
        torch.autograd.backward(vectors, gradient)
        table.step()

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few steps; allows fewer cores than ranks")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if len(available) < RANKS and not options.quick:
        raise SystemExit(f"{len(available)} cores available: {RANKS} ranks require one each; --quick runs with fewer")
    cores = [available[n * len(available) // RANKS] for n in range(RANKS)]
    batch, steps, keys = (512, 4, 20_000) if options.quick else (4096, 20, 500_000)
    figure = {"rows": "rows_per_s", "training": "examples_per_s"}
    rates: dict[str, dict[int, list[float]]] = {part: {1: [], RANKS: []} for part in figure}
    for _ in range(1 if options.quick else options.rounds):
        for part, ranks in itertools.product(figure, (1, RANKS)):
            nodes = (tuple(range(ranks)),)
            results = run_ranks(nodes, measure, cores, part, batch, steps, keys, seconds=300)
            rates[part][ranks].append(results[0][figure[part]])
            console.print(f"{part}, {ranks} ranks: {results[0][figure[part]]:,.0f} {figure[part]}")
    claims = []
    for part in figure:
        pairs = [many / one for one, many in zip(rates[part][1], rates[part][RANKS], strict=True)]
        claims.append(Claim(f"{part}: {RANKS} ranks on {RANKS} cores over one", statistics.median(pairs), PAPER))
    print_claims("one core per rank", claims)
    if options.json:
        spreads = {part: {str(n): spread(values) for n, values in sides.items()} for part, sides in rates.items()}
        write_json(options.json, {**environment(["torch"]), "batch": batch, "steps": steps, "laps": spreads}, claims)


if __name__ == "__main__":
    main()
