"""The DRAM tier against torch's EmbeddingBag + torch.optim and FBGEMM's CPU TBE.

Claims   A training step is 5x as fast as torch and as fast as FBGEMM; SGD, Adagrad, row-wise Adagrad. "train" is the
         part of the training thread (pool, update) if rows are pinned ahead; "whole" includes deduplication and
         lookup.
Method   One step gathers, pools and updates the rows of a batch of Zipf-distributed ids. All engines train the same
         rows on the same batches and gradients with the same number of threads, one process each, alternating step
         by step; their pooled vectors are compared. Figures are medians. Ids of the peers are row numbers: they have
         neither a hash table nor a budget. FBGEMM is installed into .cache/fbgemm; it is skipped if that fails.
Command  python benchmarks/mem.py --quick          under two minutes
         python benchmarks/mem.py --json FILE      more rounds, more keys
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, console, environment, noise, print_claims, spread, write_json
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FBGEMM = ROOT / ".cache" / "fbgemm"
FBGEMM_PACKAGES = (
    "fbgemm-gpu-cpu==1.8.0",
    "torchrec==1.8.0",
    "torchmetrics==1.0.3",
    "tensordict",
    "pyre-extensions",
    "iopath",
)
TRAIN = {"ours": ("pool", "update")}
"""Laps of the training thread, for engines that run others ahead."""
DUELS = {"sgd": ("ours", "torch", "fbgemm"), "rowwise": ("ours", "fbgemm"), "adagrad": ("ours", "torch")}
Laps = dict[str, list[float]]
CPU = "processor time"
"""Processor time of all threads of a step: other load on the machine affects it little."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: int
    dim: int = 16
    ids: int = 2_000_000
    """Ids per step."""
    bag: int = 10
    """Ids per pooled vector."""
    zipf: float = 1.05
    batches: int
    """Number of distinct batches, used in turn."""
    rounds: int


FULL = Sizes(rows=10_000_000, batches=8, rounds=24)
QUICK = Sizes(rows=5_000_000, batches=4, rounds=6)


