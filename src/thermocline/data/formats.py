"""Files of one format, opened: headers and footers read, columns resolved, numbers fitted; the reader does the rest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from thermocline.config.data import CRITEO_CATEGORICAL, CRITEO_NUMERIC, Data, Format
from thermocline.core import core
from thermocline.data.arrow_keys import doubles, whole
from thermocline.data.features import (
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
from thermocline.data.files import Source, each, find
from thermocline.data.parquet import ParquetBlocks, ParquetFileInfo
from thermocline.data.text_blocks import BOM, Blocks, TextBlocks
from thermocline.errors import DataError, ThermoclineError

# What only some formats have: elsewhere it would be a wish that nobody hears.
_ONLY_IN = {
    "label": ("csv", "parquet"),
    "categorical": ("criteo", "csv", "parquet"),
    "numeric": ("criteo", "csv", "parquet"),
    "ignore": ("criteo", "csv", "parquet"),
    "numeric_features": ("criteo", "csv", "parquet"),
    "delimiter": ("csv",),
    "fields": ("libsvm",),
    "num_fields": ("libsvm", "libffm"),
}
_HEAD = 1 << 18  # bytes of text: the header, and a sample of lines
_BLOCK_BYTES, _REMOTE_BLOCK_BYTES = 1 << 20, 1 << 23  # a request to a remote store takes longer than a megabyte


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """Files that are ready to be read."""

    sources: list[Source]
    format: Format
    blocks: Blocks
    features: Features
    block_bytes: int
    digest: str
    """Of everything that says which examples these bytes are."""


def open_files(
    paths: Sequence[str], data: Data, *, features: Features | None, labelled: bool | None, block_bytes: int | None
) -> Opened:
    """
    features     those of the training data; none: these are the training data
    labelled     False: labels are not read, and 0; None: read where there are some, else 0
    block_bytes  of text that one thread parses at a time; none: 1 MiB, of remote files 8 MiB
    """
    sources = find(paths)
    format = data.format_of(tuple(source.path for source in sources))
    if format == "synth":
        raise DataError('format "synth" is generated and has no files: use open_data or tc.SyntheticAds')
    _check_options(data, format)
    if block_bytes is None:
        block_bytes = _REMOTE_BLOCK_BYTES if any(source.remote for source in sources) else _BLOCK_BYTES
    if format == "parquet":
        blocks, found, columns = _open_parquet(sources, data, features, labelled)
        columns = sorted(columns, key=str)  # read by name, so their order says nothing
    elif format in ("libsvm", "libffm"):
        blocks, found, columns = _open_ids(sources, data, format, features, block_bytes)
    else:
        blocks, found, columns = _open_table(sources, data, format, features, labelled, block_bytes)
    if len(blocks) == 0:
        raise DataError(f"{sources[0].name} has no examples{', nor have the others' if len(sources) > 1 else ''}")
    about: list[Any] = [format, found.to_json(), columns, dataclasses.asdict(data.numbers_of(format)), data.raw_keys]
    # Not on_error: examples before a position were read either way, and a malformed line still to come may be skipped.
    about += [data.label_threshold, data.delimiter, data.fields, labelled]
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
    return Opened(sources, format, blocks, found, block_bytes, digest)


def _check_options(data: Data, format: Format) -> None:
    plain = Data()
    for name, formats in _ONLY_IN.items():
        value = getattr(data, name)
        if value != getattr(plain, name) and format not in formats:
            raise DataError(f"data.{name} is {value!r}, but format {format} has none: it is for {', '.join(formats)}")


# ---- text


def _sampled(text: bytes, ratio: float) -> dict[str, Any]:
    """What a sample says of lines and compression."""
    whole_lines = text[: text.rfind(b"\n") + 1] or text
    lines = sum(1 for line in whole_lines.split(b"\n") if line.strip())
    return {"bytes_per_line": max(1.0, len(whole_lines) / max(1, lines)), "ratio": ratio}


def _parser(kind: str, **options: Any) -> Any:
    try:
        return core.TextParser(kind, **options)
    except ThermoclineError as error:
        raise DataError(str(error)) from None


def _open_ids(
    sources: list[Source], data: Data, format: Format, features: Features | None, block_bytes: int
) -> tuple[Blocks, Features, list[list[str]]]:
    """LibSVM and LibFFM."""
    text, ratio = sources[0].head(_HEAD)
    one_bag = format == "libsvm" and data.fields == "one"
    if one_bag:
        fields = 1
    elif features is not None:
        fields = len(features.fields)
    elif data.num_fields is not None:
        fields = data.num_fields
    else:
        fields = _ids_in_first_line(text, sources[0]) if format == "libsvm" else _fields_in(text, sources[0])
    found = Features(tuple(str(i) for i in range(fields)))
    if features is not None:
        features.require(found.fields, (), sources[0].name)
    parser = _parser(format, fields=fields, one_bag=one_bag, raw_keys=data.raw_keys)
    starts = [0] * len(sources)
    return TextBlocks(sources, starts, parser, data, block_bytes=block_bytes, **_sampled(text, ratio)), found, []


def _ids_in_first_line(text: bytes, source: Source) -> int:
    line: bytes = next((line for line in text.split(b"\n") if line.strip()), b"")
    count = len(line.split()) - 1
    if count < 1:
        raise DataError(
            f"{source.name}: its first line has no ids, so the number of fields is unknown; set data.num_fields, or "
            'data.fields = "one" if a line is one bag'
        )
    return count


def _fields_in(text: bytes, source: Source) -> int:
    numbers = re.findall(rb"[ \t](\d{1,9}):\d+", text)
    if not numbers:
        raise DataError(
            f"{source.name}: no field:id in its first lines, so the number of fields is unknown; is it LibFFM?"
        )
    fields = max(map(int, numbers)) + 1
    if fields > 65536:
        raise DataError(f"{source.name}: its fields go up to {fields - 1}, but there may be 65536; set data.num_fields")
    return fields


def _open_table(
    sources: list[Source],
    data: Data,
    format: Format,
    features: Features | None,
    labelled: bool | None,
    block_bytes: int,
) -> tuple[Blocks, Features, list[list[str]]]:
    """Criteo's format and csv."""
    if format == "criteo":
        heads, delimiter = [sources[0].head(_HEAD)], "\t"
        starts = [0] * len(sources)
        width = heads[0][0].split(b"\n", 1)[0].count(b"\t") + 1
        there = labelled is True or width != len(CRITEO_NUMERIC) + len(CRITEO_CATEGORICAL)
        names = criteo_columns(there)
    else:
        tabs = all(re.search(r"\.tsv(\.\w+)?$", source.path.lower()) for source in sources)
        delimiter = data.delimiter or ("\t" if tabs else ",")
        heads = each(lambda source: source.head(_HEAD), sources)
        headers = [_split_header(text, delimiter, source) for (text, _), source in zip(heads, sources, strict=True)]
        names, starts = headers[0][0], [start for _, start in headers]
        for source, (other, _) in zip(sources[1:], headers[1:], strict=True):
            same_header(names, other, sources[0].name, source.name)
        there = data.label in names
    labelled = there if labelled is None else labelled
    columns = resolve(names, data, format, sources[0].name, labelled, known=features is not None)
    sample = max(
        ((text[start:], ratio) for (text, ratio), start in zip(heads, starts, strict=False)), key=lambda s: len(s[0])
    )
    numbers = data.numbers_of(format)

    def parser(columns: Sequence[Column], fitted: dict[str, tuple[float, float]], log: bool, bucket: Any) -> Any:
        rules = [transform(column.name, numbers, fitted)[1:3] for column in columns]
        described = [
            (column.role, column.name, log, *rule, bucket) for column, rule in zip(columns, rules, strict=True)
        ]
        options: dict[str, Any] = {"delimiter": delimiter, "quoting": format == "csv", "raw_keys": data.raw_keys}
        return _parser("table", columns=described, **options)

    def blocks(parser: Any) -> TextBlocks:
        options: dict[str, Any] = {"block_bytes": block_bytes, "labelled": labelled, **_sampled(*sample)}
        return TextBlocks(sources, starts, parser, data, **options)

    def rows() -> Any:
        """Numbers and whether they are there: missing is what is 0 whatever the mean."""
        as_dense = [dataclasses.replace(c, role="dense" if c.role == "number_key" else c.role) for c in columns]
        numeric = numeric_columns(columns)
        probes = [parser(as_dense, dict.fromkeys(numeric, (mean, 1.0)), numbers.log, "none") for mean in (0.0, -1.0)]
        for text in blocks(probes[0]).texts():
            values, moved = (probe.parse(text, True)[3].reshape(-1, len(numeric)) for probe in probes)
            yield values, (values != 0) | (moved != 0)

    found = _features(columns, data, format, features, rows, sources[0].name)
    made = parser(columns, found.statistics, numbers.log, numbers.bucket)
    return blocks(made), found, [[column.name, column.role] for column in columns]


