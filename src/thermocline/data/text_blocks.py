"""Text files as input splits, and their parsing into blocks of examples. A block is the unit of one thread's work.

An uncompressed file is divided into byte ranges, one input split each: a split consists of the lines that begin in its
range, so that splits can be read independently. A compressed file can only be read from its beginning: it is one
sequential split, read in pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from thermocline.arrays import Floats, Mask, Offsets
from thermocline.config.data import Data
from thermocline.data.files import Source, file_errors
from thermocline.data.partition_columns import PartitionColumns
from thermocline.errors import DataError, ThermoclineError

# ids, offsets, weights (None means all 1), dense, labels: the layout of the core.
Examples = tuple[Any, Any, Any, Any, Any]

Piece = tuple[int, Any]
"""Byte offset in the decompressed text, and the lines, as bytes or a memoryview."""

BOM = b"\xef\xbb\xbf"  # byte order mark
MAX_LINE = 1 << 24  # bytes: bounds memory when a file has no line breaks
_BEYOND = 1 << 14  # bytes read past the end of a split, for the rest of its last line


@dataclasses.dataclass(frozen=True, slots=True)
class InputSplit:
    """The unit that an epoch shuffles: a byte range of a text file, a row group, or a whole compressed file."""

    source: Source
    start: int
    """Text: offset of the first byte. Parquet: index of the row group."""
    end: int = 0
    """Text: end of the byte range in which its lines begin."""


SKIP_ADVICE = '; data.on_error = "skip" skips such examples'


@dataclasses.dataclass(frozen=True, slots=True)
class Malformed:
    """A malformed line or row."""

    source: Source
    row: int
    """Index of the line within its block, or of the row within the file if `block` is None."""
    cause: str
    block: int | None = None
    """Byte offset of its block in the decompressed text."""

    def __str__(self) -> str:
        """Describe file, line and cause. Counting the lines reads the file up to the block."""
        if self.block is None:
            return f"{self.source.name}, row {self.row + 1}: {self.cause}"
        return f"{self.source.name}, line {lines_before(self.source, self.block) + self.row + 1}: {self.cause}"


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Parsed examples, and the malformed lines that were skipped."""

    examples: Examples
    first_malformed: tuple[Malformed, ...] = ()
    malformed: int = 0
    time: Offsets | None = None
    """Event time of each example; None: the data has none."""
    carried: tuple[Any, ...] = ()
    """Arrow arrays with the values of `Reader.carry`."""

    def __len__(self) -> int:
        return len(self.examples[4])


class Blocks(Protocol):
    """The input splits of files of one format. All methods are thread-safe."""

    sequential: Mask
    """Per split: whether it must be read from its beginning, piece by piece."""
    examples_per_split: float
    """Estimated examples of a split, or of a piece of a sequential split."""
    total_examples: float
    """Estimated examples of all splits."""

    @property
    def carry(self) -> Sequence[str]:
        """Columns of `Block.carried`, in its order."""
        ...

    def __len__(self) -> int: ...

    def split(self, number: int) -> InputSplit: ...

    def load(self, split: InputSplit) -> Block:
        """Read and parse a split that is not sequential."""
        ...

    def pieces(self, split: InputSplit, first: int) -> Iterator[Piece]:
        """Yield the pieces of a sequential split, from index `first` on."""
        ...

    def parse(self, split: InputSplit, piece: Piece) -> Block:
        """Parse one piece."""
        ...


def lines_before(source: Source, offset: int) -> int:
    """Count the lines that end before byte `offset` of the decompressed text."""
    count, left = 0, offset
    for chunk in source.chunks(1 << 20):
        count += chunk.count(b"\n", 0, left)
        left -= len(chunk)
        if left <= 0:
            break
    return count


def threshold_labels(label: Floats, data: Data) -> None:
    """Apply data.label_threshold in place, if it is set."""
    if data.label_threshold is not None:
        label[:] = label >= data.label_threshold


