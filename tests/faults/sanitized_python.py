"""Run Python tests on an extension module that is built with a sanitizer.

    python tests/faults/sanitized_python.py thread|address MODULE [PYTEST ARGUMENT...]

MODULE is the built _core module (see `make test-tsan`). A copy of the package gets it, and the sanitizer's library is
preloaded into Python and into the processes that it starts. Python, torch and NumPy are not instrumented: races between
their own accesses are not seen, races of our C++ code are, also with them. Prints every report with a frame of the
module, and the number of the others. Exit code 1 if a report has such a frame, or a test failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPRESSIONS = Path(__file__).with_name("tsan.supp")
LIBRARIES = {"thread": "libtsan.so", "address": "libasan.so"}
TESTS = {
    "thread": [
        *("tests/pipeline", "tests/tiers/test_dram_api.py", "tests/tiers/test_ssd_api.py"),
        *("tests/distributed/test_sharded_table.py", "tests/distributed/test_hints.py"),
        *("tests/distributed/test_row_exchange.py", "tests/distributed/test_shm_transport.py"),
        *("tests/distributed/test_early_rows.py", "tests/distributed/test_admission_ranks.py"),
        *("tests/distributed/test_publish_ranks.py", "tests/distributed/test_restarts.py"),
        *("tests/embedding/test_expiry.py", "tests/embedding/test_admission.py"),
        *("tests/checkpoint/test_manager.py", "tests/serving/test_publication.py"),
    ],
    "address": ["tests/pipeline", "tests/tiers", "tests/embedding", "tests/serving/test_publication.py"],
}
DEFAULT = ["-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not faults and not long", "--timeout", "1800"]


def environment(kind: str, package: Path, logs: Path) -> dict[str, str]:
    """Return the environment of the tests; reports go to files logs/report.PID."""
    compiler = os.environ.get("CXX", "g++")
    library = subprocess.check_output([compiler, f"-print-file-name={LIBRARIES[kind]}"], text=True).strip()
    if not Path(library).is_absolute():
        raise SystemExit(f"{compiler} has no {LIBRARIES[kind]}: install the sanitizers of the compiler")
    log = f"log_path={logs / 'report'}"
    return {
        **os.environ,
        "LD_PRELOAD": library,
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
        "PYTHONMALLOC": "malloc",  # Python's own allocator hides freed memory from the sanitizer
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TSAN_OPTIONS": f"{log} suppressions={SUPPRESSIONS} halt_on_error=0 exitcode=0 die_after_fork=0 history_size=4",
        "ASAN_OPTIONS": f"{log} detect_leaks=0 halt_on_error=1 allocator_may_return_null=1",
        "UBSAN_OPTIONS": f"{log} print_stacktrace=1",
    }


def reports_in(logs: Path) -> tuple[list[str], int]:
    """Return the reports with a frame of the module, without repetitions, and the number of all others."""
    ours: dict[str, str] = {}
    others = 0
    for file in sorted(logs.iterdir()):
        for report in re.split(r"={18,}\n", file.read_text(errors="replace")):
            if "Sanitizer" not in report and "runtime error" not in report:
                continue
            frames = [line for line in report.splitlines() if re.match(r"\s*#\d+ ", line) and "_core" in line]
            if frames:
                ours.setdefault("\n".join(re.sub(r"0x[0-9a-f]+", "", frame) for frame in frames[:4]), report)
            else:
                others += 1
    return list(ours.values()), others


def main(kind: str, module: Path, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="thermocline-sanitized-") as folder:
        package, logs = Path(folder) / "src", Path(folder) / "logs"
        logs.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "_core*.so")
        shutil.copytree(ROOT / "src", package, ignore=ignored)
        shutil.copy(module, package / "thermocline" / "core" / module.name)
        env = environment(kind, package, logs)
        command = ["setarch", "-R", sys.executable, "-m", "pytest", *DEFAULT, *(arguments or TESTS[kind])]
        failed = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        ours, others = reports_in(logs)
    for report in ours:
        print(report)
    print(
        f"{kind} sanitizer: {len(ours)} reports with a frame of the module, {others} others; pytest exit code {failed}"
    )
    return 1 if ours or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
