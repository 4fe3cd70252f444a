"""Mutation test of Python parts: plants known bugs in a copy of the package, one at a time, and counts those detected.

    python tests/faults/mutants_python.py [NAME...]

A bug in a hint changes no bit, so tests of bits cannot detect it. Run by `make test-faults`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
HINTS = "tests/distributed/test_hints.py"
STEPS = "tests/training/test_graph_step.py"
PLANS = "tests/tiers/test_plan_graph.py"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str
    """File of the tests that have to detect it."""


MUTANTS = [
    Mutant(
        "hints are sent to the next rank",
        "distributed/hint_lane.py",
        "            words[rank] += hint.encode()\n",
        "            words[(rank + 1) % len(words)] += hint.encode()\n",
        HINTS,
    ),
    Mutant(
        "a rank without hints joins no round",
        "distributed/hint_lane.py",
        "                self._changed.wait(_INTERVAL)\n",
        "                self._changed.wait()\n",
        HINTS,
    ),
    Mutant(
        "the end of a pipeline keeps its hints",
        "distributed/hint_lane.py",
        "            receiver.end(training)\n",
        "            pass\n",
        HINTS,
    ),
    Mutant(
        "batches that pass release no rows",
        "distributed/sharded_backend.py",
        "            self.hints.passed(len(window.routes), training=True)\n",
        "            pass\n",
        HINTS,
    ),
    Mutant(
        "a recorded step keeps the constants of the first step",
        "training/graph_step.py",
        "            rows.set_constants(step, table.lr, 1.0)\n",
        "            rows.set_constants(1, table.lr, 1.0)\n",
        STEPS,
    ),
    Mutant(
        "a recorded step keeps the dense features of the first batch",
        "training/graph_step.py",
        "        if self._dense is not None:\n            self._dense.load(batch.dense)\n",
        "        if self._dense is not None and self._uses < 2:\n            self._dense.load(batch.dense)\n",
        STEPS,
    ),
    Mutant(
        "a failed attempt to record leaves its random numbers",
        "training/graph_step.py",
        "            torch.set_rng_state(random[0])\n",
        "",
        STEPS,
    ),
    Mutant(
        "recorded planning assumes that no slot is missing",
        "tiers/plan_graph.py",
        "        evict = self.shape.keys > self._tier.capacity - used\n",
        "        evict = False\n",
        PLANS,
    ),
]


def first_failure(package: Path, tests: str) -> str:
    """Return the first failing test; empty if all pass."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(package), str(ROOT)]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"{tests} timed out"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0].removeprefix("FAILED ")[:150] if failed else f"exit {done.returncode}" * (done.returncode != 0)


def main(names: list[str]) -> int:
    mutants = [m for m in MUTANTS if not names or any(n in m.name for n in names)]
    detected = 0
    with tempfile.TemporaryDirectory(prefix="thermocline-mutants-") as folder:
        package = Path(folder) / "src"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in mutants:
            if (package / "thermocline" / mutant.file).read_text().count(mutant.old) != 1:
                raise SystemExit(
                    f"'{mutant.name}' does not match src/thermocline/{mutant.file}: update it in "
                    "tests/faults/mutants_python.py"
                )
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            if reason := first_failure(package, tests):
                raise SystemExit(f"the tests fail without a planted bug: {reason}")
        for mutant in mutants:
            start, path = time.monotonic(), package / "thermocline" / mutant.file
            text = path.read_text()
            path.write_text(text.replace(mutant.old, mutant.new))
            reason = first_failure(package, mutant.tests)
            path.write_text(text)
            detected += bool(reason)
            verdict = f"detected by {reason}" if reason else "NOT DETECTED"
            print(f"{mutant.name} ({time.monotonic() - start:.0f} s): {verdict}", flush=True)
    print(f"planted bugs detected: {detected} of {len(mutants)}")
    return 0 if detected == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