def _split_header(text: bytes, delimiter: str, source: Source) -> tuple[list[str], int]:
    """The column names, and where the examples begin."""
    begin = len(BOM) if text.startswith(BOM) else 0
    end = text.find(b"\n")
    if end < 0:
        if len(text) >= _HEAD:
            raise DataError(
                f"{source.name}: its first line is longer than {_HEAD} bytes; a csv file begins with a header"
            )
        end = len(text) - 1
    return header_of(text[begin : end + 1], delimiter, source.name), end + 1


# ---- Parquet


def _open_parquet(
    sources: list[Source], data: Data, features: Features | None, labelled: bool | None
) -> tuple[Blocks, Features, list[list[str]]]:
    packed = next((source for source in sources if source.compression is not None), None)
    if packed is not None:
        raise DataError(f"{packed.name}: Parquet files are compressed inside; decompress this one")
    infos: list[ParquetFileInfo] = each(ParquetFileInfo, sources)
    names = list(infos[0].schema.names)
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise DataError(f"{sources[0].name}: column {repeated!r} is there twice; names must tell columns apart")
    labelled = data.label in names if labelled is None else labelled
    columns = resolve(names, data, "parquet", sources[0].name, labelled, known=features is not None)
    if features is not None:
        columns = _in_order_of(features, columns)
    numbers, numeric = data.numbers_of("parquet"), numeric_columns(columns)

    def rows() -> Any:
        unfitted = ParquetBlocks(sources, infos, columns, data, {})
        for number in range(len(unfitted)):
            table = unfitted.table(unfitted.unit(number), numeric)
            values = np.stack([doubles(whole(table[name])) for name in numeric], axis=1)
            values[np.abs(values) > np.finfo(np.float32).max] = np.nan
            there = ~np.isnan(values)
            plain = core.number_dense(np.ascontiguousarray(values.reshape(-1)), None, numbers.log, 0.0, 1.0)
            yield plain.reshape(-1, len(numeric)), there

    found = _features(columns, data, "parquet", features, rows, sources[0].name)
    blocks = ParquetBlocks(sources, infos, columns, data, found.statistics)
    return blocks, found, [[column.name, column.role] for column in columns]


def _in_order_of(features: Features, columns: list[Column]) -> list[Column]:
    """Parquet columns are read by name: any order in the file will do."""
    places = {name: i for i, name in enumerate((*features.fields, *features.dense))}
    return sorted(columns, key=lambda column: places.get(column.name, len(places)))


# ---- both


def _features(
    columns: Sequence[Column], data: Data, format: Format, given: Features | None, rows: Any, name: str
) -> Features:
    """Of these columns; the statistics are those given, or fitted to the first rows."""
    fields = tuple(column.name for column in columns if column.role in ("key", "number_key"))
    dense = tuple(column.name for column in columns if column.role == "dense")
    if given is not None:
        given.require(fields, dense, name, data.ignore)
        return given
    numbers, numeric = data.numbers_of(format), numeric_columns(columns)
    if not numbers.fitted or not numeric:
        return Features(fields, dense)
    taken, left = [], numbers.fit_rows
    for values, there in rows():
        taken.append((values[:left], there[:left]))
        left -= len(values)
        if left <= 0:
            break
    return Features(fields, dense, statistics(numeric, taken))
