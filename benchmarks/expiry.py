"""Step times while an expiry deletes a tenth of the rows of an SSD store, and the disk space that comes back.

    python -m benchmarks.expiry [--rows 2000000] [--spread 1000] [--mem-share 0.1] [--batch 1024] [--folder DIR]

Fills a store with rows of which a tenth has not been used for long, then trains (26 fields, dim 16, Adagrad, look-ahead
and pipeline as by default, an MLP of 64 units) for three phases of `spread` steps, at least 1,000: before, during and
after the expiry. `--spread 1` deletes all rows after one step. Prints percentiles of the time from step to step and
processor seconds per step of each phase, rows deleted, and the bytes on disk before, after a commit, and after the log
was merged.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline as tc
from thermocline.arrays import Floats, Keys
from thermocline.embedding.bulk_load import fill_store
from thermocline.embedding.key_hash import hash_keys

FIELDS, DIM = 26, 16
BEGIN = 1_000_000
"""Steps before the measurement: rows in use were last used here, the others in step 0."""


def open_table(options: argparse.Namespace, phase: int) -> tc.Table:
    every = 4 * phase
    rule = tc.Expiry(every=every, spread=options.spread, unused_steps=BEGIN // 2)
    row_bytes = DIM * 8 + 4
    table = tc.Table(
        DIM, tc.Adagrad(lr=0.01), mem=max(64 << 20, int(options.rows * row_bytes * options.mem_share)),
        ssd=options.folder / "store", ssd_mem=max(64 << 20, options.rows * 8), statistics=["last_step"], expiry=rule,
    )  # fmt: skip
    table.step_count = (BEGIN // every + 1) * every - phase - 1  # the expiry begins after the first phase
    return table


def fill(table: tc.Table, ads: tc.SyntheticAds) -> None:
    """Write a row for every key; a tenth of them is unused."""

    def rows(keys: Keys) -> Floats:
        values = table.dram.initial_stored(keys)
        unused = (hash_keys(keys) & np.uint64(0xFFFF)) < 6554
        values.view(np.uint32)[:, table.spec.trained_floats] = np.where(unused, 0, BEGIN)
        return values

    assert table.store is not None
    fill_store(table.store, ads, rows)
    table.commit()


def train(table: tc.Table, batches: Any, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the wall and processor seconds of each step, from the end of one to the end of the next."""
    bag = tc.EmbeddingBag(table, FIELDS)
    dense = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    with tc.prefetch(batches, table, depth=4) as loaded:
        before = time.perf_counter(), time.process_time()
        for _, batch in zip(range(steps), loaded, strict=False):
            logits = dense(bag(batch).flatten(1))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            table.step()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter(), time.process_time()
            yield now[0] - before[0], now[1] - before[1]
            before = now


def report(name: str, times: list[tuple[float, float]]) -> float:
    wall, processor = np.array(times).T
    p50, p99, p999 = np.percentile(wall, [50, 99, 99.9]) * 1e3
    print(
        f"{name:7} {len(wall):6} steps: p50 {p50:7.1f} ms  p99 {p99:7.1f}  p99.9 {p999:7.1f}  "
        f"max {1e3 * wall.max():8.1f}  p99.9/p50 {p999 / p50:5.2f}  processor {1e3 * processor.mean():6.1f} ms per step"
    )
    return float(p999 / p50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--spread", type=int, default=1000)
    parser.add_argument("--mem-share", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--phase", type=int, default=0, help="steps per phase; default: spread, at least 1,000")
    parser.add_argument("--folder", type=Path, help="where the store is made; default: a temporary folder")
    options = parser.parse_args()
    phase = options.phase or max(1000, options.spread)
    temporary = options.folder is None
    options.folder = Path(tempfile.mkdtemp()) if temporary else options.folder
    try:
        ads = tc.SyntheticAds(keys=options.rows, fields=FIELDS, batch_size=options.batch, examples=10**12)
        table = open_table(options, phase)
        store = table.store
        assert store is not None
        fill(table, ads)
        print(f"{len(store):,} rows, {store.stats().disk_bytes / 1e6:,.0f} MB on disk, {table!r}")
        warm = phase // 4
        table.step_count -= warm
        times = list(train(table, ads, warm + 3 * phase))[warm:]
        for number, name in enumerate(("before", "during", "after")):
            report(name, times[number * phase : (number + 1) * phase])
        expired = table.expired
        print(f"deleted {expired.rows:,} rows, kept {expired.last_kept:,}, {expired.seconds:.1f} s in all")
        table.commit()
        for epoch in store.epochs[:-1]:
            store.release(epoch)
        committed = store.stats()
        store.merge()
        table.commit()
        for epoch in store.epochs[:-1]:
            store.release(epoch)
        merged = store.stats()
        print(
            f"disk: {committed.disk_bytes / 1e6:,.0f} MB after the expiry ({committed.log_bytes / 1e6:,.0f} of log), "
            f"{merged.disk_bytes / 1e6:,.0f} MB after a merge; {merged.rows_in_base:,} rows"
        )
        table.close()
    finally:
        if temporary:
            shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
