"""Text files -> blocks of whole lines -> examples. A block is what one thread reads and parses at a time.

A plain file is cut into ranges of bytes: a block's lines are those that begin in its range, so any block can be read
alone. A compressed file can only be read from its beginning: it is one unit that gives its pieces in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from thermocline.config.data import Data
from thermocline.data.files import Source
from thermocline.errors import DataError, ThermoclineError

# ids, offsets, weights (None: all are 1), dense, labels: as the core gives and takes them.
Examples = tuple[Any, Any, Any, Any, Any]
Floats = npt.NDArray[np.float32]

Piece = tuple[int, Any]
"""Where it begins in the text, in bytes; and its lines, as bytes or a view of them."""

BOM = b"\xef\xbb\xbf"  # some editors put it before a text
MAX_LINE = 1 << 24  # bytes: what is longer is no line of examples, and memory is bounded
_BEYOND = 1 << 14  # bytes read past a block at once, for the end of its last line


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What an epoch's order is made of: a block of a plain file, a row group, or a whole compressed file."""

    source: Source
    start: int
    """Text: the first byte. Parquet: the row group."""
    end: int = 0
    """Text: behind the last byte in which a line of it may begin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Malformed:
    """A line or row that is not what the format asks for."""

    source: Source
    row: int
    """Within the block, counted from 0; without a block, within the file."""
    cause: str
    block: int | None = None
    """Where its block begins, in bytes of text."""

    def __str__(self) -> str:
        """Counts the lines before it, which reads the file up to there."""
        if self.block is None:
            return f"{self.source.name}, row {self.row + 1}: {self.cause}"
        return f"{self.source.name}, line {lines_before(self.source, self.block) + self.row + 1}: {self.cause}"


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Parsed examples, and what was left out."""

    examples: Examples
    first_malformed: tuple[Malformed, ...] = ()
    malformed: int = 0

    def __len__(self) -> int:
        return len(self.examples[4])


class Blocks(Protocol):
    """Files of one format, as the reader sees them: a row of units. All calls may run in several threads at once."""

    sequential: npt.NDArray[np.bool_]
    """Per unit: whether it gives pieces in order, and only from its beginning."""
    examples_per_unit: float
    """About how many a plain unit, or a piece of a sequential one, has."""
    total_examples: float
    """About how many there are."""

    def __len__(self) -> int: ...

    def unit(self, number: int) -> Unit: ...

    def load(self, unit: Unit) -> Block:
        """A plain unit's examples."""
        ...

    def pieces(self, unit: Unit, first: int) -> Iterator[Piece]:
        """The pieces of a sequential unit from number `first` on."""
        ...

    def parse(self, unit: Unit, piece: Piece) -> Block:
        """Examples of one piece."""
        ...


def lines_before(source: Source, offset: int) -> int:
    """How many lines end before byte `offset` of the text."""
    count, left = 0, offset
    for chunk in source.chunks(1 << 20):
        count += chunk.count(b"\n", 0, left)
        left -= len(chunk)
        if left <= 0:
            break
    return count


def threshold_labels(label: Floats, data: Data) -> None:
    """In place: 0 or 1, if the data asks for it."""
    if data.label_threshold is not None:
        label[:] = label >= data.label_threshold


