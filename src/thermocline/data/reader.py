"""`tc.Reader`: reads files as batches, in an order determined by a seed, from any position.

The files are divided into input splits (text_blocks.py), each loaded as blocks of examples. An epoch's order is a
permutation of the splits. Consecutive blocks that fill the shuffle buffer form a shuffle chunk, whose examples are
shuffled together; batches are taken from one chunk after another. A position is the index of a chunk's first block and
the number of examples taken from the chunk: resuming reads that chunk again. Without shuffling a chunk is one block, in
the order of the files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import os
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from thermocline.arrays import Offsets
from thermocline.batch import Batch
from thermocline.config.data import Data
from thermocline.core import core
from thermocline.data.block_prefetch import BlockIndex, prefetch_blocks
from thermocline.data.feature_hashing import make_hasher
from thermocline.data.features import FeatureCounts, Features
from thermocline.data.files import NoExamples, Source, dataset_files, map_threads
from thermocline.data.formats import no_examples, open_files
from thermocline.data.parquet import ParquetBlocks
from thermocline.data.text_blocks import Block, Malformed
from thermocline.errors import DataError
from thermocline.utils.cpu_affinity import cores

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

_MAX_DESCRIBED = 10  # malformed lines kept for `Reader.skipped`


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Malformed lines that an iteration skipped."""

    count: int
    malformed: tuple[Malformed, ...]
    """The first ones."""

    @property
    def first(self) -> tuple[str, ...]:
        """File, line and cause of the first ones. Counting line numbers reads the files up to these lines."""
        return tuple(str(malformed) for malformed in self.malformed)


@dataclasses.dataclass(slots=True)
class ShuffleChunk:
    """Consecutive blocks whose examples are shuffled together."""

    first_block: BlockIndex
    blocks: list[Block]
    order: Offsets
    """Permutation of the examples of all blocks."""
    taken: int = 0
    """Examples already returned in batches."""

    @property
    def remaining(self) -> int:
        return len(self.order) - self.taken


