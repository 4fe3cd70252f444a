"""Run the long tests, the sanitizers and the planted bugs in resumable parts, and keep each result.

    python tests/faults/long_run.py KIND... [--shard I/N] [--jobs 1] [--minutes 55] [--only TEXT] [--results FILE]

KIND: cpp and py, the parts of `make test-long`; asan, tsan, those of `make test-sanitize`; asan-python, tsan-python,
those of `make test-asan` and `make test-tsan`; mutants, mutants-python.
A unit is a C++ suite (or one test of a Faults suite, or a part of its seeds), a Python test or some of its parameters,
a file of Python tests on a sanitized module, or planted bugs. Each appends one JSON line to the results, by default to
benchmarks/results/long-run.jsonl, which git tracks: date, commit, unit, seconds, result, and the last lines of its
output. A unit that passed at this commit is not repeated, so that the same command continues after an interruption.
With --jobs, that many units run at once; times are then those of a busy machine.
Units that the minutes do not suffice for are "not finished". Exit code: 0 if all units of the shard have passed, 1 if
one failed, 3 if some are left.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.report import git_commit, now

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "long-run.jsonl"
PARTS = {
    "FaultsCrash.Replay": 10,
    "FaultsCrash.KilledThenPowerLoss": 5,
    "FaultsCrash.WhileLogs": 4,
    "FaultsIo.": 10,
    "FaultsRepair.EveryPage": 3,
    "FaultsRepair.": 10,
}
"""Beginnings of C++ tests that are run in parts of their seeds (THERMOCLINE_PART), and the number of parts of the long
column. Half as many under a sanitizer, whose tests have fewer seeds."""
ALONE = ("tests/faults/", "tests/soak/", "tests/exact/test_kill")
"""Python tests of which each parameter is a unit."""
PARAMETERS = 24
"""Parameters of another Python test in one unit; each takes seconds."""
JOB = "{job}"
KINDS = ("cpp", "py", "asan", "tsan", "asan-python", "tsan-python", "mutants", "mutants-python")
SANITIZERS = {"asan-python": "address", "tsan-python": "thread"}


@dataclasses.dataclass(frozen=True)
class Unit:
    """A command whose exit code 0 means that it passed. JOB in it stands for the number of the job that runs it."""

    name: str
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


def cpp_units(kind: str, binary: Path, *, long: bool, prefix: Sequence[str] = ()) -> list[Unit]:
    """Return one unit per suite, one per test of a Faults suite, and one per part of the tests in `PARTS`."""
    listed = subprocess.run([str(binary), "--list"], capture_output=True, text=True, check=True).stdout.split()
    names = dict.fromkeys(test if test.startswith("Faults") else test.partition(".")[0] + "." for test in listed)
    env = (("THERMOCLINE_LONG", "1" if long else "0"), ("UBSAN_OPTIONS", "print_stacktrace=1"))
    units = []
    for name in names:
        command = (*prefix, str(binary), name)
        parts = next((parts for start, parts in PARTS.items() if name.startswith(start)), 1)
        parts = parts if long else max(1, parts // 2)
        if parts == 1:
            units.append(Unit(f"{kind} {name}", command, env))
        for part in (f"{number}/{parts}" for number in range(1, parts + 1) if parts > 1):
            units.append(Unit(f"{kind} {name} {part}", command, (*env, ("THERMOCLINE_PART", part))))
    return units


def python_units() -> list[Unit]:
    """Return the units of all tests that are marked faults or long."""
    long = {"THERMOCLINE_LONG": "1"}
    options = ("-m", "pytest", "-n", "0", "-q", "-m", "faults or long")
    listed = subprocess.run(
        [sys.executable, *options, "--collect-only"], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **long},
    ).stdout  # fmt: skip
    tests = [line for line in listed.splitlines() if line.startswith("tests/") and "::" in line]
    if not tests:
        raise SystemExit(f"no Python test was found:\n{listed[-2000:]}")
    command = (sys.executable, *options, "--timeout", "0")
    return [Unit(f"py {name}", (*command, *ids), tuple(long.items())) for name, ids in grouped(tests).items()]


def grouped(tests: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of units and their test ids: each id of `ALONE`, at most `PARAMETERS` ids of another test."""
    ids: dict[str, list[str]] = {}
    for test in tests:
        ids.setdefault(test if test.startswith(ALONE) else test.partition("[")[0], []).append(test)
    groups = {}
    for name, each in ids.items():
        for first in range(0, len(each), PARAMETERS):
            part = each[first : first + PARAMETERS]
            numbers = f" {first + 1} to {first + len(part)} of {len(each)}" if len(each) > PARAMETERS else ""
            groups[name + numbers] = part
    return groups


