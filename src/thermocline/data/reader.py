"""`tc.Reader`: files -> batches, in an order that a seed fixes, from any position.

The files are cut into blocks (blocks.py). An epoch's order is a permutation of the blocks; as many consecutive ones as
make up the shuffle buffer form a lot, whose examples are shuffled together; batches are cut from lot after lot. A
position names a lot by its first block, and a number of examples in it: resuming reads that one lot again.
Without shuffling a lot is one block, in the order of the files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from thermocline.batch import Batch
from thermocline.config.data import Data
from thermocline.core import core
from thermocline.data.block_prefetch import Place, load_ahead
from thermocline.data.feature_hashing import make as make_hasher
from thermocline.data.features import Features
from thermocline.data.files import each
from thermocline.data.formats import open_files
from thermocline.data.parquet import ParquetBlocks
from thermocline.data.text_blocks import Block, Malformed
from thermocline.errors import DataError
from thermocline.utils.cpu_affinity import cores

_DESCRIBED = 10  # malformed lines that are remembered

Order = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Malformed lines that an iteration left out."""

    count: int
    malformed: tuple[Malformed, ...]
    """The first few."""

    @property
    def first(self) -> tuple[str, ...]:
        """Where those are, and what is wrong with them. Finding line numbers reads the files up to those lines."""
        return tuple(str(malformed) for malformed in self.malformed)


@dataclasses.dataclass(slots=True)
class _Lot:
    """Examples that are shuffled together."""

    place: Place
    blocks: list[Block]
    order: Order
    taken: int = 0

    @property
    def left(self) -> int:
        return len(self.order) - self.taken


