"""`tc.SyntheticAds`: generated ads data of any size, with labels that a model can learn.

Ids follow Zipf's law in each field. Labels come from a planted model with interactions, the teacher
(csrc/data/teacher.h): models with interactions reach a higher AUC than logistic regression, and hashing into fewer bins
lowers it. Example i is a function of the configuration and i: every batch can be generated independently, with the same
bits for any number of threads.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from thermocline.arrays import Floats, Keys
from thermocline.batch import Batch
from thermocline.config.data import Hashing, Split
from thermocline.data.ads_distribution import AdsDistribution
from thermocline.data.feature_hashing import make_hasher
from thermocline.data.paper_models import PaperModel
from thermocline.data.writers import OUTPUT_FORMATS, OutputFormat, write_parquet, write_text
from thermocline.errors import require, require_type, whole_number
from thermocline.utils.cpu_affinity import cores

# First example number of each split: the splits are disjoint ranges. The fourth quarter calibrates the teacher.
_FIRST = {"train": 0, "valid": 1 << 62, "test": 2 << 62}
_MAX_EXAMPLES = 1 << 62
_CHUNK_IDS = 1 << 22  # ids in memory while files are written


class SyntheticAds:
    """An iterable of `tc.Batch`, determined by configuration and position. One iteration is one epoch of `examples`.

    `SyntheticAds.preset("E/1000")` has the sizes of a model of Zhao et al. (MLSys 2020). `ads.split("valid",
    examples=100_000)` generates other examples with the same keys and teacher. Every iteration repeats the same epoch.
    """

    def __init__(
        self,
        distribution: AdsDistribution | None = None,
        *,
        batch_size: int = 4096,
        examples: int | None = None,
        split: Split = "train",
        hashing: Hashing | None = None,
        start: int | Mapping[str, Any] | None = None,
        threads: int | None = None,
        tensors: bool = True,
        shard: tuple[int, int] = (0, 1),
        contiguous: bool = False,
        **options: Any,
    ) -> None:
        """
        distribution  keys, fields, labels ...; `options` override its fields: keys, fields, nonzeros, zipf, spread,
                      dense, seed, base_rate, signal, label_noise (see `AdsDistribution`)
        batch_size    examples per batch
        examples      examples per epoch; None means endless
        split         training, validation and test data have different examples
        hashing       feature hashing of the batches' keys; `write` writes the keys themselves
        start         start of the first iteration: a batch's `position`, or a number of examples
        threads       threads that generate a batch; None means all cores
        tensors       return labels and dense features as torch tensors; False returns NumPy arrays
        shard         (number, count): generate every count-th batch of the epoch, beginning with batch `number`
        contiguous    shards are consecutive batches; the epoch must have an end
        """
        rule = "(number, count) with 0 <= number < count"
        require_type(shard, tuple | list, "shard", rule)
        require(len(shard) == 2 and 0 <= shard[0] < shard[1], "shard", shard, rule)
        batch_size = whole_number(batch_size, "batch_size")
        require(batch_size >= 1, "batch_size", batch_size, "at least 1")
        threads = None if threads is None else whole_number(threads, "threads")
        require_type(hashing, Hashing | None, "hashing", "a Hashing, or None")
        base = AdsDistribution() if distribution is None else distribution
        self.distribution = dataclasses.replace(base, **options)
        self.batch_size = batch_size
        self.tensors = tensors
        self.shard = shard
        self._contiguous = contiguous
        self._config = self.distribution.digest()
        self._core = self.distribution.generator(cores() if threads is None else threads)
        self._hasher = make_hasher(hashing, threads)
        self._plan: PaperModel | None = None
        self._next = 0
        self._set_split(split, examples)
        if start is not None:
            self.seek(start)

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """Generate data for model A, B, C, D or E of Zhao et al. (2020), scaled down: "E/1000" is 1/1000 of model E.

        `options` are arguments of the constructor and override the preset. `plan` has the model's other sizes.
        """
        plan = PaperModel.parse(name)
        ads = cls(**{"keys": plan.keys, "fields": plan.fields, "nonzeros": plan.nonzeros, **options})
        ads._plan = plan
        return ads

    @property
    def plan(self) -> PaperModel:
        """Dim, hidden sizes and budgets (`mem`, `hbm`) of a preset."""
        if self._plan is None:
            raise ValueError('only a preset has a plan, such as SyntheticAds.preset("E/1000").plan')
        return self._plan

    @property
    def keys(self) -> tuple[int, ...]:
        """Number of keys of each field."""
        return self.distribution.field_keys

    @property
    def zipf(self) -> tuple[float, ...]:
        """Zipf exponent of each field."""
        return self.distribution.field_zipf

    @property
    def nonzeros(self) -> tuple[int, int]:
        """Least and most ids per example."""
        return self.distribution.nonzeros_range

    @property
    def dense(self) -> int:
        """Number of dense features."""
        return self.distribution.dense

    @property
    def seed(self) -> int:
        return self.distribution.seed

    @property
    def fields(self) -> int:
        """Number of fields of a batch; 1 if hashing combines them."""
        return len(self.keys) if self._hasher is None else self._hasher.settings.fields_of(len(self.keys))

    def some_keys(self, first: int, end: int) -> Keys:
        """Return keys number first .. end - 1 of all sum(self.keys), numbered by field, then by falling frequency."""
        if not 0 <= first <= end <= sum(self.keys):
            raise IndexError(f"keys {first} to {end} are out of range: there are {sum(self.keys)} keys")
        return self._core.keys(first, end - first)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that determine the batches of all shards together: equal on all ranks of a run."""
        hashing = None if self._hasher is None else dataclasses.asdict(self._hasher.settings)
        sizes = {"examples": self.examples, "batch_size": self.batch_size, "shards": self.shard[1]}
        return {"generator": self._config, "split": self.split_name, **sizes, "hashing": hashing}

    # ---- splits and positions

    def split(self, split: Split, *, examples: int | None = None) -> SyntheticAds:
        """Return a generator of other examples with the same keys and teacher."""
        other = copy.copy(self)
        other._next = 0
        other._set_split(split, examples)
        return other

    def _set_split(self, split: Split, examples: int | None) -> None:
        require(split in _FIRST, "split", split, f"one of {', '.join(_FIRST)}")
        examples = None if examples is None else whole_number(examples, "examples")
        valid = examples is None or 0 <= examples <= _MAX_EXAMPLES
        require(valid, "examples", examples, "from 0 to 2**62, or None for endless data")
        self.split_name = split
        self.examples = examples

    def seek(self, position: int | Mapping[str, Any]) -> Self:
        """Start the next iteration at a batch's `position` or a number of examples; later iterations start at 0."""
        if isinstance(position, Mapping):
            expected = self._position(0)
            for name in ("reader", "config", "split", "shard", "contiguous"):
                if position.get(name, [0, 1]) != expected.get(name, [0, 1]):
                    raise ValueError(
                        f"this position belongs to other data: its {name} is {position.get(name)!r}, but here it is "
                        f"{expected.get(name)!r} (config is a digest of seed, keys, fields and the other options)"
                    )
            position = position["example"]
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        if not isinstance(position, int) or not 0 <= position <= end:
            raise ValueError(f"position {position!r} is not an example of this epoch: it must be from 0 to {end}")
        self._next = position
        return self

    def _position(self, example: int) -> dict[str, Any]:
        position: dict[str, Any] = {"reader": "synthetic_ads", "config": self._config, "split": self.split_name}
        if self.shard != (0, 1):
            position["shard"] = list(self.shard)
        if self._contiguous:
            position["contiguous"] = True
        return {**position, "example": example}

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        first, self._next = self._next, 0
        return self._batches(first)

    def _batches(self, first: int) -> Iterator[Batch]:
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        own = self._shard_batches(-(-end // self.batch_size))
        if first == 0:
            first = own.start * self.batch_size
        while first < min(end, own.stop * self.batch_size):
            yield self._make(first, min(self.batch_size, end - first))
            first += self.batch_size * own.step

    def _shard_batches(self, batches: int) -> range:
        """Return the numbers of this shard's batches, of all `batches` of an epoch."""
        number, count = self.shard
        if not self._contiguous:
            return range(number, batches, count)
        return range(number * batches // count, (number + 1) * batches // count)

    def __len__(self) -> int:
        """Batches per epoch."""
        if self.examples is None:
            raise TypeError("endless data has no length: set `examples`")
        return len(self._shard_batches(-(-self.examples // self.batch_size)))

    def batch(self, number: int) -> Batch:
        """Generate batch `number` of the epoch, counted from 0."""
        first = number * self.batch_size
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        if not 0 <= first < end:
            raise IndexError(f"batch {number} is out of range: the epoch has {-(-end // self.batch_size)} batches")
        return self._make(first, min(self.batch_size, end - first))

    def _make(self, first: int, examples: int) -> Batch:
        batch = self._draw(first, examples)
        return batch if self._hasher is None else self._hasher(batch)

    def _draw(self, first: int, examples: int) -> Batch:
        """Generate a batch without feature hashing."""
        ids, offsets, dense, label, _ = self._core.generate(_FIRST[self.split_name] + first, examples)
        features: Any = dense.reshape(examples, self.dense) if self.dense else None
        target: Any = label
        if self.tensors:
            import torch

            target = torch.from_numpy(label)
            features = None if features is None else torch.from_numpy(features)
        skipped = 0 if self._contiguous else self.shard[1] - 1
        after = first + examples + skipped * self.batch_size  # first example of this shard's next batch
        if self.examples is not None:
            after = min(after, self.examples)
        return Batch(ids, offsets, len(self.keys), None, features, target, self._position(after))

    def key_of(self, field: int, rank: int) -> int:
        """Return the key of a field with frequency rank `rank`, counted from 0."""
        return self._core.key_of(field, rank)

    def true_logits(self, first: int, examples: int) -> Floats:
        """Return the teacher's logits before label noise; their AUC is the upper bound for any model."""
        return self._core.generate(_FIRST[self.split_name] + first, examples)[4]

    # ---- files

    def write(
        self,
        path: str | os.PathLike[str],
        format: OutputFormat = "parquet",
        *,
        examples: int | None = None,
        examples_per_file: int | None = None,
        compression: str = "zstd",
        progress: Callable[[int], None] = lambda examples: None,
    ) -> list[Path]:
        """Write the epoch, or its first `examples`, to files in bounded memory; return their paths.

        format              "parquet" (columns label, dense_i, field_i), "libsvm" (label id:1 ...) or "libffm"
                            (label field:id:1 ...)
        examples_per_file   split into files of this size in the folder `path`
        compression         compression of Parquet columns
        progress            called with the number of examples just written
        """
        require(format in OUTPUT_FORMATS, "format", format, f"one of {', '.join(OUTPUT_FORMATS)}")
        total = self.examples if examples is None else examples
        if total is None:
            raise ValueError("the data is endless: set `examples` to the number to write")
        if total < 1 or (self.examples is not None and total > self.examples):
            raise ValueError(f"examples is {total}: it must be at least 1, and the epoch has {self.examples}")
        target = Path(path)
        if examples_per_file is None:
            parts = [(target, 0, total)]
        else:
            target.mkdir(parents=True, exist_ok=True)
            parts = [
                (target / f"part-{i:05}.{format}", first, min(total, first + examples_per_file))
                for i, first in enumerate(range(0, total, examples_per_file))
            ]
        for file, first, end in parts:
            if format == "parquet":
                write_parquet(file, self._chunks(first, end, progress), self._one_hot, compression)
            else:
                write_text(file, self._chunks(first, end, progress), format == "libffm")
        return [file for file, _, _ in parts]

    @property
    def _one_hot(self) -> bool:
        return self.nonzeros == (len(self.keys),) * 2

    def _chunks(self, first: int, end: int, progress: Callable[[int], None]) -> Iterator[Batch]:
        """Yield the examples in chunks whose size does not depend on batch_size or examples_per_file."""
        chunk = max(1, min(65536, _CHUNK_IDS // self.nonzeros[1]))
        for start in range(first, end, chunk):
            examples = min(chunk, end - start)
            yield self._draw(start, examples)
            progress(examples)

    def __repr__(self) -> str:
        low, high = self.nonzeros
        ids = f"{low}" if low == high else f"{low}..{high}"
        name = "" if self._plan is None else f"{self._plan.name}/{self._plan.scale:g}, "
        count = "endless" if self.examples is None else f"{self.examples} examples"
        return (
            f"SyntheticAds({name}{self.split_name}, {sum(self.keys)} keys in {len(self.keys)} fields, {ids} ids per "
            f"example, {count}, seed={self.seed})"
        )
