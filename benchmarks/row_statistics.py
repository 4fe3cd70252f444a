"""Processor time of row statistics, admission by count and expiry, rows in DRAM.

    python benchmarks/row_statistics.py [--steps 80] [--hidden 64] [--parts steps,expiry] [--json FILE]

Steps: processor seconds of a training step (26 fields, dim 16, Adagrad, batch 4,096, one thread) without statistics,
with all of them, and with all and admission by count, on each batch in turn; the first half of the steps is not
counted. `--hidden 400,400,400` is the network of the default config, 64 the smallest. Expiry: one that tests all rows
and deletes a tenth. Processor time, so that other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, noise, print_claims, spread, write_json

import thermocline as tc

FIELDS, DIM = 26, 16
NAMES = ("frequency", "last_step", "last_time", "show", "click")
SIDES = {"none": False, "statistics": False, "statistics and admission": True}
"""Name, and whether the side has admission."""


def batches(count: int, examples: int, seed: int) -> list[tc.Batch]:
    rng = np.random.default_rng(seed)
    offsets = np.arange(FIELDS * examples + 1)
    return [
        tc.Batch(
            rng.zipf(1.1, FIELDS * examples).astype(np.uint64) % np.uint64(300_000), offsets, FIELDS,
            label=rng.integers(0, 2, examples).astype(np.float32), time=rng.integers(0, 10**9, examples),
        )
        for _ in range(count)
    ]  # fmt: skip


class Run:
    """A table and a network with these hidden layers."""

    def __init__(self, names: tuple[str, ...], admission: tc.Admission | None, hidden: Sequence[int]) -> None:
        self.table = tc.Table(
            DIM, tc.Adagrad(lr=0.01), mem="512MB", threads=1, statistics=names, admission=admission, device="cpu"
        )
        self.bag = tc.EmbeddingBag(self.table, FIELDS)
        layers: list[torch.nn.Module] = []
        for width, more in itertools.pairwise([FIELDS * DIM, *hidden]):
            layers += [torch.nn.Linear(width, more), torch.nn.ReLU()]
        self.dense = torch.nn.Sequential(*layers, torch.nn.Linear(hidden[-1], 1))

    def step(self, batch: tc.Batch) -> float:
        begin = time.process_time()
        with tc.prefetch([batch], self.table, depth=1) as loaded:
            for each in loaded:
                logits = self.dense(self.bag(each).flatten(1))[:, 0]
                label = torch.from_numpy(each.label)
                torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
                self.table.step()
        return time.process_time() - begin


def measure_steps(steps: int, examples: int, hidden: Sequence[int]) -> dict[str, Any]:
    """Return processor seconds of a step of each side, and what it adds to the side without statistics.

    That is the median, over batches, of the ratio of two steps on the same batch.
    """
    counts = tc.Admission(count=3)
    runs = {
        name: Run(() if name == "none" else NAMES, counts if admission else None, hidden)
        for name, admission in SIDES.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, batch in enumerate(batches(steps, examples, 0)):
        for name in runs if number % 2 else reversed(runs):
            batch.prepared.clear()
            times[name].append(runs[name].step(batch))
    counted = {name: values[steps // 2 :] for name, values in times.items()}
    ratios = {
        name: [each / none for each, none in zip(values, counted["none"], strict=True)]
        for name, values in counted.items()
    }
    return {
        "hidden": list(hidden),
        "seconds": {name: spread(values) for name, values in counted.items()},
        "ratios": {name: spread(values) for name, values in ratios.items() if name != "none"},
        "added": {name: statistics.median(values) - 1 for name, values in ratios.items() if name != "none"},
    }


def measure_expiry(rows: int) -> tuple[float, int]:
    """Return processor seconds of one expiry of `rows` rows in DRAM, and the rows it deletes."""
    table = tc.Table(DIM, tc.Adagrad(lr=0.01), mem="4GB", threads=1, statistics=NAMES)
    for first in range(0, rows, 1 << 18):
        keys = np.arange(first, min(rows, first + (1 << 18)), dtype=np.uint64)
        values = np.zeros((len(keys), table.spec.row_floats), np.float32)
        values.view(np.uint32)[:, table.spec.trained_floats + 1] = keys % 10 > 0  # last_step
        table.dram.push(keys, values, unique=True)
    table.step_count = 1
    begin = time.process_time()
    deleted = table.expire(tc.Expiry(every=1, unused_steps=0, min_norm=0.0, decay=0.98, min_score=0.0))
    return time.process_time() - begin, deleted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--hidden", default="64", help="widths of the hidden layers, separated by commas")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table that the expiry tests")
    parser.add_argument("--parts", default="steps,expiry")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {}
    claims = []
    with noise() as load:
        if "steps" in options.parts:
            record["steps"] = measure_steps(options.steps, options.batch, [int(n) for n in options.hidden.split(",")])
            seconds = record["steps"]["seconds"]
            for name, added in record["steps"]["added"].items():
                detail = f"{1e3 * seconds['none']['median']:.1f} ms, with {name} {1e3 * seconds[name]['median']:.1f} ms"
                text = f"{name}, hidden layers of {options.hidden}"
                claims.append(Claim(text, added, 0.05, "of a step", at_most=True, detail=detail))
        if "expiry" in options.parts:
            used, deleted = measure_expiry(options.rows)
            record["expiry"] = {"rows": options.rows, "deleted": deleted, "seconds": used}
            per_row = 1e9 * used / options.rows
            console.print(f"expiry of {options.rows:,} rows: {per_row:.0f} ns per row, {deleted:,} deleted")
    print_claims("Row statistics", claims)
    if options.json:
        write_json(options.json, {**environment(["torch", "numpy"]), **record, **load}, claims)


if __name__ == "__main__":
    main()
