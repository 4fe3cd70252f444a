"""Blocks loaded ahead by a few threads, delivered in order, bounded."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from thermocline.data.text_blocks import Block, Blocks, Piece, Unit

Place = tuple[int, int]
"""A unit's number in the epoch's order, and a block's within the unit (always 0, unless the unit is sequential)."""


_Loaded = tuple[int, Block] | None
"""A block and its number in its unit; None: there was none any more."""


class _Stream:
    """Pieces of a sequential unit, taken one by one on the thread that decompresses."""

    def __init__(self, pieces: Iterator[tuple[int, Piece]]) -> None:
        self._pieces = pieces
        self.ended = False

    def next(self) -> tuple[int, Piece] | None:
        try:
            piece = next(self._pieces, None)
        except BaseException:
            self.ended = True
            raise
        self.ended = piece is None
        return piece


def load_ahead(
    blocks: Blocks,
    order: Sequence[int],
    start: Place,
    *,
    threads: int,
    depth: int,
    wanted: Callable[[int], bool] = lambda piece: True,
) -> Generator[tuple[Place, Block], None, None]:
    """The blocks of the units `order`, from `start` on, with at most `depth` loaded or being loaded ahead.

    wanted    which pieces of sequential units are; the others are decompressed and dropped

    The number of pieces of a sequential unit is known only at its end: until then one more is always asked for, and
    what comes back empty is no block. So neither threads nor timing change what is delivered.
    """
    pool = ThreadPoolExecutor(threads, "thermocline-parse")
    decompress = ThreadPoolExecutor(1, "thermocline-decompress")

    def submitted() -> Iterator[tuple[int, Future[_Loaded]]]:
        for number in range(start[0], len(order)):
            unit = blocks.unit(order[number])
            if not blocks.sequential[order[number]]:
                yield number, pool.submit(_load, blocks, unit)
                continue
            first = start[1] if number == start[0] else 0
            stream = _Stream(
                (piece, text) for piece, text in enumerate(blocks.pieces(unit, first), first) if wanted(piece)
            )
            while not stream.ended:
                yield number, pool.submit(_parse, blocks, unit, decompress.submit(stream.next))

    waiting: collections.deque[tuple[int, Future[_Loaded]]] = collections.deque()
    coming = submitted()
    try:
        while True:
            while len(waiting) <= depth and (task := next(coming, None)) is not None:
                waiting.append(task)
            if not waiting:
                return
            number, future = waiting.popleft()
            loaded = future.result()
            if loaded is not None:
                yield (number, loaded[0]), loaded[1]
    finally:
        decompress.shutdown(wait=False, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
        decompress.shutdown(wait=True)


def _load(blocks: Blocks, unit: Unit) -> _Loaded:
    return 0, blocks.load(unit)


def _parse(blocks: Blocks, unit: Unit, coming: Future[tuple[int, Piece] | None]) -> _Loaded:
    numbered = coming.result()
    if numbered is None or not numbered[1][1]:
        return None
    return numbered[0], blocks.parse(unit, numbered[1])
