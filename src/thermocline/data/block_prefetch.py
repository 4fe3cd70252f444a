"""Loads blocks ahead on a few threads; delivers them in order, with a bounded number in memory."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from thermocline.data.text_blocks import Block, Blocks, InputSplit, Piece

BlockIndex = tuple[int, int]
"""Index of an input split in the epoch's order, and of a block within it (always 0 unless the split is sequential)."""

_Loaded = tuple[int, Block] | None
"""A block and its index within its input split; None means that the split had no further block."""


class _PieceStream:
    """The pieces of a sequential input split, read one by one on the decompression thread."""

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


def prefetch_blocks(
    blocks: Blocks,
    order: Sequence[int],
    start: BlockIndex,
    *,
    threads: int,
    depth: int,
    keep_piece: Callable[[int], bool] = lambda piece: True,
) -> Generator[tuple[BlockIndex, Block], None, None]:
    """Yield the blocks of the input splits `order` from `start` on, with at most `depth` loading or loaded ahead.

    keep_piece   selects pieces of sequential splits by index; the others are decompressed and dropped

    The number of pieces of a sequential split is known only at its end: until then one more is always requested, and an
    empty result is not a block. Thread timing therefore does not change the blocks delivered.
    """
    parse_pool = ThreadPoolExecutor(threads, "thermocline-parse")
    decompress_pool = ThreadPoolExecutor(1, "thermocline-decompress")

    def submit_all() -> Iterator[tuple[int, Future[_Loaded]]]:
        for number in range(start[0], len(order)):
            split = blocks.split(order[number])
            if not blocks.sequential[order[number]]:
                yield number, parse_pool.submit(_load, blocks, split)
                continue
            first = start[1] if number == start[0] else 0
            stream = _PieceStream(
                (piece, text) for piece, text in enumerate(blocks.pieces(split, first), first) if keep_piece(piece)
            )
            while not stream.ended:
                yield number, parse_pool.submit(_parse, blocks, split, decompress_pool.submit(stream.next))

    pending: collections.deque[tuple[int, Future[_Loaded]]] = collections.deque()
    tasks = submit_all()
    try:
        while True:
            while len(pending) <= depth and (task := next(tasks, None)) is not None:
                pending.append(task)
            if not pending:
                return
            number, future = pending.popleft()
            loaded = future.result()
            if loaded is not None:
                yield (number, loaded[0]), loaded[1]
    finally:
        decompress_pool.shutdown(wait=False, cancel_futures=True)
        parse_pool.shutdown(wait=True, cancel_futures=True)
        decompress_pool.shutdown(wait=True)


def _load(blocks: Blocks, split: InputSplit) -> _Loaded:
    return 0, blocks.load(split)


def _parse(blocks: Blocks, split: InputSplit, decompressed: Future[tuple[int, Piece] | None]) -> _Loaded:
    numbered = decompressed.result()
    if numbered is None or not numbered[1][1]:
        return None
    return numbered[0], blocks.parse(split, numbered[1])
