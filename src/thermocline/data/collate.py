"""`tc.Collate`: examples as dicts to a `tc.Batch`, in the worker processes of a torch DataLoader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thermocline.batch import Batch
from thermocline.data.value_keys import key_of


class Collate:
    """A `collate_fn`: [{"user": "u1", "tags": ["a", "b"], "age": 31.0, "click": 1}, ...] -> `tc.Batch`.

    fields     names of the categorical values: one value, a list of values, or None for a missing one (not with
               raw_keys)
    dense      names of the numbers, which become float32[examples, numbers]
    label      name of the label, which becomes float32[examples]; None: no label
    raw_keys   values are 64-bit keys already (whole numbers); else they are hashed as by the readers (`tc.key_of`)

    It can be pickled, for workers that are spawned.
    """

    def __init__(
        self, fields: Sequence[str], *, dense: Sequence[str] = (), label: str | None = None, raw_keys: bool = False
    ) -> None:
        self.fields, self.dense, self.label, self.raw_keys = tuple(fields), tuple(dense), label, raw_keys
        if not self.fields:
            raise ValueError("fields are empty: name at least one")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch, with names."""
        import torch

        lists = [self._ids(field, self._value(example, field)) for example in examples for field in self.fields]
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        dense = [[float(self._value(example, name)) for name in self.dense] for example in examples]
        label = self.label
        labels = None if label is None else [float(self._value(example, label)) for example in examples]
        return Batch(
            np.concatenate([np.empty(0, np.uint64), *lists]),
            offsets,
            len(self.fields),
            dense=torch.tensor(dense, dtype=torch.float32) if self.dense else None,
            label=None if labels is None else torch.tensor(labels, dtype=torch.float32),
            names=self.fields,
        )

    @staticmethod
    def _value(example: Mapping[str, Any], name: str) -> Any:
        if name not in example:
            raise KeyError(f"an example has no {name!r}: it has {sorted(example)}")
        return example[name]

    def _ids(self, field: str, value: Any) -> Any:
        values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
        if not self.raw_keys:
            return key_of(field, values)
        try:
            keys = [int(one) for one in values]
            if any(key != one for key, one in zip(keys, values, strict=True) if not isinstance(one, str)):
                raise ValueError
            return np.array(keys, dtype=object).astype(np.uint64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{field!r} is {value!r}: with raw_keys values must be whole numbers from 0 to 2**64 - 1"
            ) from None
