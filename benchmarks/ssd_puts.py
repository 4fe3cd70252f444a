"""Claim `puts` of benchmarks/ssd.py: sustained puts against the disk's own write bandwidth.

Rounds alternate between a probe of the disk and puts of random existing rows, with a commit every `commit_every`
batches. The clock of a round stops when merging has stopped, so that no merging is free. The probe writes 1 MiB blocks
of new files on eight threads, then reads a block before each write on sixteen, without the page cache. Merging reads as
many bytes as it writes: the second figure is its floor.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, noise, progress_bar, spread
from engines import Ours, folder_bytes

_BLOCK = 1 << 20
_PROBE_THREADS = 8
_PROBE_SECONDS = 1.0
_IDLE_SECONDS = 0.1
"""Merging has stopped if nothing was written for this long."""


def _in_threads(work: Callable[[int, float], int], count: int) -> float:
    """Run work(thread, end time) on threads, and return the sum of the bytes they return per second."""
    total = [0] * count
    start = time.perf_counter()

    def run(i: int) -> None:
        total[i] = work(i, start + _PROBE_SECONDS)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(total) / (time.perf_counter() - start)


def probe_disk(folder: Path) -> dict[str, float]:
    """Bytes per second of writes alone, and of writes by threads that read as many bytes, as merging does."""
    files = [folder / f"probe-{i}" for i in range(2 * _PROBE_THREADS)]

    def write(path: Path, end: float, source: Path | None) -> int:
        """Write blocks until `end`; with a source, read one before each. Return the bytes written."""
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
        read_fd = -1 if source is None else os.open(source, os.O_RDONLY | os.O_DIRECT)
        size = 0 if source is None else os.fstat(read_fd).st_size
        with mmap.mmap(-1, _BLOCK) as block:
            block.write(os.urandom(_BLOCK))
            done = 0
            while time.perf_counter() < end:
                if size:
                    os.preadv(read_fd, [block], done % size)
                done += os.pwrite(fd, block, done)
        os.fdatasync(fd)
        for one in (fd, read_fd):
            if one >= 0:
                os.close(one)
        return done

    try:
        alone = _in_threads(lambda i, end: write(files[i], end, None), _PROBE_THREADS)
        reading = [*range(_PROBE_THREADS)] * 2  # twice the threads: each has a read or a write in flight
        beside = _in_threads(
            lambda i, end: write(folder / f"probe-copy-{i}", end, files[reading[i]]), 2 * _PROBE_THREADS
        )
    finally:
        for path in folder.glob("probe-*"):
            path.unlink()
    return {"write": alone, "write_beside_reads": beside}


class _PeakDisk:
    """The largest number of bytes of the store's files, sampled on a thread."""

    def __init__(self, engine: Ours) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.bytes = 0
        self.running = 0

    def __enter__(self) -> _PeakDisk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            stats = self._engine.store.stats()
            self.bytes = max(self.bytes, stats.disk_bytes)
            self.running = max(self.running, stats.merges_running)


def _wait_until_merging_stops(engine: Ours) -> float:
    """Return the time of the last write."""
    written, last = -1, time.perf_counter()
    while time.perf_counter() - last < _IDLE_SECONDS:
        now = engine.store.stats().bytes_written
        if now != written:
            written, last = now, time.perf_counter()
        time.sleep(0.005)
    return last


def run_puts(engine: Ours, *, batch: int, batches: int, rounds: int, commit_every: int) -> dict[str, Any]:
    """Put until the log has its usual length, then measure `rounds` rounds of `batches` batches."""
    rng = np.random.default_rng(44)
    data = engine.data

    def prepared() -> list[Any]:
        return [engine.as_rows(data.sample(rng, batch), 1) for _ in range(batches)]

    def put_all(rows: list[Any]) -> None:
        for i, one in enumerate(rows):
            engine.put(one)
            if (i + 1) % commit_every == 0:
                engine.commit()

    records = []
    with noise() as around, progress_bar(f"puts of {batch:,} rows", rounds + 1) as progress, _PeakDisk(engine) as peak:
        while engine.store.stats().merges < engine.store.stats().partitions:  # every partition was merged: steady
            put_all(prepared())
        progress(1)
        peak.bytes = 0
        for i in range(rounds):
            _wait_until_merging_stops(engine)
            disk = probe_disk(engine.path.parent)
            rows, before, cpu = prepared(), engine.store.stats(), time.process_time()
            start = time.perf_counter()
            put_all(rows)
            seconds = _wait_until_merging_stops(engine) - start
            after = engine.store.stats()
            put_bytes = after.bytes_put - before.bytes_put
            written = after.bytes_written - before.bytes_written
            records.append({
                "seconds": seconds,
                "rows_per_second": batch * batches / seconds,
                "write_amplification": written / put_bytes,
                "share": written / seconds / disk["write"],
                "share_beside_reads": written / seconds / disk["write_beside_reads"],
                "stall_s": after.stall_seconds - before.stall_seconds,
                "merge_bytes_per_thread_second": (after.merge_bytes_written - before.merge_bytes_written)
                / (after.merge_seconds - before.merge_seconds),
                "processor_s": time.process_time() - cpu,
                "mem_total": after.mem_total,
                **{f"disk_{name}": value for name, value in disk.items()},
            })  # fmt: skip
            progress(2 + i)
    live = data.rows * (8 + data.row_bytes)
    return {
        **{name: spread([r[name] for r in records]) for name in records[0]},
        "write_amplification_max": max(r["write_amplification"] for r in records),
        "space_amplification": max(peak.bytes, folder_bytes(engine.path)) / live,
        "merges_running_max": peak.running,
        "merge_threads": engine.store.stats().merge_threads,
        "batches": batches,
        "records": records,
        **around,
    }


def puts_claims(puts: dict[str, Any]) -> list[Claim]:
    rate, disk = puts["rows_per_second"]["median"], puts["disk_write"]["median"]
    beside = puts["disk_write_beside_reads"]["median"]
    detail = f"{rate:,.0f} rows/s, {puts['merge_threads']} merge threads; the disk writes {disk / 1e9:.2f} GB/s"
    busy = puts["others_cpu"]
    return [
        Claim(
            "sustained puts, share of the disk's writes", puts["share"]["median"], 0.7, detail=detail, others_cpu=busy
        ),
        Claim(
            "sustained puts, share of its writes beside as many reads",
            puts["share_beside_reads"]["median"],
            0.7,
            detail=f"the disk writes {beside / 1e9:.2f} GB/s so",
            others_cpu=busy,
        ),
        Claim("write amplification of puts", puts["write_amplification"]["median"], 6.5, at_most=True),
        Claim("space amplification of puts", puts["space_amplification"], 1.6, at_most=True),
    ]
