"""Two machines of two ranks with a slow link, a slow node, or a link that fails during training."""

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
from helpers.machines import Machines, unavailable_reason
from helpers.ranks import run_ranks

from thermocline.config.dense_sync import DenseSync

NODES = ((0, 1), (2, 3))
PARAMETERS = 100_000
"""A merge of x and v sends 0.8 MB from each node to the other."""


@pytest.fixture(scope="module")
def two_machines() -> Iterator[Machines]:
    """Yield the machines of all tests. On exit namespaces, folders and running ranks must be removed."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    before = namespaces()
    with Machines(2) as machines:
        yield machines
        machines.connect(1)
        running = machines.start("helpers.dense:train_steps", 100, 10**9, DenseSync())
        running.await_steps(1)
        pids = [running.pid(rank) for rank in range(4)]
        assert len(namespaces()) == len(before) + 3
    assert namespaces() == before
    assert not running.folder.exists()
    assert_exited(*pids)


@pytest.fixture
def machines(two_machines: Machines) -> Machines:
    """Return the machines with both links up at 100 Mbit/s."""
    for node in range(2):
        two_machines.connect(node)
        two_machines.set_link(node, "100mbit")
    return two_machines


def namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if line.startswith(f"thermocline-{os.getpid()}-")]


def assert_exited(*pids: int) -> None:
    """Wait up to 20 s for killed processes to exit. Zombies count as exited."""
    deadline = time.monotonic() + 20
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                assert time.monotonic() < deadline, f"process {pid} still runs"
                time.sleep(0.05)


def test_a_slow_link_gives_the_same_bits(machines: Machines) -> None:
    settings = (DenseSync(exact=True), DenseSync(every=2, exact=True), DenseSync(every=3, merge="all", exact=True))
    cases = [Case(n, sync, batch_norm=True) for n, sync in enumerate(settings)]
    local = run_ranks(NODES, train, cases)
    for rank, end in enumerate(machines.run("helpers.dense:train", cases)):
        assert end.status == 0, end.output
        for case, actual, expected in zip(cases, end.result, local[rank], strict=True):
            assert_same(actual[0], expected[0], (rank, case))
            assert actual[1:] == expected[1:]


def test_counted_traffic_equals_the_bytes_on_the_link(machines: Machines) -> None:
    """Beside the payload a link carries headers, acknowledgements and the rendezvous."""
    for exact in (True, False):
        before = machines.bytes_sent()
        ends = machines.run("helpers.dense:average_traffic", 1_000_000, exact)
        crossed = [after - start for after, start in zip(machines.bytes_sent(), before, strict=True)]
        for node, ranks in enumerate(NODES):
            counted = sum(ends[rank].result[1] for rank in ranks)
            assert counted == 4_000_000
            assert counted <= crossed[node] < 1.1 * counted + 200_000


def test_a_slow_node_gives_the_same_bits(machines: Machines) -> None:
    """A tenth of the link rate on one node, and a rank that is stopped for a second."""
    sync = DenseSync(every=2, exact=True)
    fast = machines.run("helpers.dense:train_steps", PARAMETERS, 4, sync)
    machines.set_link(1, "10mbit")
    running = machines.start("helpers.dense:train_steps", PARAMETERS, 4, sync)
    running.await_steps(2)
    running.signal(3, signal.SIGSTOP)
    time.sleep(1)
    running.signal(3, signal.SIGCONT)
    slow = machines.wait(running, 60)
    assert [rank.status for rank in fast + slow] == 8 * [0], [rank.output for rank in fast + slow]
    assert len({str(rank.result) for rank in fast + slow}) == 1
    assert min(rank.seconds for rank in slow) > 1.5  # three merges of 0.8 MB at 1.25 MB/s take 1.9 s


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.faults), 3])
def test_a_disconnected_node_ends_every_rank_with_a_rank_error(machines: Machines, every: int) -> None:
    """Each rank waits 4 s for the others; a busy machine may need longer to end."""
    running = machines.start("helpers.dense:train_steps", PARAMETERS, 10_000, DenseSync(every=every), timeout=4)
    running.await_steps(3)
    machines.disconnect(1)
    at = time.monotonic() - running.started
    for rank, end in enumerate(machines.wait(running, at + 90)):
        assert end.status == 1
        assert "RankError" in end.output, end.output
        assert f"rank {rank} of 4 (node {rank // 2}) cannot continue" in end.output
        assert end.seconds - at < 60


@pytest.mark.faults
def test_namespaces_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    code = """
import os, signal
from helpers.machines import Machines
from thermocline.config.dense_sync import DenseSync
machines = Machines(1).__enter__()
running = machines.start("helpers.dense:train_steps", 100, 10**9, DenseSync(), per_node=1)
running.await_steps(1)
print(running.pid(0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}", "TMPDIR": str(tmp_path)}
    killed = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    pid = int(killed.communicate(timeout=60)[0])
    assert killed.returncode == -signal.SIGKILL
    with Machines(1):
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"thermocline-{killed.pid}-" not in listing
    assert_exited(pid)
