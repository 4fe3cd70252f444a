"""Array types, and conversion of arguments to the arrays that the C++ core takes.

NumPy arrays and torch CPU tensors are converted without a copy where the layout allows it; torch is not imported.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Offsets = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def as_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """Return a NumPy array over the memory of `value`; `name` names the argument in errors."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name} is a {type(value).__name__}: pass a NumPy array or a torch CPU tensor")
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        return np.asarray(value)
    except TypeError as error:
        device, dtype = getattr(value, "device", "?"), getattr(value, "dtype", "?")
        raise TypeError(
            f"{name} cannot be converted to a NumPy array (device {device}, dtype {dtype}): call .cpu() on a GPU "
            "tensor, .view(torch.uint8) on a dtype that NumPy lacks"
        ) from error


def as_keys(keys: Any) -> Keys:
    """Convert keys to uint64: int64 arrays by bit pattern, sequences of integers by value."""
    if isinstance(keys, (list, tuple, range)):
        try:
            return np.fromiter(map(operator.index, keys), dtype=np.uint64, count=len(keys))
        except (TypeError, OverflowError) as error:
            raise type(error)(_invalid_key(keys)) from None
    array = as_numpy(keys, "keys")
    if array.dtype != np.uint64 and array.dtype != np.int64:
        raise TypeError(f"keys have dtype {array.dtype}: they must be uint64, or int64 (converted by bit pattern)")
    if array.ndim != 1:
        raise ValueError(f"keys have shape {array.shape}: they must be one-dimensional, such as keys.reshape(-1)")
    return np.ascontiguousarray(array).view(np.uint64)


def _invalid_key(keys: Sequence[Any]) -> str:
    """Build the error message for the first invalid key of a sequence."""
    valid = (hasattr(key, "__index__") and 0 <= operator.index(key) < 2**64 for key in keys)
    index = next(i for i, is_valid in enumerate(valid) if not is_valid)
    return (
        f"keys[{index}] is {keys[index]!r}: keys must be whole numbers from 0 to 2**64 - 1; pass an int64 array to use "
        "bit patterns"
    )


def as_rows(rows: Any, count: int, row_bytes: int, name: str = "rows", writable: bool = False) -> Rows:
    """View rows as uint8[count, row_bytes], without a copy. Accepts any dtype whose rows have `row_bytes` bytes."""
    array = as_numpy(rows, name)
    if array.ndim != 2 or array.shape[0] != count or array.shape[1] * array.itemsize != row_bytes:
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}: expected {count} rows (one per key) of "
            f"{row_bytes} bytes, such as uint8[{count}, {row_bytes}]"
        )
    if array.dtype.hasobject:
        raise TypeError(f"{name} has dtype object: its bytes are pointers, not values")
    if count and array.strides[1] != array.itemsize and array.shape[1] != 1:
        raise ValueError(f"{name}: the bytes of a row are not contiguous (strides {array.strides}); copy it first")
    if count > 1 and array.strides[0] < row_bytes:
        raise ValueError(f"{name}: rows overlap or are in reverse order (strides {array.strides}); copy it first")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only: pass a writable array")
    if count == 0:
        return np.empty((0, row_bytes), dtype=np.uint8)
    return array.view(np.uint8)


def floats_of(value: Any, shape: tuple[int, ...], name: str) -> Floats:
    """Convert to a contiguous float32 array and check its shape; copies only a non-contiguous array."""
    array = as_numpy(value, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} has dtype {array.dtype}: it must be float32")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: expected {shape}")
    return np.ascontiguousarray(array)


def out_of(out: Any, shape: tuple[int, ...]) -> Floats:
    """Return the array that a result is written to: `out` after checks, or a new array if `out` is None."""
    if out is None:
        return np.empty(shape, np.float32)
    array = floats_of(out, shape, "out")
    if not array.flags.writeable or (not np.shares_memory(array, as_numpy(out, "out")) and array.size):
        raise ValueError("out must be a contiguous, writable array")
    return array