def sanitized_units(kind: str, build: Path) -> list[Unit]:
    """Return a unit per file of the Python tests that sanitized_python.py runs."""
    program, sanitizer = str(Path(__file__).with_name("sanitized_python.py")), SANITIZERS[kind]
    module = next((build / kind).glob("_core*.so"), None)
    if module is None:
        raise SystemExit(f"no module in {build / kind}: run make {kind}-tests")
    files = [
        str(file.relative_to(ROOT))
        for tests in beside("sanitized_python").TESTS[sanitizer]
        for file in sorted((ROOT / tests).rglob("test_*.py")) or [ROOT / tests]
    ]
    return [Unit(f"{kind} {file}", (sys.executable, program, sanitizer, str(module), file)) for file in files]


def beside(script: str) -> Any:
    """Import a script of this folder."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(script)


def planted_bugs(script: str) -> list[Any]:
    """Return the list of mutants.py or mutants_python.py."""
    mutants: list[Any] = beside(script).MUTANTS
    return mutants


def mutant_units(script: str, *options: str) -> list[Unit]:
    """Return a unit per planted bug in C++, whose build is kept, and per test that has to detect bugs in Python."""
    program = str(Path(__file__).with_name(f"{script}.py"))
    names: dict[str, list[str]] = {}
    for mutant in planted_bugs(script):
        names.setdefault(getattr(mutant, "tests", mutant.name), []).append(mutant.name)
    return [Unit(f"{script} {name}", (sys.executable, program, *options, *bugs)) for name, bugs in names.items()]


def units_of(kind: str, build: Path, shard: int) -> list[Unit]:
    """Return the units of a kind, in a fixed order; shards and jobs that run at the same time use different folders."""
    if kind == "cpp":
        return cpp_units(kind, build / "inplace" / "thermocline_tests", long=True)
    if kind == "asan":
        return cpp_units(kind, build / "asan" / "thermocline_tests", long=False)
    if kind == "tsan":
        return cpp_units(kind, build / "tsan" / "thermocline_tests", long=False, prefix=("setarch", "-R"))
    if kind in SANITIZERS:
        return sanitized_units(kind, build)
    if kind == "mutants":
        return mutant_units(kind, "--folder", str(build / f"mutants-{shard}-{JOB}"))
    return python_units() if kind == "py" else mutant_units("mutants_python")


def read_results(path: Path, commit: str) -> dict[str, str]:
    """Return the last result of each unit at this commit."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {entry["unit"]: entry["result"] for entry in entries if entry["commit"] == commit}


def run_unit(unit: Unit, seconds: float, job: int = 0, jobs: int = 1) -> dict[str, Any]:
    """Run one unit for at most `seconds`; return its result and the end of its output."""
    start = time.monotonic()
    build_jobs = max(1, (os.cpu_count() or 1) // jobs)
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(build_jobs), **os.environ, **dict(unit.env)}
    command = [word.replace(JOB, str(job)) for word in unit.command]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        result = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        result = "not finished"
    lines = output.replace(str(ROOT), ".").splitlines()[-12 if result == "passed" else -60 :]
    return {"result": result, "seconds": round(time.monotonic() - start, 1), "output": lines}


def run(units: Sequence[Unit], results: Path, minutes: float, commit: str, jobs: int = 1) -> int:
    """Run the units that have not passed at this commit; return the exit code."""
    deadline = time.monotonic() + minutes * 60
    done = read_results(results, commit)
    results.parent.mkdir(parents=True, exist_ok=True)
    left = iter([unit for unit in units if done.get(unit.name) != "passed"])
    lock = threading.Lock()

    def run_some(job: int) -> None:
        while (seconds := deadline - time.monotonic()) > 0:
            with lock:
                unit = next(left, None)
            if unit is None:
                return
            entry = {"date": now(), "commit": commit, "unit": unit.name} | run_unit(unit, seconds, job, jobs)
            with lock:
                with results.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
                done[unit.name] = entry["result"]
                print(f"{entry['date']} {unit.name}: {entry['result']}, {entry['seconds']} s", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        for each in [threads.submit(run_some, job) for job in range(jobs)]:
            each.result()
    counts = {result: sum(done.get(unit.name) == result for unit in units) for result in ("passed", "failed")}
    unfinished = len(units) - sum(counts.values())
    print(f"{counts['passed']} units passed, {counts['failed']} failed, {unfinished} not finished, commit {commit}")
    return 1 if counts["failed"] else 3 if unfinished else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th unit, from the I-th")
    parser.add_argument("--jobs", type=int, default=1, help="units that run at once")
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="to record on a machine that has a copy of it; default: that of git")
    parser.add_argument("--only", default="", help="text that the names of units contain")
    options = parser.parse_args()
    index, _, count = options.shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        parser.error(f"--shard is {options.shard!r}: it must be I/N with I from 1 to N")
    shard = int(index)
    units = [unit for kind in options.kinds for unit in units_of(kind, options.build, shard)]
    units = [unit for unit in units if options.only in unit.name]
    units, commit = units[shard - 1 :: int(count)], options.commit or git_commit()
    return run(units, options.results, options.minutes, commit, max(1, options.jobs))


if __name__ == "__main__":
    sys.exit(main())
