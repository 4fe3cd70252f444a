"""Ranks of one life of a job find each other in a store that may still hold what an earlier life wrote.

torchrun keeps its store when it restarts a job, so a rank could take the address of one that was killed for that of its
successor. Rank 0 therefore draws a token, and all that this life writes goes under it. A rank knows the token to be of
this life because rank 0 gives it together with a number that the rank has just drawn.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import torch.distributed as dist

from thermocline.errors import RankError

_PAUSE = 0.01


def meet(store: Any, rank: int, world: int, timeout: float) -> Any:
    """The store, as this life's ranks share it. All of them call it; whoever is not there in time is named."""
    token = _lead(store, world, timeout) if rank == 0 else _follow(store, rank, timeout)
    return dist.PrefixStore(f"thermocline/{token}", store)  # type: ignore[attr-defined]


def _lead(store: Any, world: int, timeout: float) -> str:
    token = secrets.token_hex(8)
    answered: dict[int, str] = {}
    missing = set(range(1, world))
    end = time.monotonic() + timeout
    while missing:
        for rank in sorted(missing):
            number = _read(store, f"thermocline/hello/{rank}")
            if number is not None and answered.get(rank) != number:  # perhaps an earlier life's: then another follows
                answered[rank] = number
                store.set(f"thermocline/welcome/{rank}", f"{number} {token}")
            if _read(store, f"thermocline/here/{rank}") == token:
                missing.discard(rank)
        if missing:
            if time.monotonic() > end:
                raise RankError(
                    f"ranks {sorted(missing)} of {world} have not joined within {timeout:g} s (dist.timeout): "
                    "were they started, and can they reach rank 0?"
                )
            time.sleep(_PAUSE)
    return token


def _follow(store: Any, rank: int, timeout: float) -> str:
    number = secrets.token_hex(8)
    store.set(f"thermocline/hello/{rank}", number)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        welcome = _read(store, f"thermocline/welcome/{rank}")
        if welcome is not None and welcome.startswith(number):
            token = welcome.partition(" ")[2]
            store.set(f"thermocline/here/{rank}", token)
            return token
        time.sleep(_PAUSE)
    raise RankError(f"rank 0 has not answered rank {rank} within {timeout:g} s (dist.timeout): was it started?")


def _read(store: Any, key: str) -> str | None:
    found: str | None = store.get(key).decode() if store.check([key]) else None
    return found
