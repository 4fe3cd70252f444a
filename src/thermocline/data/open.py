"""[data] -> the batches of a split: a reader of its files, or generated ads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thermocline.config.data import Data, Split
from thermocline.data.features import Features
from thermocline.data.files import find
from thermocline.data.reader import Reader
from thermocline.data.synthetic import SyntheticAds
from thermocline.errors import ConfigError, DataError


def has_split(data: Data, split: Split) -> bool:
    """Whether there is data for it."""
    return _synth_examples(data, split) > 0 if data.format == "synth" else bool(getattr(data, split))


def check_paths(data: Data, splits: Iterable[Split]) -> None:
    """Raises `ConfigError` for a local path that is not there. URLs are looked at when they are read."""
    if data.format == "synth":
        return
    for split in splits:
        for i, path in enumerate(getattr(data, split)):
            if "://" not in path:
                try:
                    find([path])
                except DataError as error:
                    raise ConfigError(f"data.{split}[{i}]: {error}") from None


def open_data(
    data: Data,
    split: Split,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool | None = None,
    features: Features | None = None,
    labelled: bool | None = True,
    tensors: bool = True,
    shard: tuple[int, int] = (0, 1),
) -> Reader | SyntheticAds:
    """Batches of one split. Validation and test come in the order of their files.

    shuffle    none: the training data, if data.shuffle says so
    features   of the training data; none: taken from the training files
    labelled   False: labels are not read, and 0; None: read where there are some, else 0
    tensors    False: labels and dense features are NumPy arrays, and torch is not needed
    shard      (number, count): of the ranks of a job, each has a part
    """
    if not has_split(data, split):
        what = f"data.synth.{split}_examples is 0" if data.format == "synth" else f"data.{split} names no files"
        raise ConfigError(f"there is no {split} data: {what}")
    if data.format == "synth":
        return _generated(data, split, batch_size, tensors, shard)
    if features is None and split != "train" and data.train:
        features = Reader(data.train, data, batch_size=batch_size).features
    mixed = data.shuffle and split == "train" if shuffle is None else shuffle
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "shuffle": mixed, "tensors": tensors}
    options["shard"] = shard
    return Reader(getattr(data, split), data, features=features, labelled=labelled, **options)


def _synth_examples(data: Data, split: Split) -> int:
    synth = data.synth
    return {"train": synth.examples, "valid": synth.valid_examples, "test": synth.test_examples}[split]


def _generated(data: Data, split: Split, batch_size: int, tensors: bool, shard: tuple[int, int]) -> SyntheticAds:
    synth = data.synth
    options: dict[str, Any] = {"zipf": synth.zipf, "dense": synth.dense, "seed": synth.seed}
    options |= {"threads": data.threads, "tensors": tensors, "shard": shard, "hashing": data.hashing}
    try:
        if synth.preset is not None:
            ads = SyntheticAds.preset(synth.preset, batch_size=batch_size, **options)
        else:
            size = {"keys": synth.keys, "fields": synth.fields, "nonzeros": synth.nonzeros}
            ads = SyntheticAds(batch_size=batch_size, **size, **options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"[data.synth]: {error}") from None
    return ads.split(split, examples=_synth_examples(data, split))
