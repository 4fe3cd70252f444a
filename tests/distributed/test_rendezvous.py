"""Rendezvous of one restart attempt with keys of earlier attempts in the store."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.group_setup import _allow_store_connections, open_store
from thermocline.distributed.rendezvous import decide_json, scoped_store


def run_attempt(store: Any, world: int, seed: int, timeout: float = 20.0) -> list[Any]:
    """Join all ranks, as threads with random delays. Returns the values that each rank read, or its error."""
    rng = random.Random(seed)
    results: list[Any] = [None] * world
    delays = [rng.choice([0.0, 0.0, 0.05]) for _ in range(world)]

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            shared = scoped_store(store, rank, world, timeout)
            shared.set(f"from {rank}", str(seed))
            results[rank] = [shared.get(f"from {other}").decode() for other in range(world)]
        except tc.RankError as error:
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_repeated_attempts_on_one_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for seed in range(12):
        assert run_attempt(store, 4, seed) == [[str(seed)] * 4] * 4


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    run_attempt(store, 3, 0)
    with pytest.raises(tc.RankError, match=r"ranks \[1, 2\] of 3 did not join within 0.2 s"):
        scoped_store(store, 0, 3, 0.2)
    with pytest.raises(tc.RankError, match=r"rank 0 did not answer rank 1 within 0\.2 s"):
        scoped_store(store, 1, 3, 0.2)


@pytest.mark.usefixtures("no_process_group")
def test_a_store_whose_process_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was killed before this rank connected."""
    with socket.socket() as unused:  # open until the end: no other test gets the port, and nobody listens there
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(tc.RankError, match="rank 1 cannot reach the rendezvous store"):
            open_store(1, 2, timeout=1.0)


def test_a_store_whose_process_exits_while_ranks_join() -> None:
    class Lost:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(tc.RankError, match="Connection reset by peer"):
        decide_json(Lost(), "job", 1, 2, {}, lambda values: values, 1.0)


# ---- open files of the process that hosts the store


@contextlib.contextmanager
def torchrun_with_limits(soft: int, hard: int) -> Iterator[int]:
    """Let another process stand for torchrun, this process's parent, with these limits. Yields its number."""
    with subprocess.Popen(["sleep", "60"]) as process, pytest.MonkeyPatch.context() as patch:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setattr(os, "getppid", lambda: process.pid)
        try:
            yield process.pid
        finally:
            process.kill()


def test_rank_0_raises_the_limit_of_torchrun() -> None:
    """Two connections of each of 512 ranks need more than the usual soft limit; a hard limit stays."""
    with torchrun_with_limits(1024, 4096) as process:
        assert _allow_store_connections(100) is None
        assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (1024, 4096)
        assert _allow_store_connections(512) is None
        soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        assert 2 * 512 + 64 <= soft < 1200
        assert hard == 4096
        assert _allow_store_connections(2048) is None  # connections that are open may be counted twice
        assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (4096, 4096)
        problem = _allow_store_connections(2049)
        assert problem is not None
        assert re.fullmatch(
            rf"torchrun \(process {process}\) hosts .* up to (4\d\d\d) open files for 2049 ranks, its limit is 4096: "
            r"raise .* \(ulimit -n \1\) before it starts",
            problem,
        )
    with torchrun_with_limits(64, 64), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getppid", lambda: 1 << 30)  # in another container
        assert _allow_store_connections(512) is None


def join_with_few_files(groups: Groups) -> str:
    with torchrun_with_limits(3, 3), pytest.raises(tc.ConfigError) as error:
        open_store(groups.topology.rank, groups.topology.world, 20.0)
    return str(error.value)


def test_a_store_with_too_few_files_is_refused_on_every_rank() -> None:
    first, second = run_ranks(((0,), (1,)), join_with_few_files)
    assert first == second
    assert "hosts the rendezvous store" in first
    assert "for 2 ranks, its limit is 3" in first
