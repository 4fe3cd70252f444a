"""Keys from Arrow columns, equal to the keys of the same values in a text file.

A value is hashed as text: strings and bytes unchanged; integers, and integral floats up to 2^53, in decimal; booleans
as "0" and "1"; other floats as the shortest text that parses to the same value; null and NaN as "".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thermocline.arrays import Doubles, Keys, Mask, Offsets
from thermocline.core import core


def hash_column(array: Any, field: str) -> Keys:
    """Hash the values of an Arrow array, one key per value."""
    import pyarrow as pa
    import pyarrow.types as pt

    kind = array.type
    if pt.is_dictionary(kind):
        keys = np.append(hash_column(array.dictionary, field), np.uint64(core.key_of(field, b"")))
        indices = array.indices.cast(pa.int64()).fill_null(len(keys) - 1)
        return np.asarray(keys[indices.to_numpy(zero_copy_only=False)])
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if is_text(kind):
        if not (pt.is_large_string(kind) or pt.is_large_binary(kind)):
            array = array.cast(pa.large_binary()) if not (pt.is_string(kind) or pt.is_binary(kind)) else array
        wide = pt.is_large_string(array.type) or pt.is_large_binary(array.type)
        _, offsets, text = array.buffers()
        cuts: Any = np.zeros(1, np.int32)  # an empty array may have no offsets buffer
        if len(array):
            cuts = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset :][: len(array) + 1]
        return core.hash_strings(field, cuts, np.frombuffer(text or b"", np.uint8), valid)
    if pt.is_floating(kind):
        array = array.cast(pa.float64() if pt.is_float64(kind) else pa.float32())
        return core.hash_floats(field, array.fill_null(0).to_numpy(zero_copy_only=False), valid)
    integer = pa.uint64() if pt.is_unsigned_integer(kind) else pa.int64()
    return core.hash_ints(field, array.cast(integer).fill_null(0).to_numpy(zero_copy_only=False), valid)


def as_doubles(array: Any) -> Doubles:
    """Convert an Arrow array to float64, with NaN for null."""
    import pyarrow as pa

    values = array.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values)


def as_seconds(array: Any) -> tuple[Offsets, Mask]:
    """Convert event times to seconds since 1970, rounded down, and mark invalid ones: null, NaN or beyond 2^53.

    Times are timestamps, dates, or numbers of seconds.
    """
    import pyarrow as pa
    import pyarrow.types as pt

    invalid = ~array.is_valid().to_numpy(zero_copy_only=False)
    if pt.is_timestamp(array.type) or pt.is_date(array.type):
        units = 1 if pt.is_date(array.type) else {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[array.type.unit]
        array = array.cast(pa.timestamp("s")) if pt.is_date(array.type) else array
        return array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) // units, invalid
    if pt.is_integer(array.type):
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        invalid |= (values > 2**53) | (values < -(2**53)) if pt.is_signed_integer(array.type) else values > 2**53
        return np.where(invalid, 0, values).astype(np.int64), invalid
    seconds = np.floor(as_doubles(array))
    invalid |= ~(np.abs(seconds) <= 2**53)
    return np.where(invalid, 0, seconds).astype(np.int64), invalid


def is_time(kind: Any) -> bool:
    """Whether `as_seconds` converts values of this Arrow type."""
    import pyarrow.types as pt

    number = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)
    return bool(number or pt.is_timestamp(kind) or pt.is_date(kind))


def parse_times(array: Any) -> tuple[Offsets, Mask, Mask]:
    """Convert times to seconds since 1970, and mark those that are missing, and those that are invalid.

    Times are text (csrc/data/parse_time.h), timestamps, dates, or numbers of seconds. Null, NaN and "" are missing.
    """
    import pyarrow as pa
    import pyarrow.types as pt

    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        # A copy without slice or nulls, whose buffers are whole.
        whole = pa.concat_arrays([array.cast(pa.large_binary()).fill_null(b"")])
        _, offsets, text = whole.buffers()
        cuts: Any = np.zeros(1, np.int64)  # an empty array may have no offsets buffer
        if len(whole):
            cuts = np.frombuffer(offsets, np.int64)[whole.offset :][: len(whole) + 1]
        seconds, missing, invalid = core.parse_times(cuts, np.frombuffer(text or b"", np.uint8))
        return seconds, missing.astype(np.bool_), invalid.astype(np.bool_)
    absent = ~array.is_valid().to_numpy(zero_copy_only=False)
    if pt.is_floating(array.type):
        absent = absent | np.isnan(as_doubles(array))
    seconds, wrong = as_seconds(array)
    return seconds, absent, wrong & ~absent


def split_values(array: Any, separator: str) -> Any:
    """Split text at a separator into lists; empty parts are left out, and null is an empty list."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    parts = pc.split_pattern(array.cast(pa.large_binary()), separator.encode())
    sizes = parts.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = parts.flatten()
    kept = pc.greater(pc.binary_length(values), 0)
    rows = np.repeat(np.arange(len(array)), sizes)[kept.to_numpy(zero_copy_only=False)]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.filter(kept))


