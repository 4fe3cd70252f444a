"""`tc.key_of`: the 64-bit key of a value of a field, as the readers compute it. docs/keys.md states the rule."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys, as_numpy
from thermocline.core import core


@overload
def key_of(field: str, value: str | bytes | float | None) -> int: ...
@overload
def key_of(field: str, value: list[Any] | tuple[Any, ...] | npt.NDArray[Any]) -> Keys: ...
def key_of(field: str, value: Any) -> int | Keys:
    """Return the key of a value: text, bytes, a number, a bool, or None for a missing value.

    Of a list, tuple, NumPy array or torch CPU tensor of values: uint64, one key per value. The same column of a file
    gives the same keys (`tc.Reader`), unless it is read with `raw_keys` or its numbers are put into buckets.
    """
    if not isinstance(field, str):
        raise TypeError(f"field is {field!r}: it must be the name of a field, such as {str(field)!r}")
    if isinstance(value, (list, tuple)):
        return np.fromiter((_key(field, one) for one in value), np.uint64, len(value))
    if isinstance(value, np.ndarray) or (hasattr(value, "__dlpack__") and not isinstance(value, np.generic)):
        array = np.ascontiguousarray(as_numpy(value, "value"))
        return _keys_of_array(field, array.reshape(-1)).reshape(array.shape)
    return _key(field, value)


def _key(field: str, value: Any) -> int:
    if value is None:
        return core.key_of(field, b"")
    if isinstance(value, str):
        return core.key_of(field, value.encode())
    if isinstance(value, (bytes, bytearray, memoryview)):
        return core.key_of(field, bytes(value))
    if isinstance(value, (bool, np.bool_)):
        return core.key_of(field, b"1" if value else b"0")
    if isinstance(value, (int, np.integer)):
        return core.key_of(field, str(int(value)).encode())
    if isinstance(value, (float, np.floating)):
        return int(_keys_of_array(field, np.array([value]))[0])
    raise TypeError(f"value is a {type(value).__name__}: it must be text, bytes, a number, a bool or None")


def _keys_of_array(field: str, values: npt.NDArray[Any]) -> Keys:
    kind = values.dtype.kind
    if kind in "ib":
        return core.hash_ints(field, values.astype(np.int64))
    if kind == "u":
        return core.hash_ints(field, values.astype(np.uint64))
    if kind == "f":
        if values.dtype.itemsize >= 8:
            return core.hash_floats(field, values.astype(np.float64))
        return core.hash_floats(field, values.astype(np.float32))
    if kind in "OSU":
        return np.fromiter((_key(field, one) for one in values.tolist()), np.uint64, len(values))
    raise TypeError(f"values have dtype {values.dtype}: they must be text, bytes, numbers or bools")
