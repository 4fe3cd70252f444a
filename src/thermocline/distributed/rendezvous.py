"""Rendezvous, scoped to one restart attempt, and small values of all ranks before process groups exist.

The store may hold keys of an earlier attempt: torchrun keeps it when it restarts a job, so a rank could read the
address of a killed process instead of its successor's. Rank 0 therefore draws a token, and this attempt's keys get it
as prefix. Each other rank publishes a random nonce and accepts a token only together with that nonce, so a token of an
earlier attempt is never accepted.

Thread     the thread that calls `Groups.make`
Blocks     until every rank has joined, at most `timeout` seconds
Raises     `RankError` with the missing ranks
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from thermocline.errors import RankError

_POLL_SECONDS = 0.01


@contextlib.contextmanager
def store_errors(message: str, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Re-raise errors of torch's store, which name a socket, as `RankError`: its process has exited, or never began."""
    try:
        yield
    except kind as error:
        raise RankError(f"{message}. Cause: {str(error).splitlines()[0]}") from error


def joining_errors(rank: int) -> contextlib.AbstractContextManager[None]:
    """Return `store_errors` of a rank that joins."""
    return store_errors(
        f"rank {rank} cannot reach the rendezvous store, which rank 0 or torchrun hosts: that process has exited, or "
        "did not start in time (dist.timeout). See its error",
        dist.DistError,
    )


def scoped_store(store: Any, rank: int, world: int, timeout: float) -> Any:
    """Return a view of `store` that only the ranks of this attempt share. Every rank calls it."""
    token = _publish_token(store, world, timeout) if rank == 0 else _receive_token(store, rank, timeout)
    return dist.PrefixStore(f"thermocline/{token}", store)  # type: ignore[attr-defined]


def gather_json(store: Any, name: str, rank: int, world: int, value: Any, timeout: float) -> list[Any]:
    """Return a JSON value of every rank, by rank. Every rank calls it once per `name`, with a scoped store."""
    gathered: list[Any] = decide_json(store, name, rank, world, value, lambda values: values, timeout)
    return gathered


def decide_json(
    store: Any, name: str, rank: int, world: int, value: Any, decide: Callable[[list[Any]], Any], timeout: float
) -> Any:
    """Return rank 0's decision on every rank, as JSON values: `decide` gets the values of all ranks, by rank.

    Every rank calls it once per `name`, with a scoped store. An error of `decide` is raised on rank 0 only.
    """
    if rank != 0:
        with joining_errors(rank):
            store.set(f"{name}/{rank}", json.dumps(value))
            return json.loads(_await(store, f"{name}/decision", 0, world, timeout))
    values = [value]
    for other in range(1, world):
        values.append(json.loads(_await(store, f"{name}/{other}", other, world, timeout)))
    decision = json.dumps(decide(values))
    store.set(f"{name}/decision", decision)
    return json.loads(decision)


def _await(store: Any, key: str, rank: int, world: int, timeout: float) -> str:
    try:
        store.wait([key], datetime.timedelta(seconds=timeout))
    except RuntimeError:
        raise RankError(
            f"rank {rank} of {world} joined, but did not continue within {timeout:g} s (dist.timeout): see its error"
        ) from None
    value: str = store.get(key).decode()
    return value


def _publish_token(store: Any, world: int, timeout: float) -> str:
    token = secrets.token_hex(8)
    answered: dict[int, str] = {}
    missing = set(range(1, world))
    deadline = time.monotonic() + timeout
    while missing:
        for rank in sorted(missing):
            nonce = _read(store, f"thermocline/nonce/{rank}")
            if nonce is not None and answered.get(rank) != nonce:  # may be stale: then this attempt's nonce follows
                answered[rank] = nonce
                store.set(f"thermocline/token/{rank}", f"{nonce} {token}")
            if _read(store, f"thermocline/joined/{rank}") == token:
                missing.discard(rank)
        if missing:
            if time.monotonic() > deadline:
                raise RankError(
                    f"ranks {sorted(missing)} of {world} did not join within {timeout:g} s (dist.timeout): check that "
                    "they were started and can reach rank 0"
                )
            time.sleep(_POLL_SECONDS)
    return token


def _receive_token(store: Any, rank: int, timeout: float) -> str:
    nonce = secrets.token_hex(8)
    store.set(f"thermocline/nonce/{rank}", nonce)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = _read(store, f"thermocline/token/{rank}")
        if answer is not None and answer.startswith(nonce):
            token = answer.partition(" ")[2]
            store.set(f"thermocline/joined/{rank}", token)
            return token
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"rank 0 did not answer rank {rank} within {timeout:g} s (dist.timeout): check that rank 0 was started"
    )


def _read(store: Any, key: str) -> str | None:
    value: str | None = store.get(key).decode() if store.check([key]) else None
    return value
