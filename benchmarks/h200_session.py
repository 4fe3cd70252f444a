"""Everything that is measured on an H200, as calls of less than nine minutes, in order of priority.

    python benchmarks/h200_session.py --list                     calls, parts, expected seconds and command lines
    python benchmarks/h200_session.py --call N --out FOLDER      run the parts of a call, one after the other

A part that fails or exceeds its time does not stop the later ones; a part that no longer fits `--limit` is skipped. The
output of all parts is FOLDER/call-N.log, figures are in FOLDER/PART.json. Exit status: 0 if every part ended with 0, or
with 1 (a missed target, a failed test); 1 otherwise. Every call builds the module first, unless it is built.

What a machine without a network needs, besides the tree: README.md, "A session on an H200".
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 580.0
"""Seconds of a call with the build: below the ten minutes after which a command is ended."""
DATA = "build/device-data"
"""Folder of data sets: ml-100k."""
PACKAGES = "build/device"
"""Folder of Python packages that the machine lacks."""
DISK = "build/disk"
"""Folder of stores."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A command. `{out}` in its words is the folder of the results."""

    name: str
    seconds: float
    """Expected."""
    words: Sequence[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def command(self, out: str) -> list[str]:
        """Return the command line; "python" is this interpreter."""
        words = [word.replace("{out}", out) for word in self.words]
        names = {"python": sys.executable, "PYTHON=python": f"PYTHON={sys.executable}"}
        return [names.get(word, word) for word in words]

    def text(self) -> str:
        """Return the command line for a reader."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, *(shlex.quote(word) if " " in word else word for word in self.words)])


def bench(name: str, seconds: float, script: str, options: str = "", **environment: str) -> Part:
    """Return a part that runs a benchmark and writes its figures."""
    words = ["python", f"benchmarks/{script}.py", *options.split(), "--json", f"{{out}}/{name}.json"]
    return Part(name, seconds, words, environment)


def tests(name: str, seconds: float, graphs: int) -> Part:
    words = ["python", "-m", "pytest", "-q", "-n", "4", "-m", "gpu", "tests"]
    return Part(name, seconds, words, {"THERMOCLINE_GRAPHS": str(graphs)})


def steady(model: str, seconds: float) -> list[Part]:
    options = f"--only steady:{model} --device cuda --no-page --out {{out}}/steady --cache .cache/steady"
    ahead = ["--lookahead", "1400MB"] if model in "DE" else []
    return [Part(f"steady-{model}", seconds, ["python", "-m", "experiments", *options.split(), *ahead])]


def hashing(step: str) -> list[Part]:
    options = f"--only hashing:{step} --device cuda --no-page --out {{out}}/hashing --cache .cache/hashing"
    return [Part(f"hashing-{step}", 500, ["python", "-m", "experiments", *options.split()])]


def sanitizer(tool: str) -> Part:
    words = f"compute-sanitizer --tool {tool} --error-exitcode 3 python -m pytest -q -m gpu"
    chosen = ["tests/tiers/test_plan_graph.py", "-k", "page_locked or used_again"]
    return Part(f"sanitizer-{tool}", 130, [*words.split(), *chosen])


BUILD = Part("build", 90, ["make", "build-inplace", "PYTHON=python"])
CALLS: list[list[Part]] = [
    [tests("tests-graphs", 210, 1), tests("tests-no-graphs", 210, 0)],
    [
        bench("hbm-step", 130, "hbm_step"),
        bench("hbm-step-65536", 40, "hbm_step", "--batches 65536 --precision bf16 --sides torch,loop,auto"),
        bench("hbm-step-rows", 60, "hbm_step", "--batches 4096,16384 --rows fp32,fp16,int8 --sides auto"),
        bench("mlperf-dcnv2", 90, "mlperf_dcnv2"),
        bench("hbm-tier", 60, "hbm_tier"),
        bench("first-step", 50, "first_step"),
    ],
    steady("E", 490),
    [
        bench("hbm", 60, "hbm"),
        bench(
            "hbm-e2e", 330, "hbm_e2e",
            f"--preset E/1000 --warm 550 --batches 2300 --lookahead 1400MB --window 1 --depth 4 --folder {DISK}",
        ),
    ],
    steady("D", 470),
    steady("C", 450),
    steady("B", 440),
    steady("A", 430),
    [bench("gpu-soak", 510, "gpu_soak", "--part soak")],
    [bench("gpu-bits", 150, "gpu_soak", "--part bits"), sanitizer("memcheck"), sanitizer("racecheck")],
    [
        bench("ssd-puts", 120, "ssd", f"--only puts --engines ours --dir {DISK}"),
        bench(
            "accuracy-tf32", 200, "accuracy", f"{DATA}/ml-100k --models dnn,dcnv2 --sides ours,tf32 --device cuda"
        ),
        Part("demo", 60, ["make", "demo", "PYTHON=python"]),
    ],
    hashing("image"),
    hashing("web"),
]  # fmt: skip
"""Parts by call, the most important ones first."""


def run(parts: Sequence[Part], out: Path, log: Path, limit: float) -> dict[str, str]:
    """Run the parts; return by name "ok", "exit N", "over N s" or "skipped"."""
    begin, outcome = time.monotonic(), {}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / PACKAGES}"}
    for number, part in enumerate(parts):
        left = limit - (time.monotonic() - begin)
        if number and left < part.seconds / 2:
            outcome[part.name] = "skipped"
            continue
        started = time.monotonic()
        with log.open("a") as output:
            output.write(f"==== {part.text()}\n")
            output.flush()
            try:
                process = subprocess.run(
                    part.command(str(out)), cwd=ROOT, env=environment | part.environment, stdout=output,
                    stderr=subprocess.STDOUT, timeout=left, check=False,
                )  # fmt: skip
                outcome[part.name] = "ok" if process.returncode == 0 else f"exit {process.returncode}"
            except subprocess.TimeoutExpired:
                outcome[part.name] = f"over {left:.0f} s"
        print(f"{part.name}: {outcome[part.name]}, {time.monotonic() - started:.0f} s of {part.seconds:g} expected")
    return outcome


def listing() -> str:
    """Return all calls with their parts."""
    lines = []
    for number, parts in enumerate(CALLS, 1):
        total = sum(part.seconds for part in parts)
        lines.append(f"call {number}: {total:.0f} s expected")
        lines += [f"  {part.name} ({part.seconds:.0f} s): {part.text()}" for part in parts]
    total = sum(part.seconds for parts in CALLS for part in parts)
    return "\n".join([*lines, f"all calls: {total / 60:.0f} minutes, and {BUILD.seconds:.0f} s per machine to build"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print all calls")
    parser.add_argument("--call", type=int, help="number of the call to run")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of the call; default {LIMIT:g}")
    options = parser.parse_args(arguments)
    if options.list:
        print(listing())
        return 0
    if options.out is None or not 1 <= (options.call or 0) <= len(CALLS):
        parser.error(f"give --list, or --call 1 to {len(CALLS)} and --out FOLDER")
    out = options.out.resolve()
    for folder in (out, ROOT / DISK):
        folder.mkdir(parents=True, exist_ok=True)
    outcome = run([BUILD, *CALLS[options.call - 1]], out, out / f"call-{options.call}.log", options.limit)
    return 0 if set(outcome.values()) <= {"ok", "exit 1"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
