"""Typed messages between ranks: a closed set of values as bytes, and the collectives that carry them. Uses no pickle.

Values are None, bool, int, float, str, bytes, list, tuple, dict, NumPy arrays and torch tensors of the dtypes below. A
NumPy scalar arrives as the Python value, a GPU tensor as a CPU tensor. `decode` builds these values only and calls no
code that the sender chooses. It checks every length against the bytes that are left before it allocates, so the memory
of a decoded message is bounded by a constant times its size.

A value is one tag byte and its content; integers are little endian:

    N  F  T      None, False, True
    i            u8 length, then a signed integer of that many bytes
    d            float64
    s  b         u64 length, then UTF-8 text or bytes
    l  t         u64 count, then the items of a list or tuple
    m            u64 count, then the keys and values of a dict in turn
    a  A         NumPy array, torch tensor: u8 dtype (index in `DTYPES`), u8 dimensions, u64 per dimension, elements

Thread     the thread of the process group
Blocks     until the other ranks of the group have called the same function
Raises     `MessageError` for malformed bytes, TypeError or ValueError for a value that is not in the set
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch

from thermocline.distributed.torch_group import TorchGroup
from thermocline.errors import RankError

Buffer = bytes | bytearray | memoryview

MAX_BYTES = 1 << 34
"""Largest message. Larger sizes are refused by the sender, and by the receiver before it allocates memory."""
MAX_DEPTH = 100
"""Largest number of containers inside each other."""
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_MAX_DIMENSIONS = 32
_SIZE = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_REFUSED = "a {} cannot be sent to other ranks: send numbers, text, bytes, lists, dicts, arrays, tensors"


class MessageError(RankError):
    """Received bytes are not a message of this version of thermocline."""


# ---- values -> bytes


def encode(value: Any) -> bytearray:
    """Serialize a value. Raises TypeError for another type, ValueError for a value that is too large or too deep."""
    out = bytearray()
    _encode(value, out, 0)
    if len(out) > MAX_BYTES:
        raise ValueError(f"a message to other ranks has {len(out)} bytes: it must have at most {MAX_BYTES}")
    return out


def _encode(value: Any, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"a message to other ranks is nested more than {MAX_DEPTH} levels deep: flatten the value")
    match value:
        case None:
            out += b"N"
        case bool():
            out += b"T" if value else b"F"
        case int():
            size = value.bit_length() // 8 + 1
            if size > 255:
                raise ValueError(f"an integer of {value.bit_length()} bits cannot be sent to other ranks: at most 2039")
            out += b"i" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            out += b"d" + _FLOAT.pack(value)
        case str():
            _encode_bytes(b"s", value.encode("utf-8", "surrogatepass"), out)
        case bytes() | bytearray() | memoryview():
            _encode_bytes(b"b", value, out)
        case list() | tuple():
            out += (b"l" if isinstance(value, list) else b"t") + _SIZE.pack(len(value))
            for item in value:
                _encode(item, out, depth + 1)
        case dict():
            out += b"m" + _SIZE.pack(len(value))
            for key, item in value.items():
                _encode(key, out, depth + 1)
                _encode(item, out, depth + 1)
        case np.generic():
            _encode(_checked_item(value), out, depth)
        case np.ndarray():
            _encode_shape(b"a", value.dtype.name, value.shape, out)
            out += np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        case torch.Tensor():
            _encode_shape(b"A", str(value.dtype).removeprefix("torch."), tuple(value.shape), out)
            out += value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        case _:
            raise TypeError(
                f"a {type(value).__name__} cannot be sent to other ranks: send numbers, text, arrays, dicts"
            )


def _checked_item(value: np.generic) -> Any:
    item = value.item()
    if isinstance(item, np.generic):  # longdouble has no Python value
        raise TypeError(_REFUSED.format(value.dtype.name))
    return item


def _encode_bytes(tag: bytes, data: Buffer, out: bytearray) -> None:
    out += tag + _SIZE.pack(memoryview(data).nbytes)
    out += data


def _encode_shape(tag: bytes, dtype: str, shape: tuple[int, ...], out: bytearray) -> None:
    if dtype not in DTYPES or len(shape) > _MAX_DIMENSIONS:
        raise TypeError(
            f"an array of {dtype} with {len(shape)} dimensions cannot be sent to other ranks: it must have at most "
            f"{_MAX_DIMENSIONS} dimensions and one of the dtypes {', '.join(DTYPES)}"
        )
    out += tag + bytes([DTYPES.index(dtype), len(shape)]) + b"".join(_SIZE.pack(size) for size in shape)


# ---- bytes -> values


def decode(data: Buffer) -> Any:
    """Return the value that `encode` serialized. Raises `MessageError` for any other bytes."""
    decoder = _Decoder(memoryview(data).cast("B"))
    value = decoder.value(0)
    if decoder.position != len(decoder.data):
        raise decoder.error(f"{len(decoder.data) - decoder.position} bytes follow its end")
    return value


class _Decoder:
    """Reads values from front to back."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def error(self, cause: str) -> MessageError:
        return MessageError(
            f"a message of another rank is malformed at byte {self.position}: {cause}. All ranks must run the same "
            "version of thermocline, and only they may reach the rendezvous"
        )

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.position:
            raise self.error(f"{size} bytes expected, {len(self.data) - self.position} left")
        self.position += size
        return self.data[self.position - size : self.position]

    def size(self) -> int:
        number: int = _SIZE.unpack(self.take(8))[0]
        return number

    def count(self, item_bytes: int) -> int:
        """Read the number of items that follow, each of at least `item_bytes` bytes."""
        count = self.size()
        if count * item_bytes > len(self.data) - self.position:
            raise self.error(f"{count} items expected, {len(self.data) - self.position} bytes left")
        return count

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} levels deep")
        match bytes(self.take(1)):
            case b"N":
                return None
            case b"T":
                return True
            case b"F":
                return False
            case b"i":
                return int.from_bytes(self.take(self.take(1)[0]), "little", signed=True)
            case b"d":
                return _FLOAT.unpack(self.take(8))[0]
            case b"s":
                try:
                    return str(self.take(self.size()), "utf-8", "surrogatepass")
                except UnicodeDecodeError as error:
                    raise self.error(f"text is not UTF-8 ({error.reason})") from None
            case b"b":
                return bytes(self.take(self.size()))
            case b"l":
                return [self.value(depth + 1) for _ in range(self.count(1))]
            case b"t":
                return tuple(self.value(depth + 1) for _ in range(self.count(1)))
            case b"m":
                return self.dict_(depth)
            case b"a":
                return self.array(self.dtype(), torch_dtype=False)
            case b"A":
                return self.array(self.dtype(), torch_dtype=True)
            case tag:
                raise self.error(f"unknown tag {tag!r}")

    def dict_(self, depth: int) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for _ in range(self.count(2)):
            key, item = self.value(depth + 1), self.value(depth + 1)
            try:
                if key in values:
                    raise self.error(f"key {key!r:.100} occurs twice")
                values[key] = item
            except TypeError:
                raise self.error(f"a {type(key).__name__} cannot be a key") from None
        return values

    def dtype(self) -> str:
        number = self.take(1)[0]
        if number >= len(DTYPES):
            raise self.error(f"unknown dtype {number}")
        return DTYPES[number]

    def array(self, dtype: str, *, torch_dtype: bool) -> Any:
        dimensions = self.take(1)[0]
        if dimensions > _MAX_DIMENSIONS:
            raise self.error(f"an array has {dimensions} dimensions")
        shape = [self.size() for _ in range(dimensions)]
        if dtype == "bfloat16" and not torch_dtype:
            raise self.error("a NumPy array cannot have dtype bfloat16")
        kind = getattr(torch, dtype)
        # An empty array may have any other dimensions; `take` refuses others that are too large.
        if 0 in shape and math.prod(max(size, 1) for size in shape) * kind.itemsize >= 1 << 62:
            raise self.error(f"an array has shape {shape}")
        data = bytearray(self.take(math.prod(shape) * kind.itemsize))
        if dtype == "bool" and data.translate(None, b"\x00\x01"):
            raise self.error("a bool is neither 0 nor 1")
        if torch_dtype:
            return (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(shape)
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


# ---- collectives


def all_gather_message(group: TorchGroup, message: Buffer) -> list[memoryview]:
    """Return the messages of all ranks of the group, in group order."""
    sizes = _gather_sizes(group, len(message))
    received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    group.all_gather(received, _padded(message, max(sizes)))
    return [tensor.numpy().data[:size] for tensor, size in zip(received, sizes, strict=True)]


def gather_message(group: TorchGroup, message: Buffer) -> list[memoryview]:
    """Send the messages of all ranks to the group's rank 0 and return them there, in group order; elsewhere []."""
    sizes = _gather_sizes(group, len(message))
    received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if group.rank == 0 else []
    group.gather(received, _padded(message, max(sizes)))
    return [tensor.numpy().data[:size] for tensor, size in zip(received, sizes, strict=False)]


def broadcast_message(group: TorchGroup, message: Buffer | None) -> Buffer:
    """Return the message of the group's rank 0 on every rank; the others pass None. A rank receives it once."""
    size = torch.tensor([0 if message is None else len(message)])
    group.broadcast(size)
    content = torch.empty(_checked_size(int(size[0])), dtype=torch.uint8) if message is None else as_tensor(message)
    group.broadcast(content)
    return content.numpy().data if message is None else message


def _gather_sizes(group: TorchGroup, size: int) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    group.all_gather(sizes, torch.tensor([size]))
    return [_checked_size(int(size[0])) for size in sizes]


def _padded(message: Buffer, size: int) -> torch.Tensor:
    """Return the message with zeros after it: Gloo gathers equal sizes."""
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(message)] = as_tensor(message)
    return padded


def _checked_size(size: int) -> int:
    if not 0 < size <= MAX_BYTES:
        raise MessageError(
            f"a message of another rank has {size} bytes: it must have 1 to {MAX_BYTES}; ranks called different "
            "collectives"
        )
    return size


def as_tensor(message: Buffer) -> torch.Tensor:
    """Return the bytes as uint8, without a copy of a bytearray."""
    if not message:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(message if isinstance(message, bytearray) else bytearray(message), dtype=torch.uint8)
