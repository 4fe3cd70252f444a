"""Opens input files of one format: reads headers and footers, assigns column roles, fits numeric statistics."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from thermocline.config.data import CRITEO_CATEGORICAL, CRITEO_NUMERIC, Data, Format
from thermocline.core import core
from thermocline.data.arrow_ipc import ArrowBlocks, ArrowFileInfo
from thermocline.data.arrow_keys import as_doubles, one_array
from thermocline.data.column_checks import check_columns, has_line_breaks, sampled_values
from thermocline.data.features import (
    KEY_ROLES,
    Column,
    Features,
    criteo_columns,
    header_of,
    numeric_columns,
    resolve,
    same_header,
    statistics,
    transform,
)
from thermocline.data.files import NoExamples, Source, find_files, map_threads
from thermocline.data.parquet import ParquetBlocks, ParquetFileInfo
from thermocline.data.partition_columns import PartitionColumns, partition_names
from thermocline.data.text_blocks import BOM, Blocks, TextBlocks
from thermocline.errors import DataError, ThermoclineError
from thermocline.utils.text_format import plural

# Options that only some formats have; set for another format, they are an error.
_COLUMNAR: dict[str, tuple[str, Any, Any]] = {
    "parquet": ("Parquet", ParquetFileInfo, ParquetBlocks),
    "arrow": ("Arrow", ArrowFileInfo, ArrowBlocks),
}
"""Formats with typed columns: title, class of a file's schema and size, class of the input splits."""
_ONLY_IN = {
    "label": ("csv", "parquet", "arrow"),
    "time": ("csv", "parquet", "arrow"),
    "categorical": ("criteo", "csv", "parquet", "arrow"),
    "numeric": ("criteo", "csv", "parquet", "arrow"),
    "ignore": ("criteo", "csv", "parquet", "arrow"),
    "numeric_features": ("criteo", "csv", "parquet", "arrow"),
    "separators": ("csv", "parquet", "arrow"),
    "time_buckets": ("csv", "parquet", "arrow"),
    "line_breaks": ("csv",),
    "delimiter": ("csv",),
    "fields": ("libsvm",),
    "num_fields": ("libsvm", "libffm"),
}
_HEAD = 1 << 18  # bytes of text read for the header and a sample of lines
_BLOCK_BYTES, _REMOTE_BLOCK_BYTES = 1 << 20, 1 << 23  # remote requests have a high latency
_LEAST_BLOCK_BYTES = 1 << 14
_BLOCKS_PER_SHARD = 16
"""Least number of blocks of text per shard, unless blocks become too short: shards have nearly equal sizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedFiles:
    """Input files, ready to be read."""

    sources: list[Source]
    format: Format
    blocks: Blocks
    features: Features
    block_bytes: int
    digest: str
    """Digest of all settings that determine the examples of these files."""


def open_files(
    paths: Sequence[str | Source],
    data: Data,
    *,
    features: Features | None,
    labelled: bool | None,
    block_bytes: int | None,
    shards: int = 1,
    carry: Sequence[str] = (),
) -> OpenedFiles:
    """Open files for reading.

    features     features of the training data; None means that these files are the training data
    labelled     False sets labels to 0 without reading them; None reads them if the files have them
    block_bytes  text bytes that one thread parses at a time; None means 1 MiB, or 8 MiB for remote files, and less
                 where the shards would have fewer than 16 blocks
    shards       number of parts that the blocks are divided into
    carry        columns whose values the blocks have, too
    """
    sources = find_files(paths)
    format = data.format_of(tuple(source.path for source in sources))
    if format == "synth":
        raise DataError('format "synth" is generated data and has no files: use open_data or tc.SyntheticAds')
    _check_options(data, format)
    if block_bytes is None:
        block_bytes = _REMOTE_BLOCK_BYTES if any(source.remote for source in sources) else _BLOCK_BYTES
        if shards > 1 and format not in _COLUMNAR:  # whose blocks are row groups and record batches
            block_bytes = even_block_bytes(sources, shards * _BLOCKS_PER_SHARD, block_bytes)
    partitions = next((source.partitions for source in sources if source.partitions), None)
    if partitions and format not in ("csv", *_COLUMNAR):
        name = next(iter(partitions))
        warnings.warn(
            f"{format} files in folders {name}=... have no column {name!r}: write it into the files, or use CSV, "
            "Parquet or Arrow",
            stacklevel=3,
        )
    if format in _COLUMNAR:
        blocks, resolved, columns = _open_columnar(sources, data, format, features, labelled, carry)
        columns = sorted(columns, key=str)  # columns are read by name: their order does not matter
    elif format in ("libsvm", "libffm"):
        if carry:
            raise DataError(f"{sources[0].name} has no column {carry[0]!r}: {format} files have no named columns")
        blocks, resolved, columns = _open_ids(sources, data, format, features, labelled, block_bytes)
    else:
        blocks, resolved, columns = _open_table(sources, data, format, features, labelled, block_bytes, carry)
    if len(blocks) == 0:
        raise NoExamples(no_examples(sources))
    identity: list[Any] = [format, resolved.to_json(), columns, dataclasses.asdict(data.numbers_of(format))]
    # on_error is left out: a run that stopped at a malformed line may be resumed with on_error = "skip".
    identity += [data.raw_keys, data.label_threshold, data.delimiter, data.fields, labelled]
    # Keys that earlier versions lack are added only if they are set, so that their positions stay valid.
    identity += [value for value in (data.separators, data.time_buckets) if value]
    identity += [[source.partitions for source in sources]] * any(source.partitions for source in sources)
    identity += ["line_breaks"] * (isinstance(blocks, TextBlocks) and blocks.line_breaks)
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
    return OpenedFiles(sources, format, blocks, resolved, block_bytes, digest)


def even_block_bytes(sources: Sequence[Source], blocks: int, most: int = _BLOCK_BYTES) -> int:
    """Return the size of blocks of text for at least so many blocks in all: at least 16 KiB, at most `most`."""
    return min(most, max(sum(source.size for source in sources) // blocks, _LEAST_BLOCK_BYTES))


def no_examples(sources: Sequence[Source]) -> str:
    """Build the error message for files without examples."""
    if len(sources) == 1:
        return f"{sources[0].name} has no examples"
    return f"{sources[0].name} and {plural(len(sources) - 1, 'other file')} have no examples"


def _check_options(data: Data, format: Format) -> None:
    defaults = Data()
    for name, formats in _ONLY_IN.items():
        value = getattr(data, name)
        if value != getattr(defaults, name) and format not in formats:
            raise DataError(
                f"data.{name} is {value!r}, but format {format} does not use it: remove it; it is for "
                f"{', '.join(formats)}"
            )


# ---- text


def _sample_estimates(text: bytes, ratio: float) -> dict[str, Any]:
    """Estimate bytes per line and compression ratio from a sample, as arguments of `TextBlocks`."""
    whole_lines = text[: text.rfind(b"\n") + 1] or text
    lines = sum(1 for line in whole_lines.split(b"\n") if line.strip())
    return {"bytes_per_line": max(1.0, len(whole_lines) / max(1, lines)), "ratio": ratio}


def _parser(kind: str, **options: Any) -> Any:
    try:
        return core.TextParser(kind, **options)
    except ThermoclineError as error:
        raise DataError(str(error)) from None


def _binary(data: Data, labelled: bool | None) -> bool:
    """Whether labels other than 0 and 1 are malformed."""
    return labelled is True and data.label_values == "binary" and data.label_threshold is None


def _open_ids(
    sources: list[Source],
    data: Data,
    format: Format,
    features: Features | None,
    labelled: bool | None,
    block_bytes: int,
) -> tuple[Blocks, Features, list[list[str]]]:
    """Open LibSVM or LibFFM files."""
    text, ratio = sources[0].head(_HEAD)
    one_bag = format == "libsvm" and data.fields == "one"
    if one_bag:
        fields = 1
    elif features is not None:
        fields = len(features.fields)
    elif data.num_fields is not None:
        fields = data.num_fields
    else:
        fields = _count_ids(text, sources[0]) if format == "libsvm" else _count_fields(text, sources[0])
    resolved = Features(tuple(str(i) for i in range(fields)))
    if features is not None:
        features.require(resolved.fields, (), sources[0].name)
    options = {"raw_keys": data.raw_keys, "binary_labels": _binary(data, labelled)}
    parser = _parser(format, fields=fields, one_bag=one_bag, **options)
    estimates = {"labelled": labelled is not False, **_sample_estimates(text, ratio)}
    return TextBlocks(sources, [0] * len(sources), parser, data, block_bytes=block_bytes, **estimates), resolved, []


def _count_ids(text: bytes, source: Source) -> int:
    """Count the ids of the first line of a LibSVM file."""
    line: bytes = next((line for line in text.split(b"\n") if line.strip()), b"")
    count = len(line.split()) - 1
    if count < 1:
        raise DataError(
            f"{source.name}: the first line has no ids, so the number of fields is unknown; set data.num_fields, or "
            'data.fields = "one" if a line is one bag'
        )
    return count


def _count_fields(text: bytes, source: Source) -> int:
    """Find the number of fields in the first lines of a LibFFM file."""
    numbers = re.findall(rb"[ \t](\d{1,9}):\d+", text)
    if not numbers:
        raise DataError(
            f"{source.name}: the first lines have no field:id, so the number of fields is unknown; check the "
            "format, or set data.num_fields"
        )
    fields = max(map(int, numbers)) + 1
    if fields > 65536:
        raise DataError(f"{source.name}: field {fields - 1} exceeds the maximum of 65536 fields; set data.num_fields")
    return fields


def _open_table(
    sources: list[Source],
    data: Data,
    format: Format,
    features: Features | None,
    labelled: bool | None,
    block_bytes: int,
    carry: Sequence[str],
) -> tuple[Blocks, Features, list[list[str]]]:
    """Open CSV files, or files in the Criteo format."""
    binary = _binary(data, labelled)
    if format == "criteo":
        heads, delimiter = [sources[0].head(_HEAD)], "\t"
        starts = [0] * len(sources)
        width = heads[0][0].split(b"\n", 1)[0].count(b"\t") + 1
        has_label = labelled is True or width != len(CRITEO_NUMERIC) + len(CRITEO_CATEGORICAL)
        names = criteo_columns(has_label)
    else:
        tabs = all(re.search(r"\.tsv(\.\w+)?$", source.path.lower()) for source in sources)
        delimiter = data.delimiter or ("\t" if tabs else ",")
        heads = map_threads(lambda source: source.head(_HEAD), sources)
        headers = [_split_header(text, delimiter, source) for (text, _), source in zip(heads, sources, strict=True)]
        starts = [start for _, start in headers]
        names = partition_names(sources[0], headers[0][0])
        for source, (other, _) in zip(sources[1:], headers[1:], strict=True):
            same_header(names, partition_names(source, other), sources[0].name, source.name)
        has_label = data.label in names
    labelled = has_label if labelled is None else labelled
    extra = _require_carried(carry, names, features, sources[0].name)
    columns = resolve(names, data, format, sources[0].name, labelled, known=features is not None, carried=extra)
    path_columns = len(sources[0].partitions) if format == "csv" else 0
    own_columns = columns[: len(columns) - path_columns]
    samples = [_whole_sample(text[start:], len(text)) for (text, _), start in zip(heads, starts, strict=False)]
    line_breaks = False
    if format == "csv":
        found = data.line_breaks is None and has_line_breaks(samples, len(own_columns), delimiter)
        line_breaks = bool(data.line_breaks) or found
    if features is None and format == "csv":
        path_values = {name: [value] for name, value in sources[0].partitions.items() if value}
        check_columns(
            {**sampled_values(samples[0], own_columns, delimiter), **path_values}, columns, data, sources[0].name
        )
    sample = max(
        ((text[start:], ratio) for (text, ratio), start in zip(heads, starts, strict=False)), key=lambda s: len(s[0])
    )
    numbers = data.numbers_of(format)

    def parser(columns: Sequence[Column], fitted: dict[str, tuple[float, float]], log: bool, bucket: Any) -> Any:
        scales = [transform(column.name, numbers, fitted)[1:3] for column in columns]
        specs = [(column.role, column.name, log, *scale, bucket) for column, scale in zip(columns, scales, strict=True)]
        options: dict[str, Any] = {"delimiter": delimiter, "quoting": format == "csv", "raw_keys": data.raw_keys}
        options |= {"separators": data.separators, "time_buckets": data.time_buckets, "carry": set(carry)}
        return _parser("table", columns=specs, binary_labels=binary, line_breaks=line_breaks, **options)

    path = None
    if path_columns:
        of_path = columns[-path_columns:]
        path = PartitionColumns(of_path, own_columns, parser(of_path, {}, numbers.log, numbers.bucket), delimiter)

    def blocks(parser: Any) -> TextBlocks:
        options: dict[str, Any] = {"block_bytes": block_bytes, "labelled": labelled, **_sample_estimates(*sample)}
        options |= {"line_breaks": line_breaks, "carry": [name for name in names if name in carry], "path": path}
        return TextBlocks(sources, starts, parser, data, **options)

    def rows() -> Any:
        """Yield numbers and a mask of those present. A missing number is parsed as 0 for any mean."""
        as_dense = [dataclasses.replace(c, role="dense" if c.role == "number_key" else c.role) for c in own_columns]
        numeric = numeric_columns(columns)
        probes = [parser(as_dense, dict.fromkeys(numeric, (mean, 1.0)), numbers.log, "none") for mean in (0.0, -1.0)]
        for text in blocks(probes[0]).texts():
            values, shifted = (probe.parse(text, True)[3].reshape(-1, len(numeric)) for probe in probes)
            yield values, (values != 0) | (shifted != 0)

    resolved = _resolve_features(columns, data, format, features, rows, sources[0].name)
    final_parser = parser(own_columns, resolved.statistics, numbers.log, numbers.bucket)
    return blocks(final_parser), resolved, [[column.name, column.role] for column in columns]


def _whole_sample(text: bytes, head: int) -> bytes:
    """Return the whole lines of a sample of a file; `head` bytes of the file were read."""
    return text if head < _HEAD else text[: text.rfind(b"\n") + 1]


def _require_carried(carry: Sequence[str], names: Sequence[str], features: Features | None, name: str) -> list[str]:
    """Return the carried columns that are no features; raise DataError for a column that the file lacks."""
    missing = next((column for column in carry if column not in names), None)
    if missing is not None:
        raise DataError(f"{name} has no column {missing!r} to carry along: it has {', '.join(map(repr, names))}")
    used = () if features is None else (*features.fields, *features.dense)
    return [column for column in carry if column not in used]


def _split_header(text: bytes, delimiter: str, source: Source) -> tuple[list[str], int]:
    """Return the column names, and the byte offset of the first example."""
    begin = len(BOM) if text.startswith(BOM) else 0
    end = text.find(b"\n")
    if end < 0:
        if len(text) >= _HEAD:
            raise DataError(
                f"{source.name}: the first line is longer than {_HEAD} bytes; a CSV file begins with a header"
            )
        end = len(text) - 1
    return header_of(text[begin : end + 1], delimiter, source.name), end + 1


# ---- Parquet and Arrow


def _open_columnar(
    sources: list[Source],
    data: Data,
    format: Format,
    features: Features | None,
    labelled: bool | None,
    carry: Sequence[str],
) -> tuple[Blocks, Features, list[list[str]]]:
    """Open Parquet files, or Arrow IPC files."""
    title, info, kind = _COLUMNAR[format]
    compressed = next((source for source in sources if source.compression is not None), None)
    if compressed is not None:
        raise DataError(f"{compressed.name}: {title} files have their own compression; decompress this file")
    infos: list[Any] = map_threads(info, sources)
    names = list(infos[0].schema.names)
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise DataError(f"{sources[0].name}: column {repeated!r} occurs twice; column names must be unique")
    binary = _binary(data, labelled)
    labelled = data.label in names if labelled is None else labelled
    extra = _require_carried(carry, names, features, sources[0].name)
    columns = resolve(names, data, format, sources[0].name, labelled, known=features is not None, carried=extra)
    if features is not None:
        columns = sort_columns(columns, features)
    numbers, numeric = data.numbers_of(format), numeric_columns(columns)

    def rows() -> Any:
        unfitted = kind(sources, infos, columns, data, {})
        splits = map(unfitted.split, range(len(unfitted)))
        for table in itertools.chain.from_iterable(unfitted.tables(split, numeric) for split in splits):
            values = np.stack([as_doubles(one_array(table[name])) for name in numeric], axis=1)
            values[np.abs(values) > np.finfo(np.float32).max] = np.nan
            present = ~np.isnan(values)
            numbers_only = core.number_dense(np.ascontiguousarray(values.reshape(-1)), None, numbers.log, 0.0, 1.0)
            yield numbers_only.reshape(-1, len(numeric)), present

    resolved = _resolve_features(columns, data, format, features, rows, sources[0].name)
    blocks = kind(sources, infos, columns, data, resolved.statistics, binary_labels=binary, carry=carry)
    if features is None and len(blocks):
        check_columns(blocks.sampled_values(), columns, data, sources[0].name)
    return blocks, resolved, [[column.name, column.role] for column in columns]


def sort_columns(columns: list[Column], features: Features) -> list[Column]:
    """Sort columns by their order in the training data: columns of Parquet and Arrow are read by name, in any order."""
    order = {name: i for i, name in enumerate((*features.fields, *features.dense))}
    return sorted(columns, key=lambda column: order.get(column.name, len(order)))


# ---- features


def _resolve_features(
    columns: Sequence[Column], data: Data, format: Format, given: Features | None, rows: Any, name: str
) -> Features:
    """Return the features of these columns, with the given statistics or statistics fitted to the first rows."""
    fields = tuple(column.name for column in columns if column.role in KEY_ROLES)
    dense = tuple(column.name for column in columns if column.role == "dense")
    if given is not None:
        given.require(fields, dense, name, data.ignore)
        return given
    numbers, numeric = data.numbers_of(format), numeric_columns(columns)
    if not numbers.fitted or not numeric:
        return Features(fields, dense)
    sample, remaining = [], numbers.fit_rows
    for values, present in rows():
        sample.append((values[:remaining], present[:remaining]))
        remaining -= len(values)
        if remaining <= 0:
            break
    return Features(fields, dense, statistics(numeric, sample))
