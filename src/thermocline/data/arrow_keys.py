"""Arrow columns -> keys, those that the same values in a text file have.

Strings and bytes are themselves, integers and floats without a fraction (up to 2^53) their decimal text, booleans "0"
and "1", other floats the shortest text that reads back the same; a null, and NaN, is the value "".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thermocline.core import core

Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def hashed(array: Any, field: str) -> Keys:
    """The keys of an Arrow array's values."""
    import pyarrow as pa
    import pyarrow.types as pt

    kind = array.type
    if pt.is_dictionary(kind):
        words = np.append(hashed(array.dictionary, field), np.uint64(core.key_of(field, b"")))
        places = array.indices.cast(pa.int64()).fill_null(len(words) - 1)
        return np.asarray(words[places.to_numpy(zero_copy_only=False)])
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if is_text(kind):
        if not (pt.is_large_string(kind) or pt.is_large_binary(kind)):
            array = array.cast(pa.large_binary()) if not (pt.is_string(kind) or pt.is_binary(kind)) else array
        wide = pt.is_large_string(array.type) or pt.is_large_binary(array.type)
        _, offsets, text = array.buffers()
        cuts: Any = np.zeros(1, np.int32)  # an empty array may have no offsets at all
        if len(array):
            cuts = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset :][: len(array) + 1]
        return core.hash_strings(field, cuts, np.frombuffer(text or b"", np.uint8), valid)
    if pt.is_floating(kind):
        array = array.cast(pa.float64() if pt.is_float64(kind) else pa.float32())
        return core.hash_floats(field, array.fill_null(0).to_numpy(zero_copy_only=False), valid)
    integer = pa.uint64() if pt.is_unsigned_integer(kind) else pa.int64()
    return core.hash_ints(field, array.cast(integer).fill_null(0).to_numpy(zero_copy_only=False), valid)


def doubles(array: Any) -> npt.NDArray[np.float64]:
    """Numbers of an Arrow array; NaN where there is none."""
    import pyarrow as pa

    values = array.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values)


def raw_keys(array: Any) -> Keys:
    """Integers as they are, negative ones as bit patterns; text as decimal numbers."""
    import pyarrow as pa
    import pyarrow.types as pt

    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = array.cast(pa.string()).cast(pa.uint64())
    if pt.is_signed_integer(array.type):
        return np.ascontiguousarray(array.cast(pa.int64()).to_numpy(zero_copy_only=False)).view(np.uint64)
    return np.ascontiguousarray(array.cast(pa.uint64()).to_numpy(zero_copy_only=False))


def rows_without_key(array: Any) -> Mask:
    """Rows with a null, or a text that is no decimal number of 64 bits, where a key should be."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if is_list(array.type):
        sizes = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(array)), sizes)
        bad = np.zeros(len(array), np.bool_)
        bad[rows[rows_without_key(array.flatten())]] = True
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


def interleave(
    rows: int, columns: Sequence[tuple[Keys, npt.NDArray[np.int64] | None]]
) -> tuple[Keys, npt.NDArray[np.int64]]:
    """Columns of keys -> ids and offsets, example by example."""
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


def whole(column: Any) -> Any:
    """A chunked column as one array."""
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