class Reader:
    """An iterable of `tc.Batch`: one iteration is one epoch. `set_epoch(n)` chooses its order, `seek` where it begins.

    `tc.Reader("train/*.csv", label="click", numeric=("age",), batch_size=4096, shuffle=True)`
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
        **options: Any,
    ) -> None:
        """
        paths        files, folders, globs, URLs: one or several
        data         how to read them (its `shuffle` is not used here); `options` are
                     fields of it: format, label, categorical, numeric, on_error, ...
        batch_size   examples per batch; the last of an epoch may have fewer
        seed         of the shuffling
        shard        (number, count): this reader's part; all parts together are the whole, and no two overlap. With
                     several workers per rank: (rank * workers + worker, ranks * workers)
        features     `.features` of the training data's reader: same fields, same statistics. None: those of data.train
                     if these are other files, otherwise their own
        labelled     False: labels are not read, and 0; None: read where there are some, else 0
        block_bytes  of text parsed at a time by one thread; none: 1 MiB, of remote files 8 MiB
        tensors      labels and dense features as torch tensors; False: as NumPy arrays
        """
        given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        names = [os.fspath(path) for path in given]
        settings = Data(**options) if data is None else dataclasses.replace(data, **options)
        _check(batch_size, seed, shard, block_bytes)
        self.data = settings
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.shard = (int(shard[0]), int(shard[1]))
        self.tensors = tensors
        if features is None and settings.train and list(settings.train) != names:
            features = open_files(settings.train, settings, features=None, labelled=True, block_bytes=None).features
        opened = open_files(names, settings, features=features, labelled=labelled, block_bytes=block_bytes)
        self.format = opened.format
        self.features = opened.features
        """Fields, dense features and statistics, as other readers and `predict` need them."""
        self._sources = opened.sources
        self._blocks = opened.blocks
        self._threads = settings.threads or min(8, cores())
        self._hasher = make_hasher(settings.hashing, settings.threads)
        self._lot_blocks = max(1, round(settings.shuffle_buffer / opened.blocks.examples_per_unit)) if shuffle else 1
        sequential = int(opened.blocks.sequential.sum())
        self._deal_pieces = 0 < sequential < self.shard[1]
        if not sequential and len(opened.blocks) < self.shard[1]:
            raise DataError(
                f"{len(opened.blocks)} blocks for {self.shard[1]} shards: some would have no examples; use fewer "
                "shards, a smaller block_bytes (text) or smaller row groups (Parquet)"
            )
        self._identity = {
            "reader": "files",
            "files": _files_digest(opened.sources),
            "features": opened.digest,
            "seed": seed,
            "shuffle": shuffle,
            "shard": list(self.shard),
            "block_bytes": opened.block_bytes,
            "lot_blocks": self._lot_blocks,
        }
        self._epoch = 0
        self._start: tuple[Place, int] = ((0, 0), 0)
        self._skipped = 0
        self._malformed: list[Malformed] = []

    # ---- what is known before the first batch

    @property
    def fields(self) -> int:
        """Of its batches: one, if data.hashing puts them together."""
        fields = len(self.features.fields)
        return fields if self._hasher is None else self._hasher.settings.fields_of(fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        names = self.features.fields
        return names if self.fields == len(names) else ("all fields",)

    @property
    def dense(self) -> int:
        """Number of dense features."""
        return len(self.features.dense)

    @property
    def skipped(self) -> Skipped:
        """What the latest iteration has left out so far."""
        return Skipped(self._skipped, tuple(self._malformed))

    @property
    def bytes(self) -> int:
        """Of all its files, as they are stored."""
        return sum(source.size for source in self._sources)

    def estimated_batches(self) -> int:
        """About how many an epoch has: from the files' sizes and a sample of lines."""
        return max(1, math.ceil(self._blocks.total_examples / self.shard[1] / self.batch_size))

    def __len__(self) -> int:
        """Batches per epoch, where the files say so (Parquet)."""
        if isinstance(self._blocks, ParquetBlocks) and self.data.on_error == "raise":
            return -(-self._blocks.rows(self._order(self._epoch)) // self.batch_size)
        raise TypeError(
            "the number of batches in these files is known only once they are read: see estimated_batches()"
        )

    def __repr__(self) -> str:
        return (
            f"Reader({self.format}, {len(self._sources)} files with {self.bytes} bytes, {self.fields} fields, "
            f"{self.dense} dense, batch_size={self.batch_size}, shuffle={self.shuffle}, shard={self.shard})"
        )

    # ---- epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """The iterations from now on have the order of this epoch."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: epochs are counted from 0")
        self._epoch = epoch

    def seek(self, position: Mapping[str, Any]) -> Self:
        """The next iteration is the rest of the epoch after the batch with this `position`; later ones are whole."""
        for name, mine in self._identity.items():
            if not isinstance(position, Mapping) or position.get(name) != mine:
                its = position.get(name) if isinstance(position, Mapping) else position
                raise DataError(
                    f"this position is of other data or settings: its {name} is {its!r}, here it is {mine!r} "
                    "(files: names and sizes; features: format, columns and what becomes of them)"
                )
        values: list[Any] = [position.get(name) for name in ("epoch", "unit", "block", "example")]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise DataError(f"this position is damaged: epoch, unit, block and example are {values}")
        epoch, unit, block, example = values
        if unit and unit >= len(self._order(epoch)):
            raise DataError(f"this position is damaged: unit {unit} of {len(self._order(epoch))}")
        self._epoch = epoch
        self._start = ((unit, block), example)
        return self

    def _order(self, epoch: int) -> Order:
        """The units of this shard, in this epoch's order."""
        order = np.arange(len(self._blocks), dtype=np.int64)
        if self.shuffle:
            order = _permutation(len(order), self.seed, epoch)
        number, count = self.shard
        if not self._deal_pieces:
            return order[number::count]
        sequential = self._blocks.sequential[order]
        mine = (np.cumsum(~sequential) - 1) % count == number
        return np.asarray(order[sequential | mine])

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        (place, example), self._start = self._start, ((0, 0), 0)
        return self._batches(self._epoch, place, example)

    def _batches(self, epoch: int, start: Place, example: int) -> Iterator[Batch]:
        self._skipped, self._malformed = 0, []
        each(lambda source: source.check_unchanged(), self._sources)
        lots: collections.deque[_Lot] = collections.deque()
        examples = 0
        with contextlib.closing(self._lots(epoch, start)) as coming:
            while True:
                while sum(lot.left for lot in lots) < self.batch_size:
                    lot = next(coming, None)
                    if lot is None:
                        break
                    lot.taken, example = example, 0
                    if lot.left < 0:
                        raise DataError(f"this position is damaged: example {lot.taken} of a lot with {len(lot.order)}")
                    lots.append(lot)
                    examples += len(lot.order)
                batch = self._take(lots, epoch)
                if batch is None:
                    break
                yield batch
        if examples or start != (0, 0):
            return
        if self._skipped:
            raise DataError(f"all {self._skipped} lines are malformed; the first: {self._malformed[0]}")
        if self.shard[1] == 1:
            others = f", nor have the {len(self._sources) - 1} others" if len(self._sources) > 1 else ""
            raise DataError(f"{self._sources[0].name} has no examples{others}: there are only empty lines")

    def _take(self, lots: collections.deque[_Lot], epoch: int) -> Batch | None:
        """The next batch; its examples leave the lots."""
        blocks: list[Any] = []
        orders: list[Order] = []
        need, before = self.batch_size, 0
        place, taken = (0, 0), 0
        while lots and need:
            lot = lots[0]
            count = min(need, lot.left)
            if count:
                blocks += [block.examples for block in lot.blocks]
                orders.append(lot.order[lot.taken : lot.taken + count] + before)
                before += len(lot.order)
            lot.taken += count
            need -= count
            place, taken = lot.place, lot.taken
            if lot.left == 0:
                lots.popleft()
        if not orders:
            return None
        fields = len(self.features.fields)
        order = orders[0] if len(orders) == 1 else np.concatenate(orders)
        ids, offsets, weights, dense, label = core.gather_examples(blocks, fields, self.dense, order)
        features: Any = dense.reshape(len(order), self.dense) if self.dense else None
        target: Any = label
        if self.tensors:
            import torch

            target = torch.from_numpy(label)
            features = None if features is None else torch.from_numpy(features)
        where = {"epoch": epoch, "unit": place[0], "block": place[1], "example": taken}
        batch = Batch(ids, offsets, fields, weights, features, target, {**self._identity, **where})
        return batch if self._hasher is None else self._hasher(batch)

    def _lots(self, epoch: int, start: Place) -> Generator[_Lot, None, None]:
        number, count = self.shard
        order = self._order(epoch).tolist()
        coming = load_ahead(
            self._blocks,
            order,
            start,
            threads=self._threads,
            depth=max(self._lot_blocks, self._threads + 1),
            wanted=(lambda piece: piece % count == number) if self._deal_pieces else (lambda piece: True),
        )
        with contextlib.closing(coming):
            gathered: list[Block] = []
            place = start
            for where, block in coming:
                self._note(block)
                place = place if gathered else where
                gathered.append(block)
                if len(gathered) == self._lot_blocks:
                    yield self._lot(epoch, place, gathered)
                    gathered = []
            if gathered:
                yield self._lot(epoch, place, gathered)

    def _lot(self, epoch: int, place: Place, blocks: list[Block]) -> _Lot:
        examples = sum(len(block) for block in blocks)
        if self.shuffle:
            return _Lot(place, blocks, _permutation(examples, self.seed, epoch, *place))
        return _Lot(place, blocks, np.arange(examples, dtype=np.int64))

    def _note(self, block: Block) -> None:
        self._skipped += block.malformed
        self._malformed += block.first_malformed[: _DESCRIBED - len(self._malformed)]


def _permutation(count: int, *seed: int) -> Order:
    """Sorted random numbers: NumPy keeps its raw streams for ever, its `permutation` not."""
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


def _files_digest(sources: Sequence[Any]) -> str:
    """Names without folders, and sizes: data that was moved as a whole is still the same."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        digest.update(f"{os.path.basename(source.path)}\0{source.size}\n".encode())
    return f"{len(sources)} files, {sum(source.size for source in sources)} bytes, {digest.hexdigest()}"


def _check(batch_size: int, seed: int, shard: tuple[int, int], block_bytes: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: at least 1 example per batch")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}: it has 64 bits, 0 to 2**64 - 1")
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard is {shard}: (number, count) with 0 <= number < count")
    if block_bytes is not None and block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}: at least 1")