def write_batches(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Write batches of Zipf-distributed row numbers, and the same rows as 64-bit keys; popular rows are scattered."""
    random = np.random.default_rng(1)
    share = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -sizes.zipf)
    rows = random.permutation(sizes.rows)
    ranks = np.searchsorted(share, random.random((sizes.batches, sizes.ids)) * share[-1])
    ids = rows[ranks]
    row_keys = random.integers(0, 2**64, sizes.rows, dtype=np.uint64)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "keys.npy", row_keys[ids])
    np.save(folder / "row_keys.npy", row_keys)
    (folder / "sizes.json").write_text(json.dumps(dataclasses.asdict(sizes)))
    counts = np.bincount(ids[0])
    return {"unique_ids": int((counts > 0).sum()), "hottest_id": int(counts.max())}


def fbgemm_python() -> Path | None:
    """Interpreter of the environment with FBGEMM, created if missing; None if it cannot be installed."""
    python = FBGEMM / "bin" / "python"
    probe = [str(python), "-c", "import fbgemm_gpu.split_table_batched_embeddings_ops_training"]
    if python.exists() and subprocess.run(probe, capture_output=True).returncode == 0:
        return python
    console.print(f"installing FBGEMM into {FBGEMM.relative_to(ROOT)}, once")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(FBGEMM)],
        [*pip, "--constraint", str(ROOT / "constraints.txt"), "torch", "numpy"],
        [*pip, "--no-deps", *FBGEMM_PACKAGES],
        probe,
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
            console.print(f"[yellow]skipped: FBGEMM, because it cannot be installed: {' '.join(reason)}[/]")
            return None
    return python


class Worker:
    """An engine in a separate process."""

    def __init__(self, python: Path, engine: str, optimizer: str, folder: Path, threads: int) -> None:
        script = Path(__file__).with_name("mem_workers.py")
        self.name = engine
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self.process = subprocess.Popen(
            [str(python), str(script), engine, optimizer, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def __enter__(self) -> Worker:
        if self.line() != "ready":
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"worker {self.name} did not start:\n{self.errors.read()}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def step(self, number: int) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"step {number}\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.line())
        time.sleep(0.05)  # spinning threads of this engine must not disturb the next one
        return answer


def duel(optimizer: str, pythons: dict[str, Path], folder: Path, sizes: Sizes, threads: int) -> dict[str, Laps]:
    """Milliseconds per engine and lap."""
    names = [name for name in DUELS[optimizer] if name in pythons]
    laps: dict[str, Laps] = {name: {} for name in names}
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task(f"{optimizer}: filling tables", total=sizes.rounds + 1)
        workers = [stack.enter_context(Worker(pythons[name], name, optimizer, folder, threads)) for name in names]
        for number in range(1, sizes.rounds + 2):
            checksums = {}
            for worker in workers if number % 2 else reversed(workers):
                progress.update(task, description=f"{optimizer}: {worker.name}")
                answer = worker.step(number)
                checksums[worker.name] = answer["checksum"]
                if number == 1:
                    continue  # the first step of a process allocates its pages
                for lap, milliseconds in {**answer["laps"], CPU: answer["cpu"]}.items():
                    laps[worker.name].setdefault(lap, []).append(milliseconds)
            for name, value in checksums.items():
                if abs(value - checksums["ours"]) > 1e-3 * abs(value):
                    raise RuntimeError(
                        f"{optimizer}: pooled vectors of {name} and ours differ after {number} steps: {checksums}"
                    )
            progress.advance(task)
    return laps


def sums(laps: Laps, names: tuple[str, ...] | None) -> list[float]:
    """Milliseconds per round of the named laps, or of all."""
    wanted = names or [name for name in laps if name != CPU]
    return [sum(values) for values in zip(*(laps[name] for name in wanted), strict=True)]


def claims_of(optimizer: str, laps: dict[str, Laps]) -> list[Claim]:
    claims = []
    for peer in laps:
        if peer == "ours":
            continue
        theirs = spread(sums(laps[peer], None))["median"]
        for part in ("train", "whole"):
            ours = spread(sums(laps["ours"], TRAIN["ours"] if part == "train" else None))["median"]
            detail = f"{theirs:.1f} ms : {ours:.1f} ms"
            target = {"torch": 5.0, "fbgemm": 1.0}[peer]
            claims.append(Claim(f"{optimizer}, {part} step, against {peer}", theirs / ours, target, detail=detail))
    return claims


def print_laps(results: dict[str, dict[str, Laps]], sizes: Sizes) -> None:
    table = Table(title="milliseconds of one step, median (20th to 80th percentile)")
    for column in ("optimizer", "engine", "part", "ms", "p20 .. p80", "M ids/s"):
        table.add_column(column, justify="right" if column in ("ms", "M ids/s") else "left")
    for optimizer, engines in results.items():
        for engine, laps in engines.items():
            parts = {name: values for name, values in laps.items() if name != CPU}
            if engine == "ours":
                parts["train"] = sums(laps, TRAIN["ours"])
            for part, values in {**parts, "whole": sums(laps, None), CPU: laps[CPU]}.items():
                s = spread(values)
                rate = f"{sizes.ids / s['median'] / 1e3:.0f}"
                table.add_row(optimizer, engine, part, f"{s['median']:.1f}", f"{s['p20']:.1f} .. {s['p80']:.1f}", rate)
        table.add_section()
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--threads", type=int, default=2, help="threads per engine (default 2)")
    parser.add_argument("--only", choices=DUELS, action="append", help="optimizer; may be repeated")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes = QUICK if args.quick else FULL
    pythons = {"ours": Path(sys.executable), "torch": Path(sys.executable)}
    if any("fbgemm" in DUELS[name] for name in args.only or DUELS):
        python = fbgemm_python()
        if python:
            pythons["fbgemm"] = python
    results, claims = {}, []
    with tempfile.TemporaryDirectory(prefix="thermocline-mem-") as name, noise() as others:
        folder = Path(name)
        batch = write_batches(sizes, folder)
        console.print(f"{sizes} {batch}, {args.threads} threads each")
        for optimizer in args.only or DUELS:
            results[optimizer] = duel(optimizer, pythons, folder, sizes, args.threads)
            claims += claims_of(optimizer, results[optimizer])
    print_laps(results, sizes)
    console.print(f"other processes used {others['others_cpu']:.0%} of the cores")
    print_claims("DRAM tier", claims)
    if args.json:
        medians = {o: {e: {k: spread(v) for k, v in laps.items()} for e, laps in r.items()} for o, r in results.items()}
        record = {"environment": environment(("torch", "numpy")), "sizes": dataclasses.asdict(sizes), **batch, **others}
        write_json(args.json, {**record, "threads": args.threads, "milliseconds": medians}, claims)


if __name__ == "__main__":
    main()
