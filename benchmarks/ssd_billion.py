"""One store of 1e9 keys with rows of 16 bytes: open time, DRAM per key, and gets against raw reads.

Claims   open    10 s or less
         dram    3 bytes per key or less, with a filter of 10 bits per key and the log at its default ratio
         floor   a get of 100,000 random rows at 0.8 of the speed of raw reads of the same pages
Method   The keys are the inverse hashes of evenly spread, jittered values: they come in hash order without a sort, and
         are loaded as base files. Then rows of random keys are put again until the log has 95 % of the bytes at which
         merging starts. The store is committed, closed and opened; gets alternate with raw reads on new random keys.
         Every row that is read is checked. 24 bytes per row on disk, and 32 per row of the log: 30 GB. Sizes are
         compared with the formulas of `planner/scale_model.py`.
Command  python benchmarks/ssd_billion.py --folder DISK --json FILE      minutes on 16 cores
         python benchmarks/ssd_billion.py --keys 1e6                     seconds
         In parts, where a command may run for ten minutes only; the store is kept in DISK:
         python benchmarks/ssd_billion.py --folder DISK --step build --minutes 8     again until it prints "complete"
         python benchmarks/ssd_billion.py --folder DISK --step measure --json FILE   then removes the store
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
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
from thermocline.planner.scale_model import LOG_ROW_BYTES, StoreShape, StoreSize
from thermocline.planner.ssd_model import KEY_BYTES
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


@dataclasses.dataclass(slots=True)
class Built:
    """Committed progress of building a store."""

    keys: int
    loaded: int = 0
    load_s: float = 0.0
    put: int = 0
    """Rows put into the log."""
    puts: int = 0
    put_s: float = 0.0
    complete: bool = False

    @classmethod
    def of(cls, folder: Path, keys: int) -> Built:
        """Read the state of the store in `folder`; a new one if there is none. Raises SystemExit for another store."""
        file = folder / "built.json"
        built = cls(**json.loads(file.read_text())) if file.exists() else cls(keys)
        if built.keys != keys:
            raise SystemExit(f"{folder}: a store of {built.keys:,} keys, not of {keys:,}; remove it, or use --keys")
        return built

    def write(self, folder: Path) -> None:
        """Replace the file: after a commit, so that it never names rows that the store has lost."""
        part = folder / "built.json.part"
        part.write_text(json.dumps(dataclasses.asdict(self)))
        part.replace(folder / "built.json")


def build(folder: Path, keys: Keys, data: Data, seconds: float = math.inf) -> Built:
    """Load all rows, then put rows of random keys until the log is nearly full. Stops after `seconds`, and continues
    at the next call."""
    folder.mkdir(exist_ok=True)
    built, end = Built.of(folder, keys.count), time.perf_counter() + seconds
    workers = max(1, min(12, cores() - 2))

    def loaded(first: int) -> tuple[U64, Any]:
        wanted = keys(np.arange(first, min(keys.count, first + PIECE)))
        return wanted, data.values(wanted)

    def updated(seed: int, count: int) -> tuple[U64, Any]:
        wanted = keys.sample(np.random.default_rng([7, seed]), count)
        return wanted, data.values(wanted, 1)

    with ThreadPoolExecutor(workers) as pool, open_store(folder / "rows", keys.count) as store:
        start, all_loaded = time.perf_counter(), built.loaded == keys.count
        jobs = (lambda first=first: loaded(first) for first in range(built.loaded, keys.count, PIECE))
        for number, (wanted, rows) in enumerate(ahead(pool, jobs, workers)):
            store.load(wanted, rows)
            built.loaded += len(wanted)
            if number % 64 == 63:
                progress(f"{built.loaded:,} rows loaded")
            if time.perf_counter() > end:
                break
        built.load_s += time.perf_counter() - start
        start = time.perf_counter()
        limit = LOG_FILL * LOG_RATIO * store.stats().base_bytes
        piece = max(1000, min(PIECE, keys.count // 500))
        puts = (lambda seed=seed: updated(seed, piece) for seed in itertools.count(built.puts))
        if built.loaded == keys.count and not built.complete and (all_loaded or time.perf_counter() <= end):
            for wanted, rows in ahead(pool, puts, workers):
                store.put(wanted, rows)
                built.put += len(wanted)
                built.puts += 1
                filled = store.stats().log_bytes
                built.complete = filled >= limit or built.put >= 2 * LOG_RATIO * keys.count
                if built.complete or time.perf_counter() > end:
                    break
                if built.puts % 16 == 0:
                    progress(f"{built.put:,} rows put, log at {filled / limit:.2f}")
        store.commit()
        for epoch in store.epochs[:-1]:
            store.release(epoch)
        built.put_s += time.perf_counter() - start
    built.write(folder)
    return built


def measure(folder: Path, keys: Keys, data: Data, rounds: int, batch: int) -> dict[str, Any]:
    """Open the store; alternate gets and raw reads."""
    before = resident_bytes()
    start, used, read = time.perf_counter(), time.process_time(), read_bytes()
    with noise() as opening:
        store = open_store(folder, keys.count)
    open_s, open_cpu_s, opened = time.perf_counter() - start, time.process_time() - used, read_bytes() - read
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
        sizes = formulas(folder, StoreSize(StoreShape(row_bytes=ROW_BYTES), keys.count), stats, opened)
    shares = [floor / get for floor, get in zip(floors, gets, strict=True)]
    return {
        "open_s": open_s,
        "open_cpu_s": open_cpu_s,
        "open_others_cpu": opening["others_cpu"],
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
        "formulas": sizes,
        "reads_per_get": (stats.reads - counted.reads) / (2 * rounds),
        "megabytes_per_get": (stats.bytes_read - counted.bytes_read) / (2e6 * rounds),
        **around,
    }


def formulas(folder: Path, size: StoreSize, stats: Any, opened: int) -> dict[str, dict[str, float]]:
    """Return predicted and measured sizes of a store whose log has not been merged.

    opened   bytes that opening it has read
    """
    segments = len(list(folder.glob("log-*.tc")))
    manifest = max(file.stat().st_size for file in folder.glob("MANIFEST-*"))
    index = size.fence_bytes + size.filter_bytes + LOG_ROW_BYTES * stats.rows_in_log + size.record_bytes
    opening = size.open_bytes + KEY_BYTES * (stats.rows_in_log - 2 * size.log_rows)
    pairs = {
        "base bytes": (size.base_bytes, stats.base_bytes),
        "log bytes per row": (size.log_row_bytes, stats.log_bytes / stats.rows_in_log),
        "index with this log, of the most": (index, stats.mem_index),
        "partitions, of the largest number": (size.partitions[1], stats.partitions),
        "open data files, of the largest number": (size.open_files, stats.partitions + segments),
        "bytes that opening reads": (opening, opened),
        "manifest bytes, of the largest number": (size.manifest_bytes, manifest),
    }
    return {name: {"predicted": a, "measured": b, "ratio": b / a} for name, (a, b) in pairs.items()}


def read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_START = time.perf_counter()


def progress(text: str) -> None:
    console.print(f"{time.perf_counter() - _START:.0f} s: {text}")
    sys.stdout.flush()


def claims_of(result: dict[str, Any]) -> list[Claim]:
    opening = f"{result['open_cpu_s']:.1f} s of processor time; others used {result['open_others_cpu']:.0%}"
    shares = f"log at {result['log_share']:.2f} of its limit; the process grew by {result['process_per_key']:.2f}"
    gets = f"{result['get_s']['median'] * 1000:.0f} ms against {result['floor_s']['median'] * 1000:.0f} ms of raw reads"
    return [
        Claim("time to open", result["open_s"], 10, "s", at_most=True, detail=opening),
        Claim("DRAM per key", result["dram_per_key"], 3, "bytes", at_most=True, detail=shares),
        Claim("get, share of the floor", result["share_of_medians"], 0.8, detail=gets),
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=float, default=1e9, help="number of keys")
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--step", choices=("all", "build", "measure"), default="all", help="build: keep the store")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop building after this time")
    options = parser.parse_args(words)
    keys, data = Keys(int(options.keys)), Data(int(options.keys), ROW_BYTES)
    check = keys(np.arange(min(keys.count, 1000)))
    if not (np.diff(hash_keys(check)) > 0).all():
        raise SystemExit("keys are not in hash order: csrc/util/hash.h has changed")
    with contextlib.ExitStack() as stack:
        if options.step == "all":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        else:
            folder = Path(options.folder) / "ssd-billion"
        if options.step != "measure":
            require_space(folder, keys.count)
            built = build(folder, keys, data, 60 * options.minutes)
            progress(f"loaded in {built.load_s:.0f} s, log filled in {built.put_s:.0f} s")
        built = Built.of(folder, keys.count)
        if options.step == "build":
            progress("complete" if built.complete else "not complete: repeat the command")
            return
        if not built.complete:
            raise SystemExit(f"{folder}: no complete store of {keys.count:,} keys; run --step build first")
        batch = min(BATCH, keys.count // 10)
        result = dataclasses.asdict(built) | measure(folder / "rows", keys, data, ROUNDS, batch)
        if options.step == "measure":
            shutil.rmtree(folder)
    claims = claims_of(result)
    print_claims(f"{keys.count:,} keys of {ROW_BYTES} bytes in one store", claims)
    for name, pair in result["formulas"].items():
        console.print(
            f"{name}: predicted {pair['predicted']:,.6g}, measured {pair['measured']:,.6g}, {pair['ratio']:.2f}"
        )
    if options.json:
        sizes = {"keys": keys.count, "row_bytes": ROW_BYTES, "filter_bits": FILTER_BITS, "batch": batch}
        write_json(options.json, {**environment(["numpy"]), "sizes": sizes, "result": result}, claims)


def require_space(folder: Path, keys: int) -> None:
    """Raise SystemExit if the disk has too little space for what is not built yet."""
    need = keys * (ROW_BYTES + 8) * (1 + 2 * LOG_RATIO)
    have = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if (free := shutil.disk_usage(folder.parent).free) < need - have:
        raise SystemExit(f"--folder {folder.parent}: {need / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free")


if __name__ == "__main__":
    main()
