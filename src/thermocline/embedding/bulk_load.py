"""A row for every key of a large world, at once: on SSD without log and merging, or in the top tier."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from thermocline.embedding.arrays import Floats, Keys
from thermocline.embedding.key_hash import hash_keys
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores

PIECE = 1 << 21
"""Rows at a time, about."""

A = TypeVar("A")
B = TypeVar("B")


class World(Protocol):
    """What has numbered keys, as `tc.SyntheticAds` does."""

    @property
    def keys(self) -> tuple[int, ...]: ...  # per field

    def some_keys(self, first: int, end: int) -> Keys: ...


def pieces(world: World, piece: int = PIECE) -> Iterator[Keys]:
    """All keys in the order of the world, some at a time."""
    total = sum(world.keys)
    for first in range(0, total, piece):
        yield world.some_keys(first, min(total, first + piece))


def fill_store(
    store: SsdStore,
    world: World,
    rows: Callable[[Keys], Floats],
    *,
    done: int = 0,
    piece: int = PIECE,
    after: Callable[[int], bool] = lambda done: True,
) -> int:
    """A row on SSD for every key of the world; commit it to make it durable. Returns how many are there.

    done    of an earlier call that `after` ended, with the same `piece`: it goes on behind them
    rows    of some keys; called by several threads
    after   gets the number of rows so far; false ends the call
    """
    workers = min(8, cores())
    with ThreadPoolExecutor(workers, "thermocline-bulk") as pool:
        cut = _cut(pool, world, piece)

        def made(keys: Keys) -> tuple[Keys, Floats]:
            keys = keys[np.argsort(hash_keys(keys))]
            return keys, rows(keys)

        firsts = list(itertools.accumulate(map(len, cut), initial=0))
        if done not in firsts:
            raise ValueError(
                f"done is {done}: no piece of about {piece} rows ends there; it was said with other pieces"
            )
        left = [keys for keys, first in zip(cut, firsts, strict=False) if first >= done]
        for keys, values in _ahead(pool, made, left, workers):
            store.load(keys, values)
            done += len(keys)
            if not after(done):
                break
    return done


def _cut(pool: ThreadPoolExecutor, world: World, piece: int) -> list[Keys]:
    """All keys, cut by ranges of their hashes."""
    total = sum(world.keys)
    count = max(1, -(-total // piece))

    def sorted_by_piece(first: int) -> tuple[Keys, Any]:
        keys = world.some_keys(first, min(total, first + PIECE))
        places = ((hash_keys(keys) >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.uint16)
        order = np.argsort(places, kind="stable")  # of 16 bits: a radix sort
        return keys[order], np.cumsum(np.bincount(places, minlength=count))[:-1]

    parts = [np.split(keys, ends) for keys, ends in pool.map(sorted_by_piece, range(0, total, PIECE))]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _ahead(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A], depth: int) -> Iterator[B]:
    """Results in order, at most `depth` of them not yet taken."""
    running: deque[Future[B]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > depth:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def fill_top(table: Any, keys: Iterable[Keys]) -> None:
    """Rows of these keys in the top tier of a `tc.Table`: HBM where it has one, else DRAM; clean, as the store has."""
    for some in keys:
        if table.hbm is None:
            table.dram.push(some, table.dram.initial_rows(some), dirty=False)
            continue
        pins = table.hbm.pin(table.hbm.stage([some]))
        table.hbm.load(pins)
        pins.release()
