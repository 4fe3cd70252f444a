"""Write-back ahead of need in the DRAM tier, against write-back inside the pull.

Claims   pull       the median pull takes at most 0.8 of the time without it
         processor  processor time per pulled row at most 1.05 of that without it
Method   Two tiers over two equal stores, ten times larger than the memory. Rounds alternate between them: each pulls
         batches of random keys, changes all rows and unpins them, with a pause as long as the compute of a step.
         Every pull reads its missing rows from SSD and evicts as many changed rows.
Command  python benchmarks/write_ahead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, console, environment, noise, print_claims, progress_bar, spread, write_json

import thermocline as tc

DIM = 16
OPTIMIZER = tc.Adagrad()
SIDES: dict[str, int | None] = {"in the pull": 0, "ahead": None}


def make_tier(folder: Path, rows: int, write_ahead: int | None) -> tuple[tc.SsdStore, tc.DramTier]:
    row_bytes = 4 * (DIM + OPTIMIZER.state_floats(DIM))
    store = tc.SsdStore.open(folder, row_bytes=row_bytes, mem_budget="256MB")
    step = 500_000
    for first in range(0, rows, step):
        keys = np.arange(first, min(first + step, rows), dtype=np.uint64)
        store.put(keys, np.zeros((len(keys), row_bytes), np.uint8))
    store.merge()
    store.commit()
    budget = rows // 10 * (row_bytes + 50)
    return store, tc.DramTier(DIM, OPTIMIZER, budget=budget, store=store, write_ahead=write_ahead)


def run_round(tier: tc.DramTier, batches: list[Any], compute: float) -> list[float]:
    """Seconds of each pull."""
    seconds = []
    for keys in batches:
        start = time.perf_counter()
        slots = tier.pull(keys)
        seconds.append(time.perf_counter() - start)
        time.sleep(compute)
        tier.unpin(slots, dirty=True)
    return seconds


def measure(rows: int, batch: int, rounds: int, pulls: int, compute: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="thermocline-bench-"))
    rng = np.random.default_rng(1)
    pulled: dict[str, list[float]] = {side: [] for side in SIDES}
    processor = dict.fromkeys(SIDES, 0.0)
    counters: dict[str, Any] = {}

    def batches() -> list[Any]:
        return [np.unique(rng.integers(0, rows, batch).astype(np.uint64)) for _ in range(pulls)]

    try:
        sides = {side: make_tier(folder / str(i), rows, SIDES[side]) for i, side in enumerate(SIDES)}
        with noise() as around, progress_bar("rounds", rounds + 1) as progress:
            for _, tier in sides.values():  # full of changed rows, and the log at its usual length
                while tier.stats().free > 0:
                    run_round(tier, batches(), 0)
                run_round(tier, batches(), 0)
            progress(1)
            for i in range(rounds):
                for side, (_, tier) in sides.items():
                    work = batches()
                    before = time.process_time()
                    pulled[side] += run_round(tier, work, compute)
                    time.sleep(0.2)  # background work of this side ends before the other side runs
                    processor[side] += time.process_time() - before
                progress(2 + i)
        for side, (store, tier) in sides.items():
            stats = tier.stats()
            counters[side] = {name: getattr(stats, name) for name in ("puts", "puts_in_pulls", "flushed", "evictions")}
            tier.check(idle=True)
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    out: dict[str, Any] = {"pull_s": {side: spread(values) for side, values in pulled.items()}}
    out["slowest_s"] = {side: max(values) for side, values in pulled.items()}
    out["processor_s"] = {side: seconds / (rounds * pulls) for side, seconds in processor.items()}
    return {**out, "counters": counters, **around}


def claims_of(results: dict[str, Any]) -> list[Claim]:
    pull = {side: value["median"] for side, value in results["pull_s"].items()}
    slowest = results["slowest_s"]
    detail = f"{pull['ahead'] * 1e3:.1f} ms against {pull['in the pull'] * 1e3:.1f} ms; slowest "
    detail += f"{slowest['ahead'] * 1e3:.0f} ms against {slowest['in the pull'] * 1e3:.0f} ms"
    processor = results["processor_s"]
    puts = results["counters"]["ahead"]
    return [
        Claim("pull", pull["ahead"] / pull["in the pull"], 0.8, at_most=True, detail=detail),
        Claim(
            "processor time per pull",
            processor["ahead"] / processor["in the pull"],
            1.05,
            at_most=True,
            detail=f"{puts['puts_in_pulls']} of {puts['puts']} puts inside pulls",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    sizes = {"rows": 1_000_000, "batch": 10_000, "rounds": 2, "pulls": 20, "compute": 0.02}
    if not args.quick:
        sizes |= {"rows": 4_000_000, "batch": 40_000, "rounds": 4, "pulls": 20, "compute": 0.05}
    results = measure(**sizes)  # type: ignore[arg-type]
    claims = claims_of(results)
    if args.json:
        record = {"environment": environment(["numpy"]), "sizes": sizes, "quick": args.quick, "results": results}
        write_json(args.json, record, claims)
    if results.get("others_cpu", 0.0) > 0.1:
        console.print(f"[yellow]other processes used {results['others_cpu']:.0%} of the cores: not reliable[/]")
    print_claims("Write-back ahead of need", claims)


if __name__ == "__main__":
    main()
