"""`tc.SyntheticAds`: endless ads data made up as it is read, with labels that a good model can learn.

Ids follow Zipf's law per field; labels come from a planted model with interactions (csrc/data/teacher.h), so that
logistic regression stays below models with interactions, and hashing into fewer bins costs accuracy. Example i is a
function of the configuration and i: any batch can be made at any time, on any machine, by any number of threads,
with the same bits.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from thermocline.batch import Batch, Floats
from thermocline.config.data import Hashing
from thermocline.core import core
from thermocline.data.feature_hashing import make as make_hasher
from thermocline.data.paper_models import Plan
from thermocline.data.writers import FORMATS, Format, write_parquet, write_text
from thermocline.embedding.arrays import Keys
from thermocline.errors import ThermoclineError, require_type, whole_number
from thermocline.utils.cpu_affinity import cores

Split = Literal["train", "valid", "test"]

# Splits are disjoint ranges of example numbers; the fourth quarter calibrates the teacher.
_FIRST = {"train": 0, "valid": 1 << 62, "test": 2 << 62}
_MAX_EXAMPLES = 1 << 62
_CHUNK_IDS = 1 << 22  # in memory at a time while files are written


class SyntheticAds:
    """An iterable of `tc.Batch`, deterministic by (seed, position). One iteration is one epoch of `examples`.

    `SyntheticAds.preset("E/1000")` gives the source's models; `ads.split("valid", examples=100_000)` other examples of
    the same world. Iterating again gives the same epoch again.
    """

    def __init__(
        self,
        *,
        keys: int | Sequence[int] = 1_000_000,
        fields: int = 26,
        nonzeros: int | tuple[int, int] | None = None,
        zipf: float | Sequence[float] = 1.05,
        spread: float = 100.0,
        dense: int = 0,
        batch_size: int = 4096,
        examples: int | None = None,
        seed: int = 0,
        split: Split = "train",
        base_rate: float = 0.2,
        signal: float = 2.5,
        label_noise: float = 0.05,
        hashing: Hashing | None = None,
        start: int | Mapping[str, Any] | None = None,
        threads: int | None = None,
        tensors: bool = True,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """
        keys         how many there are, up to 2**63, shared among the fields; or one number per field
        fields       how many; as many as `keys` has numbers
        nonzeros     ids per example, spread evenly over the fields; a pair: between the two. Default: one per field
        zipf         exponent of popularity; 0: all keys alike; or one per field
        spread       how many times the keys of the smallest field the largest one has
        dense        number of dense features
        examples     per epoch; none: endless
        base_rate    share of labels that are 1
        signal       deviation of the true logits: at 2.5 the teacher itself has an AUC near 0.85
        label_noise  share of labels that are drawn with the base rate instead
        hashing      of its batches' keys, into few bins; files that it writes have the keys themselves
        start        where the first iteration begins: a batch's `position`, or a number of examples
        threads      that make batches; default: all cores
        tensors      labels and dense features as torch tensors; False: as NumPy arrays
        shard        (number, count): every count-th batch of the epoch, from the number-th on; together they are all
        """
        require_type(shard, tuple | list, "shard", "(number, count), the number below the count")
        if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard is {shard}: (number, count), the number below the count")
        fields, dense, seed = whole_number(fields, "fields"), whole_number(dense, "dense"), whole_number(seed, "seed")
        batch_size = whole_number(batch_size, "batch_size")
        threads = None if threads is None else whole_number(threads, "threads")
        rates = {"spread": spread, "base_rate": base_rate, "signal": signal, "label_noise": label_noise}
        for name, rate in rates.items():
            require_type(rate, int | float, name, "a number")
        require_type(hashing, Hashing | None, "hashing", "a Hashing, or None")
        if not isinstance(keys, Iterable) or isinstance(keys, str):
            keys = whole_number(keys, "keys", "a whole number, or one per field")
            if not 1 <= fields <= 65536:
                raise ValueError(f"fields is {fields}: there are 1 to 65536")
            ids = _pair(fields if nonzeros is None else nonzeros)
            self.keys = _share(keys, fields, spread, -(-ids[1] // fields))
        else:
            self.keys = tuple(whole_number(size, f"keys[{i}]") for i, size in enumerate(keys))
            ids = _pair(len(self.keys) if nonzeros is None else nonzeros)
        self._fields = len(self.keys)
        self.nonzeros = ids
        for exponent in zipf if isinstance(zipf, Iterable) else [zipf]:
            require_type(exponent, int | float, "zipf", "a number, or one per field")
        self.zipf = tuple(zipf) if isinstance(zipf, Iterable) else (float(zipf),) * self._fields
        if len(self.zipf) != self._fields:
            raise ValueError(f"{len(self.zipf)} zipf exponents for {self._fields} fields: give one, or one per field")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: at least 1 example per batch")
        if dense < 0:
            raise ValueError(f"dense is {dense}: a number of features is not negative")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}: it has 64 bits, 0 to 2**64 - 1")
        self.dense = dense
        self.batch_size = batch_size
        self.seed = seed
        self.tensors = tensors
        self.shard = shard
        config = [seed, self.keys, self.zipf, ids, dense, base_rate, signal, label_noise]
        self._config = hashlib.blake2b(json.dumps(config).encode(), digest_size=8).hexdigest()
        workers = cores() if threads is None else threads
        popularity = (list(self.keys), list(self.zipf))
        try:
            self._core = core.Synth(seed, *popularity, *ids, dense, base_rate, signal, label_noise, workers)
        except ThermoclineError as error:
            raise ValueError(str(error)) from None
        self._hasher = make_hasher(hashing, threads)
        self._plan: Plan | None = None
        self._next = 0
        self._set_split(split, examples)
        if start is not None:
            self.seek(start)

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """Model A, B, C, D or E of the source, divided by what follows the slash: "E/1000". See `plan`.

        `options` are those of the constructor, and win over the preset's.
        """
        plan = Plan.of(name)
        ads = cls(**{"keys": plan.keys, "fields": plan.fields, "nonzeros": plan.nonzeros, **options})
        ads._plan = plan
        return ads

    @property
    def plan(self) -> Plan:
        """Suggested dim, hidden sizes and budgets (`mem`, `hbm`) of a preset."""
        if self._plan is None:
            raise ValueError('only presets have a plan: SyntheticAds.preset("E/1000").plan')
        return self._plan

    @property
    def fields(self) -> int:
        """Of its batches: one, if hashing puts them together."""
        return self._fields if self._hasher is None else self._hasher.settings.fields_of(self._fields)

    def some_keys(self, first: int, end: int) -> Keys:
        """Keys first .. end - 1 of all sum(self.keys), field after field, each from its most popular one on."""
        if not 0 <= first <= end <= sum(self.keys):
            raise IndexError(f"keys {first} to {end} of {sum(self.keys)}")
        return self._core.keys(first, end - first)

    # ---- splits and positions

    def split(self, split: Split, *, examples: int | None = None) -> SyntheticAds:
        """Other examples of the same world: same keys, same teacher, no example in common."""
        other = copy.copy(self)
        other._next = 0
        other._set_split(split, examples)
        return other

    def _set_split(self, split: Split, examples: int | None) -> None:
        if split not in _FIRST:
            raise ValueError(f"split is {split!r}: it is one of {', '.join(_FIRST)}")
        examples = None if examples is None else whole_number(examples, "examples")
        if examples is not None and not 0 <= examples <= _MAX_EXAMPLES:
            raise ValueError(f"examples is {examples}: an epoch has 0 to 2**62, or none for endless")
        self.split_name = split
        self.examples = examples

    def seek(self, position: int | Mapping[str, Any]) -> Self:
        """The next iteration begins there: a batch's `position`, or a number of examples. Those after it, at 0."""
        if isinstance(position, Mapping):
            mine = self._position(0)
            for name in ("reader", "config", "split", "shard"):
                if position.get(name, [0, 1]) != mine.get(name, [0, 1]):
                    raise ValueError(
                        f"this position is of other data: its {name} is {position.get(name)!r}, here it is "
                        f"{mine.get(name)!r} (config is a digest of seed, keys, fields and the other options)"
                    )
            position = position["example"]
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        if not isinstance(position, int) or not 0 <= position <= end:
            raise ValueError(f"position {position!r} is not an example of this epoch, 0 to {end}")
        self._next = position
        return self

    def _position(self, example: int) -> dict[str, Any]:
        place: dict[str, Any] = {"reader": "synthetic_ads", "config": self._config, "split": self.split_name}
        if self.shard != (0, 1):
            place["shard"] = list(self.shard)
        return {**place, "example": example}

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        first, self._next = self._next, 0
        return self._batches(first)

    def _batches(self, first: int) -> Iterator[Batch]:
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        number, count = self.shard
        if first == 0:
            first = number * self.batch_size
        while first < end:
            yield self._make(first, min(self.batch_size, end - first))
            first += self.batch_size * count

    def __len__(self) -> int:
        """Batches per epoch."""
        if self.examples is None:
            raise TypeError("endless data has no length: give `examples`")
        return len(range(self.shard[0], -(-self.examples // self.batch_size), self.shard[1]))

    def batch(self, number: int) -> Batch:
        """Batch `number` of the epoch, counted from 0. Costs no more than any other."""
        first = number * self.batch_size
        end = _MAX_EXAMPLES if self.examples is None else self.examples
        if not 0 <= first < end:
            raise IndexError(f"batch {number} of an epoch with {-(-end // self.batch_size)}")
        return self._make(first, min(self.batch_size, end - first))

    def _make(self, first: int, examples: int) -> Batch:
        batch = self._draw(first, examples)
        return batch if self._hasher is None else self._hasher(batch)

    def _draw(self, first: int, examples: int) -> Batch:
        """With the keys themselves."""
        ids, offsets, dense, label, _ = self._core.generate(_FIRST[self.split_name] + first, examples)
        features: Any = dense.reshape(examples, self.dense) if self.dense else None
        target: Any = label
        if self.tensors:
            import torch

            target = torch.from_numpy(label)
            features = None if features is None else torch.from_numpy(features)
        after = first + examples + (self.shard[1] - 1) * self.batch_size  # where this shard's next batch begins
        if self.examples is not None:
            after = min(after, self.examples)
        return Batch(ids, offsets, self._fields, None, features, target, self._position(after))

    def key_of(self, field: int, rank: int) -> int:
        """The key of a field that is the rank-th most popular there, from 0."""
        return self._core.key_of(field, rank)

    def true_logits(self, first: int, examples: int) -> Floats:
        """What the teacher thinks of these examples, before label noise: its AUC is what the best model can reach."""
        return self._core.generate(_FIRST[self.split_name] + first, examples)[4]

    # ---- files

    def write(
        self,
        path: str | os.PathLike[str],
        format: Format = "parquet",
        *,
        examples: int | None = None,
        examples_per_file: int | None = None,
        compression: str = "zstd",
        progress: Callable[[int], None] = lambda examples: None,
    ) -> list[Path]:
        """Writes the epoch, or its first `examples`, in bounded memory; returns the files.

        format              "parquet" (columns label, dense_i, field_i), "libsvm" (label id:1 ...) or "libffm"
                            (label field:id:1 ...)
        examples_per_file   makes `path` a folder of files of that many examples
        compression         of Parquet
        progress            called with the number of examples just written
        """
        if format not in FORMATS:
            raise ValueError(f"format is {format!r}: it is one of {', '.join(FORMATS)}")
        total = self.examples if examples is None else examples
        if total is None:
            raise ValueError("the data is endless: say how many `examples` to write")
        if total < 1 or (self.examples is not None and total > self.examples):
            raise ValueError(f"examples is {total}: the epoch has {self.examples}, and a file at least 1")
        target = Path(path)
        if examples_per_file is None:
            parts = [(target, 0, total)]
        else:
            target.mkdir(parents=True, exist_ok=True)
            firsts = range(0, total, examples_per_file)
            ends = [min(total, first + examples_per_file) for first in firsts]
            parts = [(target / f"part-{i:05}.{format}", *cut) for i, cut in enumerate(zip(firsts, ends, strict=True))]
        for file, first, end in parts:
            if format == "parquet":
                write_parquet(file, self._chunks(first, end, progress), self._one_hot, compression)
            else:
                write_text(file, self._chunks(first, end, progress), format == "libffm")
        return [file for file, _, _ in parts]

    @property
    def _one_hot(self) -> bool:
        return self.nonzeros == (self._fields,) * 2

    def _chunks(self, first: int, end: int, progress: Callable[[int], None]) -> Iterator[Batch]:
        """In pieces whose size depends on neither batch_size nor the files."""
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
            f"SyntheticAds({name}{self.split_name}, {sum(self.keys)} keys in {self._fields} fields, {ids} ids per "
            f"example, {count}, seed={self.seed})"
        )


def _pair(nonzeros: int | tuple[int, int]) -> tuple[int, int]:
    rule = "a number from 1 to 2**24, or (least, most)"
    pair = nonzeros if isinstance(nonzeros, (tuple, list)) and len(nonzeros) == 2 else (nonzeros, nonzeros)
    low, high = (whole_number(number, "nonzeros", rule) for number in pair)
    if not 1 <= low <= high <= 1 << 24:
        raise ValueError(f"nonzeros is {nonzeros!r}: {rule}")
    return low, high


def _share(keys: int, fields: int, spread: float, least: int) -> tuple[int, ...]:
    """Field sizes that fall evenly (in ratio) from first to last, none below `least`, with sum `keys`."""
    if not 1 <= keys <= 1 << 63:
        raise ValueError(f"keys is {keys}: there are 1 to 2**63")
    if not 1 <= spread <= 1e6:
        raise ValueError(f"spread is {spread}: the largest field has 1 to 1e6 times the keys of the smallest")
    # Integers, so that a last bit of pow is no other data set.
    shares = [round(2**30 * spread ** (-field / max(fields - 1, 1))) for field in range(fields)]
    sizes = [max(least, keys * share // sum(shares)) for share in shares]
    sizes[0] = keys - sum(sizes[1:])
    if sizes[0] < least:
        raise ValueError(
            f"{keys} keys are too few: each of {fields} fields needs {least}, as many as an example can have of it"
        )
    return tuple(sizes)
