"""`JaggedTensor` and `KeyedJaggedTensor`: lists of ids per example, for one feature or several, as in TorchRec."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

_VARIABLE_BATCH = "a batch size per feature is not supported: give every feature the same number of examples"


class _Jagged:
    """Values in bags of `lengths`, with optional weights per value."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> None:
        if lengths is None and offsets is None:
            raise ValueError("neither lengths nor offsets are given: give one of them")
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None and tensor.numel() and tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} have dtype {tensor.dtype}: they must be int32 or int64")
        if weights is not None and len(weights) != len(values):
            raise ValueError(f"{len(weights)} weights for {len(values)} values: give one weight per value")
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    def values(self) -> torch.Tensor:
        """Values of all bags, one after another."""
        return self._values

    def weights(self) -> torch.Tensor:
        """Weights of the values. Raises ValueError if there are none."""
        if self._weights is None:
            raise ValueError("there are no weights: make the tensor with weights=...")
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        """Weights of the values, or None."""
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Number of values per bag."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def lengths_or_none(self) -> torch.Tensor | None:
        """`lengths` if they are known already."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """First value of each bag, and the number of values at the end."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = _cumulated(self._lengths)
        return self._offsets

    def offsets_or_none(self) -> torch.Tensor | None:
        """`offsets` if they are known already."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def record_stream(self, stream: Any) -> None:
        """Call `record_stream` of each tensor."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets):
            if tensor is not None:
                tensor.record_stream(stream)


class JaggedTensor(_Jagged):
    """One feature: bag i has values[offsets[i] : offsets[i + 1]]."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)

    @classmethod
    def empty(cls, is_weighted: bool = False, device: Any = None, values_dtype: torch.dtype | None = None) -> Self:
        """Return a tensor without bags."""
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        return cls(values, torch.empty(0, device=device) if is_weighted else None, nothing)

    @classmethod
    def from_dense(cls, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None) -> Self:
        """Build it from one tensor per bag."""
        joined = torch.cat(list(values))
        lengths = torch.tensor([len(bag) for bag in values], dtype=torch.int32, device=joined.device)
        return cls(joined, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(
        cls, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> Self:
        """Build it from a 2-D tensor, of which row i has lengths[i] values."""
        mask = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        return cls(values[mask], None if weights is None else weights[mask], lengths)

    def to_dense(self) -> list[torch.Tensor]:
        """Return one tensor per bag."""
        return list(torch.split(self._values, self.lengths().tolist()))

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        """Return the weights, one tensor per bag; None: there are none."""
        return None if self._weights is None else list(torch.split(self._weights, self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """Return [bags, length, ...]: the first values of each bag, padded; default length: that of the longest."""
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        """Return the weights as `to_padded_dense`; None: there are none."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, values: torch.Tensor, length: int | None, padding: float) -> torch.Tensor:
        lengths = self.lengths().long()
        if length is None:
            length = int(lengths.max()) if len(lengths) else 0
        bag = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
        column = torch.arange(len(values), device=values.device) - self.offsets().long()[:-1][bag]
        kept = column < length
        out = values.new_full((len(lengths), length, *values.shape[1:]), padding)
        return out.index_put((bag[kept], column[kept]), values[kept])

    def to(self, device: Any, non_blocking: bool = False) -> JaggedTensor:
        """Return a copy on a device."""
        return JaggedTensor(*_moved(self, device, non_blocking))

    def __repr__(self) -> str:
        return f"JaggedTensor({[bag.tolist() for bag in self.to_dense()]})"


