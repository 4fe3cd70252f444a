"""Race detection of a module that Python loads: a race is reported, with a frame of the module."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults.sanitized_python import environment, reports_in

SOURCE = """
#include <sched.h>
#include <atomic>
#include <mutex>
static long counter;
static std::atomic<int> arrived;
static std::mutex mutex;
extern "C" void add(int locked) {
  arrived.fetch_add(1, std::memory_order_relaxed);
  while (arrived.load(std::memory_order_relaxed) < 2) sched_yield();  // both threads are here: the GIL orders nothing
  if (locked) mutex.lock();
  ++counter;
  if (locked) mutex.unlock();
}
"""
PROGRAM = """
import ctypes, sys, threading
add = ctypes.CDLL(sys.argv[1]).add
threads = [threading.Thread(target=add, args=(int(sys.argv[2]),)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("setarch") is None, reason="needs g++ and setarch")
def test_a_race_of_the_module_is_reported_and_a_lock_prevents_it(tmp_path: Path) -> None:
    source, module = tmp_path / "racy.cc", tmp_path / "_core.so"
    source.write_text(SOURCE)
    build = ["g++", "-fsanitize=thread", "-g", "-O1", "-shared", "-fPIC", str(source), "-o", str(module)]
    if subprocess.run(build, check=False).returncode:
        pytest.skip("g++ has no ThreadSanitizer")
    for locked, count in ((0, 1), (1, 0)):
        logs = tmp_path / f"logs-{locked}"
        logs.mkdir()
        command = ["setarch", "-R", sys.executable, "-c", PROGRAM, str(module), str(locked)]
        subprocess.run(command, env=environment("thread", tmp_path, logs), check=True, timeout=120)
        ours, _ = reports_in(logs)
        assert len(ours) == count
        assert all("data race" in report and "add" in report for report in ours)
