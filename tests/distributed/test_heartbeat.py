"""Heartbeats: local work may take longer than the timeout; stopped, killed and blocked ranks are still detected."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Nodes, run_failing_ranks, run_ranks

import thermocline as tc
from thermocline.checkpoint.table_stores import TableStores
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.communicator import Groups
from thermocline.distributed.heartbeat import Deadline, Heartbeat

TIMEOUT = 2.0
ONE_NODE: Nodes = ((0, 1),)
TWO_NODES: Nodes = ((0,), (1,))
"""Over shared memory and over Gloo."""


def wait_silently(heartbeat: Heartbeat, seconds: float) -> float:
    """Wait for a rank that never answers, at most `seconds`. Returns the seconds until the deadline passed."""
    start = time.monotonic()
    with heartbeat.waiting(start) as deadline:
        while time.monotonic() - start < seconds:
            try:
                deadline.check("rank 1")
            except RuntimeError:
                break
            time.sleep(0.02)
    return time.monotonic() - start


def test_a_busy_section_extends_deadlines_up_to_its_limit() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    busy, waiting = Heartbeat(store, 1.0, busy_timeout=3.0), Heartbeat(store, 1.0, busy_timeout=3.0)
    assert 0.9 < wait_silently(waiting, 10) < 2.5  # nobody is busy
    with busy.busy(), busy.busy():
        assert 3.0 < wait_silently(waiting, 30) < 7.0
    with busy.busy(), busy.waiting(time.monotonic()):  # a busy section that itself waits sends no heartbeat
        assert 0.9 < wait_silently(waiting, 10) < 2.5
    assert not busy._busy
    assert not busy._waiting
    for heartbeat in (busy, waiting):
        heartbeat.close()
    with pytest.raises(RuntimeError, match="closed on this rank"):
        Deadline(waiting, time.monotonic()).check("rank 1")


class LostStore:
    """A store whose host has exited."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection closed")


def test_a_lost_store_extends_nothing() -> None:
    heartbeat = Heartbeat(LostStore(), 0.5, busy_timeout=60.0)
    with heartbeat.busy():
        assert wait_silently(heartbeat, 10) < 3.0


def slow_commit(groups: Groups, folder: str) -> int:
    """Commit in more than twice the timeout on rank 1, while another thread of rank 0 waits in a collective, too."""
    with Groups.make(groups.topology, timeout=TIMEOUT) as short:
        rank, waited = short.topology.rank, []
        if rank == 1:
            commit = TableStores.commit

            def sleep_and_commit(self: TableStores, note: str) -> Any:
                time.sleep(2.5 * TIMEOUT)
                return commit(self, note)

            TableStores.commit = sleep_and_commit  # type: ignore[method-assign]

        def wait_ahead() -> None:
            waited.append(short.ahead.all_gather(np.array([rank]), "waiting ahead").tolist())

        table = tc.ShardedTable(4, tc.SGD(lr=0.1), groups=short, mem="4MB", ssd=Path(folder) / "store", threads=1)
        ahead = threading.Thread(target=wait_ahead)
        if rank == 0:
            ahead.start()
        checkpoints = tc.Checkpoints(Path(folder) / "run", [table])
        checkpoints.save(7)
        if rank == 1:
            ahead.start()
        ahead.join()
        assert waited == [[[0], [1]]]
        table.close()
        return checkpoints.saved()[-1].step


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["shared memory", "Gloo"])
def test_a_commit_that_is_slower_than_the_timeout(nodes: Nodes, tmp_path: Path) -> None:
    assert run_ranks(nodes, slow_commit, str(tmp_path)) == [7, 7]


def lose_rank_1(groups: Groups, how: str, file: str) -> None:
    """Rank 1 stops, is killed or blocks while rank 0 waits. Rank 0 writes its error and the seconds until it."""
    with Groups.make(groups.topology, timeout=TIMEOUT) as short:
        runner = CollectiveRunner(short.train)
        pids = short.train.all_gather(np.array([os.getpid()]), "testing")[:, 0].tolist()
        if short.topology.rank == 1:
            if how == "blocked":
                time.sleep(30)
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        start = time.monotonic()
        try:
            runner.barrier("testing")
        except tc.RankError as error:
            Path(file).write_text(json.dumps([time.monotonic() - start, str(error)]))
        finally:
            os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("how", ["stopped", "killed", "blocked"])
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["shared memory", "Gloo"])
def test_a_lost_rank_is_detected(nodes: Nodes, how: str, tmp_path: Path) -> None:
    """Silence outside of busy sections: after the timeout, and at once if the process exits."""
    file = tmp_path / "error"
    _, lost = run_failing_ranks(nodes, lose_rank_1, how, str(file), seconds=60)
    assert lost == ("killed", None)
    seconds, message = json.loads(file.read_text())
    assert seconds < (TIMEOUT if how == "killed" else 3 * TIMEOUT)
    assert "rank 0 of 2 (node 0) cannot continue" in message
    if how != "killed":
        assert seconds > 0.9 * TIMEOUT
        assert f"did not answer for {TIMEOUT:g} s" in message


def fail_and_exit(groups: Groups) -> None:
    """Rank 0 gives up a collective over Gloo; then its groups are destroyed with the operation unfinished."""
    short = Groups.make(groups.topology, timeout=0.5)
    if short.topology.rank == 0:
        with pytest.raises(tc.RankError, match=r"another rank did not answer for 0\.5 s"):
            short.train.all_to_all("world", torch.zeros(2, dtype=torch.uint8), [1, 1], [1, 1], "testing")
        start = time.monotonic()
        process_group = short.train.world
        short.close()
        del short, process_group
        assert time.monotonic() - start < 5
        with pytest.raises(AssertionError):
            groups.read.group("node")
    else:
        time.sleep(3)


def test_an_unfinished_operation_does_not_block_the_end() -> None:
    run_ranks(TWO_NODES, fail_and_exit, seconds=60)
