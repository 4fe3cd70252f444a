"""Mutation test of Python parts: plants known bugs in a copy of the package, one at a time, and counts those detected.

    python tests/faults/mutants_python.py [NAME...]

A bug in a hint changes no bit, so tests of bits cannot detect it. bugs_in_runs.py has those of checkpoints, publishing,
admission, the look-ahead and ranks, bugs_in_guards.py those of guards. Run by `make test-faults`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bugs_in_guards import GUARDS
from bugs_in_runs import BUGS
from planted_bugs import PythonMutant, chosen, plant

ROOT = Path(__file__).parents[2]
CLEAN_LIMIT, BUG_LIMIT = 1800.0, 300.0
"""Seconds of the tests without a bug, and with one."""
SLOWER = 10
"""A test with a bug may take this many times as long as without: on a busy machine, slowness is no detection."""
HINTS = "tests/distributed/test_hints.py"
STEPS = "tests/training/test_graph_step.py"
PLANS = "tests/tiers/test_plan_graph.py"
STATISTICS = "tests/embedding/test_row_statistics.py"
EXPIRY = "tests/embedding/test_expiry.py"
EXPIRY_AHEAD = "tests/embedding/test_expiry_ahead.py"


MUTANTS = [
    *BUGS,
    *GUARDS,
    PythonMutant(
        "hints are sent to the next rank",
        "distributed/hint_lane.py",
        "            words[rank] += hint.encode()\n",
        "            words[(rank + 1) % len(words)] += hint.encode()\n",
        HINTS,
    ),
    PythonMutant(
        "a rank without hints joins no round",
        "distributed/hint_lane.py",
        "                self._changed.wait(_INTERVAL)\n",
        "                self._changed.wait()\n",
        HINTS,
    ),
    PythonMutant(
        "the end of a pipeline keeps its hints",
        "distributed/hint_lane.py",
        "            receiver.end(training)\n",
        "            pass\n",
        HINTS,
    ),
    PythonMutant(
        "batches that pass release no rows",
        "distributed/sharded_backend.py",
        "            self.hints.passed(len(window.routes), training=True)\n",
        "            pass\n",
        HINTS,
    ),
    PythonMutant(
        "a recorded step keeps the constants of the first step",
        "training/graph_step.py",
        "            rows.set_constants(step, table.lr, 1.0)\n",
        "            rows.set_constants(1, table.lr, 1.0)\n",
        STEPS,
    ),
    PythonMutant(
        "a recorded step keeps the dense features of the first batch",
        "training/graph_step.py",
        "        if self._dense is not None:\n            self._dense.load(batch.dense)\n",
        "        if self._dense is not None and self._uses < 2:\n            self._dense.load(batch.dense)\n",
        STEPS,
    ),
    PythonMutant(
        "a failed attempt to record leaves its random numbers",
        "training/graph_step.py",
        "            torch.set_rng_state(random[0])\n",
        "",
        STEPS,
    ),
    PythonMutant(
        "recorded planning assumes that no slot is missing",
        "tiers/plan_graph.py",
        "        insert = _Kind.EVICT if self._keys > self._tier.capacity - used else _Kind.INSERT\n",
        "        insert = _Kind.INSERT\n",
        PLANS,
    ),
    PythonMutant(
        "expired rows stay in DRAM",
        "tiers/host_rows.py",
        "        self.dram.erase(keys)\n",
        "",
        EXPIRY,
    ),
    PythonMutant(
        "expired rows stay on SSD",
        "tiers/host_rows.py",
        "            store.delete(keys)",
        "            pass",
        EXPIRY,
    ),
    PythonMutant(
        "a part of an expiry tests rows as they were last written",
        "tiers/host_rows.py",
        "        self.dram.flush(store, part)\n",
        "        self.dram.flush(store, KeyPart(0, 10**9))\n",
        EXPIRY_AHEAD,
    ),
    PythonMutant(
        "a part that was read ahead tests rows as they were last written",
        "tiers/scan_ahead.py",
        "        return [*pieces, (unwritten, unwritten_rows[:, self.words])], unwritten\n",
        "        return pieces, unwritten\n",
        EXPIRY_AHEAD,
    ),
    PythonMutant(
        "a part that was read ahead tests rows as of the scan",
        "tiers/scan_ahead.py",
        "        replaced = _places(keys, np.concatenate([changed_keys, unwritten]))\n",
        "        replaced = _places(keys, unwritten)\n",
        EXPIRY_AHEAD,
    ),
    PythonMutant(
        "rows decay with each part of an expiry",
        "embedding/expiry.py",
        "        if expiry.decay != 1 and part.number == 0:\n",
        "        if expiry.decay != 1:\n",
        EXPIRY,
    ),
    PythonMutant(
        "expired rows stay in HBM",
        "tiers/hbm_backend.py",
        "            self.hbm.erase(keys)\n",
        "",
        EXPIRY,
    ),
    PythonMutant(
        "an expired row in HBM is still dirty",
        "tiers/hbm.py",
        "                self.dirty[slots.long()] = 0\n",
        "                self.dirty[slots.long()] = 1\n",
        EXPIRY,
    ),
    PythonMutant(
        "a resumed run forgets its decays",
        "embedding/row_statistics.py",
        '"decays": self.runs}',
        '"decays": []}',
        EXPIRY,
    ),
    PythonMutant(
        "ranks count their own occurrences only",
        "distributed/sharded_backend.py",
        "        return from_limbs(total)\n",
        "        return from_limbs(total) // 2\n",
        STATISTICS,
    ),
]


def first_failure(package: Path, tests: str, seconds: float) -> str:
    """Return the first failing test, or that they took longer than `seconds`; empty if all pass."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(package), str(ROOT)]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-x",
        "-q",
        "-m",
        "not faults and not long",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "0",
        tests,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{tests} timed out after {seconds:.0f} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0].removeprefix("FAILED ")[:150] if failed else f"exit {done.returncode}" * (done.returncode != 0)


def main(names: list[str]) -> int:
    mutants = chosen(MUTANTS, names)
    with tempfile.TemporaryDirectory(prefix="thermocline-mutants-") as folder:
        package = Path(folder) / "src"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))

        limits: dict[str, float] = {}

        def clean() -> str:
            for tests in dict.fromkeys(mutant.tests for mutant in mutants):
                start = time.monotonic()
                if reason := first_failure(package, tests, CLEAN_LIMIT):
                    return reason
                limits[tests] = max(BUG_LIMIT, SLOWER * (time.monotonic() - start))
            return ""

        return plant(
            mutants, package / "thermocline", "tests/faults/mutants_python.py", clean,
            lambda mutant: first_failure(package, mutant.tests, limits[mutant.tests]),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
