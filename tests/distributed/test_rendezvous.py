"""Ranks of one life find each other, whatever earlier lives have left in the store."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import thermocline as tc
from thermocline.distributed.rendezvous import meet


def one_life(store: Any, world: int, seed: int, timeout: float = 20.0) -> list[Any]:
    """All ranks as threads, each a random moment late; what each found, or raised."""
    rng = random.Random(seed)
    found: list[Any] = [None] * world
    late = [rng.choice([0.0, 0.0, 0.05]) for _ in range(world)]

    def rank_of(rank: int) -> None:
        time.sleep(late[rank])
        try:
            shared = meet(store, rank, world, timeout)
            shared.set(f"from {rank}", str(seed))
            found[rank] = [shared.get(f"from {other}").decode() for other in range(world)]
        except tc.RankError as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_many_lives() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for seed in range(12):
        assert one_life(store, 4, seed) == [[str(seed)] * 4] * 4


def test_a_rank_that_is_not_there() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    one_life(store, 3, 0)
    with pytest.raises(tc.RankError, match=r"ranks \[1, 2\] of 3 have not joined within 0.2 s"):
        meet(store, 0, 3, 0.2)
    with pytest.raises(tc.RankError, match=r"rank 0 has not answered rank 1 within 0\.2 s"):
        meet(store, 1, 3, 0.2)
