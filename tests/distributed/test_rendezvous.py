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


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    run_attempt(store, 3, 0)
    with pytest.raises(tc.RankError, match=r"ranks \[1, 2\] of 3 did not join within 0.2 s"):
        scoped_store(store, 0, 3, 0.2)
    with pytest.raises(tc.RankError, match=r"rank 0 did not answer rank 1 within 0\.2 s"):
        scoped_store(store, 1, 3, 0.2)


def test_a_store_whose_process_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was killed before this rank connected."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tc.RankError, match="rank 1 cannot reach the rendezvous store"):
        open_store(1, 2, timeout=1.0)


def test_a_store_whose_process_exits_while_ranks_join() -> None:
    class Lost:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(tc.RankError, match="Connection reset by peer"):
        decide_json(Lost(), "job", 1, 2, {}, lambda values: values, 1.0)