class TextBlocks:
    """Input splits of text files that share a parser."""

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
        line_breaks: bool = False,
        carry: Sequence[str] = (),
        path: PartitionColumns | None = None,
    ) -> None:
        """
        starts          byte offset of the first example of each file
        bytes_per_line  average of a sample
        ratio           text bytes per byte of a compressed file, from a sample
        labelled        False sets all labels to 0
        line_breaks     the parser reads records of several lines: where one begins is known only from the beginning of
                        a file, so that each file is one sequential split
        carry           columns whose values the parser returns, in file order, then those of the files' paths
        path            the columns of the files' paths; None: there are none
        """
        self._sources = sources
        self._starts = starts
        self._parser = parser
        self._data = data
        self._block_bytes = block_bytes
        self._labelled = labelled
        self.line_breaks = line_breaks
        self.carry = carry
        self._path = path
        of_path = sources[0].partitions if path is not None else {}
        self._carried_of_path = [name for name in carry if name in of_path]
        self._first = {id(source): start for source, start in zip(sources, starts, strict=True)}
        counts = [
            1 if self._is_sequential(source) else -(-(source.size - start) // block_bytes)
            for source, start in zip(sources, starts, strict=True)
        ]
        self._ends = np.cumsum(counts)
        self.sequential = np.repeat([self._is_sequential(source) for source in sources], counts)
        self.examples_per_split = block_bytes / bytes_per_line
        text = sum(
            source.size * (1 if source.compression is None else ratio) - start
            for source, start in zip(sources, starts, strict=True)
        )
        self.total_examples = text / bytes_per_line

    def _is_sequential(self, source: Source) -> bool:
        return self.line_breaks or source.compression is not None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def split(self, number: int) -> InputSplit:
        file = int(np.searchsorted(self._ends, number, side="right"))
        source, start = self._sources[file], self._starts[file]
        if self._is_sequential(source):
            return InputSplit(source, start)
        start += (number - (int(self._ends[file - 1]) if file else 0)) * self._block_bytes
        return InputSplit(source, start, min(start + self._block_bytes, source.size))

    def texts(self) -> Iterator[Any]:
        """Yield the lines of all files in order, one split or piece at a time."""
        for number in range(len(self)):
            split = self.split(number)
            pieces = self.pieces(split, 0) if self.sequential[number] else [self._read_lines(split)]
            yield from (text for _, text in pieces)

    def load(self, split: InputSplit) -> Block:
        return self.parse(split, self._read_lines(split))

    def _read_lines(self, split: InputSplit) -> Piece:
        """Read the lines that begin in [start, end), and the offset of the first one."""
        source, end = split.source, split.end
        at_line = split.start == self._first[id(source)]
        base = split.start if at_line else split.start - 1  # the byte before shows whether a line begins at `start`
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

    def pieces(self, split: InputSplit, first: int) -> Iterator[Piece]:
        """Yield pieces: piece i holds the lines, or records of lines, that end in the i-th `block_bytes` of text.

        A last line without a line break is a separate piece.
        """
        begin, carry, number = split.start, b"", 0

        def without_bom(text: bytes) -> Piece:
            return (len(BOM), text[len(BOM) :]) if begin == 0 and text.startswith(BOM) else (begin, text)

        for number, chunk in enumerate(split.source.chunks(self._block_bytes)):
            text = carry + chunk[max(0, split.start - number * self._block_bytes) :]
            cut = self._parser.whole_records(text)
            if number >= first:
                yield without_bom(text[:cut])
            begin, carry = begin + cut, text[cut:]
            if len(carry) > MAX_LINE:
                raise _too_long(split.source, begin, self.line_breaks)
        if carry and number + 1 >= first:
            yield without_bom(carry)

    def parse(self, split: InputSplit, piece: Piece) -> Block:
        begin, text = piece
        skip = self._data.on_error == "skip"
        try:
            if len(self.carry) > len(self._carried_of_path):
                (*examples, time, errors, malformed), texts = self._parser.parse_with_texts(text, skip)
            else:
                (*examples, time, errors, malformed), texts = self._parser.parse(text, skip), ()
        except ThermoclineError as error:
            raise DataError(f"{split.source.name}: {error}") from None
        first_malformed = tuple(Malformed(split.source, line, cause, begin) for line, cause in errors)
        if first_malformed and not skip:
            raise DataError(f"{first_malformed[0]}{SKIP_ADVICE}")
        if not self._labelled:
            examples[4][:] = 0
        threshold_labels(examples[4], self._data)
        carried = [_text_array(offsets, values, split.source) for offsets, values in texts]
        if self._path is not None:
            examples = self._path.add_to(examples, split.source)
            rows = len(examples[4])
            carried += [_repeated(split.source.partitions[name], rows) for name in self._carried_of_path]
        return Block(tuple(examples), first_malformed, malformed, time, tuple(carried))


def _text_array(offsets: Offsets, values: bytes, source: Source) -> Any:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    array = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    with file_errors(source.name):
        return array.cast(pa.large_string())  # checks that it is UTF-8


def _repeated(value: str, rows: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, pa.large_string()), rows)


def _too_long(source: Source, begin: int, line_breaks: bool = False) -> DataError:
    line = lines_before(source, begin) + 1
    cause = "; a quote does not end" if line_breaks else "; check that this is a text file of examples"
    return DataError(f"{source.name}, line {line}: longer than {MAX_LINE} bytes{cause}")
