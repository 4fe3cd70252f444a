"""Reference reader: the expected result of `tc.Reader`, computed line by line without any of its code."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import thermocline as tc

# (label, one tuple of (key, weight) per field, dense features)
Example = tuple[float, tuple[tuple[tuple[int, float], ...], ...], tuple[float, ...]]

CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
_NUMBER = re.compile(rb"[ \t]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t]*")
_P = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)
_M = 2**64 - 1


class Malformed(Exception):
    """The line is not a valid example."""


# ---- keys


def xxh64(data: bytes, seed: int) -> int:
    """XXH64, after its specification."""

    def rotate(x: int, n: int) -> int:
        return (x << n | x >> (64 - n)) & _M

    def mix(acc: int, comm: int) -> int:
        return rotate((acc + comm * _P[1]) & _M, 31) * _P[0] & _M

    at = 0
    if len(data) >= 32:
        accs = [(seed + _P[0] + _P[1]) & _M, (seed + _P[1]) & _M, seed, (seed - _P[0]) & _M]
        while at + 32 <= len(data):
            accs = [mix(acc, comm) for acc, comm in zip(accs, struct.unpack_from("<4Q", data, at), strict=True)]
            at += 32
        h = sum(rotate(acc, n) for acc, n in zip(accs, (1, 7, 12, 18), strict=True)) & _M
        for acc in accs:
            h = ((h ^ mix(0, acc)) * _P[0] + _P[3]) & _M
    else:
        h = (seed + _P[4]) & _M
    h = (h + len(data)) & _M
    while at + 8 <= len(data):
        h = (rotate(h ^ mix(0, struct.unpack_from("<Q", data, at)[0]), 27) * _P[0] + _P[3]) & _M
        at += 8
    if at + 4 <= len(data):
        h = (rotate(h ^ (struct.unpack_from("<I", data, at)[0] * _P[0] & _M), 23) * _P[1] + _P[2]) & _M
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ (byte * _P[4] & _M), 11) * _P[0] & _M
    h = (h ^ h >> 33) * _P[1] & _M
    h = (h ^ h >> 29) * _P[2] & _M
    return h ^ h >> 32


def key(field: str, value: bytes) -> int:
    return xxh64(value, xxh64(field.encode(), 0))


# ---- lines


def lines_of(text: bytes, blank: bytes = b"") -> list[tuple[int, bytes]]:
    """Return (number, line) pairs, counted from 1, without lines that are empty or consist of `blank` characters."""
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    return [(i + 1, line) for i, line in enumerate(lines) if line.strip(blank)]


def number(text: bytes, largest: float = 1.7976931348623157e308) -> float | None:
    """Parse a number; None if it is missing."""
    if not text.strip(b" \t"):
        return None
    if not _NUMBER.fullmatch(text) or abs(float(text)) > largest:
        raise Malformed(text)
    return float(text)


def float32(text: bytes) -> float:
    value = number(text)
    if value is None or abs(value) > 3.4028235e38:
        raise Malformed(text)
    return float(np.float32(value))


def digits(text: bytes, raw: bool) -> bytes:
    if not re.fullmatch(rb"[0-9]+", text) or (raw and int(text) >= 2**64):
        raise Malformed(text)
    return text


def svm_example(line: bytes, *, ffm: bool, fields: int, one_bag: bool, raw: bool) -> Example:
    if b"\0" in line:
        raise Malformed(line)
    tokens = re.split(rb"[ \t]+", line.strip(b" \t"))
    label = float32(tokens[0])
    if not ffm and not one_bag and len(tokens) - 1 != fields:
        raise Malformed(line)
    bags: list[list[tuple[int, float]]] = [[] for _ in range(fields)]
    for position, token in enumerate(tokens[1:]):
        parts = token.split(b":")
        if len(parts) not in ((2, 3) if ffm else (1, 2)):
            raise Malformed(token)
        field = int(digits(parts.pop(0), False)) if ffm else 0 if one_bag else position
        if field >= fields:
            raise Malformed(token)
        value = digits(parts[0], raw)
        weight = float32(parts[1]) if len(parts) > 1 else 1.0
        name = token.split(b":")[0].decode() if ffm else str(field)
        bags[field].append((int(value) if raw else key(name, value), weight))
    return (0.0 if label == -1 else label), tuple(tuple(bag) for bag in bags), ()


def table_example(
    values: Sequence[bytes], roles: Sequence[tuple[str, str]], numbers: Any = None, raw: bool = False
) -> Example:
    """Parse the values of a line; `roles` has (role, name) per column."""
    if len(values) != len(roles):
        raise Malformed(values)
    label, bags, dense = 0.0, [], []
    for value, (role, name) in zip(values, roles, strict=True):
        if role == "label":
            label = float32(value)
        elif role == "key":
            bags.append(((int(digits(value, True)) if raw else key(name, value), 1.0),))
        elif role == "dense":
            x = number(value)
            dense.append(0.0 if x is None else scaled(x, numbers))
        elif role == "number_key":
            x = number(value)
            bags.append(((key(name, bucket(x, value, numbers)), 1.0),))
    return label, tuple(bags), tuple(dense)


def scaled(x: float, numbers: Any) -> float:
    y = math.copysign(math.log1p(abs(x)), x) if numbers.log else x
    if abs(y) > 3.4028235e38:
        raise Malformed(x)
    return float(np.float32(y))


def bucket(x: float | None, text: bytes, numbers: Any) -> bytes:
    if x is None or numbers.bucket == "none":
        return b"" if x is None else text
    if numbers.bucket == "log_square":
        index = math.floor(math.log(x) ** 2) if x > 2 else math.floor(x)
    else:
        index = math.floor((math.copysign(math.log1p(abs(x)), x) if numbers.log else x) / numbers.bucket)
    if not -(2**63) <= index < 2**63:
        raise Malformed(x)
    return str(index).encode()


def split_row(line: bytes, delimiter: str) -> list[bytes]:
    """Split a line of CSV, with quoting."""
    if b"\0" in line:
        raise Malformed(line)
    if b'"' not in line:
        return line.split(delimiter.encode())
    try:
        reader = csv.reader(io.StringIO(line.decode("latin-1"), newline=""), delimiter=delimiter, strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise Malformed(line) from error
    return [value.encode("latin-1") for value in rows[0]]


# ---- comparison


def examples_of(batches: Iterable[tc.Batch]) -> list[Example]:
    """Convert batches to a list of examples."""
    examples: list[Example] = []
    for batch in batches:
        ids, cuts = batch.ids.tolist(), batch.offsets.tolist()
        weights = [1.0] * len(ids) if batch.weights is None else batch.weights.tolist()
        labels = np.asarray(batch.label).tolist()
        dense = [[]] * len(labels) if batch.dense is None else np.asarray(batch.dense).tolist()
        pairs = list(zip(ids, weights, strict=True))
        bags = [tuple(pairs[a:b]) for a, b in itertools.pairwise(cuts)]
        for i, label in enumerate(labels):
            examples.append((label, tuple(bags[i * batch.fields : (i + 1) * batch.fields]), tuple(dense[i])))
    return examples


def contents(batch: tc.Batch) -> tuple[Any, ...]:
    """The bytes of all arrays of a batch, and its position."""
    arrays = (batch.ids, batch.offsets, batch.weights, batch.dense, batch.label)
    return (*(None if array is None else np.asarray(array).tobytes() for array in arrays), batch.position)


def pack(text: bytes, compression: str | None) -> bytes:
    """Compress text as two members or frames, which form one file."""
    if compression is None:
        return text
    half = len(text) // 2
    if compression == ".gz":
        return gzip.compress(text[:half]) + gzip.compress(text[half:])
    return pa.compress(text[:half], "zstd", asbytes=True) + pa.compress(text[half:], "zstd", asbytes=True)


def write_files(folder: Path, texts: Sequence[bytes], ending: str, compression: str | None = None) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, text in enumerate(texts):
        path = folder / f"part-{i}{ending}{compression or ''}"
        path.write_bytes(pack(text, compression))
        paths.append(str(path))
    return paths


def criteo_row(rng: np.random.Generator) -> list[str]:
    """Generate a row of the Criteo format: missing values, negative numbers, eight hexadecimal digits."""
    numbers = ["" if rng.random() < 0.2 else str(int(rng.exponential(30)) - 2) for _ in range(13)]
    words = ["" if rng.random() < 0.1 else f"{int(rng.integers(0, 2**32)):08x}" for _ in range(26)]
    return [str(int(rng.integers(0, 2))), *numbers, *words]


def write_arrow(table: pa.Table, path: Path, *, rows: int = 7, stream: bool = False, **options: Any) -> Path:
    """Write an Arrow IPC file, or a stream, with record batches of `rows` rows."""
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    path.parent.mkdir(parents=True, exist_ok=True)
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path
