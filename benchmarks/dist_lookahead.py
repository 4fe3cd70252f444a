"""Look-ahead over ranks: training beyond memory with and without hints of coming batches.

    python benchmarks/dist_lookahead.py --quick
    python benchmarks/dist_lookahead.py --ranks 4 --json FILE          a minute on 16 cores

Ranks on one machine, 26 ids per example, ids by a power law (half of them are among 1/8 of the keys), rows of 16 floats
with rowwise Adagrad, a tenth of the rows in the ranks' DRAM, all of them on SSD before the clock starts. Both sides
have the same memory and the same batches, which are made before the clock starts. Steps are timed after the ramp-up.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable

FIELDS, DIM = 26, 16
ROW_BYTES = 4 * (DIM + 1)
TARGET = 1.5
"""Speed with hints over speed without; fixed before the first measurement."""
LATE = 0.05
"""Largest share of the missing rows that the pull of a batch may have to read with hints."""


def keys_of(numbers: Any) -> Any:
    """Spread numbers over 64 bits."""
    return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def open_table(groups: Groups, folder: str, keys: int, lookahead: int | str, threads: int) -> ShardedTable:
    mem = max(keys * ROW_BYTES // 10 // groups.topology.world, 4 << 20) * 5 // 4
    options: Any = {"mem": mem, "ssd": folder, "lookahead": lookahead, "name": "rows", "threads": threads}
    return ShardedTable(DIM, tc.RowWiseAdagrad(lr=0.05), groups=groups, **options)


def fill(groups: Groups, folder: str, keys: int, threads: int) -> None:
    """Store a row for every key."""
    table = open_table(groups, folder, keys, 0, threads)
    for first in range(0, keys, 1 << 20):
        part = keys_of(np.arange(first, min(keys, first + (1 << 20))))
        part = part[table.owns(part)]
        table.backend.import_rows(part, np.full((len(part), DIM + 1), 0.01, np.float32).view(np.uint8))
    table.commit(b"")
    table.close()


def measure(
    groups: Groups, folder: str, keys: int, batch: int, warm: int, steps: int, threads: int
) -> dict[str, dict[str, float]]:
    """Train both sides on this rank. Returns the figures per side."""
    rank, world = groups.topology.rank, groups.topology.world
    torch.set_num_threads(1)
    fill(groups, folder, keys, threads)
    rng = np.random.default_rng(rank)
    offsets = np.arange(batch * FIELDS + 1)
    batches = [
        tc.Batch(keys_of((keys * rng.random(batch * FIELDS) ** 3).astype(np.int64)), offsets, FIELDS)
        for _ in range(warm + steps)
    ]
    gradient = torch.full((batch, FIELDS, DIM), 1e-3)
    results = {}
    for side in ("without", "with"):
        mem = max(keys * ROW_BYTES // 10 // world, 4 << 20)
        table = open_table(groups, folder, keys, 0 if side == "without" else f"{mem // 4}B", threads)
        bag, start, before = tc.EmbeddingBag(table, FIELDS), 0.0, None
        assert table.store is not None
        with tc.prefetch(batches, table, depth=4) as prepared:
            for step, current in enumerate(prepared, 1):
                torch.autograd.backward(bag(current), gradient)
                table.step()
                if step == warm:
                    groups.train.barrier("measuring")
                    start, before = time.perf_counter(), (table.dram.stats(), table.store.stats())
            groups.train.barrier("measuring")
            seconds = time.perf_counter() - start
        assert before is not None
        rows, reads = table.dram.stats(), table.store.stats()
        missing = rows.misses - before[0].misses
        results[side] = {
            "examples_per_s": steps * batch * world / seconds,
            "missing_rows_per_batch": missing / steps,
            "late_rows_per_batch": (missing - rows.loaded_ahead + before[0].loaded_ahead) / steps,
            "reads_per_batch": (reads.reads - before[1].reads) / steps,
            "mb_per_batch": (reads.bytes_read - before[1].bytes_read) / steps / 1e6,
            "pinned_at_the_end": rows.pinned,
        }
        table.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few steps and keys")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keys", type=int, default=24_000_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--folder", help="where the stores are; default: a temporary folder")
    options = parser.parse_args()
    keys, batch, warm, steps = (options.keys, options.batch, options.steps // 2, options.steps)
    if options.quick:
        keys, batch, warm, steps = 200_000, 32, 20, 40
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        nodes = (tuple(range(options.ranks)),)
        results = run_ranks(nodes, measure, f"{folder}/rows", keys, batch, warm, steps, options.threads, seconds=500)
    for side, (rank, result) in itertools.product(("without", "with"), enumerate(results)):
        figures = ", ".join(f"{name} {value:,.4g}" for name, value in result[side].items())
        console.print(f"{side} hints, rank {rank}: {figures}")
    sides = {side: {name: sum(r[side][name] for r in results) / len(results) for name in results[0][side]}
             for side in ("without", "with")}  # fmt: skip
    speed = sides["with"]["examples_per_s"] / sides["without"]["examples_per_s"]
    late = sides["with"]["late_rows_per_batch"] / sides["with"]["missing_rows_per_batch"]
    claims = [
        Claim(f"{options.ranks} ranks: speed with hints over without", speed, TARGET),
        Claim("late rows of missing rows, with hints", late, LATE, "", at_most=True),
    ]
    print_claims("look-ahead over ranks", claims)
    if options.json:
        sizes = {"ranks": options.ranks, "keys": keys, "batch": batch, "steps": steps, "threads": options.threads}
        write_json(options.json, {**environment(["torch"]), "sizes": sizes, "results": sides}, claims)


if __name__ == "__main__":
    main()
