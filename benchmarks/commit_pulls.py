"""Gets and puts of a store while another thread commits: does a batch wait for the syncs of a commit?

Claims   longest the longest batch beside commits takes at most one median batch longer than the longest without: no
                 pull waits for a commit longer than a batch. Needs an idle machine: with other work the longest
                 batches are those that lost the processor
         wait    a batch beside commits takes at most one median batch longer than one without, in the mean
Method   A batch reads random rows and puts as many others, as a pull does that evicts dirty rows. Batches run without
         commits, then beside a thread that commits again and again. Syncs are slowed down (THERMOCLINE_IO_DELAY), so
         that a commit takes as long as several batches on any disk: a batch that waited would take as long as the
         rest of the commit. Background merging is off. Batches without commits and beside commits alternate in rounds.
Command  python benchmarks/commit_pulls.py --folder DISK --json FILE      one minute
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import Claim, environment, noise, print_claims, spread, write_json

import thermocline as tc

ROWS, ROW_BYTES, BATCH = 1_000_000, 68, 2048
SYNC_MS = 100
ROUNDS, BATCHES = 4, 100


def run_batches(store: tc.SsdStore, rng: np.random.Generator, count: int) -> list[tuple[float, float]]:
    """Return start and end of each batch."""
    times = []
    for _ in range(count):
        wanted, others = rng.permutation(ROWS)[: 2 * BATCH].astype(np.uint64).reshape(2, BATCH)
        rows = np.full((BATCH, ROW_BYTES), 7, np.uint8)
        start = time.perf_counter()
        found, _ = store.get(wanted)
        store.put(others, rows)
        times.append((start, time.perf_counter()))
        if not found.all():
            raise SystemExit("wrong results: existing keys were not found")
    return times


def beside_commits(
    store: tc.SsdStore, rng: np.random.Generator, count: int
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return the times of batches that began while a commit ran, and the seconds of the commits."""
    commits: list[tuple[float, float]] = []
    done = threading.Event()

    def commit() -> None:
        while not done.is_set():
            start = time.perf_counter()
            store.commit()
            commits.append((start, time.perf_counter()))
            for epoch in store.epochs[:-1]:
                store.release(epoch)

    thread = threading.Thread(target=commit)
    thread.start()
    times = run_batches(store, rng, count)
    done.set()
    thread.join()
    during = [each for each in times if any(start <= each[0] < end for start, end in commits)]
    return during, [end - start for start, end in commits]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args(words)
    os.environ["THERMOCLINE_IO_DELAY"] = f"sync={1000 * SYNC_MS}"
    rng = np.random.default_rng(1)
    without: list[float] = []
    beside: list[float] = []
    commits: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        settings = {"row_bytes": ROW_BYTES, "mem_budget": 64 << 20, "background_merge": False}
        with tc.SsdStore.open(Path(folder) / "rows", **settings) as store, noise() as around:
            store.put(np.arange(ROWS, dtype=np.uint64), np.zeros((ROWS, ROW_BYTES), np.uint8))
            store.merge()
            run_batches(store, rng, BATCHES // 4)
            for _ in range(ROUNDS):
                without += [end - start for start, end in run_batches(store, rng, BATCHES)]
                times, took = beside_commits(store, rng, BATCHES)
                beside += [end - start for start, end in times]
                commits += took
    batch, wait = spread(without)["median"], statistics.mean(beside) - statistics.mean(without)
    result = {
        "wait_s": wait, "batch_s": spread(without), "longest_s": max(without), "beside_s": spread(beside),
        "longest_beside_s": max(beside), "commit_s": spread(commits), **around,
    }  # fmt: skip
    longest, medians = (
        " and ".join(f"{1000 * f(times):.0f}" for times in (beside, without)) for f in (max, statistics.median)
    )
    detail = (
        f"beside {len(commits)} commits of {spread(commits)['median'] * 1000:.0f} ms, and without: median batch "
        f"{medians} ms, longest {longest} ms; other processes used {around['others_cpu']:.0%} of the processors"
    )
    beyond = max(beside) - max(without)
    result["longest_wait_s"] = beyond
    claims = [
        Claim("wait of the longest batch, in batches", beyond / batch, 1, "", True,
              f"longest {longest} ms; {max(beside) / batch:.1f} and {max(without) / batch:.1f} median batches"),
        Claim("wait of a batch, in batches", wait / batch, 1, "", True, detail),
    ]  # fmt: skip
    print_claims(f"batches of {BATCH:,} gets and puts beside commits", claims)
    if options.json:
        sizes = {"rows": ROWS, "row_bytes": ROW_BYTES, "batch": BATCH, "sync_ms": SYNC_MS, "rounds": ROUNDS}
        write_json(options.json, {**environment(["numpy"]), "sizes": sizes, "result": result}, claims)


if __name__ == "__main__":
    main()