class TextBlocks:
    """Blocks of text files that one parser reads."""

    def __init__(
        self,
        sources: Sequence[Source],
        starts: Sequence[int],
        parser: Any,
        data: Data,
        *,
        block_bytes: int,
        bytes_per_line: float,
        ratio: float,
        labelled: bool = True,
    ) -> None:
        """
        starts          where each file's first line of examples begins
        bytes_per_line  as sampled
        ratio           bytes of text per byte of a compressed file, as sampled
        labelled        False: there are no labels to read, they are 0
        """
        self._sources = sources
        self._starts = starts
        self._parser = parser
        self._data = data
        self._block_bytes = block_bytes
        self._labelled = labelled
        self._first = {id(source): start for source, start in zip(sources, starts, strict=True)}
        counts = [
            1 if source.compression is not None else -(-(source.size - start) // block_bytes)
            for source, start in zip(sources, starts, strict=True)
        ]
        self._ends = np.cumsum(counts)
        self.sequential = np.repeat([source.compression is not None for source in sources], counts)
        self.examples_per_unit = block_bytes / bytes_per_line
        text = sum(
            source.size * (1 if source.compression is None else ratio) - start
            for source, start in zip(sources, starts, strict=True)
        )
        self.total_examples = text / bytes_per_line

    def __len__(self) -> int:
        return int(self._ends[-1])

    def unit(self, number: int) -> Unit:
        file = int(np.searchsorted(self._ends, number, side="right"))
        source, start = self._sources[file], self._starts[file]
        if source.compression is not None:
            return Unit(source, start)
        start += (number - (int(self._ends[file - 1]) if file else 0)) * self._block_bytes
        return Unit(source, start, min(start + self._block_bytes, source.size))

    def texts(self) -> Iterator[Any]:
        """All lines of all files, in order."""
        for number in range(len(self)):
            unit = self.unit(number)
            cuts = self.pieces(unit, 0) if self.sequential[number] else [self._cut(unit)]
            yield from (text for _, text in cuts)

    def load(self, unit: Unit) -> Block:
        return self.parse(unit, self._cut(unit))

    def _cut(self, unit: Unit) -> Piece:
        """Where the unit's first line begins, and its lines: those that begin in [start, end)."""
        source, end = unit.source, unit.end
        at_line = unit.start == self._first[id(source)]
        base = unit.start if at_line else unit.start - 1  # the byte before tells whether a line begins here
        text = source.read(base, min(end + _BEYOND, source.size))
        low = 0 if at_line else text.find(b"\n", 0, end - 1 - base) + 1
        if low == 0 and not at_line:
            return end, b""
        if base == 0 and at_line and text.startswith(BOM):
            low = len(BOM)
        high = text.find(b"\n", end - 1 - base)
        while high < 0 and base + len(text) < source.size:
            if len(text) - (end - base) > MAX_LINE:
                raise _too_long(source, base + text.rfind(b"\n", 0, end - 1 - base) + 1)
            more = source.read(base + len(text), base + 2 * len(text))
            high = more.find(b"\n")
            high += len(text) if high >= 0 else 0
            text += more
        return base + low, memoryview(text)[low : high + 1 if high >= 0 else len(text)]

    def pieces(self, unit: Unit, first: int) -> Iterator[Piece]:
        """Piece i: the lines that end in the i-th `block_bytes` of text; the last piece, what has no line break."""
        begin, carry, number = unit.start, b"", 0

        def without_bom(text: bytes) -> Piece:
            return (len(BOM), text[len(BOM) :]) if begin == 0 and text.startswith(BOM) else (begin, text)

        for number, chunk in enumerate(unit.source.chunks(self._block_bytes)):
            text = carry + chunk[max(0, unit.start - number * self._block_bytes) :]
            cut = text.rfind(b"\n") + 1
            if number >= first:
                yield without_bom(text[:cut])
            begin, carry = begin + cut, text[cut:]
            if len(carry) > MAX_LINE:
                raise _too_long(unit.source, begin)
        if carry and number + 1 >= first:
            yield without_bom(carry)

    def parse(self, unit: Unit, piece: Piece) -> Block:
        begin, text = piece
        skip = self._data.on_error == "skip"
        try:
            *examples, errors, malformed = self._parser.parse(text, skip)
        except ThermoclineError as error:
            raise DataError(f"{unit.source.name}: {error}") from None
        found = tuple(Malformed(unit.source, line, cause, begin) for line, cause in errors)
        if found and not skip:
            raise DataError(str(found[0]))
        if not self._labelled:
            examples[4][:] = 0
        threshold_labels(examples[4], self._data)
        return Block(tuple(examples), found, malformed)


def _too_long(source: Source, begin: int) -> DataError:
    line = lines_before(source, begin) + 1
    return DataError(
        f"{source.name}, line {line}: it is longer than {MAX_LINE} bytes; is this a text file of examples?"
    )
