"""Rows beyond HBM: a training step with a tenth of the rows on the GPU and all rows in DRAM, prefetched.

Claims   A step takes at most 3.5 ms, and at most 1.2x the time of its missing rows on the host link.
Method   dynamicemb's published workload: 1,048,570 ids per step (10 features), dim 128, fp32, power law 1.05, SGD, a
         vector per id, given gradients. Wall time per step in the steady state with `tc.prefetch`: planning, rows in
         both directions, training stream; the median of three rounds over all depths. The link is measured with
         page-locked copies of as many rows.
Command  python benchmarks/hbm_tier.py --json FILE      an H200, 40M rows of dim 128, two minutes
         python benchmarks/hbm_tier.py --quick          a tenth of the rows
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, spread, write_json
from hbm_train import DIM, FEATURES, IDS_PER_FEATURE, key_of, power_law

import thermocline as tc
from thermocline.tiers.hbm import HbmTier, bytes_for

DEPTHS = (1, 2, 4, 6)
TARGET = 3.5
"""Milliseconds of a step."""


def batches(count: int, keys: int) -> list[tc.Batch]:
    out = []
    for seed in range(count):
        ids = key_of(power_law(FEATURES, IDS_PER_FEATURE, keys, seed)).cpu().numpy().view(np.uint64)
        out.append(tc.Batch(ids, np.array([0, len(ids)]), 1))
    return out


def filled(keys: int, hbm_rows: int, threads: int | None) -> tc.Table:
    """A table with a row in DRAM for every key."""
    rows = FEATURES * keys
    table = tc.Table(
        DIM, tc.SGD(lr=0.01), hbm=bytes_for(hbm_rows, DIM), mem=int(rows * (4 * DIM + 40) * 1.05), device="cuda",
        threads=threads,
    )  # fmt: skip
    values = np.random.default_rng(0).random((1 << 20, DIM), np.float32)
    for first in range(0, rows, len(values)):
        numbers = torch.arange(first, min(first + len(values), rows), device="cuda")
        table.dram.push(key_of(numbers).cpu().numpy(), values[: len(numbers)], dirty=False)
    return table


def link_seconds(rows: int) -> dict[str, float]:
    """Seconds to copy `rows` rows between page-locked memory and the GPU, per direction."""
    host = torch.empty(rows, DIM, pin_memory=True).normal_()
    device = torch.empty(rows, DIM, device="cuda")
    times: dict[str, list[float]] = {"in": [], "out": []}
    for _ in range(10):
        for name, target, source in (("in", device, host), ("out", host, device)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in times.items()}


def run(table: tc.Table, source: list[tc.Batch], depth: int, warm: int) -> dict[str, Any]:
    """Wall milliseconds, misses and evictions per step, after `warm` steps."""
    tier = table.hbm
    assert isinstance(tier, HbmTier)
    bag = tc.EmbeddingBag(table, 1, pooling="none")
    grad = torch.randn(FEATURES * IDS_PER_FEATURE, DIM, device="cuda") * 0.01
    marks, before, stages = [], tier.stats(), {}
    with tc.prefetch(source, table, depth=depth) as ready:
        for n, batch in enumerate(ready):
            if n == warm:
                before = tier.stats()
                stages = {stage.name: stage.busy_seconds for stage in ready.stats}
            torch.autograd.backward(bag(batch), grad)
            table.step()
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        end = time.perf_counter()
        busy = {stage.name: stage.busy_seconds - stages.get(stage.name, 0.0) for stage in ready.stats}
    after, steps = tier.stats(), len(source) - warm
    return {
        "ms": (end - marks[warm - 1]) / steps * 1000,
        "steps": spread(list(np.diff(marks[warm - 1 :]) * 1000)),
        "missing": (after.misses - before.misses) / steps,
        "evicted": (after.evictions - before.evictions) / steps,
        "busy_ms": {name: seconds / steps * 1000 for name, seconds in busy.items()},
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median time per step."""
    return sorted(runs, key=lambda figures: figures["ms"])[len(runs) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each depth, in turns; medians count")
    parser.add_argument("--threads", type=int, help="threads of the DRAM tier; default: all cores")
    options = parser.parse_args()
    keys = 400_000 if options.quick else 4_000_000
    source = batches(options.steps, keys)
    record: dict[str, Any] = {**environment(["torch", "triton"]), "gpu": torch.cuda.get_device_name(), "keys": keys}
    table = filled(keys, FEATURES * keys // 10, options.threads)
    console.print(f"filled: {table}")
    for number in range(options.rounds):
        for depth in DEPTHS:
            figures = run(table, source, depth, len(source) // 3)
            record.setdefault(f"depth {depth}", {"runs": []})["runs"].append(figures)
            console.print(f"round {number}, depth {depth}: {figures}")
    for depth in DEPTHS:
        record[f"depth {depth}"] |= median_run(record[f"depth {depth}"]["runs"])
    tenth = record["depth 4"]
    record["link"] = link = link_seconds(int(tenth["missing"]))
    console.print(f"link, {tenth['missing']:.0f} rows: {link}")
    floor = max(link.values()) * 1000
    claims = [
        Claim(
            "10 % of the rows in HBM, SGD, per step", tenth["ms"], TARGET, "ms", True, f"{tenth['missing']:.0f} misses"
        ),
        Claim(
            "step time / time of the missing rows on the link", tenth["ms"] / floor, 1.2, "x", True, f"{floor:.2f} ms"
        ),
    ]
    print_claims("Rows beyond HBM", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
