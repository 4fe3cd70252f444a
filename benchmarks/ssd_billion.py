"""One store of 1e9 keys with rows of 16 bytes: open time, DRAM per key, and gets against raw reads.

Claims   open    10 s or less
         dram    3 bytes per key or less, with a filter of 10 bits per key and the log at its default ratio
         floor   a get of 100,000 random rows at 0.8 of the speed of raw reads of the same pages
Method   The keys are the inverse hashes of evenly spread, jittered values: they come in hash order without a sort, and
         are loaded as base files. Then rows of random keys are put again until the log has 95 % of the bytes at which
         merging starts. The store is committed, closed and opened; gets alternate with raw reads on new random keys.
         Every row that is read is checked. 24 bytes per row on disk, and 24 per row of the log: 30 GB.
Command  python benchmarks/ssd_billion.py --folder DISK --json FILE      minutes on 16 cores
         python benchmarks/ssd_billion.py --keys 1e6                     seconds
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from common import Claim, console, environment, noise, print_claims, spread, write_json
from engines import Data

import thermocline as tc
from thermocline.embedding.key_hash import hash_keys
from thermocline.utils.cpu_affinity import cores

U64 = npt.NDArray[np.uint64]
ROW_BYTES, FILTER_BITS = 16, 10
PIECE = 1 << 21
"""Rows per call of `load` and `put`."""
LOG_RATIO, LOG_FILL = 0.2, 0.95
"""Log bytes per base byte at which merging starts by default, and the share of it that is filled."""
BATCH, ROUNDS = 100_000, 15
T = TypeVar("T")


# ---- keys in hash order


def unmix64(x: U64) -> U64:
    """Inverse of `mix64` of csrc/util/hash.h."""
    shift = np.uint64(33)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        x = (x ^ (x >> shift)) * np.uint64(pow(factor, -1, 1 << 64))
    return x ^ (x >> shift)


class Keys:
    """`count` distinct keys, numbered in the order of their hashes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._stride = np.uint64((1 << 64) // count)

    def __call__(self, numbers: npt.NDArray[np.integer[Any]]) -> U64:
        """Return the keys of these numbers."""
        index = numbers.astype(np.uint64)
        jitter = unmix64(index + np.uint64(1)) % self._stride  # any fixed function of the number
        return unmix64(index * self._stride + jitter) ^ np.uint64(0x9E3779B97F4A7C15)

    def sample(self, rng: np.random.Generator, count: int) -> U64:
        """Return random distinct keys."""
        numbers = np.unique(rng.integers(0, self.count, count + count // 8 + 8))
        return self(rng.permutation(numbers)[:count])


def ahead(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], T]], depth: int) -> Iterator[T]:
    """Yield the results of jobs in order, `depth` of them computed ahead."""
    running: deque[Future[T]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) > depth:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


# ---- the store


def open_store(folder: Path, keys: int) -> tc.SsdStore:
    budget = (64 << 20) + 4 * keys
    return tc.SsdStore.open(folder, row_bytes=ROW_BYTES, mem_budget=budget, filter_bits=FILTER_BITS)


