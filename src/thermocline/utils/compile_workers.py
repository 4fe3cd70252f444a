"""Processes that compile kernels into Triton's cache, beside this process and its interpreter lock. Loads no torch.

A worker that fails or is killed costs time only: the caller then compiles in place. `start_early` starts workers before
torch is loaded, unless a file in the cache lists the kernels of an equal run and all of them are there.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from thermocline.utils.atomic_file import atomic_path
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.machine import local_ranks

_MOST, _LEAST = 8, 3
"""Workers; fewer than `_LEAST` are not faster than threads of this process."""
_IN_PLACE = 3
"""Missing kernels that are compiled in place, before workers are started for the others."""
_SECONDS = 120.0
"""Time limit of one kernel; then its worker is killed."""
_END_SECONDS = 1.0
"""Time in which workers end by themselves when they are stopped."""
_COMMAND = (sys.executable, "-P", "-m", "thermocline.utils.compile_worker")


class CompileWorkers:
    """Worker processes, one kernel at a time each. Any thread."""

    def __init__(self, command: Iterable[str] = _COMMAND, count: int | None = None) -> None:
        """Start nothing yet. count   default: as many as cores, divided by the ranks of this machine, at most 8."""
        self._count = min(_MOST, cores() // local_ranks()) if count is None else count
        if not sys.executable or getattr(sys, "frozen", False):
            self._count = 0  # the interpreter is not a program of its own
        self._command = [*command]
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        """Workers without a kernel; None: there will be no more."""
        self._missing = self._users = 0
        self._marker: Path | None = None
        self._folders: set[str] = set()
        self.compiled = 0
        """Kernels that workers have compiled."""

    def start(self) -> None:
        """Start the workers, if they do not run. They load Triton meanwhile."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._processes or self._count < _LEAST:
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        for n in range(self._count):
            command = [*self._command, *(["first"] if n == 0 else [])]
            with contextlib.suppress(OSError):  # no memory or no process is left: fewer workers
                self._processes.append(subprocess.Popen(command, env=environment, **pipes))
        for process in reversed(self._processes):  # the first one builds Triton's driver: used last
            self._idle.put(process)
        if not self._processes:
            self._idle.put(None)
        atexit.register(self.stop)

    def start_early(self, identity: str) -> None:
        """Start the workers, unless the kernels of a run of this `identity` are in the cache."""
        spec = importlib.util.find_spec("triton")
        if spec is None or spec.origin is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError):
            marker = cache_folder() / f"thermocline-{_fingerprint(identity, Path(spec.origin))}.json"
            self._marker = marker
            folders = json.loads(marker.read_text())
            if folders and all(any((marker.parent / folder).glob("__grp__*")) for folder in folders):
                self._marker = None
                return
        self.start()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep workers until the last such block ends; then write down the folders of the cache, and stop them."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self.stop_unused()

    def compile(self, task: dict[str, Any]) -> bool:
        """Let a worker compile a kernel, `compile_worker.compile_kernel`; return whether it did.

        Without workers the first missing kernels are not compiled; then workers are started.
        """
        with self._lock:
            self._missing += 1
            if self._count < _LEAST or not (self._processes or self._missing > _IN_PLACE):
                return False
            self._start()
            idle = self._idle  # of these workers: `stop` replaces it
        worker = idle.get()
        if worker is None:
            idle.put(None)  # for the next thread that waits
            return False
        if _reply(worker, task) is None:
            self._drop(worker, idle)
            return False
        idle.put(worker)
        with self._lock:
            self.compiled += 1
        return True

    def used_folder(self, folder: str) -> None:
        """Note a folder of the cache that has a kernel of this run, or will have it."""
        with self._lock:
            self._folders.add(folder)

    def stop(self) -> None:
        """Stop the workers and wait for their end. Those that are compiling have a second, all together."""
        with self._lock:
            processes = self._take()
        self._end(processes)

    def stop_unused(self) -> None:
        """Stop the workers unless a `used` block needs them."""
        with self._lock:
            if self._users:
                return
            processes = self._take()
        self._mark()
        self._end(processes)

    def _take(self) -> list[subprocess.Popen[bytes]]:
        processes, self._processes = self._processes, []
        self._idle.put(None)  # for threads that wait for a worker
        self._idle = queue.LifoQueue()
        return processes

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        until = time.monotonic() + _END_SECONDS
        for process in processes:
            _end(process, until - time.monotonic())
        atexit.unregister(self.stop)

    def _drop(self, worker: subprocess.Popen[bytes], idle: queue.LifoQueue[subprocess.Popen[bytes] | None]) -> None:
        worker.kill()
        _end(worker, _END_SECONDS)
        with self._lock:
            if worker in self._processes:
                self._processes.remove(worker)
                if not self._processes:
                    self._count = 0
                    idle.put(None)

    def _mark(self) -> None:
        if self._marker is not None and self._folders:
            with contextlib.suppress(OSError), atomic_path(self._marker) as path:
                path.write_text(json.dumps(sorted(self._folders)))


def _reply(worker: subprocess.Popen[bytes], task: dict[str, Any]) -> Any:
    """Send a task and wait for its end; None: the worker failed, was killed or takes too long."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(task).encode() + b"\n")
        worker.stdin.flush()
        ready = select.poll()
        ready.register(worker.stdout, select.POLLIN)
        if not ready.poll(1000 * _SECONDS):
            return None
        reply = json.loads(worker.stdout.readline())
        return None if reply["error"] else reply
    except (OSError, ValueError):
        return None


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def is_used() -> bool:
    """Whether kernels are compiled ahead of their launches: not in Python 3.11, where two threads cannot parse kernels
    at the same time, and not by the interpreter."""
    return sys.version_info >= (3, 12) and os.environ.get("TRITON_INTERPRET") != "1"


def cache_folder() -> Path:
    """Return the folder of Triton's cache, without loading Triton."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _fingerprint(identity: str, triton: Path) -> str:
    """Return a hash of what decides which kernels a run compiles, and how; equal hashes are a hint, no more."""
    installed = triton.stat()
    digest = hashlib.sha256(f"{identity} {triton} {installed.st_mtime_ns} {sys.version}".encode())
    for path in sorted((Path(__file__).parent.parent / "kernels").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


workers = CompileWorkers()
"""The workers of this process."""
