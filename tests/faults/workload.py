"""A deterministic workload of an `SsdStore`: step i depends only on (seed, i), so that it can be replayed.

A process of the workload opens the store, reads the last step from its note and continues from there. It prints when a
commit begins and when it has returned. The tests kill it and compare the store with `State`. As a program this module
forks such a process for each line of its input: a fork starts in milliseconds, an interpreter in a tenth of a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from typing import Any

import numpy as np
import numpy.typing as npt

import thermocline as tc

ROW_BYTES = 64
KEYS = 24_000
KEEP_EPOCHS = 3
SECONDS = 120  # after which a process of the workload is ended by SIGALRM
# Small files, so that merges, splits and releases are frequent.
OPTIONS: dict[str, Any] = {
    "mem_budget": "16MB",
    "segment_bytes": 256 << 10,
    "partition_bytes": 128 << 10,
    "min_log_bytes": 64 << 10,
    "write_buffer": 64 << 10,
}

Versions = npt.NDArray[np.uint64]


def key_of(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map numbers to keys spread over all 64 bits."""
    keys: npt.NDArray[np.uint64] = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345)
    return keys


ALL_KEYS = key_of(np.arange(KEYS, dtype=np.uint64))


def rows_of(keys: npt.NDArray[np.uint64], versions: Versions) -> npt.NDArray[np.uint8]:
    """Return the row of each key at its version: every word depends on key, version and position."""
    words = np.arange(1, ROW_BYTES // 8 + 1, dtype=np.uint64)[None, :]
    x = (keys[:, None] ^ (versions[:, None] * np.uint64(0xD6E8FEB86659FD93))) * (words * np.uint64(2) + np.uint64(1))
    x ^= x >> np.uint64(29)
    return np.ascontiguousarray(x * np.uint64(0xBF58476D1CE4E5B9)).view(np.uint8).reshape(len(keys), ROW_BYTES)


@dataclasses.dataclass
class Step:
    """Puts and deletes of one step, as key numbers."""

    puts: list[npt.NDArray[np.int64]]
    deletes: npt.NDArray[np.int64]


def step_of(seed: int, i: int) -> Step:
    rng = np.random.default_rng([seed, i])
    puts = [rng.integers(0, KEYS, int(rng.integers(1, 3000))) for _ in range(int(rng.integers(1, 5)))]
    return Step(puts, rng.integers(0, KEYS, int(rng.integers(0, 100))))


class State:
    """Expected contents after step `done`: per key its version, the step that put it; 0 means no row."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.done = 0
        self.versions: Versions = np.zeros(KEYS, dtype=np.uint64)

    def advance(self, to: int) -> None:
        assert to >= self.done, f"LOST COMMIT: step {to} after step {self.done} was committed"
        while self.done < to:
            self.done += 1
            step = step_of(self.seed, self.done)
            for numbers in step.puts:
                self.versions[numbers] = self.done
            self.versions[step.deletes] = 0

    def check(self, store: tc.SsdStore) -> None:
        """Assert that every key is present or absent as expected, with the expected row."""
        found, rows = store.get(ALL_KEYS)
        live = self.versions != 0
        assert np.array_equal(found, live), f"step {self.done}: {(found != live).sum()} keys wrongly present or absent"
        wrong = (rows[live] != rows_of(ALL_KEYS, self.versions)[live]).any(axis=1)
        assert not wrong.any(), f"step {self.done}: WRONG ROWS: {wrong.sum()}"


def step_of_note(store: tc.SsdStore) -> int:
    return int(store.note) if store.note else 0


def apply_step(store: tc.SsdStore, seed: int, i: int) -> None:
    step = step_of(seed, i)
    write = store.load if i == 1 else store.put  # the first batch of all goes to base files directly
    for numbers in step.puts:
        keys = ALL_KEYS[numbers]
        write(keys, rows_of(keys, np.full(len(keys), i, dtype=np.uint64)))
    store.delete(ALL_KEYS[step.deletes])


def report(text: str) -> None:
    """Write a line to the output at once: a kill leaves the whole line or nothing."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def run(path: str, seed: int, steps: int, background_merge: bool) -> None:
    """Run `steps` more steps; print "begin i" and "end i" around each commit."""
    # Without the background thread merges are rare and large, so that merges of several chunks occur too.
    options = OPTIONS if background_merge else {**OPTIONS, "min_log_bytes": 2 << 20}
    with tc.SsdStore.open(path, row_bytes=ROW_BYTES, background_merge=background_merge, **options) as store:
        first = step_of_note(store) + 1
        report("ready")
        for i in range(first, first + steps):
            apply_step(store, seed, i)
            if i % 7 == 0:
                store.merge()
            report(f"begin {i}")
            store.commit(str(i).encode())
            report(f"end {i}")
            for epoch in store.epochs[:-KEEP_EPOCHS]:
                store.release(epoch)
            if i % 11 == 0:
                store.link_checkpoint(f"{path}-checkpoint-{i}-{first}")


def run_in_fork(path: str, seed: int, steps: int, background_merge: bool, kill_at: str) -> int:
    """Run the workload in a new process; return its exit code, which is negative if a signal ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(SECONDS)
        os.environ["THERMOCLINE_KILL_AT"] = kill_at
        report(f"pid {os.getpid()}")
        run(path, seed, steps, background_merge)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """For each line [path, seed, steps, background_merge, kill_at], run the workload and print "exit" and its code."""
    step_of(0, 1)  # import before the forks what the workload needs
    assert tc.SsdStore
    for line in sys.stdin:
        report(f"exit {run_in_fork(*json.loads(line))}")


if __name__ == "__main__":
    main()
