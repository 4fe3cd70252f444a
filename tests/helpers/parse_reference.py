"""Reference parser: the contract of csrc/data/parse.h in plain Python, line by line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_M = 2**64 - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Malformed(Exception):
    """The line is not a valid example."""


def xxh64(data: bytes, seed: int) -> int:
    """XXH64, after its public specification."""

    def rotl(x: int, r: int) -> int:
        return ((x << r) | (x >> (64 - r))) & _M

    def mix(acc: int, comm: int) -> int:
        return rotl((acc + comm * _P2) & _M, 31) * _P1 & _M

    at, n = 0, len(data)
    if n >= 32:
        v = [(seed + _P1 + _P2) & _M, (seed + _P2) & _M, seed, (seed - _P1) & _M]
        while at + 32 <= n:
            for i in range(4):
                v[i] = mix(v[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            at += 32
        h = (rotl(v[0], 1) + rotl(v[1], 7) + rotl(v[2], 12) + rotl(v[3], 18)) & _M
        for comm in v:
            h = ((h ^ mix(0, comm)) * _P1 + _P4) & _M
    else:
        h = (seed + _P5) & _M
    h = (h + n) & _M
    while at + 8 <= n:
        h = (rotl(h ^ mix(0, int.from_bytes(data[at : at + 8], "little")), 27) * _P1 + _P4) & _M
        at += 8
    if at + 4 <= n:
        h = (rotl(h ^ (int.from_bytes(data[at : at + 4], "little") * _P1 & _M), 23) * _P2 + _P3) & _M
        at += 4
    while at < n:
        h = rotl(h ^ (data[at] * _P5 & _M), 11) * _P1 & _M
        at += 1
    h = (h ^ (h >> 33)) * _P2 & _M
    h = (h ^ (h >> 29)) * _P3 & _M
    return h ^ (h >> 32)


def key_of(name: str, value: bytes) -> int:
    return xxh64(value, xxh64(name.encode(), 0))


def number(text: bytes) -> float | None:
    """Parse a number; None if it is missing."""
    text = text.strip(b" ")
    if not text:
        return None
    if not _NUMBER.fullmatch(text) or math.isinf(float(text)):
        raise Malformed(text)
    return float(text)


def float32(text: bytes) -> float:
    value = number(text)
    with np.errstate(over="ignore"):
        rounded = math.inf if value is None else float(np.float32(value))
    if math.isinf(rounded):
        raise Malformed(text)
    return rounded


def raw_key(text: bytes) -> int:
    if not re.fullmatch(rb"\d+", text) or int(text) >= 2**64:
        raise Malformed(text)
    return int(text)


@dataclass
class Example:
    label: float
    bags: list[list[tuple[int, float]]]  # per field: (id, weight)
    dense: list[float] = field(default_factory=list)


Column = tuple[str, str, bool, float, float, float | str]


def svm_line(line: bytes, fields: int, one_bag: bool, raw_keys: bool) -> Example:
    label, *tokens = re.split(rb"[ \t]+", line.strip(b" \t"))
    bags: list[list[tuple[int, float]]] = [[] for _ in range(1 if one_bag else fields)]
    if not one_bag and len(tokens) != fields:
        raise Malformed(line)
    for i, token in enumerate(tokens):
        bags[0 if one_bag else i].append(_id(token, 0 if one_bag else i, raw_keys))
    return Example(_svm_label(label), bags)


def ffm_line(line: bytes, fields: int, raw_keys: bool) -> Example:
    label, *tokens = re.split(rb"[ \t]+", line.strip(b" \t"))
    bags: list[list[tuple[int, float]]] = [[] for _ in range(fields)]
    for token in tokens:
        number_text, colon, rest = token.partition(b":")
        if not colon or not re.fullmatch(rb"\d+", number_text) or int(number_text) >= fields:
            raise Malformed(token)
        bags[int(number_text)].append(_id(rest, int(number_text), raw_keys))
    return Example(_svm_label(label), bags)


def _svm_label(text: bytes) -> float:
    return 0.0 if float32(text) == -1 else float32(text)


def _id(token: bytes, number: int, raw_keys: bool) -> tuple[int, float]:
    text, colon, value = token.partition(b":")
    if not re.fullmatch(rb"\d+", text):
        raise Malformed(token)
    return raw_key(text) if raw_keys else key_of(str(number), text), float32(value) if colon else 1.0


def split_columns(line: bytes, delimiter: bytes, quoting: bool) -> list[bytes]:
    if not quoting:
        return line.split(delimiter)
    columns, rest = [], line
    while True:
        if rest.startswith(b'"'):
            match = re.match(rb'"((?:[^"]|"")*)"(?!")', rest)
            if not match:
                raise Malformed(line)
            columns.append(match[1].replace(b'""', b'"'))
            rest = rest[match.end() :]
            if rest and not rest.startswith(delimiter):
                raise Malformed(line)
            more, rest = bool(rest), rest[1:]
        else:
            value, found, rest = rest.partition(delimiter)
            columns.append(value)
            more = bool(found)
        if not more:
            return columns


def bucket_of(x: float, bucket: float | str) -> int:
    if bucket == "log_square":
        return math.floor(math.log(x) ** 2) if x > 2 else math.floor(x)
    return math.floor(x / float(bucket))


def table_line(line: bytes, columns: Sequence[Column], delimiter: bytes, quoting: bool, raw_keys: bool) -> Example:
    values = split_columns(line, delimiter, quoting)
    if len(values) != len(columns):
        raise Malformed(line)
    example = Example(0.0, [])
    for value, (role, name, log, mean, inverse, bucket) in zip(values, columns, strict=True):
        if role == "label":
            example.label = float32(value)
        elif role == "key":
            example.bags.append([(raw_key(value) if raw_keys else key_of(name, value), 1.0)])
        elif role in ("dense", "number_key"):
            x = number(value)
            if x is not None and log:
                x = math.copysign(math.log1p(abs(x)), x)
            if x is not None:
                x = (x - mean) * inverse
            if role == "dense":
                with np.errstate(over="ignore"):
                    example.dense.append(0.0 if x is None else float(np.float32(x)))
                if not math.isfinite(example.dense[-1]):
                    raise Malformed(value)
            else:
                text = value if bucket == "none" else b"" if x is None else str(bucket_of(x, bucket)).encode()
                if x is not None and bucket != "none" and not -(2**63) <= int(text) < 2**63:
                    raise Malformed(value)
                example.bags.append([(key_of(name, b"" if x is None else text), 1.0)])
    return example


def parse(block: bytes, parse_line: Callable[[bytes], Example], spaces: bytes) -> tuple[list[Example], list[int]]:
    """Return the examples and the indices of malformed lines. Lines that consist of `spaces` are empty."""
    examples, malformed = [], []
    for i, line in enumerate(block.split(b"\n")):
        line = line.removesuffix(b"\r")
        if not line.strip(spaces) if spaces else not line:
            continue
        try:
            if b"\0" in line:
                raise Malformed(line)
            examples.append(parse_line(line))
        except Malformed:
            malformed.append(i)
    return examples, malformed
