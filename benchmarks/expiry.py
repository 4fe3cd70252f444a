"""Step times while an expiry deletes a tenth of the rows of an SSD store, and the disk space that comes back.

    python benchmarks/expiry.py [--rows 2000000] [--spread 5000] [--phase 1000] [--mem-share 0.1] [--batch 1024]
                                [--hidden 64] [--folder DIR] [--parts fill,train,merge] [--json FILE]

Fills a store with rows of which a tenth has not been used for long, then trains (26 fields, dim 16, Adagrad,
look-ahead and pipeline as by default, an MLP with `hidden` units) before, during and after the expiry. The expiry
takes `spread` steps: with 5,000 the p99.9 of their times is the fifth longest, with 1,000 nearly the longest;
`--spread 1` deletes all rows after one step. The parts may run in separate calls with the same DIR and FILE: `fill`
makes DIR/filled, `train` trains on a copy of it, made of hard links, `merge` merges the copy; FILE is written after
`train` and again after `merge`. Claims: p99.9 of the
times from step to step during the expiry is at most twice their median; after a merge the store has the size of its
remaining rows, plus 5 %.
"""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY, which OpenMP reads when torch loads it

# isort: split
import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, noise, print_claims, write_json

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


def train(table: tc.Table, batches: Any, steps: int, hidden: list[int]) -> Iterator[tuple[float, float, float]]:
    """Yield, for each step, from the end of one to the end of the next: wall seconds, those of expiry, processor
    seconds."""
    bag = tc.EmbeddingBag(table, FIELDS)
    layers: list[torch.nn.Module] = []
    for width, units in itertools.pairwise([FIELDS * DIM, *hidden]):
        layers += [torch.nn.Linear(width, units), torch.nn.ReLU()]
    dense = torch.nn.Sequential(*layers, torch.nn.Linear(hidden[-1], 1))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    with tc.prefetch(batches, table, depth=4) as loaded:
        before = clocks(table)
        for _, batch in zip(range(steps), loaded, strict=False):
            logits = dense(bag(batch).flatten(1))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            table.step()
            optimizer.step()
            optimizer.zero_grad()
            now = clocks(table)
            yield now[0] - before[0], now[1] - before[1], now[2] - before[2]
            before = clocks(table)


def clocks(table: tc.Table) -> tuple[float, float, float]:
    """Return wall time, the time of expiries so far, and processor time."""
    return time.perf_counter(), table.expired.seconds, time.process_time()


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


def train_through(options: argparse.Namespace, ads: tc.SyntheticAds) -> dict[str, Any]:
    """Train through the expiry of a filled store; return the figures."""
    copy_of(options.folder / "filled", options.folder / "store")
    table = open_table(options, options.folder / "store")
    store = table.store
    assert store is not None
    record: dict[str, Any] = {"rows": len(store), "spread": options.spread, "batch": options.batch}
    record["hidden"] = options.hidden
    record["disk_bytes"] = {"filled": store.stats().disk_bytes}
    console.print(f"{len(store):,} rows, {store.stats().disk_bytes / 1e6:,.0f} MB on disk, {table!r}")
    warm = options.phase // 4
    table.step_count -= warm
    phases = {"before": options.phase, "during": max(options.phase, options.spread), "after": options.phase}
    hidden = [int(units) for units in options.hidden.split(",")]
    times = train(table, ads, warm + sum(phases.values()), hidden)
    list(itertools.islice(times, warm))
    record["ms"] = {}
    for name, steps in phases.items():
        record["ms"][name] = figures = figures_of(list(itertools.islice(times, steps)))
        numbers = {key: value for key, value in figures.items() if key != "longest"}
        console.print(f"{name:7}", "  ".join(f"{key} {value:,.1f}" for key, value in numbers.items()))
    expired = table.expired
    record |= {"deleted": expired.rows, "kept": expired.last_kept, "expiry_seconds": expired.seconds}
    record["disk_bytes"]["expired"], record["rows_in_base_expired"] = commit_only(table)
    table.close()
    return record


def commit_only(table: tc.Table) -> tuple[int, int]:
    """Commit and release all other commits; return the bytes on disk and the rows in base files."""
    assert table.store is not None
    table.commit()
    for epoch in table.store.epochs[:-1]:
        table.store.release(epoch)
    return table.store.stats().disk_bytes, table.store.stats().rows_in_base


def merge(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Merge the store after the expiry; add the figures."""
    table = open_table(options, options.folder / "store")
    assert table.store is not None
    table.store.merge()
    record["disk_bytes"]["merged"], record["rows_in_base_merged"] = commit_only(table)
    table.close()


def claims_of(record: dict[str, Any]) -> list[Claim]:
    ratios = {name: figures["p99.9"] / figures["p50"] for name, figures in record["ms"].items()}
    during, disk = record["ms"]["during"], record["disk_bytes"]
    detail = (
        f"median {during['p50']:.1f} ms, longest {during['max']:.0f} ms; part of the expiry: median "
        f"{during['expiry_p50']:.1f} ms, p99.9 {during['expiry_p99.9']:.1f} ms; without expiry: before it "
        f"{ratios['before']:.2f} x, after it {ratios['after']:.2f} x"
    )
    text = f"{record['deleted']:,} of {record['rows']:,} rows deleted"
    left = (record["rows"] - record["deleted"]) / record["rows"]
    name = "p99.9 of step times during the expiry, of their median"
    claims = [Claim(name, ratios["during"], 2.0, at_most=True, detail=detail)]
    if "merged" in disk:
        ratio = disk["merged"] / disk["filled"]
        name = "disk space after a merge, of the filled store"
        claims.append(Claim(name, ratio, left * 1.05, at_most=True, detail=text))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--spread", type=int, default=5000)
    parser.add_argument("--mem-share", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", default="64", help="units of the hidden layers, such as 400,400,400")
    parser.add_argument("--phase", type=int, default=1000, help="steps before and after the expiry")
    parser.add_argument("--folder", type=Path, help="where the store is made; default: a temporary folder")
    parser.add_argument("--parts", default="fill,train,merge")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if len(parts) < 3 and (options.folder is None or (options.json is None and parts != ["fill"])):
        parser.error("--parts needs --folder, and --json unless it is fill")
    temporary = options.folder is None
    options.folder = Path(tempfile.mkdtemp()) if temporary else options.folder
    ads = tc.SyntheticAds(keys=options.rows, fields=FIELDS, batch_size=options.batch, examples=10**12)
    record: dict[str, Any] = {}
    try:
        if "fill" in parts:
            fill(options, ads)
        if "train" in parts:
            with noise() as load:
                record = train_through(options, ads)
            record = {**environment(["torch", "numpy"]), **record, **load}
            save(options.json, record)
        if "merge" in parts:
            record = record or json.loads(options.json.read_text())
            merge(options, record)
            save(options.json, record)
    finally:
        if temporary:
            shutil.rmtree(options.folder, ignore_errors=True)
    if record:
        print_claims("Expiry on SSD", claims_of(record))


def save(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, record, claims_of(record))


if __name__ == "__main__":
    main()
