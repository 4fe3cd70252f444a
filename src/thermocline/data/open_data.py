"""Opens the training, validation or test data of a [data] config: a reader of files, or generated ads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from thermocline.config.data import Data, Format, Split
from thermocline.data.features import Features
from thermocline.data.files import find_files, is_remote, without_secrets
from thermocline.data.follow import FileAgreement, FollowReader
from thermocline.data.reader import Reader
from thermocline.data.synthetic import SyntheticAds
from thermocline.errors import ConfigError, DataError


def has_split(data: Data, split: Split) -> bool:
    """Whether the config has data for this split."""
    return _synth_examples(data, split) > 0 if data.format == "synth" else bool(getattr(data, split))


def training_format(data: Data) -> Format | None:
    """Return the format of the training data, by the config or by its local files; None: neither tells it."""
    with contextlib.suppress(DataError):
        return data.format_of(tuple(data.train))
    with contextlib.suppress(DataError):
        local = [path for path in data.train if not is_remote(path)]
        return data.format_of(tuple(source.path for source in find_files(local, empty=True)))
    return None


def check_paths(data: Data, splits: Iterable[Split]) -> None:
    """Raise `ConfigError` for a local path that does not exist. URLs are checked when they are read."""
    if data.format == "synth":
        return
    for split in splits:
        for i, path in enumerate(getattr(data, split)):
            if not is_remote(path) and not (data.follow and split == "train"):
                try:
                    find_files([path])
                except DataError as error:
                    raise ConfigError(f"data.{split}[{i}]: {error}") from None


def require_local(data: Data, split: Split, run_dir: str) -> None:
    """Raise `ConfigError` if the folder of a run, which may come from elsewhere, names data behind a URL."""
    for i, path in enumerate(getattr(data, split) if data.format != "synth" else ()):
        if is_remote(path):
            raise ConfigError(
                f"data.{split}[{i}] of {run_dir}/config.toml is {without_secrets(path)!r}: remote data that only the "
                "folder of a run names is not contacted. Give the files on the command line, or allow it with "
                "--allow-remote-data (allow_remote_data=True)"
            )


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
    contiguous: bool = False,
    carry: Sequence[str] = (),
    agreement: FileAgreement | None = None,
) -> Reader | FollowReader | SyntheticAds:
    """Open one split as an iterable of batches.

    shuffle    None means data.shuffle for the training data, and no shuffling for validation and test
    features   features of the training data; None reads them from the training files
    labelled   False sets labels to 0 without reading them; None reads them if the files have them
    tensors    False returns labels and dense features as NumPy arrays, without importing torch
    shard      (number, count): the part of one rank
    contiguous shards are consecutive parts of the data: see `Reader`
    carry      columns whose values each batch has, too: see `Reader`
    agreement  of the ranks about the files that they follow
    """
    if not has_split(data, split):
        cause = f"data.synth.{split}_examples is 0" if data.format == "synth" else f"data.{split} names no files"
        raise ConfigError(f"no {split} data: {cause}")
    if data.format == "synth":
        if carry:
            raise ConfigError(f"generated data has no column {carry[0]!r} to carry along")
        return _open_synthetic(data, split, batch_size=batch_size, tensors=tensors, shard=shard, contiguous=contiguous)
    if shuffle is None:
        shuffle = data.shuffle and split == "train"
    if data.follow and (split == "train" or features is None):
        if shard[1] != (1 if agreement is None else agreement.world):
            raise ConfigError(f"data.follow = true: {shard[1]} shards need the agreement of {shard[1]} ranks")
        followed: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "labelled": labelled, "tensors": tensors}
        followed["agreement"] = agreement
        reader = FollowReader(data, batch_size=batch_size, features=features, **followed)
        if split == "train":
            return reader
        features = reader.features
    if features is None and split != "train" and data.train:
        features = Reader(data.train, data, batch_size=batch_size).features
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle}
    options |= {"tensors": tensors, "shard": shard, "contiguous": contiguous, "carry": carry}
    return Reader(getattr(data, split), data, features=features, labelled=labelled, **options)


def _synth_examples(data: Data, split: Split) -> int:
    synth = data.synth
    return {"train": synth.examples, "valid": synth.valid_examples, "test": synth.test_examples}[split]


def _open_synthetic(data: Data, split: Split, *, batch_size: int, **options: Any) -> SyntheticAds:
    synth = data.synth
    options |= {"zipf": synth.zipf, "dense": synth.dense, "seed": synth.seed}
    options |= {"threads": data.threads, "hashing": data.hashing}
    try:
        if synth.preset is not None:
            ads = SyntheticAds.preset(synth.preset, batch_size=batch_size, **options)
        else:
            size = {"keys": synth.keys, "fields": synth.fields, "nonzeros": synth.nonzeros}
            ads = SyntheticAds(batch_size=batch_size, **size, **options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"[data.synth]: {error}") from None
    return ads.split(split, examples=_synth_examples(data, split))
