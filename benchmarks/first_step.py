"""Seconds from the start of `thermocline train` to the end of the first step, in new processes.

Claims   At most 8 s with Triton's cache of compiled kernels empty, and 4 s with it filled.
Method   The real command in a process of its own, on generated data; marks are written by wrappers around the parts of
         the run. The cache is a folder of its own: empty for the first run, filled by it for the others. Python's
         bytecode is cached, as after `pip install`: a run before the first one writes it to a folder of its own, and
         machines whose packages have none, or that forbid to write it, are measured as others. Kernels are counted:
         compiled by worker processes, compiled by the process itself, found in the cache; and the launchers that the
         process built with a C compiler (Triton up to 3.6).
Command  python benchmarks/first_step.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG = """
[data]
format = "synth"
[data.synth]
keys = {keys}
fields = 26
examples = {examples}
valid_examples = {held_out}
test_examples = {held_out}
[model]
name = "dnn"
dim = 16
[tiers]
hbm = "{hbm}"
mem = "1GB"
[train]
batch_size = {batch}
steps = 2
run_dir = "{folder}/run"
checkpoint_minutes = "none"
"""
TARGETS = {"empty": 8.0, "filled": 4.0}


def child(config: str, started: float) -> None:
    """Run `thermocline train` and print, as JSON, the seconds since `started` at which its parts ended."""
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks.setdefault(name, time.time() - started)

    mark("python started")
    from thermocline.cli.main import app

    mark("command imported")
    from thermocline.training import run
    from thermocline.training.callbacks import Callback

    def marked(owner: Any, name: str, text: str, before: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if before:
                mark(before)
            result = original(*args, **kwargs)
            mark(text)
            return result

        setattr(owner, name, wrapper)

    class FirstStep(Callback):
        def on_start(self, trainer: Any) -> None:
            mark("trainer started")

        def on_step(self, trainer: Any, loss: Any) -> None:
            if trainer.progress.step == 1:
                float(loss)
                mark("first step")
            else:
                mark("second step")

    kernels: dict[str, list[str]] = {"compiled": [], "found": [], "launchers built": []}
    make_table = run.Run._table

    def table_of(self: Any, read_only: bool) -> Any:
        count_kernels(kernels)  # here, where Triton is imported next in any case
        return make_table(self, read_only)

    run.Run._table = table_of  # type: ignore[method-assign]
    marked(run.Run, "_open_data", "data open")
    marked(run.Run, "_table", "table made", before="torch imported")
    marked(run, "gpu_budget", "CUDA context made")
    marked(run, "build", "model built")
    marked(run, "dense_optimizers", "optimizers made")
    fit = run.Run.fit
    run.Run.fit = lambda self, **options: fit(self, **{**options, "callbacks": [FirstStep()]})  # type: ignore[method-assign]
    try:
        app(["train", config], standalone_mode=False)
    finally:
        from thermocline.utils.compile_workers import workers

        counts = {"compiled by workers": workers.compiled, **{name: len(names) for name, names in kernels.items()}}
        print("MARKS " + json.dumps({**marks, "kernels": counts, "names": kernels["compiled"]}), flush=True)


def count_kernels(kernels: dict[str, list[str]]) -> None:
    """Append the kernels that this process compiles, with the thread that does, or finds in Triton's cache."""
    import torch

    if not torch.cuda.is_available():
        return
    from triton import knobs
    from triton.runtime import build

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        kernels["found" if cache_hit else "compiled"].append(f"{src.name} ({threading.current_thread().name})")

    build_library = build._build

    def build_counted(name: str, *args: Any, **options: Any) -> Any:
        kernels["launchers built"].append(f"{name} ({threading.current_thread().name})")
        return build_library(name, *args, **options)

    knobs.compilation.listener = listener
    build._build = build_counted


def measure(config: Path, cache: Path, bytecode: Path) -> dict[str, Any]:
    """Run the child with a folder of Triton's cache and one of Python's bytecode; return its marks."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", str(config), "--started", repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MARKS ")), None)
    if done.returncode or line is None:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    marks: dict[str, Any] = json.loads(line.removeprefix("MARKS "))
    return marks


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--runs", type=int, default=3, help="runs with the cache filled")
    parser.add_argument("--tiny", action="store_true", help="few keys and examples, for a dry run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child, args.started)
        return
    from common import Claim, console, environment, print_claims, write_json

    sizes = {"keys": 1_000_000, "examples": 100_000, "batch": 4096, "hbm": "1GB", "held_out": 100_000}
    if args.tiny:
        sizes = {"keys": 1000, "examples": 64, "batch": 8, "hbm": "1MB", "held_out": 8}
    record: dict[str, Any] = {**environment(["torch", "triton"]), "sizes": sizes, "filled": []}
    with tempfile.TemporaryDirectory(prefix="thermocline-first-step-") as folder:
        for n in range(-1, 1 + args.runs):
            work = Path(folder) / str(n)
            work.mkdir()
            config = work / "config.toml"
            config.write_text(CONFIG.format(**sizes, folder=work))
            cache = "triton before" if n < 0 else "triton"
            marks = measure(config, Path(folder) / cache, Path(folder) / "bytecode")
            state = "no bytecode" if n < 0 else "empty" if n == 0 else "filled"
            console.print(f"{state}: {marks}")
            if n > 0:
                record["filled"].append(marks)
            else:
                record[state] = marks
    filled = min(marks["first step"] for marks in record["filled"])
    claims = [
        Claim("first step, Triton's cache empty", record["empty"]["first step"], TARGETS["empty"], "s", True),
        Claim("first step, cache filled, best run", filled, TARGETS["filled"], "s", True),
    ]
    print_claims("First step of thermocline train", claims)
    if args.json:
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
