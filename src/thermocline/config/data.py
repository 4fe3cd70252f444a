"""`Data`: which files, what their columns are, and what becomes of them. The [data] section of a config."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from thermocline.errors import DataError, require

Format = Literal["libsvm", "libffm", "criteo", "csv", "parquet", "synth"]
FORMATS: tuple[str, ...] = get_args(Format)
Split = Literal["train", "valid", "test"]

CRITEO_LABEL = "label"
CRITEO_NUMERIC = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))

_ENDINGS: dict[str, Format] = {
    ".libsvm": "libsvm",
    ".svm": "libsvm",
    ".libffm": "libffm",
    ".ffm": "libffm",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numeric:
    """What becomes of numeric columns. A missing value is the mean (dense), or a key of its own."""

    to: Literal["dense", "keys"] = "dense"
    """Dense features, or keys of buckets."""
    log: bool = False
    """x becomes sign(x) * log(1 + |x|) first; dense features and buckets of one width."""
    standardize: bool = True
    """x becomes (x - mean) / deviation, after the logarithm; dense features and buckets of one width."""
    fit_rows: int = 100_000
    """Mean and deviation are those of the first so many training examples."""
    bucket: float | Literal["log_square", "none"] = "none"
    """Keys only. A number: the width of buckets. "log_square", the rule of Criteo's winners: floor(ln(x)^2) above 2,
    floor(x) below. "none": the value's text is the value."""

    def __post_init__(self) -> None:
        name = "data.numeric_features."
        require(self.to in ("dense", "keys"), name + "to", self.to, '"dense" or "keys"')
        require(self.fit_rows >= 1, name + "fit_rows", self.fit_rows, "at least 1")
        rule = 'a width above 0, "log_square" or "none"'
        if isinstance(self.bucket, str):
            require(self.bucket in ("log_square", "none"), name + "bucket", self.bucket, rule)
        else:
            require(0 < self.bucket < float("inf"), name + "bucket", self.bucket, rule)
        if self.to == "dense":
            require(self.bucket == "none", name + "bucket", self.bucket, '"none" when to = "dense"; buckets are keys')
        elif isinstance(self.bucket, str):
            rule = f'false with bucket = "{self.bucket}", which takes the number as it stands'
            require(not self.log, name + "log", self.log, rule)

    @property
    def fitted(self) -> bool:
        """Whether mean and deviation are needed."""
        return self.standardize and (self.to == "dense" or not isinstance(self.bucket, str))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Synth:
    """The generated data of format "synth": see `tc.SyntheticAds`."""

    preset: str | None = None
    """A model of the source and what to divide it by, such as "E/1000"; it sets keys, fields and nonzeros."""
    keys: int = 1_000_000
    """How many there are."""
    fields: int = 26
    """How many."""
    nonzeros: int | None = None
    """Ids per example; none: one per field."""
    zipf: float = 1.05
    """Exponent of popularity; 0: all keys alike."""
    dense: int = 0
    """Number of dense features."""
    examples: int = 1_000_000
    """Per epoch of training."""
    valid_examples: int = 100_000
    """Of validation; 0: none."""
    test_examples: int = 100_000
    """Of the test; 0: none."""
    seed: int = 0
    """Of the data, whatever the training's."""

    def __post_init__(self) -> None:
        for name, least in (("keys", 1), ("fields", 1), ("dense", 0), ("zipf", 0), ("examples", 1), ("seed", 0)):
            require(getattr(self, name) >= least, f"data.synth.{name}", getattr(self, name), f"at least {least}")
        for name in ("valid_examples", "test_examples"):
            require(getattr(self, name) >= 0, f"data.synth.{name}", getattr(self, name), "at least 0")
        require(self.zipf < float("inf"), "data.synth.zipf", self.zipf, "finite")
        require(self.nonzeros is None or self.nonzeros >= 1, "data.synth.nonzeros", self.nonzeros, "at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hashing:
    """Keys hashed into k bins as batches are read: see `thermocline.data.feature_hashing`."""

    kind: Literal["op_osrp", "count_sketch", "modulo"] = "op_osrp"
    """One permutation and one sign random projection (2k slots); its bins with signed weights (k); key mod k (k)."""
    k: int = 1 << 24
    """Bins: 1 to 2**40, not necessarily a power of two."""
    seed: int = 0
    """Of permutation and projection; modulo has none."""
    fields: Literal["per_example", "per_field"] = "per_example"
    """An example is hashed as one vector and becomes one bag, as in the source; or each of its fields by itself."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("op_osrp", "count_sketch", "modulo")),
            ("fields", ("per_example", "per_field")),
        ):
            value = getattr(self, name)
            require(value in allowed, f"data.hashing.{name}", value, "one of " + ", ".join(allowed))
        for name, least, most, rule in (("k", 1, 1 << 40, "1 to 2**40"), ("seed", 0, 2**64 - 1, "0 to 2**64 - 1")):
            value = getattr(self, name)
            fine = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            require(fine, f"data.hashing.{name}", value, f"a whole number, {rule}")

    def fields_of(self, fields: int) -> int:
        """How many fields batches of `fields` fields come back with."""
        return 1 if self.fields == "per_example" else fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Which files hold the examples, and how to read them."""

    train: tuple[str, ...] = ()
    """Files, folders, globs or URLs (s3://, gs://, hdfs://, any of Arrow's and fsspec's), read in this order."""
    valid: tuple[str, ...] = ()
    """The same, for validation."""
    test: tuple[str, ...] = ()
    """The same, for the test."""
    format: Format | None = None
    """None: by the files' ending, .gz and .zst put aside: .libsvm .svm, .libffm .ffm, .csv .tsv, .parquet .pq."""
    label: str = "label"
    """The label's column (csv, parquet)."""
    label_threshold: float | None = None
    """Labels of at least this become 1, all others 0; none: as they stand (in LibSVM and LibFFM, -1 becomes 0)."""
    categorical: tuple[str, ...] | None = None
    """Columns whose values become keys; none: all that are neither label, numeric nor ignored. "c_*" is a pattern."""
    numeric: tuple[str, ...] = ()
    """Columns of numbers: see `numeric_features`. In Criteo's format they are I1 to I13."""
    ignore: tuple[str, ...] = ()
    """Columns that are not read."""
    delimiter: str | None = None
    """Of csv; none: a tab in files that end with .tsv, otherwise a comma."""
    fields: Literal["position", "one"] = "position"
    """LibSVM. "position": a token's place is its field, and all lines have equally many; "one": a line is one bag."""
    num_fields: int | None = None
    """How many fields LibSVM (by position) and LibFFM have; none: LibSVM's first line or LibFFM's first block says."""
    raw_keys: bool = False
    """Values are 64-bit keys already (what `SyntheticAds.write` writes); false: keys are hashes of field and value."""
    numeric_features: Numeric | None = None
    """What becomes of numeric columns; none: Criteo's by the rule "log_square" to keys, all others dense."""
    on_error: Literal["raise", "skip"] = "raise"
    """A malformed line: an error that names it, or it is left out and counted."""
    shuffle: bool = True
    """The training examples come in another order each epoch."""
    shuffle_buffer: int = 100_000
    """Examples that are shuffled together; they come from blocks all over the files. Two such lots are in memory."""
    threads: int | None = None
    """That read and parse; none: one per core, 8 at most."""
    synth: Synth = dataclasses.field(default_factory=Synth)
    """What format = "synth" generates."""
    hashing: Hashing | None = None
    """Into how few bins the keys of every split are hashed; none: keys stay as they are."""

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("categorical", "numeric", "ignore"):
            value = getattr(self, name)
            require(not isinstance(value, str), f"data.{name}", value, "a list of column names")
            object.__setattr__(self, name, None if value is None else tuple(value))
        choices = {"format": (*FORMATS, None), "fields": ("position", "one"), "on_error": ("raise", "skip")}
        for name, allowed in choices.items():
            rule = "one of " + ", ".join(str(choice) for choice in allowed if choice is not None)
            require(getattr(self, name) in allowed, f"data.{name}", getattr(self, name), rule)
        one_byte = self.delimiter is None or (len(self.delimiter.encode()) == 1 and self.delimiter not in '"\r\n')
        require(one_byte, "data.delimiter", self.delimiter, "one ASCII character that is no quote or line break")
        require(self.shuffle_buffer >= 1, "data.shuffle_buffer", self.shuffle_buffer, "at least 1 example")
        require(self.threads is None or self.threads >= 1, "data.threads", self.threads, "at least 1, or none")
        threshold = self.label_threshold
        fine = threshold is None or abs(threshold) < float("inf")
        require(fine, "data.label_threshold", threshold, "a finite number, or none")
        for name in ("train", "valid", "test"):
            files = getattr(self, name)
            rule = 'left out with format = "synth", whose data is generated: data.synth says how much'
            require(self.format != "synth" or not files, f"data.{name}", list(files), rule)
        few = self.num_fields is None or 1 <= self.num_fields <= 65536
        require(few, "data.num_fields", self.num_fields, "1 to 65536, or none")

    def format_of(self, paths: tuple[str, ...]) -> Format:
        """The format of these files: the one given, or that of their endings."""
        if self.format is not None:
            return self.format
        found = {_by_ending(path) for path in paths}
        if len(found) == 1 and None not in found:
            return found.pop()  # type: ignore[return-value]
        unknown = [path for path in paths if _by_ending(path) is None]
        why = f"the ending of {unknown[0]!r} does not tell it" if unknown else "the files' endings differ"
        raise DataError(f"data.format is not given, and {why}: set it to one of {', '.join(FORMATS)}")

    def numbers_of(self, format: Format) -> Numeric:
        """What becomes of numeric columns in files of this format."""
        if self.numeric_features is not None:
            return self.numeric_features
        return Numeric(to="keys", bucket="log_square") if format == "criteo" else Numeric()


def compression_of(path: str) -> str | None:
    """ "gzip" or "zstd", by the file's ending."""
    return next((kind for ending, kind in COMPRESSED.items() if path.lower().endswith(ending)), None)


def _by_ending(path: str) -> Format | None:
    name = path.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return next((format for ending, format in _ENDINGS.items() if name.endswith(ending)), None)
