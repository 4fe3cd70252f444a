"""`Data`, the section [data]: input files, their columns, and how columns become features."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, FiniteFloat, model_validator

from thermocline.config.fields import Count, Duration, FrozenTable, Items, Maybe, NonNegative, NonNegativeInt, Rule
from thermocline.config.messages import reject
from thermocline.config.section import section
from thermocline.errors import DataError

Format = Literal["libsvm", "libffm", "criteo", "csv", "parquet", "arrow", "synth"]
FORMATS: tuple[str, ...] = get_args(Format)
Split = Literal["train", "valid", "test"]

CRITEO_LABEL = "label"
CRITEO_NUMERIC = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))

_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".libsvm": "libsvm",
    ".svm": "libsvm",
    ".libffm": "libffm",
    ".ffm": "libffm",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@section("data.numeric_features")
class Numeric:
    """Conversion of numeric columns. A missing value becomes the mean (dense), or a separate key (keys)."""

    to: Literal["dense", "keys"] = "dense"
    """dense: dense features; keys: one key per bucket."""
    log: bool = False
    """Replace x by sign(x) * log(1 + |x|) first. For dense features and buckets of fixed width."""
    standardize: bool = True
    """Replace x by (x - mean) / deviation, after the logarithm. For dense features and buckets of fixed width."""
    fit_rows: Count = 100_000
    """Number of training examples, from the first, that mean and deviation are computed from."""
    bucket: Annotated[FiniteFloat, Gt(0)] | Literal["log_square", "none"] = "none"
    """Only with to = "keys". A number is the width of buckets. "log_square" is the rule of Criteo's winners:
    floor(ln(x)^2) above 2, floor(x) below. "none" uses the text of the value as the key's value."""

    @model_validator(mode="after")
    def _check_bucket(self) -> Self:
        if self.to == "dense" and self.bucket != "none":
            reject("bucket", self.bucket, '"none" when to = "dense", because buckets are keys')
        if self.to == "keys" and isinstance(self.bucket, str) and self.log:
            reject("log", self.log, f'false with bucket = "{self.bucket}", which uses the value unchanged')
        return self

    @property
    def fitted(self) -> bool:
        """Whether mean and deviation are needed."""
        return self.standardize and (self.to == "dense" or not isinstance(self.bucket, str))


@section("data.synth")
class Synth:
    """Generated data, for format = "synth"; see `tc.SyntheticAds`."""

    preset: Maybe[str] = None
    """A model of Zhao et al. (2020) and a divisor of its size, such as "E/1000". It sets keys, fields and nonzeros."""
    keys: Count = 1_000_000
    """Number of distinct keys."""
    fields: Count = 26
    """Number of fields."""
    nonzeros: Maybe[Count] = None
    """Number of keys per example; by default one per field."""
    zipf: NonNegative = 1.05
    """Exponent of the Zipf distribution of keys; 0 is uniform."""
    dense: NonNegativeInt = 0
    """Number of dense features."""
    examples: Count = 1_000_000
    """Training examples per epoch."""
    valid_examples: NonNegativeInt = 100_000
    """Validation examples; 0 generates no validation data."""
    test_examples: NonNegativeInt = 100_000
    """Test examples; 0 generates no test data."""
    seed: NonNegativeInt = 0
    """Seed of the data, independent of train.seed."""


@section("data.hashing")
class Hashing:
    """Feature hashing: keys are hashed into k bins as batches are read; see `thermocline.data.feature_hashing`."""

    kind: Literal["op_osrp", "count_sketch", "modulo"] = "op_osrp"
    """op_osrp: one permutation and one sign random projection, 2k slots. count_sketch: the same bins with signed
    weights, k slots. modulo: key mod k, k slots."""
    k: Annotated[int, Ge(1), Le(1 << 40)] = 1 << 24
    """Number of bins, not necessarily a power of two."""
    seed: Annotated[int, Ge(0), Le(2**64 - 1)] = 0
    """Seed of permutation and projection; modulo does not use it."""
    fields: Literal["per_example", "per_field"] = "per_example"
    """per_example: hash an example as one vector, which becomes one bag, as by Zhao (2026). per_field: hash each field
    separately."""

    def fields_of(self, fields: int) -> int:
        """Return the number of fields after hashing of batches with `fields` fields."""
        return 1 if self.fields == "per_example" else fields


Column = Annotated[str, Rule("a column name")]
Delimiter = Annotated[
    str,
    Rule(
        "one ASCII character other than a quote or a line break",
        lambda text: len(text.encode()) == 1 and text not in '"\r\n',
    ),
]
Separators = Annotated[
    dict[str, str],
    AfterValidator(FrozenTable),
    Rule(
        'a table of columns and the text between their values, such as { tags = "|" }',
        lambda table: all(text and not set(text) & set('"\r\n') for text in table.values()),
    ),
]
TimeBucket = Literal["hour_of_day", "weekday", "hour_of_week", "day_of_month", "month"]
TimeBuckets = Annotated[
    dict[str, TimeBucket],
    AfterValidator(FrozenTable),
    Rule(f'a table of columns and one of {", ".join(get_args(TimeBucket))}, such as {{ seen_at = "hour_of_day" }}'),
]


