"""Bulk loading: write a row for every key of a data set, to an SSD store or to the top tier of a table.

Used to measure steady state at full size. The SSD store receives sorted runs, without a log and without merges.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from thermocline.arrays import Floats, Keys
from thermocline.embedding.key_hash import hash_keys
from thermocline.tiers.ssd import SsdStore
from thermocline.utils.cpu_affinity import cores

PIECE = 1 << 21
"""Default number of rows per piece, approximately."""

A = TypeVar("A")
B = TypeVar("B")


class NumberedKeys(Protocol):
    """A data set with numbered keys, such as `tc.SyntheticAds`."""

    @property
    def keys(self) -> tuple[int, ...]: ...  # number of keys per field

    def some_keys(self, first: int, end: int) -> Keys: ...


def pieces(source: NumberedKeys, piece: int = PIECE) -> Iterator[Keys]:
    """Yield all keys by number, `piece` keys at a time."""
    total = sum(source.keys)
    for first in range(0, total, piece):
        yield source.some_keys(first, min(total, first + piece))


def fill_store(
    store: SsdStore,
    source: NumberedKeys,
    rows: Callable[[Keys], Floats],
    *,
    done: int = 0,
    piece: int = PIECE,
    after: Callable[[int], bool] = lambda done: True,
) -> int:
    """Write a row for every key to an SSD store; return the number of rows written so far. Does not commit.

    rows    maps keys to their rows; called from several threads
    done    return value of an earlier call that `after` stopped, with the same `piece`: resumes after it
    after   called with the number of rows so far after each piece; returning False stops the call
    """
    workers = min(8, cores())
    with ThreadPoolExecutor(workers, "thermocline-bulk") as pool:
        partitions = _partition(pool, source, piece)

        def sorted_rows(keys: Keys) -> tuple[Keys, Floats]:
            keys = keys[np.argsort(hash_keys(keys))]
            return keys, rows(keys)

        starts = list(itertools.accumulate(map(len, partitions), initial=0))
        if done not in starts:
            raise ValueError(
                f"done is {done}: no piece of about {piece} rows ends there; pass the piece size of the earlier call"
            )
        remaining = [keys for keys, start in zip(partitions, starts, strict=False) if start >= done]
        for keys, values in _map_ahead(pool, sorted_rows, remaining, workers):
            store.load(keys, values)
            done += len(keys)
            if not after(done):
                break
    return done


def _partition(pool: ThreadPoolExecutor, source: NumberedKeys, piece: int) -> list[Keys]:
    """Partition all keys by ranges of their hash, into partitions of about `piece` keys."""
    total = sum(source.keys)
    count = max(1, -(-total // piece))

    def sort_by_partition(first: int) -> tuple[Keys, Any]:
        keys = source.some_keys(first, min(total, first + PIECE))
        partition = ((hash_keys(keys) >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.uint16)
        order = np.argsort(partition, kind="stable")  # a radix sort for 16-bit integers
        return keys[order], np.cumsum(np.bincount(partition, minlength=count))[:-1]

    parts = [np.split(keys, ends) for keys, ends in pool.map(sort_by_partition, range(0, total, PIECE))]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _map_ahead(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A], depth: int) -> Iterator[B]:
    """Yield work(item) in order, with at most `depth` results computed ahead."""
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
    """Load the rows of `keys` into the top tier of a `tc.Table` (HBM if it has one, else DRAM), marked clean."""
    for part in keys:
        if table.hbm is None:
            table.dram.push(part, table.dram.initial_rows(part), dirty=False)
            continue
        pins = table.hbm.pin(table.hbm.stage([part]))
        table.hbm.load(pins)
        pins.release()
