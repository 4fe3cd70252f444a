"""Arguments as the arrays the C++ core takes, without copies: NumPy arrays and torch tensors, torch not imported."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Offsets = npt.NDArray[np.int64]


def as_numpy(value: Any, what: str) -> npt.NDArray[Any]:
    """The same memory as a NumPy array."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{what} is a {type(value).__name__}: pass a NumPy array or a torch CPU tensor")
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        return np.asarray(value)
    except TypeError as error:
        device, dtype = getattr(value, "device", "?"), getattr(value, "dtype", "?")
        raise TypeError(
            f"{what} cannot be read as a NumPy array (device {device}, dtype {dtype}): call .cpu() on a GPU tensor, "
            f".view(torch.uint8) on a dtype NumPy lacks"
        ) from error


def as_keys(keys: Any) -> Keys:
    """Keys as uint64. int64 arrays are taken by their bit pattern; sequences of ints are converted."""
    if isinstance(keys, (list, tuple, range)):
        try:
            return np.fromiter(map(operator.index, keys), dtype=np.uint64, count=len(keys))
        except (TypeError, OverflowError) as error:
            raise type(error)(_wrong_key(keys)) from None
    array = as_numpy(keys, "keys")
    if array.dtype != np.uint64 and array.dtype != np.int64:
        raise TypeError(f"keys have dtype {array.dtype}: they must be uint64, or int64 (taken as bit patterns)")
    if array.ndim != 1:
        raise ValueError(f"keys have shape {array.shape}: they must be one-dimensional, such as keys.reshape(-1)")
    return np.ascontiguousarray(array).view(np.uint64)


def _wrong_key(keys: Sequence[Any]) -> str:
    """What is wrong with the first of them that is no key."""
    fine = (hasattr(key, "__index__") and 0 <= operator.index(key) < 2**64 for key in keys)
    place = next(place for place, one in enumerate(fine) if not one)
    return (
        f"keys have {keys[place]!r} at place {place}: they must be whole numbers from 0 to 2**64 - 1; an int64 array "
        "is taken by its bit patterns"
    )


def as_rows(rows: Any, count: int, row_bytes: int, what: str = "rows", writable: bool = False) -> Rows:
    """Rows as uint8[count, row_bytes]: the same memory. Any dtype will do whose rows have that many bytes."""
    array = as_numpy(rows, what)
    if array.ndim != 2 or array.shape[0] != count or array.shape[1] * array.itemsize != row_bytes:
        raise ValueError(
            f"{what} has shape {array.shape} of {array.dtype}: needed are {count} rows (one per key) of {row_bytes} "
            f"bytes, uint8[{count}, {row_bytes}] or the same bytes in another dtype"
        )
    if array.dtype.hasobject:
        raise TypeError(f"{what} has dtype object: its bytes are pointers, not values")
    if count and array.strides[1] != array.itemsize and array.shape[1] != 1:
        raise ValueError(f"{what}: the bytes of one row are not contiguous (strides {array.strides}); copy it first")
    if count > 1 and array.strides[0] < row_bytes:
        raise ValueError(f"{what}: rows overlap or run backwards (strides {array.strides}); copy it first")
    if writable and not array.flags.writeable:
        raise ValueError(f"{what} is read-only: pass an array that can be written")
    if count == 0:
        return np.empty((0, row_bytes), dtype=np.uint8)
    return array.view(np.uint8)


def floats_of(value: Any, shape: tuple[int, ...], what: str) -> Floats:
    """The same memory as a contiguous float32 array of that shape; copies only what is not contiguous."""
    array = as_numpy(value, what)
    if array.dtype != np.float32:
        raise TypeError(f"{what} has dtype {array.dtype}: it must be float32")
    if array.shape != shape:
        raise ValueError(f"{what} has shape {array.shape}: needed is {shape}")
    return np.ascontiguousarray(array)


def out_of(out: Any, shape: tuple[int, ...]) -> Floats:
    """Where a result goes: `out` itself, checked, or new memory."""
    if out is None:
        return np.empty(shape, np.float32)
    array = floats_of(out, shape, "out")
    if not array.flags.writeable or (not np.shares_memory(array, as_numpy(out, "out")) and array.size):
        raise ValueError("out must be a contiguous array that can be written")
    return array
