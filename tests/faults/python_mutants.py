"""Mutation test of Python sources: plants known bugs in a copy, one at a time, and counts those that tests detect.

    python tests/faults/python_mutants.py [NAME...]

Each bug would give wrong results only in some steps of a recorded training. Run by `make test-faults`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str


GRAPH_TESTS = "tests/training/test_graph_step.py"
PLAN_TESTS = "tests/tiers/test_plan_graph.py"
MUTANTS = [
    Mutant(
        "a recorded step keeps the constants of the first step",
        "training/graph_step.py",
        "            rows.set_constants(step, table.lr, 1.0)\n",
        "            rows.set_constants(1, table.lr, 1.0)\n",
        f"{GRAPH_TESTS} -k schedule",
    ),
    Mutant(
        "a recorded step keeps the dense features of the first batch",
        "training/graph_step.py",
        "        if self._dense is not None:\n            self._dense.load(batch.dense)\n",
        "        if self._dense is not None and self._uses < 2:\n            self._dense.load(batch.dense)\n",
        f"{GRAPH_TESTS} -k schedule",
    ),
    Mutant(
        "a failed attempt to record leaves its random numbers",
        "training/graph_step.py",
        "            torch.set_rng_state(random[0])\n",
        "",
        f"{GRAPH_TESTS} -k cannot_be_recorded",
    ),
    Mutant(
        "recorded planning assumes that no slot is missing",
        "tiers/plan_graph.py",
        "        evict = self.shape.keys > self._tier.capacity - used\n",
        "        evict = False\n",
        f"{PLAN_TESTS} -k equal_to_planning",
    ),
]


def run_tests(source: Path, tests: str) -> bool:
    """Return whether the tests pass with this source."""
    path = os.pathsep.join([str(source), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, PYTHONPATH=path), capture_output=True, check=False)
    return done.returncode == 0


def main(names: list[str]) -> int:
    mutants = [m for m in MUTANTS if not names or any(n in m.name for n in names)]
    detected = 0
    with tempfile.TemporaryDirectory(prefix="thermocline-mutants-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        for mutant in mutants:
            path = source / "thermocline" / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"'{mutant.name}' does not match {mutant.file}: update it in {Path(__file__).name}")
            path.write_text(text.replace(mutant.old, mutant.new))
            failed = not run_tests(source, mutant.tests)
            path.write_text(text)
            detected += failed
            print(f"{mutant.name}: {'detected' if failed else 'NOT DETECTED'}", flush=True)
    print(f"planted bugs detected: {detected} of {len(mutants)}")
    return 0 if detected == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
