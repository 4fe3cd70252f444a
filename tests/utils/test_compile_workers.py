"""Processes that compile kernels: replies, failures, the end of workers, and when they are started early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thermocline.utils import compile_workers
from thermocline.utils.compile_workers import CompileWorkers

ECHO = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    if task.get("end"):
        sys.exit(1)
    print(json.dumps({"error": task.get("error", "")}), flush=True)
"""


@pytest.fixture
def workers() -> CompileWorkers:
    return CompileWorkers([sys.executable, "-c", ECHO], 3)


def test_workers_start_with_the_fourth_missing_kernel(workers: CompileWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_END_SECONDS", 60.0)  # they may still be starting
    with workers.used():
        assert [workers.compile({}) for _ in range(5)] == [False, False, False, True, True]
        processes = list(workers._processes)
        assert len(processes) == 3
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert workers.compiled == 2


def test_a_kernel_that_fails_or_ends_its_worker_is_left_to_the_caller(workers: CompileWorkers) -> None:
    workers.start()
    assert not workers.compile({"error": "no such kernel"})
    assert not workers.compile({"end": True})
    assert workers.compile({}), "one worker is left"
    workers._processes[0].kill()
    assert not workers.compile({})
    assert not workers.compile({}), "without workers nothing waits, and none is started again"
    assert not workers._processes
    workers.stop()


def test_a_worker_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_SECONDS", 0.2)
    workers = CompileWorkers([sys.executable, "-c", "import time; time.sleep(600)"], 3)
    workers.start()
    stuck = workers._processes[0]
    assert not workers.compile({})
    assert stuck.returncode == -signal.SIGKILL
    workers.stop()
    assert not workers._processes


def test_few_cores_and_a_missing_program_leave_compiling_to_the_caller() -> None:
    few = CompileWorkers([sys.executable, "-c", ECHO], 2)
    none = CompileWorkers(["/nonexistent/program"], 3)
    for workers in (few, none):
        workers.start()
        assert not any(workers.compile({}) for _ in range(5))
        assert not workers._processes
        workers.stop()


def test_threads_that_wait_for_a_worker_end_when_workers_are_stopped() -> None:
    workers = CompileWorkers([sys.executable, "-c", "import time; time.sleep(600)"], 3)
    workers.start()
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(workers.compile({})), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    while workers._idle.qsize():
        time.sleep(0.01)
    begin = time.monotonic()
    workers.stop()
    for thread in threads:
        thread.join(30)
    assert results == [False] * 8
    assert time.monotonic() - begin < 20, "a second for all workers, not for each"


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "cores", lambda: 16)
    for text in ("", "0"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert CompileWorkers()._count == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert CompileWorkers()._count == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert CompileWorkers()._count == 4


def test_workers_start_early_unless_the_cache_has_all_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: CompileWorkers
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def starts(identity: str) -> bool:
        again = CompileWorkers(workers._command, 3)
        again.start_early(identity)
        started = bool(again._processes)
        again.stop()
        return started

    assert starts("a")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__grp__kernel.json").write_text("{}")
    workers.start_early("a")
    with workers.used():
        workers.used_folder("one")
        workers.used_folder("two")
    assert not starts("a")
    assert starts("b"), "another run may need other kernels"
    (tmp_path / "two" / "__grp__kernel.json").unlink()
    assert starts("a"), "the cache lacks a kernel"
    (tmp_path / "two" / "__grp__kernel.json").write_text("{}")
    assert not starts("a")
    for damaged in ("[", "[1]", "5"):
        next(tmp_path.glob("thermocline-*.json")).write_text(damaged)
        assert starts("a"), "the list is damaged"


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from thermocline.utils.compile_workers import CompileWorkers
workers = CompileWorkers([sys.executable, "-c", {ECHO!r}], 3)
workers.start()
print(*[process.pid for process in workers._processes], flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    owner.kill()
    owner.wait()
    owner.stdout.close()
    limit = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_exits_stops_its_workers_without_output() -> None:
    script = f"""
import sys
from thermocline.utils.compile_workers import CompileWorkers
workers = CompileWorkers([sys.executable, "-c", {ECHO!r}], 3)
workers.start()
print(*[process.pid for process in workers._processes], flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    assert not any(map(_runs, pids))


def test_the_worker_replies_to_a_kernel_that_it_does_not_know() -> None:
    task = {"module": "thermocline.kernels.pool", "name": "no_kernel", "target": ["cuda", 90, 32], "data": "{}"}
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "thermocline.utils.compile_worker"],
        input=json.dumps(task) + "\n", capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0
    assert "no_kernel" in json.loads(done.stdout)["error"]