class KeyedJaggedTensor(_Jagged):
    """Several features of the same examples: all bags of the first key, then of the second, and so on."""

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Any = None,
        inverse_indices: Any = None,
    ) -> None:
        """
        stride   number of examples; default: the number of bags divided by that of keys

        `stride_per_key_per_rank` and `inverse_indices` of TorchRec (a batch size per feature) are refused.
        """
        for name, given in (("stride_per_key_per_rank", stride_per_key_per_rank), ("inverse_indices", inverse_indices)):
            if given is not None:
                raise ValueError(f"{name} is given: {_VARIABLE_BATCH}")
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"keys are {self._keys}: they must be unique")
        bags = len(lengths) if lengths is not None else max(0, len(self.offsets()) - 1)
        self._stride = bags // max(1, len(self._keys)) if stride is None else stride
        if bags != self._stride * len(self._keys):
            raise ValueError(
                f"{bags} bags do not match {len(self._keys)} keys and stride {self._stride}: expected one length per "
                "key and example"
            )
        self._length_per_key: list[int] | None = None

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Build it from the number of values per key and example."""
        return cls(keys, values, weights, lengths=lengths, stride=stride)

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Build it from the first value of each bag, and the number of values at the end."""
        return cls(keys, values, weights, offsets=offsets, stride=stride)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, Any]) -> Self:
        """Build it from one `JaggedTensor` per key, each of the same examples."""
        parts = list(jt_dict.values())
        if len({len(part.lengths()) for part in parts}) > 1:
            sizes = {key: len(part.lengths()) for key, part in jt_dict.items()}
            raise ValueError(f"examples per key are {sizes}: {_VARIABLE_BATCH}")
        weights = [part.weights_or_none() for part in parts]
        joined = None if not parts or None in [w if w is None else 1 for w in weights] else torch.cat(weights)
        return cls(
            list(jt_dict),
            torch.cat([part.values() for part in parts]) if parts else torch.empty(0, dtype=torch.int64),
            joined,
            lengths=torch.cat([part.lengths() for part in parts]) if parts else torch.empty(0, dtype=torch.int32),
        )

    @classmethod
    def concat(cls, kjt_list: Sequence[Any]) -> Self:
        """Join the keys of several tensors of the same examples."""
        if len({kjt.stride() for kjt in kjt_list}) > 1:
            raise ValueError(f"strides are {[kjt.stride() for kjt in kjt_list]}: they must be equal")
        weighted = [kjt.weights_or_none() is not None for kjt in kjt_list]
        if any(weighted) and not all(weighted):
            raise ValueError("some tensors have weights and some have none: give all of them weights, or none")
        return cls(
            [key for kjt in kjt_list for key in kjt.keys()],  # noqa: SIM118
            torch.cat([kjt.values() for kjt in kjt_list]),
            torch.cat([kjt.weights() for kjt in kjt_list]) if all(weighted) else None,
            lengths=torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride=kjt_list[0].stride(),
        )

    @classmethod
    def empty(cls, is_weighted: bool = False, device: Any = None, values_dtype: torch.dtype | None = None) -> Self:
        """Return a tensor without keys."""
        values = torch.empty(0, dtype=values_dtype, device=device)
        weights = torch.empty(0, device=device) if is_weighted else None
        return cls([], values, weights, lengths=torch.empty(0, dtype=torch.int32, device=device), stride=0)

    @classmethod
    def empty_like(cls, kjt: Any) -> Self:
        """Return a tensor without keys, with the device, dtype and stride of another."""
        values, weights = kjt.values()[:0], kjt.weights_or_none()
        return cls([], values, None if weights is None else weights[:0], lengths=kjt.lengths()[:0], stride=kjt.stride())

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of examples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Number of examples, per key."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Whether features differ in their number of examples: never."""
        return False

    def inverse_indices_or_none(self) -> None:
        """Return None: a batch size per feature is not supported."""
        return

    def length_per_key(self) -> list[int]:
        """Number of values, per key. Blocks on the device."""
        if self._length_per_key is None:
            self._length_per_key = self.lengths().view(len(self._keys), -1).sum(1).tolist() if self._keys else []
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """`length_per_key` if it is known already."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First value of each key, and the number of values at the end. Blocks on the device."""
        return [0, *itertools.accumulate(self.length_per_key())]

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        return {key: i for i, key in enumerate(self._keys)}

    def sync(self) -> Self:
        """Compute what blocks on the device."""
        self.length_per_key()
        return self

    def unsync(self) -> Self:
        """Forget what `sync` computed."""
        self._length_per_key = None
        return self

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Split it by keys: the first `segments[0]` keys, the next `segments[1]`, and so on."""
        ends = list(itertools.accumulate(segments))
        return [self._select(list(range(end - size, end))) for end, size in zip(ends, segments, strict=True)]

    def permute(self, indices: Sequence[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """Return the keys with these positions, in this order. `indices_tensor`, the same as a tensor, is not used."""
        return self._select(list(indices))

    def _select(self, positions: list[int]) -> KeyedJaggedTensor:
        starts = self.offset_per_key()
        parts = [slice(starts[i], starts[i + 1]) for i in positions]
        lengths = self.lengths().view(len(self._keys), -1) if self._keys else self.lengths().view(0, self._stride)
        chosen = KeyedJaggedTensor(
            [self._keys[i] for i in positions],
            _joined(self._values, parts),
            None if self._weights is None else _joined(self._weights, parts),
            lengths=lengths[torch.tensor(positions, dtype=torch.int64, device=lengths.device)].reshape(-1),
            stride=self._stride,
        )
        chosen._length_per_key = [part.stop - part.start for part in parts]
        return chosen

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"key is {key!r}: the tensor has keys {self._keys}")
        one = self._select([self._keys.index(key)])
        return JaggedTensor(one._values, one._weights, one._lengths)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return one `JaggedTensor` per key."""
        return {key: self[key] for key in self._keys}

    def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Return a copy on a device."""
        values, weights, lengths, offsets = _moved(self, device, non_blocking)
        moved = KeyedJaggedTensor(self._keys, values, weights, lengths, offsets, self._stride)
        moved._length_per_key = self._length_per_key
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """Return a copy in page-locked memory."""
        parts = (self._weights, self._lengths, self._offsets)
        weights, lengths, offsets = (None if part is None else part.pin_memory() for part in parts)
        return KeyedJaggedTensor(self._keys, self._values.pin_memory(), weights, lengths, offsets, self._stride)

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor({ {key: [bag.tolist() for bag in self[key].to_dense()] for key in self._keys} })"


def _cumulated(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def _joined(values: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
    chosen = [values[part] for part in parts]
    return chosen[0] if len(chosen) == 1 else torch.cat([values[:0], *chosen])


def _moved(tensor: _Jagged, device: Any, non_blocking: bool) -> list[Any]:
    parts = (tensor._values, tensor._weights, tensor._lengths, tensor._offsets)
    return [None if part is None else part.to(device, non_blocking=non_blocking) for part in parts]


def is_keyed_jagged(value: object) -> bool:
    """Return whether an object has the methods of a KeyedJaggedTensor that collections use."""
    return isinstance(value, KeyedJaggedTensor) or all(
        callable(getattr(type(value), name, None))
        for name in ("keys", "values", "lengths", "weights_or_none", "stride", "variable_stride_per_key")
    )


def require_equal_batches(kjt: Any) -> None:
    """Raise ValueError if features have different numbers of examples."""
    if kjt.variable_stride_per_key():
        raise ValueError(f"the KeyedJaggedTensor has stride_per_key_per_rank: {_VARIABLE_BATCH}")
    if kjt.inverse_indices_or_none() is not None:
        raise ValueError(f"the KeyedJaggedTensor has inverse_indices: {_VARIABLE_BATCH}")