@section("data")
class Data:
    """Files that contain the examples, and how they are read."""

    train: Items[str] = ()
    """Training data: files, folders, globs or URLs (s3://, gs://, hdfs://, any of Arrow's and fsspec's), in this
    order."""
    valid: Items[str] = ()
    """Validation data, in the form of `train`."""
    test: Items[str] = ()
    """Test data, in the form of `train`."""
    follow: bool = False
    """Read new files of `train`, one folder or glob, as they appear: once, in the order of their names."""
    follow_complete: Literal["rename", "_SUCCESS"] = "rename"
    """When a followed file is complete. rename: when it has its name; .*, _*, *.tmp and *.inprogress are ignored.
    _SUCCESS: when its folder has a file _SUCCESS."""
    follow_idle: Maybe[Duration] = None
    """End the run when no new file has appeared for this long, such as "60s". By default it waits without limit."""
    format: Maybe[Format] = None
    """By default derived from the file names without .gz and .zst: .libsvm .svm, .libffm .ffm, .csv .tsv,
    .parquet .pq, .arrow .arrows .feather .ipc."""
    label: str = "label"
    """Column of the label (csv, parquet, arrow)."""
    time: Maybe[Column] = None
    """Column of the event time (csv, parquet, arrow): timestamps, or seconds since 1970. It is no feature. By default
    batches have no time."""
    label_threshold: Maybe[FiniteFloat] = None
    """Labels of at least this value become 1, all others 0. By default labels are unchanged, but -1 becomes 0 in LibSVM
    and LibFFM."""
    label_values: Literal["binary", "any"] = "binary"
    """binary: a label other than 0 and 1, after `label_threshold`, is malformed. any: any number, for own losses."""
    categorical: Maybe[Items[Column]] = None
    """Columns whose values become keys; "c_*" is a pattern. By default all columns that are neither label, numeric nor
    ignored."""
    numeric: Items[Column] = ()
    """Columns of numbers, converted by `numeric_features`. In Criteo's format they are I1 to I13."""
    ignore: Items[Column] = ()
    """Columns that are not read."""
    separators: Separators = FrozenTable()
    """Categorical columns with several values, and the text between the values, such as { tags = "|" } (csv, parquet,
    arrow). Empty values are left out."""
    time_buckets: TimeBuckets = FrozenTable()
    """Columns of times that become keys, and their bucket: hour_of_day, weekday, hour_of_week, day_of_month or month,
    in UTC (csv, parquet, arrow)."""
    delimiter: Maybe[Delimiter] = None
    """Delimiter of csv files. By default a tab for .tsv, otherwise a comma."""
    line_breaks: Maybe[bool] = None
    """Quoted values of csv files may have line breaks; such a file is read from its beginning, by one rank. By default
    decided by the first 256 KB of each file."""
    fields: Literal["position", "one"] = "position"
    """LibSVM only. position: the position of a token is its field, and all lines have the same number of tokens. one: a
    line is one bag."""
    num_fields: Maybe[Annotated[int, Ge(1), Le(65536)]] = None
    """Number of fields in LibSVM (by position) and LibFFM. By default read from LibSVM's first line or LibFFM's first
    block."""
    raw_keys: bool = False
    """Use values as 64-bit keys (as `SyntheticAds.write` writes them). If false, keys are hashes of field and value."""
    numeric_features: Maybe[Numeric] = None
    """Conversion of numeric columns. By default keys by "log_square" for Criteo, and dense features otherwise."""
    on_error: Literal["raise", "skip"] = "raise"
    """Malformed lines: raise an error with file and line, or skip and count them."""
    shuffle: bool = True
    """Shuffle the training examples, differently in each epoch."""
    shuffle_buffer: Count = 100_000
    """Number of examples that are shuffled together, read from blocks all over the files. Two such chunks are in
    memory."""
    threads: Maybe[Count] = None
    """Threads that read and parse. By default one per core, at most 8."""
    synth: Synth = Synth()
    """Parameters of the data that format = "synth" generates."""
    hashing: Maybe[Hashing] = None
    """Feature hashing of the keys of all splits. By default keys are not hashed."""

    @model_validator(mode="after")
    def _check_generated(self) -> Self:
        for name in ("train", "valid", "test"):
            if self.format == "synth" and (files := getattr(self, name)):
                rule = 'left out with format = "synth", whose data is generated; data.synth sets its size'
                reject(name, list(files), rule)
        if self.format == "synth" and self.time is not None:
            reject("time", self.time, 'left out with format = "synth", whose data has no event times')
        return self

    @model_validator(mode="after")
    def _check_follow(self) -> Self:
        if self.follow and self.format == "synth":
            reject("follow", self.follow, 'false with format = "synth", which has no files')
        if self.follow and len(self.train) > 1:
            reject("train", list(self.train), "one folder or glob with follow = true")
        if not self.follow and self.follow_idle is not None:
            reject("follow_idle", self.follow_idle, "left out unless follow = true")
        return self

    def format_of(self, paths: tuple[str, ...]) -> Format:
        """Return the format of the files: `format` if it is set, else by file name."""
        if self.format is not None:
            return self.format
        formats = {_format_of_name(path) for path in paths}
        if len(formats) == 1 and None not in formats:
            return formats.pop()  # type: ignore[return-value]
        unknown = [path for path in paths if _format_of_name(path) is None]
        why = f"the ending of {unknown[0]!r} does not tell it" if unknown else "the files' endings differ"
        raise DataError(f"data.format is not given, and {why}: set it to one of {', '.join(FORMATS)}")

    def numbers_of(self, format: Format) -> Numeric:
        """Return the conversion of numeric columns in files of this format."""
        if self.numeric_features is not None:
            return self.numeric_features
        return Numeric(to="keys", bucket="log_square") if format == "criteo" else Numeric()


def compression_of(path: str) -> str | None:
    """Return "gzip" or "zstd" by the file name, or None."""
    return next((kind for suffix, kind in COMPRESSED.items() if path.lower().endswith(suffix)), None)


def _format_of_name(path: str) -> Format | None:
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return next((format for suffix, format in _FORMAT_OF_SUFFIX.items() if name.endswith(suffix)), None)
