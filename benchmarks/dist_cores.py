"""How rows scale over ranks: pull and push of one rank on one core, against four ranks on four.

    python benchmarks/dist_cores.py --quick
    python benchmarks/dist_cores.py --json FILE          at least four cores; a minute

Every rank is bound to a core of its own, all its threads together, and has batches of its own: four ranks do four times
the work of one. `rows`: batches pull their rows, pool them, and push given gradients, nothing else: rows per second,
each row of a batch counted once. `training`: the same below a network of 7e5 parameters whose gradients are averaged
every step: examples per second. Laps take turns. Rows lie in memory, in tables of equal size per rank; ranks talk by
Gloo over loopback. The source reports 3.57 for four machines against one.
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
from helpers.ranks import play

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable

FIELDS, DIM = 26, 16
RANKS = 4
PAPER = 3.57
WARM = 4


def lap(groups: Groups, cores: Sequence[int], what: str, batch: int, steps: int, keys: int) -> dict[str, float]:
    """One rank of a lap; what all of them did per second."""
    t = groups.topology
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cores[t.rank]})
    ads = tc.SyntheticAds(keys=keys * t.world, fields=FIELDS, dense=13, batch_size=batch, threads=1)
    ads.seek(t.rank * batch * (steps + WARM))
    batches = list(itertools.islice(iter(ads), steps + WARM))
    rows = sum(len(np.unique(one.ids)) for one in batches[WARM:])
    table = ShardedTable(DIM, tc.RowWiseAdagrad(lr=0.05), groups=groups, mem="512MB", threads=1)
    bag = tc.EmbeddingBag(table, FIELDS)
    train = training(groups, table, tc.DenseSync()) if what == "training" else _given(table, batch)
    begin = 0.0
    with tc.prefetch(batches, table, depth=2) as ready:
        for step, found in enumerate(ready, 1):
            train(bag(found), found, step)
            if step == WARM:  # before the next batch asks for rows
                dist.barrier()
                begin = time.perf_counter()
        dist.barrier()
        seconds = time.perf_counter() - begin
    table.close()
    every = groups.train.all_gather_object(rows, "rows of each rank")
    return {"examples_per_s": steps * batch * t.world / seconds, "rows_per_s": sum(every) / seconds}


def _given(table: ShardedTable, batch: int) -> Train:
    gradient = torch.randn(batch, FIELDS, DIM) * 0.01

    def train(vectors: torch.Tensor, found: tc.Batch, step: int) -> None:
        torch.autograd.backward(vectors, gradient)
        table.step()

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few steps; cores may be fewer than ranks")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    here = sorted(os.sched_getaffinity(0))
    if len(here) < RANKS and not options.quick:
        raise SystemExit(f"{len(here)} cores here: {RANKS} ranks need a core each. --quick runs all the same")
    cores = [here[n * len(here) // RANKS] for n in range(RANKS)]
    batch, steps, keys = (512, 4, 20_000) if options.quick else (4096, 20, 500_000)
    figure = {"rows": "rows_per_s", "training": "examples_per_s"}
    laps: dict[str, dict[int, list[float]]] = {what: {1: [], RANKS: []} for what in figure}
    for _ in range(1 if options.quick else options.rounds):
        for what, ranks in itertools.product(figure, (1, RANKS)):
            nodes = (tuple(range(ranks)),)
            found = play(nodes, lap, cores, what, batch, steps, keys, seconds=300)
            laps[what][ranks].append(found[0][figure[what]])
            console.print(f"{what}, {ranks} ranks: {found[0][figure[what]]:,.0f} {figure[what]}")
    claims = []
    for what in figure:
        pairs = [many / one for one, many in zip(laps[what][1], laps[what][RANKS], strict=True)]
        claims.append(Claim(f"{what}: {RANKS} ranks on {RANKS} cores over one", statistics.median(pairs), PAPER))
    print_claims("Ranks on cores of their own", claims)
    if options.json:
        spreads = {what: {str(n): spread(values) for n, values in sides.items()} for what, sides in laps.items()}
        write_json(options.json, {**environment(["torch"]), "batch": batch, "steps": steps, "laps": spreads}, claims)


if __name__ == "__main__":
    main()
