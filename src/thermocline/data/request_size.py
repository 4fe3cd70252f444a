"""Size of an Arrow table from elsewhere after its conversion: lists, dictionaries and views may repeat few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thermocline.arrays import Offsets
from thermocline.data.arrow_keys import is_list, is_text


def require_size(table: Any, separators: Mapping[str, str], *, max_ids: int, max_text: int) -> None:
    """Raise `ValueError` if a table has more than `max_ids` ids, or more than `max_text` bytes of text.

    table       an Arrow table that has passed `validate(full=True)`
    separators  of columns whose text has several ids
    Allocates in proportion to the number of rows and to the bytes of the table.
    """
    import pyarrow.types as pt

    ids = text = entries = entry_text = 0
    for name, column in zip(table.schema.names, table.columns, strict=True):
        for array in column.chunks:
            ids += _list_ids(array)
            _require(ids, max_ids, "ids")
            values = array.flatten() if is_list(array.type) else array
            if pt.is_dictionary(values.type):  # conversion reads all its entries, also those that no row names
                entries += len(values.dictionary)
                _require(entries, max_ids, "entries of dictionaries")
                lengths = _text_lengths(values.dictionary)
                entry_text += 0 if lengths is None else int(lengths.sum())
                _require(entry_text, max_text, "bytes of text in dictionaries")
            lengths = _text_lengths(values)
            text += 0 if lengths is None else int(lengths.sum())
            _require(text, max_text, "bytes of text")
            if name in separators and lengths is not None:
                ids += _separators(values, separators[name])
                _require(ids, max_ids, "ids")


def _require(count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise ValueError(f"a request to score has {count} {unit} or more: at most {limit}; send several batches")


def _list_ids(array: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.list_value_length(array)).as_py() or 0) if is_list(array.type) else len(array)


def _text_lengths(array: Any) -> Offsets | None:
    """Return the bytes of each value; None: the values are not text."""
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if pt.is_dictionary(array.type):
        lengths = _text_lengths(array.dictionary)
        return None if lengths is None else _take(lengths, array)
    if not is_text(array.type):
        return None
    if "view" in str(array.type):  # 16 bytes per value, of which the first four are the length
        views = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(-1, 4)
        lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
        valid = array.is_valid().to_numpy(zero_copy_only=False)  # the view of a null may have any length
        return np.where(valid, lengths, 0)
    values = pc.binary_length(array).cast("int64").fill_null(0)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _separators(array: Any, separator: str) -> int:
    """Count separators in text whose size was checked."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    whole = array.dictionary if pt.is_dictionary(array.type) else array
    found = pc.count_substring(whole.cast(pa.large_binary()), pattern=separator).fill_null(0).cast("int64")
    counts: Offsets = np.asarray(found.to_numpy(zero_copy_only=False))
    return int((_take(counts, array) if pt.is_dictionary(array.type) else counts).sum())


def _take(values: Offsets, array: Any) -> Offsets:
    """Return the values that the indices of a dictionary array name; 0 for null."""
    indices = array.indices.cast("int64").fill_null(len(values)).to_numpy(zero_copy_only=False)
    taken: Offsets = np.append(values, 0)[indices]
    return taken
