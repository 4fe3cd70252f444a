"""Step times while an expiry deletes a tenth of the rows of an SSD store, and the disk space that comes back.

    python benchmarks/expiry.py [--rows 2000000] [--spread 5000] [--phase 1000] [--mem-share 0.1] [--batch 1024]
                                [--folder DIR] [--fill] [--json FILE]

Fills a store with rows of which a tenth has not been used for long, then trains (26 fields, dim 16, Adagrad, look-ahead
and pipeline as by default, an MLP of 64 units) before, during and after the expiry. The expiry takes `spread` steps:
with 5,000 the p99.9 of their times is the fifth longest, with 1,000 nearly the longest; `--spread 1` deletes all rows
after one step. `--fill` ends after filling DIR/filled; later calls with the same DIR train on a copy of it, made of
hard links. Claims: p99.9 of the times from step to step during the expiry is at most twice their median; after a merge
the store has the size of its remaining rows, plus 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, noise, print_claims, write_json

import thermocline as tc
from thermocline.arrays import Floats, Keys
from thermocline.embedding.bulk_load import fill_store
from thermocline.embedding.key_hash import hash_keys
from thermocline.tiers.ssd import SsdStore

FIELDS, DIM, LONGEST = 26, 16, 20
BEGIN = 1_000_000
"""Steps before the measurement: rows in use were last used here, the others in step 0."""


def open_table(options: argparse.Namespace, path: Path) -> tc.Table:
    every = 4 * max(options.phase, options.spread)
    rule = tc.Expiry(every=every, spread=options.spread, unused_steps=BEGIN // 2)
    row_bytes = DIM * 8 + 4
    table = tc.Table(
        DIM, tc.Adagrad(lr=0.01), mem=max(64 << 20, int(options.rows * row_bytes * options.mem_share)),
        ssd=path, ssd_mem=max(64 << 20, options.rows * 8), statistics=["last_step"], expiry=rule,
    )  # fmt: skip
    table.step_count = (BEGIN // every + 1) * every - options.phase - 1  # the expiry begins after the first phase
    return table


def fill(options: argparse.Namespace, ads: tc.SyntheticAds) -> None:
    """Write a row for every key; a tenth of them is unused."""
    table = open_table(options, options.folder / "filled")

    def rows(keys: Keys) -> Floats:
        values = table.dram.initial_stored(keys)
        unused = (hash_keys(keys) & np.uint64(0xFFFF)) < 6554
        values.view(np.uint32)[:, table.spec.trained_floats] = np.where(unused, 0, BEGIN)
        return values

    assert table.store is not None
    fill_store(table.store, ads, rows)
    table.commit()
    table.close()


def train(table: tc.Table, batches: Any, steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield, for each step, from the end of one to the end of the next: wall seconds, those of expiry, processor
    seconds."""
    bag = tc.EmbeddingBag(table, FIELDS)
    dense = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    with tc.prefetch(batches, table, depth=4) as loaded:
        before = time.perf_counter(), table.expired.seconds, time.process_time()
        for _, batch in zip(range(steps), loaded, strict=False):
            logits = dense(bag(batch).flatten(1))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            table.step()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter(), table.expired.seconds, time.process_time()
            yield now[0] - before[0], now[1] - before[1], now[2] - before[2]
            before = now