def raw_keys(array: Any) -> Keys:
    """Convert values that are keys already: integers by bit pattern, text as decimal numbers."""
    import pyarrow as pa
    import pyarrow.types as pt

    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = array.cast(pa.string()).cast(pa.uint64())
    if pt.is_signed_integer(array.type):
        return np.ascontiguousarray(array.cast(pa.int64()).to_numpy(zero_copy_only=False)).view(np.uint64)
    return np.ascontiguousarray(array.cast(pa.uint64()).to_numpy(zero_copy_only=False))


def rows_with_invalid_key(array: Any) -> Mask:
    """Mark the rows whose raw key is null, or text other than a decimal number below 2^64."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if is_list(array.type):
        sizes = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(array)), sizes)
        bad = np.zeros(len(array), np.bool_)
        bad[rows[rows_with_invalid_key(array.flatten())]] = True
        return bad
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    bad = ~array.is_valid().to_numpy(zero_copy_only=False)
    if is_text(array.type):
        text = array.cast(pa.large_binary()).fill_null(b"")
        digits = pc.match_substring_regex(text, r"^[0-9]{1,20}$").to_numpy(zero_copy_only=False)
        bad |= ~digits
        long = np.flatnonzero(pc.binary_length(text).to_numpy(zero_copy_only=False) == 20)
        bad[[row for row in long.tolist() if not bad[row] and int(text[row].as_py()) >= 2**64]] = True
    return np.asarray(bad)


def interleave(rows: int, columns: Sequence[tuple[Keys, Offsets | None]]) -> tuple[Keys, Offsets]:
    """Convert columns to ids and offsets in CSR layout, example by example.

    columns   keys and keys per row of each field; None means one key per row
    """
    fields = len(columns)
    if all(sizes is None for _, sizes in columns):
        matrix = np.empty((rows, fields), np.uint64)
        for field, (keys, _) in enumerate(columns):
            matrix[:, field] = keys
        return matrix.reshape(-1), np.arange(rows * fields + 1, dtype=np.int64)
    counts = np.ones((rows, fields), np.int64)
    for field, (_, sizes) in enumerate(columns):
        if sizes is not None:
            counts[:, field] = sizes
    offsets = np.zeros(rows * fields + 1, np.int64)
    np.cumsum(counts.reshape(-1), out=offsets[1:])
    starts = offsets[:-1].reshape(rows, fields)
    ids = np.empty(int(offsets[-1]), np.uint64)
    for field, (keys, sizes) in enumerate(columns):
        if sizes is None:
            ids[starts[:, field]] = keys
        else:
            before = np.cumsum(sizes) - sizes
            ids[np.repeat(starts[:, field] - before, sizes) + np.arange(len(keys))] = keys
    return ids, offsets


def one_array(column: Any) -> Any:
    """Return a chunked column as one contiguous array."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        return (
            column.chunk(0)
            if column.num_chunks == 1
            else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
        )
    return column


def is_list(kind: Any) -> bool:
    import pyarrow.types as pt

    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    import pyarrow.types as pt

    checks = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary)
    views = [check for name in ("is_string_view", "is_binary_view") if (check := getattr(pt, name, None)) is not None]
    return any(check(kind) for check in (*checks, *views))
