"""`KeyedTensor`: pooled vectors of several features side by side, as in TorchRec."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import torch


class KeyedTensor:
    """A tensor that is cut along `key_dim` into one part per key, of `length_per_key`."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor, key_dim: int = 1):
        self._keys, self._length_per_key = list(keys), list(length_per_key)
        self._values, self._key_dim = values, key_dim
        if len(self._keys) != len(self._length_per_key) or sum(self._length_per_key) != values.shape[key_dim]:
            raise ValueError(
                f"{len(self._keys)} keys with lengths {self._length_per_key} do not match values of shape "
                f"{tuple(values.shape)}: expected one length per key, with sum {values.shape[key_dim]}"
            )

    @classmethod
    def from_tensor_list(
        cls, keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> Self:
        """Build it from one tensor per key."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return cls(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        """Names of the parts."""
        return self._keys

    def values(self) -> torch.Tensor:
        """The whole tensor."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that is cut."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Length of each part."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Start of each part, and the sum of lengths at the end."""
        return [0, *itertools.accumulate(self._length_per_key)]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the part of each key: views of the values."""
        return dict(zip(self._keys, torch.split(self._values, self._length_per_key, self._key_dim), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._keys:
            raise KeyError(f"key is {key!r}: the tensor has keys {self._keys}")
        at = self._keys.index(key)
        return self._values.narrow(self._key_dim, self.offset_per_key()[at], self._length_per_key[at])

    def _key_indices(self) -> dict[str, int]:
        """Return the position of each key: TorchRec's own `regroup` calls it."""
        return {key: i for i, key in enumerate(self._keys)}

    @staticmethod
    def regroup(keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        """Return one tensor per group: the parts of its keys, side by side. A key may be in several groups."""
        parts = {key: part for tensor in keyed_tensors for key, part in tensor.to_dict().items()}
        missing = [key for group in groups for key in group if key not in parts]
        if missing:
            raise KeyError(f"groups have keys {missing}: the tensors have keys {list(parts)}")
        dim = keyed_tensors[0].key_dim()
        return [torch.cat([parts[key] for key in group], dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of `regroup` by name: one name of `keys` per group."""
        if len(groups) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(groups)} groups: give one name per group")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: Any, non_blocking: bool = False) -> KeyedTensor:
        """Return a copy on a device."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    def record_stream(self, stream: Any) -> None:
        """Call `record_stream` of the values."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        shapes = {key: tuple(part.shape) for key, part in self.to_dict().items()}
        return f"KeyedTensor({shapes})"
