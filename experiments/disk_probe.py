"""Random read rate of the disk, measured without the page cache: an upper bound for the SSD tier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from thermocline.errors import ThermoclineError
from thermocline.utils.cpu_affinity import cores

SECONDS, THREADS = 2.0, 16
"""Length of the measurement; concurrent reads of each process."""
PAGE, LARGE = 4096, 1 << 18
"""Bytes of a read, for the rate in reads and for the rate in bytes."""


def reads_per_second(folder: Path, size: int = PAGE, *, seconds: float = SECONDS) -> float:
    """Read at random positions of the files above 1 MB in a folder, by several processes; return reads/s.

    size   bytes of a read, at most 1 MiB
    """
    workers = min(12, cores())
    probe = [sys.executable, "-c", _PROBE, str(folder), str(seconds), str(THREADS), str(size)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen([*probe, str(n)], stdin=pipe, stdout=pipe, text=True) for n in range(workers)]
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise ThermoclineError(f"{folder}: cannot read its files with O_DIRECT")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        counts = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return sum(float(count) for count in counts) / seconds


def write_file(path: Path, size: int) -> None:
    """Write random bytes, which no disk can compress, and flush them to the disk."""
    block = os.urandom(1 << 22)
    with path.open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


_PROBE = """
import mmap, os, random, sys, threading, time
from pathlib import Path
folder, number = sys.argv[1], sys.argv[5]
seconds, threads, size = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
files = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
handles = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // size) for path in files]
counts = [0] * threads

def read(worker):
    page, draw = mmap.mmap(-1, size), random.Random(f"{number}/{worker}")
    while time.monotonic() < end:
        handle, pages = handles[draw.randrange(len(handles))]
        os.preadv(handle, [page], size * draw.randrange(pages))
        counts[worker] += 1

workers = [threading.Thread(target=read, args=(n,)) for n in range(threads)]
assert handles
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + seconds
for worker in workers: worker.start()
for worker in workers: worker.join()
print(sum(counts))
"""
