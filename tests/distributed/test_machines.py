"""Two machines of two ranks, joined by a link that is slow, or slower on one side, or cut in the middle of a step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.dense import Case, assert_same, train
from helpers.machines import Machines, problem
from helpers.ranks import play

from thermocline.config.dense_sync import DenseSync

NODES = ((0, 1), (2, 3))
NUMBERS = 100_000
"""Parameters. A merge of x and v sends 0.8 MB from each node to the other."""


@pytest.fixture(scope="module")
def joined() -> Iterator[Machines]:
    """Two machines for all tests. When they go, nothing of them stays, whatever still runs."""
    if reason := problem():
        pytest.skip(reason)
    before = namespaces()
    with Machines(2) as machines:
        yield machines
        machines.mend(1)
        running = machines.start("helpers.dense:on_and_on", 100, 10**9, DenseSync())
        running.await_steps(1)
        pids = [int((running.folder / f"pid-{rank}").read_text()) for rank in range(4)]
        assert len(namespaces()) == len(before) + 3
    assert namespaces() == before
    assert not running.folder.exists()
    assert_gone(*pids)


@pytest.fixture
def machines(joined: Machines) -> Machines:
    """Two, as they were when new."""
    for node in range(2):
        joined.mend(node)
        joined.shape(node, "100mbit")
    return joined


def namespaces() -> list[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.startswith(f"thermocline-{os.getpid()}-")]


def assert_gone(*pids: int) -> None:
    """Killed processes take a moment to go. A status that nobody has asked for is no process."""
    end = time.monotonic() + 20
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                assert time.monotonic() < end, f"process {pid} runs on"
                time.sleep(0.05)


def test_a_slow_link_changes_no_bit(machines: Machines) -> None:
    ways = (DenseSync(exact=True), DenseSync(every=2, exact=True), DenseSync(every=3, merge="all", exact=True))
    cases = [Case(n, sync, norm=True) for n, sync in enumerate(ways)]
    near = play(NODES, train, cases)
    for rank, ended in enumerate(machines.run("helpers.dense:train", cases)):
        assert ended.status == 0, ended.output
        for case, got, expected in zip(cases, ended.result, near[rank], strict=True):
            assert_same(got[0], expected[0], (rank, case))
            assert got[1:] == expected[1:]


def test_what_is_counted_is_what_crosses(machines: Machines) -> None:
    """Beside payload a link carries headers, acknowledgements and the ranks' meeting."""
    for exact in (True, False):
        before = machines.sent()
        ended = machines.run("helpers.dense:sent_for", 1_000_000, exact)
        crossed = [after - was for after, was in zip(machines.sent(), before, strict=True)]
        for node, ranks in enumerate(NODES):
            counted = sum(ended[rank].result[1] for rank in ranks)
            assert counted == 4_000_000
            assert counted <= crossed[node] < 1.1 * counted + 200_000


def test_a_slow_node_only_slows(machines: Machines) -> None:
    """A tenth of the rate on one side, and a rank that is stopped for a while."""
    sync = DenseSync(every=2, exact=True)
    straight = machines.run("helpers.dense:on_and_on", NUMBERS, 4, sync)
    machines.shape(1, "10mbit")
    running = machines.start("helpers.dense:on_and_on", NUMBERS, 4, sync)
    running.await_steps(2)
    running.signal(3, signal.SIGSTOP)
    time.sleep(1)
    running.signal(3, signal.SIGCONT)
    slow = machines.wait(running, 60)
    assert [rank.status for rank in straight + slow] == 8 * [0], [rank.output for rank in straight + slow]
    assert len({str(rank.result) for rank in straight + slow}) == 1
    assert min(rank.seconds for rank in slow) > 1.5  # three merges of 0.8 MB at 1.25 MB/s take 1.9 s


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.faults), 3])
def test_a_node_cut_off_ends_every_rank_with_a_clear_error(machines: Machines, every: int) -> None:
    """Each waits 4 s for the others; a busy machine may need more to end."""
    running = machines.start("helpers.dense:on_and_on", NUMBERS, 10_000, DenseSync(every=every), timeout=4)
    running.await_steps(3)
    machines.cut(1)
    at = time.monotonic() - running.since
    for rank, ended in enumerate(machines.wait(running, at + 90)):
        assert ended.status == 1
        assert "RankError" in ended.output, ended.output
        assert f"rank {rank} of 4 (node {rank // 2}) cannot go on" in ended.output
        assert ended.seconds - at < 60


@pytest.mark.faults
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    if reason := problem():
        pytest.skip(reason)
    code = """
import os, signal
from helpers.machines import Machines
from thermocline.config.dense_sync import DenseSync
machines = Machines(1).__enter__()
running = machines.start("helpers.dense:on_and_on", 100, 10**9, DenseSync(), per_node=1)
running.await_steps(1)
print((running.folder / "pid-0").read_text())
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}", "TMPDIR": str(tmp_path)}
    killed = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    pid = int(killed.communicate(timeout=60)[0])
    assert killed.returncode == -signal.SIGKILL
    with Machines(1):
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"thermocline-{killed.pid}-" not in found
    assert_gone(pid)