def build(folder: Path, keys: Keys, data: Data) -> dict[str, float]:
    """Load all rows, then put rows of random keys until the log is nearly full; return the seconds of both."""
    workers = max(1, min(12, cores() - 2))

    def loaded(first: int) -> tuple[U64, Any]:
        wanted = keys(np.arange(first, min(keys.count, first + PIECE)))
        return wanted, data.values(wanted)

    def updated(seed: int, count: int) -> tuple[U64, Any]:
        wanted = keys.sample(np.random.default_rng([7, seed]), count)
        return wanted, data.values(wanted, 1)

    with ThreadPoolExecutor(workers) as pool, open_store(folder, keys.count) as store:
        start = time.perf_counter()
        jobs = (lambda first=first: loaded(first) for first in range(0, keys.count, PIECE))
        for number, (wanted, rows) in enumerate(ahead(pool, jobs, workers)):
            store.load(wanted, rows)
            if number % 64 == 63:
                progress(f"{min(keys.count, (number + 1) * PIECE):,} rows loaded")
        store.commit()
        load_s = time.perf_counter() - start
        start, put = time.perf_counter(), 0
        limit = LOG_FILL * LOG_RATIO * store.stats().base_bytes
        piece = max(1000, min(PIECE, keys.count // 500))
        puts = (lambda seed=seed: updated(seed, piece) for seed in itertools.count())
        for wanted, rows in ahead(pool, puts, workers):
            store.put(wanted, rows)
            put += len(wanted)
            if (filled := store.stats().log_bytes) >= limit or put >= 2 * LOG_RATIO * keys.count:
                break
            if put % (32 * piece) == 0:
                progress(f"{put:,} rows put, log at {filled / limit:.2f}")
        store.commit()
        for epoch in store.epochs[:-1]:
            store.release(epoch)
        put_s = time.perf_counter() - start
    return {"load_s": load_s, "loaded": keys.count, "put_s": put_s, "put": put}


def measure(folder: Path, keys: Keys, data: Data, rounds: int, batch: int) -> dict[str, Any]:
    """Open the store; alternate gets and raw reads."""
    before = resident_bytes()
    start = time.perf_counter()
    store = open_store(folder, keys.count)
    open_s = time.perf_counter() - start
    rng = np.random.default_rng(33)
    gets, floors = [], []
    with store:
        out = np.zeros((batch, ROW_BYTES), np.uint8)
        store.get(keys.sample(rng, batch), out=out)  # untimed: the store measures the device
        counted = store.stats()
        with noise() as around:
            for _ in range(rounds):
                wanted = keys.sample(rng, batch)
                start = time.perf_counter()
                found, rows = store.get(wanted, out=out)
                gets.append(time.perf_counter() - start)
                if not found.all():
                    raise SystemExit("wrong results: existing keys were not found")
                data.check(wanted, rows)
                floors.append(store.read_floor(keys.sample(rng, batch)))
        stats = store.stats()
        grew = resident_bytes() - before
    shares = [floor / get for floor, get in zip(floors, gets, strict=True)]
    return {
        "open_s": open_s,
        "dram_per_key": stats.mem_total / keys.count,
        "index_per_key": stats.mem_index / keys.count,
        "process_per_key": grew / keys.count,
        "filter_given_up": stats.filter_given_up,
        "log_share": stats.log_bytes / (LOG_RATIO * stats.base_bytes),
        "disk_bytes": stats.disk_bytes,
        "share": spread(shares),
        "share_of_medians": spread(floors)["median"] / spread(gets)["median"],
        "get_s": spread(gets),
        "floor_s": spread(floors),
        "reads_per_get": (stats.reads - counted.reads) / (2 * rounds),
        "megabytes_per_get": (stats.bytes_read - counted.bytes_read) / (2e6 * rounds),
        **around,
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_START = time.perf_counter()


def progress(text: str) -> None:
    console.print(f"{time.perf_counter() - _START:.0f} s: {text}")
    sys.stdout.flush()


def claims_of(result: dict[str, Any]) -> list[Claim]:
    shares = f"log at {result['log_share']:.2f} of its limit; the process grew by {result['process_per_key']:.2f}"
    gets = f"{result['get_s']['median'] * 1000:.0f} ms against {result['floor_s']['median'] * 1000:.0f} ms of raw reads"
    return [
        Claim("time to open", result["open_s"], 10, "s", at_most=True),
        Claim("DRAM per key", result["dram_per_key"], 3, "bytes", at_most=True, detail=shares),
        Claim("get, share of the floor", result["share_of_medians"], 0.8, detail=gets),
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e9, help="number of keys")
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args(words)
    keys, data = Keys(int(options.keys)), Data(int(options.keys), ROW_BYTES)
    need = keys.count * (ROW_BYTES + 8) * (1 + 2 * LOG_RATIO)
    if (free := shutil.disk_usage(options.folder).free) < need:
        raise SystemExit(f"--folder {options.folder}: {need / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free")
    check = keys(np.arange(min(keys.count, 1000)))
    if not (np.diff(hash_keys(check)) > 0).all():
        raise SystemExit("keys are not in hash order: csrc/util/hash.h has changed")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result: dict[str, Any] = build(Path(folder) / "rows", keys, data)
        progress(f"loaded in {result['load_s']:.0f} s, log filled in {result['put_s']:.0f} s")
        batch = min(BATCH, keys.count // 10)
        result |= measure(Path(folder) / "rows", keys, data, ROUNDS, batch)
    claims = claims_of(result)
    print_claims(f"{keys.count:,} keys of {ROW_BYTES} bytes in one store", claims)
    if options.json:
        sizes = {"keys": keys.count, "row_bytes": ROW_BYTES, "filter_bits": FILTER_BITS, "batch": batch}
        write_json(options.json, {**environment(["numpy"]), "sizes": sizes, "result": result}, claims)


if __name__ == "__main__":
    main()
