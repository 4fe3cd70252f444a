"""Input data of one rank: every mini-batch is split into one part per rank."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from thermocline.arrays import Keys
from thermocline.batch import Batch
from thermocline.config.data import Split
from thermocline.config.schema import Config
from thermocline.data.features import Features
from thermocline.data.open_data import has_split, open_data
from thermocline.data.reader import Reader
from thermocline.data.synthetic import SyntheticAds
from thermocline.errors import ConfigError, DataError


def check_config(config: Config, ranks: int) -> None:
    """Raise ConfigError for settings that the baseline does not support and that would change the result."""
    train = config.train
    supported = {"accumulate": 1, "clip_norm": None, "patience": None, "plateau_factor": 1.0}
    for name, value in supported.items():
        given = getattr(train, name)
        if given != value:
            raise ConfigError(f"train.{name} is {given}: the MPI baseline does not support it; remove it")
    if config.precision.kind != "fp32":
        raise ConfigError(f"precision.kind is {config.precision.kind}: the MPI baseline supports fp32 rows only")
    if train.batch_size < ranks:
        raise ConfigError(f"train.batch_size is {train.batch_size}: {ranks} ranks need at least one example each")


class SyntheticShard:
    """This rank's part of each mini-batch of generated data; the parts of all ranks together are the mini-batch.

    An example is a function of its number, so a rank generates its part only.
    """

    def __init__(self, ads: SyntheticAds, rank: int, ranks: int) -> None:
        self._ads, self._rank, self._ranks = ads, rank, ranks
        self._size = ads.batch_size
        self.fields, self.dense = ads.fields, ads.dense

    def __iter__(self) -> Iterator[Batch]:
        assert self._ads.examples is not None
        for first in range(0, self._ads.examples, self._size):
            size = min(self._size, self._ads.examples - first)
            begin, end = (first + size * rank // self._ranks for rank in (self._rank, self._rank + 1))
            if begin < end:
                self._ads.batch_size = end - begin
                yield next(iter(self._ads.seek(begin)))

    def key_pieces(self, piece: int = 1 << 19) -> Iterator[Keys]:
        """Yield this rank's part of all keys, equally many pieces on every rank; the last ones may be empty."""
        total = sum(self._ads.keys)
        for first in range(0, total, piece * self._ranks):
            begin = min(first + piece * self._rank, total)
            yield self._ads.some_keys(begin, min(begin + piece, total))


class RepeatedBatches:
    """Batches in memory, repeated without end."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in itertools.cycle(self._batches):
            fresh = copy.copy(batch)
            fresh.prepared = {}
            yield fresh


def open_shard(
    config: Config, split: Split, rank: int, ranks: int, features: Features | None
) -> Iterable[Batch] | None:
    """Batches of this rank; None if the config has no data for the split. Files are distributed by blocks.

    features   features of the training data; None for the training data itself
    """
    data, train = config.data, config.train
    if not has_split(data, split):
        return None
    if data.format == "synth":
        ads: Any = open_data(data, split, batch_size=train.batch_size)
        return SyntheticShard(ads, rank, ranks)
    size = train.batch_size * (rank + 1) // ranks - train.batch_size * rank // ranks
    shuffle = data.shuffle and split == "train"
    options: dict[str, Any] = {"batch_size": size, "seed": train.seed, "shuffle": shuffle, "features": features}
    try:
        return Reader(getattr(data, split), data, shard=(rank, ranks), **options)
    except DataError:
        if split == "train" or ranks == 1:
            raise
    # Fewer blocks than ranks: the first rank evaluates all of the data.
    return Reader(getattr(data, split), data, **options) if rank == 0 else []