class Reader(FeatureCounts):
    """An iterable of `tc.Batch`: one iteration is one epoch. `set_epoch` selects the order, `seek` the start position.

    `tc.Reader("train/*.csv", label="click", numeric=("age",), batch_size=4096, shuffle=True)`
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Source] | Dataset,
        data: Data | None = None,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        shard: tuple[int, int] = (0, 1),
        features: Features | None = None,
        labelled: bool | None = True,
        block_bytes: int | None = None,
        tensors: bool = True,
        contiguous: bool = False,
        carry: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """
        paths        one or several files, folders, globs or URLs; or a `pyarrow.dataset.Dataset` of Parquet or Arrow
                     files
        data         format options (data.shuffle is ignored); `options` override its fields: format, label,
                     categorical, numeric, on_error, ...
        batch_size   examples per batch; the last batch of an epoch may have fewer
        seed         seed of the shuffling
        shuffle      shuffle the examples, in a different order in each epoch
        shard        (number, count): read one of `count` disjoint parts of the data. With several workers per rank:
                     (rank * workers + worker, ranks * workers)
        features     `features` of the reader of the training data: same fields and statistics. None means the features
                     of data.train if `paths` are other files, else those of `paths`
        labelled     False sets labels to 0 without reading them; None reads them if the files have them
        block_bytes  text bytes that one thread parses at a time; None means 1 MiB, or 8 MiB for remote files, and less
                     where the shards would have fewer than 16 blocks
        tensors      return labels and dense features as torch tensors; False returns NumPy arrays
        contiguous   shards are consecutive parts of the files, so that all shards in order are the files in order. A
                     compressed file is then read by one shard, and a shard may be empty
        carry        columns, such as ids, whose values `carried` has for each batch; they need not be features
        """
        found: Any = dataset_files(paths) if hasattr(paths, "get_fragments") else paths
        several: Any = [found] if isinstance(found, (str, os.PathLike)) else found
        names = [path if isinstance(path, Source) else os.fspath(path) for path in several]
        settings = Data(**options) if data is None else dataclasses.replace(data, **options)
        _check_arguments(batch_size, seed, shard, block_bytes)
        self.data = settings
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.shard = (int(shard[0]), int(shard[1]))
        self.tensors = tensors
        if features is None and settings.train and list(settings.train) != names:
            features = open_files(settings.train, settings, features=None, labelled=True, block_bytes=None).features
        self.carry = tuple(carry)
        opened = open_files(
            names, settings, features=features, labelled=labelled, block_bytes=block_bytes, shards=self.shard[1],
            carry=self.carry,
        )  # fmt: skip
        self.format = opened.format
        self.features = opened.features
        """Fields, dense features and statistics: pass them to the readers of other data."""
        self._sources = opened.sources
        self._blocks = opened.blocks
        self._threads = settings.threads or min(8, cores())
        self._hasher = make_hasher(settings.hashing, settings.threads)
        self._chunk_blocks = max(1, round(settings.shuffle_buffer / opened.blocks.examples_per_split)) if shuffle else 1
        sequential = int(opened.blocks.sequential.sum())
        self._contiguous = contiguous
        self._shard_pieces = 0 < sequential < self.shard[1] and not contiguous
        if not sequential and len(opened.blocks) < self.shard[1] and not contiguous:
            raise DataError(
                f"{len(opened.blocks)} blocks for {self.shard[1]} shards: each shard needs at least one block; use "
                "fewer shards, a smaller block_bytes (text) or smaller row groups (Parquet) or record batches (Arrow)"
            )
        if not sequential and not contiguous:
            _warn_of_uneven_shards(len(opened.blocks), self.shard)
        self._identity = {  # stored in positions, and so in checkpoints: keep the names
            "reader": "files",
            "files": _files_digest(opened.sources),
            "features": opened.digest,
            "seed": seed,
            "shuffle": shuffle,
            "shard": list(self.shard),
            "block_bytes": opened.block_bytes,
            "lot_blocks": self._chunk_blocks,
            **({"contiguous": True} if contiguous else {}),
        }
        self.carried: dict[str, Any] = {}
        """Values of the columns `carry` in the batch that the iteration returned last, as Arrow arrays."""
        self._epoch = 0
        self._start: tuple[BlockIndex, int] = ((0, 0), 0)
        self._skipped = 0
        self._malformed: list[Malformed] = []

    # ---- properties

    @property
    def identity(self) -> dict[str, Any]:
        """Files and settings that determine the batches of all shards together: equal on all ranks of a run.

        A file is its name without folders, and its size: the data may be in another folder on another machine.
        """
        same = {name: value for name, value in self._identity.items() if name != "shard"}
        files = [f"{os.path.basename(source.path)} ({source.size} bytes)" for source in self._sources]
        return {**same, "files": files, "shards": self.shard[1], "batch_size": self.batch_size}

    @property
    def skipped(self) -> Skipped:
        """Malformed lines that the latest iteration has skipped so far."""
        return Skipped(self._skipped, tuple(self._malformed))

    @property
    def bytes(self) -> int:
        """Stored size of all files."""
        return sum(source.size for source in self._sources)

    def estimated_batches(self) -> int:
        """Estimate the batches per epoch from the files' sizes and a sample of lines."""
        return max(1, math.ceil(self._blocks.total_examples / self.shard[1] / self.batch_size))

    def __len__(self) -> int:
        """Batches per epoch; known in advance for Parquet and Arrow files only."""
        if isinstance(self._blocks, ParquetBlocks) and self.data.on_error == "raise":
            rows = self._blocks.rows(self._order(self._epoch))
            if rows is not None:
                return -(-rows // self.batch_size)
        raise TypeError(
            "the number of batches of text files and Arrow streams is not known before they are read: use "
            "estimated_batches()"
        )

    def __repr__(self) -> str:
        return (
            f"Reader({self.format}, {len(self._sources)} files with {self.bytes} bytes, {self.fields} fields, "
            f"{self.dense} dense, batch_size={self.batch_size}, shuffle={self.shuffle}, shard={self.shard})"
        )

    # ---- epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, and so the order, of the following iterations."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: it must be at least 0")
        self._epoch = epoch

    def seek(self, position: Mapping[str, Any]) -> Self:
        """Start the next iteration after the batch with this `position`; later iterations are whole epochs."""
        for name in (*self._identity, "contiguous"):
            expected = self._identity.get(name)
            if not isinstance(position, Mapping) or position.get(name) != expected:
                actual = position.get(name) if isinstance(position, Mapping) else position
                raise DataError(
                    f"this position belongs to other data or settings: its {name} is {actual!r}, but this reader's is "
                    f"{expected!r} (files: names and sizes; features: format, columns and their roles)"
                )
        values: list[Any] = [position.get(name) for name in ("epoch", "unit", "block", "example")]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise DataError(f"this position is damaged: epoch, unit, block and example are {values}")
        epoch, split, block, example = values
        if split and split >= len(self._order(epoch)):
            raise DataError(f"this position is damaged: unit is {split}, but there are {len(self._order(epoch))}")
        self._epoch = epoch
        self._start = ((split, block), example)
        return self

    def _order(self, epoch: int) -> Offsets:
        """Return the input splits of this shard in the order of this epoch."""
        order = np.arange(len(self._blocks), dtype=np.int64)
        if self.shuffle:
            order = _permutation(len(order), self.seed, epoch)
        number, count = self.shard
        if self._contiguous:
            return np.array_split(order, count)[number]
        if not self._shard_pieces:
            return order[number::count]
        sequential = self._blocks.sequential[order]
        in_shard = (np.cumsum(~sequential) - 1) % count == number
        return np.asarray(order[sequential | in_shard])

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        (first_block, example), self._start = self._start, ((0, 0), 0)
        return self._batches(self._epoch, first_block, example)

    def _batches(self, epoch: int, start: BlockIndex, example: int) -> Iterator[Batch]:
        self._skipped, self._malformed = 0, []
        map_threads(lambda source: source.check_unchanged(), self._sources)
        loaded: collections.deque[ShuffleChunk] = collections.deque()
        examples = 0
        with contextlib.closing(self._chunks(epoch, start)) as chunks:
            while True:
                while sum(chunk.remaining for chunk in loaded) < self.batch_size:
                    chunk = next(chunks, None)
                    if chunk is None:
                        break
                    chunk.taken, example = example, 0
                    if chunk.remaining < 0:
                        raise DataError(
                            f"this position is damaged: example is {chunk.taken}, but its shuffle chunk has "
                            f"{len(chunk.order)}"
                        )
                    loaded.append(chunk)
                    examples += len(chunk.order)
                batch = self._take(loaded, epoch)
                if batch is None:
                    break
                yield batch
        if examples or start != (0, 0):
            return
        if self._skipped:
            raise DataError(f"all {self._skipped} lines are malformed; the first: {self._malformed[0]}")
        if self.shard[1] == 1:
            raise NoExamples(f"{no_examples(self._sources)}: all lines are empty")

    def _take(self, chunks: collections.deque[ShuffleChunk], epoch: int) -> Batch | None:
        """Take the examples of the next batch out of `chunks`, and remove used-up chunks."""
        taken_from: list[Block] = []
        orders: list[Offsets] = []
        missing, base = self.batch_size, 0
        first_block, taken = (0, 0), 0
        while chunks and missing:
            chunk = chunks[0]
            count = min(missing, chunk.remaining)
            if count:
                taken_from += chunk.blocks
                orders.append(chunk.order[chunk.taken : chunk.taken + count] + base)
                base += len(chunk.order)
            chunk.taken += count
            missing -= count
            first_block, taken = chunk.first_block, chunk.taken
            if chunk.remaining == 0:
                chunks.popleft()
        if not orders:
            return None
        fields = len(self.features.fields)
        order = orders[0] if len(orders) == 1 else np.concatenate(orders)
        ids, offsets, weights, dense, label = core.gather_examples(
            [block.examples for block in taken_from], fields, self.dense, order
        )
        time = None
        if self.data.time is not None:
            times = [block.time for block in taken_from if block.time is not None]
            time = np.concatenate(times)[order] if times else None
        features: Any = dense.reshape(len(order), self.dense) if self.dense else None
        target: Any = label
        if self.tensors:
            import torch

            target = torch.from_numpy(label)
            features = None if features is None else torch.from_numpy(features)
        position = {"epoch": epoch, "unit": first_block[0], "block": first_block[1], "example": taken}
        self.carried = self._carried(taken_from, order)
        place, names = {**self._identity, **position}, self.features.fields
        batch = Batch(ids, offsets, fields, weights, features, target, place, names=names, time=time)
        return batch if self._hasher is None else self._hasher(batch)

    def _carried(self, blocks: Sequence[Block], order: Offsets) -> dict[str, Any]:
        if not self.carry:
            return {}
        import pyarrow as pa

        columns = {name: [block.carried[i] for block in blocks] for i, name in enumerate(self._blocks.carry)}
        return {name: pa.concat_arrays(columns[name]).take(pa.array(order)) for name in self.carry}

    def _chunks(self, epoch: int, start: BlockIndex) -> Generator[ShuffleChunk, None, None]:
        """Yield the shuffle chunks of an epoch, from the one whose first block is `start`."""
        number, count = self.shard
        order = self._order(epoch).tolist()
        blocks = prefetch_blocks(
            self._blocks,
            order,
            start,
            threads=self._threads,
            depth=max(self._chunk_blocks, self._threads + 1),
            keep_piece=(lambda piece: piece % count == number) if self._shard_pieces else (lambda piece: True),
        )
        with contextlib.closing(blocks):
            gathered: list[Block] = []
            first_block = start
            for index, block in blocks:
                self._count_malformed(block)
                first_block = first_block if gathered else index
                gathered.append(block)
                if len(gathered) == self._chunk_blocks:
                    yield self._chunk(epoch, first_block, gathered)
                    gathered = []
            if gathered:
                yield self._chunk(epoch, first_block, gathered)

    def _chunk(self, epoch: int, first_block: BlockIndex, blocks: list[Block]) -> ShuffleChunk:
        examples = sum(len(block) for block in blocks)
        if self.shuffle:
            return ShuffleChunk(first_block, blocks, _permutation(examples, self.seed, epoch, *first_block))
        return ShuffleChunk(first_block, blocks, np.arange(examples, dtype=np.int64))

    def _count_malformed(self, block: Block) -> None:
        self._skipped += block.malformed
        self._malformed += block.first_malformed[: _MAX_DESCRIBED - len(self._malformed)]


def _permutation(count: int, *seed: int) -> Offsets:
    """Return a random permutation by sorting raw random numbers, whose stream NumPy guarantees across versions."""
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def _files_digest(sources: Sequence[Source]) -> str:
    """Digest file names without folders, and sizes: moving the data to another folder does not change it."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        digest.update(f"{os.path.basename(source.path)}\0{source.size}\n".encode())
    return f"{len(sources)} files, {sum(source.size for source in sources)} bytes, {digest.hexdigest()}"


def _warn_of_uneven_shards(blocks: int, shard: tuple[int, int]) -> None:
    """Warn, for shard 0, if some shards have a quarter more blocks than others."""
    number, count = shard
    least, most = blocks // count, -(-blocks // count)
    if number == 0 and most > 1.25 * least:
        warnings.warn(
            f"{blocks} blocks for {count} shards: some have {most} and others {least}; ranks that train on unequal "
            "numbers of examples make running statistics of batch norm worse; use smaller row groups (Parquet), "
            "record batches (Arrow) or block_bytes (text), or fewer ranks",
            stacklevel=4,
        )


def _check_arguments(batch_size: int, seed: int, shard: tuple[int, int], block_bytes: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}: it must be from 0 to 2**64 - 1")
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard is {shard}: it must be (number, count) with 0 <= number < count")
    if block_bytes is not None and block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}: it must be at least 1")
