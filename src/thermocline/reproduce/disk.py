"""How fast this disk answers random reads of a page, past the page cache: what no reader of it can beat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from thermocline.cores import cores
from thermocline.errors import ThermoclineError

SECONDS, THREADS = 2.0, 16
"""Of reading; reads in flight of each process."""


def reads_per_second(folder: Path) -> float:
    """Of the files in a folder that are larger than 1 MB. By processes, which do not wait for one another."""
    workers = min(12, cores())
    probe = [sys.executable, "-c", _PROBE, str(folder), str(SECONDS), str(THREADS)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen([*probe, str(n)], stdin=pipe, stdout=pipe, text=True) for n in range(workers)]
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise ThermoclineError(f"{folder}: its files cannot be read past the page cache")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        counts = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return sum(float(count) for count in counts) / SECONDS


def write_file(path: Path, size: int) -> None:
    """Bytes that no disk can guess, on disk when this returns."""
    block = os.urandom(1 << 22)
    with path.open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


_PROBE = """
import mmap, os, random, sys, threading, time
from pathlib import Path
folder, seconds, threads, number = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
files = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
handles = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // 4096) for path in files]
counts = [0] * threads

def read(worker):
    page, draw = mmap.mmap(-1, 4096), random.Random(f"{number}/{worker}")
    while time.monotonic() < end:
        handle, pages = handles[draw.randrange(len(handles))]
        os.preadv(handle, [page], 4096 * draw.randrange(pages))
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
