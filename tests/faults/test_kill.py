"""SIGKILL of a process that uses a store: at random times, and at every failpoint of commit, merge, release, link,
repair, and the copy of a damaged partition's log.

The page cache survives a kill, so these tests do not cover power loss: csrc/ssd/crash_fault_test.cc does. They cover
the real process with its threads and files.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import workload
from faults.failpoints import failpoints
from helpers.ssd import ROW, SMALL, contents, rows_of, some_keys

import thermocline as tc
from thermocline.cli.repair import repair

pytestmark = pytest.mark.faults

LONG = os.environ.get("THERMOCLINE_LONG") == "1"
SHARDS = 8  # of the random kills, for pytest-xdist
KILLS = 10_000 if LONG else 200
TIMES_PER_POINT = 100 if LONG else 5


class Workloads:
    """Processes of the workload, one at a time, forked by a subprocess."""

    def __init__(self) -> None:
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1")  # a process with threads should not fork
        args = [sys.executable, workload.__file__]
        self.server = subprocess.Popen(args, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, path: Path, seed: int, steps: int, *, background: bool, kill_at: str = "") -> None:
        assert self.server.stdin is not None
        self.lines: list[str] = []
        self.server.stdin.write(json.dumps([str(path), seed, steps, background, kill_at]) + "\n")
        self.server.stdin.flush()
        self.pid = int(self.read_until("pid"))

    def read_until(self, word: str) -> str:
        """Return what follows `word` in the first line that begins with it; the last line is that of the exit code."""
        assert self.server.stdout is not None
        while line := self.server.stdout.readline():
            self.lines.append(line)
            first, _, rest = line.strip().partition(" ")
            assert first in (word, "exit") or word == "exit", f"{line!r} before {word}"
            if first == word:
                return rest
            assert first != "exit", f"the workload ended before {word}: {self.lines}"
        raise AssertionError(f"the server ended: {self.lines}")

    def wait_ready(self) -> None:
        self.read_until("ready")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[int, int, int]:
        """Return (exit code, last commit begun, last commit returned); 0 if there was none."""
        code = int(self.read_until("exit"))
        output = "".join(self.lines)
        begun = [int(n) for n in re.findall(r"begin (\d+)", output)]
        ended = [int(n) for n in re.findall(r"end (\d+)", output)]
        return code, max(begun, default=0), max(ended, default=0)


@pytest.fixture(scope="module")
def workloads() -> Iterator[Workloads]:
    started = Workloads()
    with started.server:
        yield started
        assert started.server.stdin is not None
        started.server.stdin.close()


def check_store(path: Path, state: workload.State, begun: int, ended: int, *, thorough: bool) -> None:
    """Assert that the store is at the last commit that returned, or at one that began, with the right rows."""
    if not path.exists():
        assert ended == 0
        return
    with tc.SsdStore.open(path, row_bytes=workload.ROW_BYTES, **workload.OPTIONS) as store:
        step = workload.step_of_note(store)
        before = state.done
        assert max(before, ended) <= step <= max(before, begun), f"step {step}, returned {ended}, begun {begun}"
        state.advance(step)
        state.check(store)
        if thorough:
            store.check()
            assert len(store) == int((state.versions != 0).sum())
        epochs = store.epochs
    if thorough:
        past = workload.State(state.seed)
        for epoch in sorted(epochs):
            with tc.SsdStore.open(path, epoch=epoch, read_only=True) as old:
                past.advance(workload.step_of_note(old))
                past.check(old)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_kill_at_random_times(tmp_path: Path, workloads: Workloads, shard: int) -> None:
    rng = random.Random(shard)
    state = workload.State(seed=shard)
    path = tmp_path / "store"
    killed = 0
    while killed < KILLS // SHARDS:
        workloads.start(path, shard, 10_000, background=bool(killed % 2))
        opened = bool(killed % 10)  # every tenth is killed before or while opening
        if opened:
            workloads.wait_ready()
        time.sleep(rng.random() ** 2 * (0.3 if opened else 0.03))
        workloads.kill()
        code, begun, ended = workloads.finish()
        assert code == -signal.SIGKILL, "the workload ended before it was killed"
        killed += 1
        check_store(path, state, begun, ended, thorough=killed % 5 == 0)
        if state.done > 400:  # replaying old epochs from step 1 becomes slow
            shutil.rmtree(path)
            state = workload.State(seed=shard)
        for checkpoint in tmp_path.glob("store-checkpoint-*"):
            shutil.rmtree(checkpoint)
    assert killed >= KILLS // SHARDS


@pytest.mark.parametrize("point", [point for point in failpoints() if not point.startswith(("repair.", "copy."))])
def test_kill_at_failpoint(tmp_path: Path, workloads: Workloads, point: str) -> None:
    for nth in range(1, TIMES_PER_POINT + 1):
        path = tmp_path / f"store-{nth}"
        state = workload.State(seed=nth)
        # Inline merging first: with the background thread a short run does not reach some failpoints.
        workloads.start(path, nth, 24, background=nth % 2 == 0, kill_at=f"{point}:{nth}")
        code, begun, ended = workloads.finish()
        assert code in (0, -signal.SIGKILL), f"the workload failed at {point}:{nth}"
        if nth == 1:
            assert code == -signal.SIGKILL, f"{point} was not reached: does it still exist?"
        check_store(path, state, begun, ended, thorough=True)
        # A new process continues.
        workloads.start(path, nth, 3, background=True)
        code, begun, ended = workloads.finish()
        assert code == 0
        check_store(path, state, begun, ended, thorough=True)
        for left in tmp_path.iterdir():
            shutil.rmtree(left)


def test_there_are_enough_failpoints() -> None:
    assert len(failpoints()) >= 20


def damage_pages(folder: Path) -> None:
    """Flip a bit of a fence page, of a row page of another base file, and of the last row page of the log."""
    first, second, *_ = sorted(folder.glob("base-*.tc"))
    (log,) = folder.glob("log-*.tc")
    for file, kind in ((first, 5), (second, 2), (log, 2)):
        data = bytearray(file.read_bytes())
        page = max(page for page in range(0, len(data), 4096) if data[page + 10] == kind)
        data[page + 100] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("point", [point for point in failpoints() if point.startswith("repair.")])
def test_kill_during_repair(tmp_path: Path, point: str) -> None:
    """Another repair continues, and its result is that of a repair that was never killed."""
    folder, keys = tmp_path / "store", some_keys(3000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.merge()
        store.put(keys[:300], rows_of(keys[:300], 1))
        store.commit(b"damaged")
        before = contents(store)
    damage_pages(folder)
    shutil.copytree(folder, tmp_path / "copy")
    command = [sys.executable, "-m", "thermocline", "repair", str(folder)]
    killed = subprocess.run(command, env=dict(os.environ, THERMOCLINE_KILL_AT=f"{point}:1"), timeout=120)
    assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: does it still exist?"
    left = []
    for path in (folder, tmp_path / "copy"):
        assert repair(path)["problems"] == []
        with tc.SsdStore.open(path, **SMALL) as store:
            store.check()
            assert store.note == b"damaged"
            left.append(contents(store))
    assert left[0] == left[1]
    assert left[0].items() <= before.items()
    assert 0 < len(before) - len(left[0]) < 300


COPY_FORWARD = """
import sys, warnings
import thermocline as tc
from helpers.ssd import SMALL, rows_of, some_keys

