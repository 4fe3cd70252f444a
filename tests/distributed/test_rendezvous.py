"""Rendezvous of one restart attempt with keys of earlier attempts in the store."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import thermocline as tc
from thermocline.distributed.group_setup import open_store
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


def test_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1]), "RANK": "1"}
        for name, value in (settings | {"WORLD_SIZE": "2"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            tc.RankError, match="rank 1 of 2 has no connection to the store of the job: check that rank 0"
        ):
            open_store(1, 2, 0.5)


def test_rank_0_ends_during_the_rendezvous() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    del server
    with pytest.raises(tc.RankError):  # the first call may be sent, and is not answered
        decide_json(client, "job", 1, 2, {}, lambda values: values, 5.0)
    with pytest.raises(tc.RankError, match="rank 1 of 2 has no connection to the store of the job"):
        decide_json(client, "job", 1, 2, {}, lambda values: values, 5.0)


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    run_attempt(store, 3, 0)
    with pytest.raises(tc.RankError, match=r"ranks \[1, 2\] of 3 did not join within 0.2 s"):
        scoped_store(store, 0, 3, 0.2)
    with pytest.raises(tc.RankError, match=r"rank 0 did not answer rank 1 within 0\.2 s"):
        scoped_store(store, 1, 3, 0.2)
