"""Benchmark of parsing the Criteo format against pandas and polars: ratios measured in one run.

    python benchmarks/read.py --quick                    a small file, under a minute
    python benchmarks/read.py --json FILE                about 200 MB, more rounds
    python benchmarks/read.py --rivals /other/bin/python a Python that has pandas and polars, if this one does not

All readers read the same generated file (a label, 13 integers, 26 values of 8 hexadecimal digits, with the skew and
the missing values of Criteo's) from the page cache, in alternation, each in its own process; results are medians. The
work differs: ours produces 64-bit keys, hashed with their field, and bucketed numbers, and keeps no result; pandas and
polars produce a table of strings and numbers in memory, without hashing. "Per core" is processor time with one thread
on one core, which other load on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from common import Claim, console, environment, noise, print_claims, spread, write_json
from rich.progress import Progress
from rich.table import Table

WORKERS = Path(__file__).with_name("read_workers.py")
# Of the Criteo columns: mean logarithm of I1 .. I13, and the fraction of lines in which each column is empty.
LOG_MEANS = (0.8, 2.5, 2.0, 1.7, 7.5, 3.6, 1.8, 2.1, 4.0, 0.3, 0.9, 0.2, 1.8)
EMPTY = (0.45, 0, 0.21, 0.22, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.22, *[0.0] * 2, 0.03, 0.03, *[0.0] * 7)
EMPTY += (0.03, 0, 0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0, 0.03, 0.44, 0.44)


def write_file(path: Path, rows: int, seed: int = 1) -> None:
    """Write a file in the Criteo format: label, 13 integers, 26 values, separated by tabs, some empty."""
    random = np.random.default_rng(seed)
    words = pa.array([f"{x:08x}" for x in random.integers(0, 1 << 32, 500_000, np.uint64)])
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file, Progress(console=console, transient=True) as progress:
        task = progress.add_task("writing the file", total=rows)
        for first in range(0, rows, 50_000):
            n = min(50_000, rows - first)
            columns = [pa.array((random.random(n) < 0.25).astype(np.int8))]
            for mean in LOG_MEANS:
                columns.append(pa.array(np.exp(random.normal(mean, 1.5, n)).astype(np.int64)))
            for _ in range(26):
                columns.append(words.take(pa.array(random.zipf(1.2, n) % len(words))))
            for c, share in enumerate(EMPTY, start=1):
                columns[c] = pa.compute.if_else(pa.array(random.random(n) < share), None, columns[c])
            table = pa.table(columns, names=[str(c) for c in range(len(columns))])
            pyarrow.csv.write_csv(table, file, options)
            progress.advance(task, n)


class Worker:
    """A process with one reader; `read` reads the file once."""

    def __init__(self, stack: ExitStack, python: str, name: str, path: Path, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        command = ["taskset", "-c", ",".join(map(str, cores)), python, str(WORKERS), name, str(path), str(threads)]
        environ = {**os.environ, "POLARS_MAX_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ))
        self.version = self._line()
        self.missing = self.version.startswith("missing")
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def read(self) -> int:
        assert self.process.stdin
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        seconds, cpu, rows = self._line().split()
        self.seconds.append(float(seconds))
        self.cpu.append(float(cpu))
        return int(rows)

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a reader process exited: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
        return line


def measure(path: Path, rows: int, rounds: int, rivals: str, threads: int) -> dict[str, Worker]:
    with ExitStack() as stack:
        workers = {}
        plan = [(name, t) for t in sorted({1, threads}) for name in ("ours", "pandas", "pandas-pyarrow", "polars")]
        for name, t in plan:
            if name == "pandas" and t > 1:
                continue  # pandas has one thread
            worker = Worker(stack, sys.executable if name == "ours" else rivals, name, path, t)
            if worker.missing:
                console.print(f"{name} is left out: {rivals} cannot import it ({worker.version}); set --rivals")
            else:
                workers[f"{name}, {t} thread{'s' * (t > 1)}"] = worker
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("reading", total=(rounds + 1) * len(workers))
            for _ in range(rounds + 1):  # the first round is a warm-up
                for name, worker in workers.items():
                    if (count := worker.read()) != rows:
                        raise SystemExit(f"{name} read {count} of {rows} lines")
                    progress.advance(task)
        for worker in workers.values():
            assert worker.process.stdin
            worker.process.stdin.close()
            del worker.seconds[0], worker.cpu[0]
    return workers


def report(workers: dict[str, Worker], size: int, rows: int) -> dict[str, Any]:
    table = Table(title=f"{size / 1e6:.0f} MB, {rows:,} lines")
    for column in ("reader", "seconds", "MB/s", "lines/s", "MB per processor second"):
        table.add_column(column, justify="left" if column == "reader" else "right")
    record: dict[str, Any] = {}
    for name, worker in workers.items():
        time, cpu = spread(worker.seconds), spread(worker.cpu)
        rate, per_core = size / time["median"] / 1e6, size / cpu["median"] / 1e6
        table.add_row(
            f"{name} ({worker.version})",
            f"{time['median']:.3f}",
            f"{rate:.0f}",
            f"{rows / time['median']:,.0f}",
            f"{per_core:.0f}",
        )
        record[name] = {"seconds": time, "cpu_seconds": cpu, "mb_per_s": rate, "version": worker.version}
    console.print(table)
    return record


def claims_of(workers: dict[str, Worker], threads: int) -> list[Claim]:
    many = f"{threads} thread{'s' * (threads > 1)}"
    targets = [("pandas", "1 thread", "cpu", 5.0), ("polars", "1 thread", "cpu", 1.0), ("polars", many, "seconds", 1.0)]
    claims = []
    for rival, readers, quantity, target in targets:
        if f"{rival}, {readers}" not in workers:
            continue
        theirs, ours = (getattr(workers[f"{name}, {readers}"], quantity) for name in (rival, "ours"))
        ratio = spread(theirs)["median"] / spread(ours)["median"]
        name = f"parse Criteo TSV vs {rival}, " + ("per core" if quantity == "cpu" else many)
        detail = "processor time" if quantity == "cpu" else "time"
        claims.append(Claim(name, ratio, target, detail=f"{detail}; our result is hashed keys"))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small file and fewer rounds: under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--rivals", metavar="PYTHON", default=sys.executable, help="a Python that has pandas and polars"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the readers that have threads (default 2)")
    args = parser.parse_args()
    rows, rounds = (100_000, 3) if args.quick else (850_000, 7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "criteo.tsv"
        write_file(path, rows)
        with noise() as others:
            workers = measure(path, rows, rounds, args.rivals, args.threads)
        size = path.stat().st_size
    figures = report(workers, size, rows)
    claims = claims_of(workers, args.threads)
    print_claims("Reading", claims)
    console.print(f"other processes used {others['others_cpu']:.0%} of the machine during the measurement")
    if args.json:
        record = {**environment(), "bytes": size, "rows": rows, "rounds": rounds, "readers": figures, **others}
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