def figures_of(times: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Percentiles of the wall time of steps and of its part in the expiry, and the mean of their processor time, in ms.

    longest   the longest steps: position in the phase, wall time, part of it in the expiry
    """
    wall, expiry, processor = np.array(times).T * 1e3
    p50, p99, p999 = np.percentile(wall, [50, 99, 99.9]).tolist()
    expiry50, expiry999 = np.percentile(expiry, [50, 99.9]).tolist()
    order = np.argsort(wall)[: -LONGEST - 1 : -1]
    return {
        "steps": len(wall), "p50": p50, "p99": p99, "p99.9": p999, "max": float(wall.max()),
        "expiry_p50": expiry50, "expiry_p99.9": expiry999, "processor": float(processor.mean()),
        "longest": [(int(i), round(float(wall[i]), 1), round(float(expiry[i]), 1)) for i in order],
    }  # fmt: skip


def copy_of(path: Path, copy: Path) -> None:
    """Make a store of the last commit of another, of hard links; replaces an earlier copy."""
    shutil.rmtree(copy, ignore_errors=True)
    with SsdStore.open(path) as filled:
        filled.link_checkpoint(copy)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train through the expiry of a filled store and merge the log."""
    ads = tc.SyntheticAds(keys=options.rows, fields=FIELDS, batch_size=options.batch, examples=10**12)
    if not (options.folder / "filled").exists():
        fill(options, ads)
    if options.fill:
        return {}
    copy_of(options.folder / "filled", options.folder / "store")
    table = open_table(options, options.folder / "store")
    store = table.store
    assert store is not None
    record: dict[str, Any] = {"rows": len(store), "spread": options.spread, "batch": options.batch}
    disk = record["disk_bytes"] = {"filled": store.stats().disk_bytes}
    console.print(f"{len(store):,} rows, {disk['filled'] / 1e6:,.0f} MB on disk, {table!r}")
    warm = options.phase // 4
    table.step_count -= warm
    phases = {"before": options.phase, "during": max(options.phase, options.spread), "after": options.phase}
    times = iter(list(train(table, ads, warm + sum(phases.values())))[warm:])
    record["ms"] = {name: figures_of(list(itertools.islice(times, steps))) for name, steps in phases.items()}
    expired = table.expired
    record |= {"deleted": expired.rows, "kept": expired.last_kept, "expiry_seconds": expired.seconds}
    for name in ("expired", "merged"):
        if name == "merged":
            store.merge()
        table.commit()
        for epoch in store.epochs[:-1]:
            store.release(epoch)
        disk[name] = store.stats().disk_bytes
        record[f"rows_in_base_{name}"] = store.stats().rows_in_base
    table.close()
    return record


def claims_of(record: dict[str, Any]) -> list[Claim]:
    ratios = {name: figures["p99.9"] / figures["p50"] for name, figures in record["ms"].items()}
    during, disk = record["ms"]["during"], record["disk_bytes"]
    detail = (
        f"median {during['p50']:.1f} ms, longest {during['max']:.0f} ms; before the expiry {ratios['before']:.2f} x"
    )
    text = f"{record['deleted']:,} of {record['rows']:,} rows deleted"
    left = (record["rows"] - record["deleted"]) / record["rows"]
    return [
        Claim("p99.9 of step times during the expiry, of their median", ratios["during"], 2.0,
              at_most=True, detail=detail),
        Claim("disk space after a merge, of the filled store", disk["merged"] / disk["filled"], left * 1.05,
              at_most=True, detail=text),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--spread", type=int, default=5000)
    parser.add_argument("--mem-share", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--phase", type=int, default=1000, help="steps before and after the expiry")
    parser.add_argument("--folder", type=Path, help="where the store is made; default: a temporary folder")
    parser.add_argument("--fill", action="store_true", help="fill the store and end")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fill and options.folder is None:
        parser.error("--fill needs --folder")
    temporary = options.folder is None
    options.folder = Path(tempfile.mkdtemp()) if temporary else options.folder
    try:
        with noise() as load:
            record = measure(options)
    finally:
        if temporary:
            shutil.rmtree(options.folder, ignore_errors=True)
    if options.fill:
        return
    for name, figures in record["ms"].items():
        numbers = {key: value for key, value in figures.items() if key != "longest"}
        console.print(f"{name:7}", "  ".join(f"{key} {value:,.1f}" for key, value in numbers.items()))
    claims = claims_of(record)
    print_claims("Expiry on SSD", claims)
    if options.json:
        write_json(options.json, {**environment(["torch", "numpy"]), **record, **load}, claims)


if __name__ == "__main__":
    main()
