"""Processor time of row statistics and expiry, rows in DRAM.

    python -m benchmarks.row_statistics [--steps 40] [--batch 4096] [--rows 1000000]

Prints the processor seconds of a training step (26 fields, dim 16, Adagrad, an MLP of 64 units) without statistics and
with all of them, taken in turns, and of one expiry that tests all rows and deletes a tenth. Processor time, so that
other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

import thermocline as tc

FIELDS, DIM = 26, 16
NAMES = ("frequency", "last_step", "last_time", "show", "click")


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
    """A table with these statistics and a small model."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.table = tc.Table(DIM, tc.Adagrad(lr=0.01), mem="1GB", threads=1, statistics=names)  # type: ignore[arg-type]
        self.bag = tc.EmbeddingBag(self.table, FIELDS)
        self.dense = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def step(self, batch: tc.Batch) -> float:
        begin = time.process_time()
        with tc.prefetch([batch], self.table, depth=1) as loaded:
            for each in loaded:
                logits = self.dense(self.bag(each).flatten(1))[:, 0]
                label = torch.from_numpy(each.label)
                torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
                self.table.step()
        return time.process_time() - begin


def measure_steps(steps: int, examples: int) -> dict[str, float]:
    """Return processor seconds of a step: medians over steps, runs in turns."""
    runs = {"none": Run(()), "all": Run(NAMES)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, batch in enumerate(batches(steps, examples, 0)):
        for name in runs if number % 2 else reversed(runs):
            batch.prepared.clear()
            times[name].append(runs[name].step(batch))
    return {name: statistics.median(values[steps // 2 :]) for name, values in times.items()}


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
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure_steps(options.steps, options.batch)
    without, kept = 1e3 * times["none"], 1e3 * times["all"]
    print(f"step: {without:.1f} ms without, {kept:.1f} ms with all statistics ({kept / without - 1:+.1%})")
    seconds, deleted = measure_expiry(options.rows)
    per_row = 1e9 * seconds / options.rows
    print(f"expiry: {seconds:.2f} s for {options.rows:,} rows, {per_row:.0f} ns per row, {deleted:,} deleted")


if __name__ == "__main__":
    main()