warnings.simplefilter("ignore")  # of the damage
keys = some_keys(4000)
with tc.SsdStore.open(sys.argv[1], background_merge=False, **SMALL) as store:
    for version in range(1, 100):
        store.put(keys, rows_of(keys, version))
        print(store.commit(str(version).encode()) and version, flush=True)
"""


@pytest.mark.parametrize("nth", [2, 3, 6])  # the first copy is before the first commit
@pytest.mark.parametrize("point", [point for point in failpoints() if point.startswith("copy.")])
def test_kill_while_the_log_of_a_damaged_partition_is_copied(tmp_path: Path, point: str, nth: int) -> None:
    folder, keys = tmp_path / "store", some_keys(4000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.merge()
        store.commit()
    base = sorted(folder.glob("base-*.tc"))[0]
    data = bytearray(base.read_bytes())
    data[4096 + 100] ^= 1
    base.write_bytes(data)
    env = dict(os.environ, THERMOCLINE_KILL_AT=f"{point}:{nth}", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", COPY_FORWARD, str(folder)]
    killed = subprocess.run(command, env=env, timeout=120, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL, f"{point}:{nth} was not reached"
    with tc.SsdStore.open(folder, read_only=True) as store:
        version = int(store.note)
        assert version == int(killed.stdout.split()[-1])
        found, rows = store.get(keys)
        assert found.all()
        assert np.array_equal(rows, rows_of(keys, version))
    report = repair(folder)
    assert report["problems"] == []
    with tc.SsdStore.open(folder, read_only=True) as store:
        assert np.array_equal(store.get(keys)[1], rows_of(keys, version))
