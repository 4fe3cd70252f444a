"""Shared words: a batch of examples, and the working set of its keys."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from thermocline.core import core
from thermocline.embedding.arrays import Keys, as_keys, as_numpy
from thermocline.utils.cpu_affinity import cores

Slots = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@functools.cache
def _dedup(threads: int) -> core.Dedup:
    """One per number of threads: it keeps its scratch memory between batches."""
    return core.Dedup(threads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """The unique keys of a batch's ids, and where each of them occurs. Computed once per batch, used by every stage."""

    keys: Keys
    """The unique keys, in order of first occurrence."""
    inverse: Slots
    """Per id: its place in `keys`."""
    starts: Slots
    """Key u occurs at order[starts[u] : starts[u + 1]]."""
    order: Slots
    """Positions of ids, grouped by key, ascending within a key."""

    @classmethod
    def of(cls, ids: Any, *, threads: int | None = None) -> Self:
        """The working set of `ids` (uint64, or int64 bit patterns). The result does not depend on `threads`."""
        return cls(*_dedup(threads or cores()).run(as_keys(ids)))

    def __len__(self) -> int:
        return len(self.keys)


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """Examples as CSR: the ids of (example, field) are ids[offsets[example * fields + field] : the next offset].

    Ids are 64-bit keys that already tell the fields apart (a hash of field and value). What a model needs beside them
    rides along: `dense` features and the `label`, as given.
    """

    ids: Keys
    offsets: Offsets
    fields: int
    weights: Floats | None = None
    """One per id; none: all 1."""
    dense: Any = None
    label: Any = None
    position: Any = None
    """Where its reader stands after this batch (JSON), so that a run can go on from there."""
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """What `tc.prefetch` has made ready, by table."""

    def __post_init__(self) -> None:
        self.ids = as_keys(self.ids)
        self.offsets = _as_offsets(self.offsets, len(self.ids))
        if self.fields < 1 or (len(self.offsets) - 1) % self.fields:
            raise ValueError(f"{len(self.offsets) - 1} bags cannot be examples of {self.fields} fields each")
        if self.weights is not None:
            self.weights = _as_weights(self.weights)
            if self.weights.shape != self.ids.shape:
                raise ValueError(f"weights have shape {self.weights.shape}, but there are {len(self.ids)} ids")

    @property
    def examples(self) -> int:
        """How many."""
        return (len(self.offsets) - 1) // self.fields

    def __len__(self) -> int:
        return self.examples

    @classmethod
    def from_lists(cls, examples: Sequence[Sequence[Any]], **more: Any) -> Self:
        """From examples[example][field]: a list of ids, or one id; negative ones are taken as bit patterns.

        `more`: weights (one per id, in a row), dense, label, position.
        """
        fields = len(examples[0]) if examples else 1
        bags: list[Any] = []
        for n, example in enumerate(examples):
            if len(example) != fields:
                raise ValueError(f"example {n} has {len(example)} fields, example 0 has {fields}")
            bags.extend([bag] if isinstance(bag, (int, np.integer)) else bag for bag in example)
        offsets = np.zeros(len(bags) + 1, np.int64)
        np.cumsum([len(bag) for bag in bags], out=offsets[1:])
        keys = (_as_pattern(key) for bag in bags for key in bag)
        ids = np.fromiter(keys, np.uint64, count=int(offsets[-1]))
        return cls(ids, offsets, fields, **more)

    @classmethod
    def from_jagged(cls, keys: Sequence[str], values: Any, lengths: Any, weights: Any = None, **more: Any) -> Self:
        """From a KeyedJaggedTensor's parts: `lengths` and `values` are field after field, each over all examples."""
        fields = len(keys)
        sizes = _as_integers(lengths, "lengths")
        ids = as_keys(values)
        if fields == 0 or len(sizes) % fields or (sizes < 0).any() or sizes.sum() != len(ids):
            raise ValueError(
                f"{len(sizes)} lengths with sum {sizes.sum()} do not fit {fields} keys and {len(ids)} values"
            )
        factors = None if weights is None else _as_weights(weights)
        if factors is not None and factors.shape != ids.shape:
            raise ValueError(f"weights have shape {factors.shape}, but there are {len(ids)} values")
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        # Bag (field, example) moves to place (example, field).
        source = np.arange(len(sizes)).reshape(fields, -1).T.reshape(-1)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes[source], out=offsets[1:])
        moved = np.repeat(starts[:-1][source] - offsets[:-1], sizes[source]) + np.arange(len(ids))
        return cls(ids[moved], offsets, fields, None if factors is None else factors[moved], **more)

    def select(self, fields: Sequence[int]) -> tuple[Keys, Offsets, Floats | None]:
        """Ids, offsets and weights of these fields alone, in the order given, example by example."""
        if list(fields) == list(range(self.fields)):
            return self.ids, self.offsets, self.weights
        for field in fields:
            if not 0 <= field < self.fields:
                raise IndexError(f"field {field} of a batch with {self.fields} fields")
        sizes = np.diff(self.offsets).reshape(-1, self.fields)[:, fields].reshape(-1)
        starts = self.offsets[:-1].reshape(-1, self.fields)[:, fields].reshape(-1)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        places = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        return self.ids[places], offsets, None if self.weights is None else self.weights[places]


def _as_pattern(key: Any) -> int:
    number = operator.index(key)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"id {number} has more than 64 bits: hash it first")
    return number % 2**64


def _as_integers(value: Any, what: str) -> Offsets:
    array = _as_array(value, what)
    if array.size == 0:
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{what} have shape {array.shape} of {array.dtype}: needed is one row of integers")
    return np.ascontiguousarray(array).astype(np.int64, copy=False)


def _as_offsets(offsets: Any, ids: int) -> Offsets:
    cuts = _as_integers(offsets, "offsets")
    if len(cuts) == 0 or cuts[0] != 0 or cuts[-1] != ids or (np.diff(cuts) < 0).any():
        raise ValueError(f"offsets must begin with 0, never fall, and end with the number of ids, {ids}")
    return cuts


def _as_weights(weights: Any) -> Floats:
    array = _as_array(weights, "weights")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"weights have dtype {array.dtype}: needed are numbers")
    return np.ascontiguousarray(array, np.float32)


def _as_array(value: Any, what: str) -> npt.NDArray[Any]:
    return np.asarray(value) if isinstance(value, (list, tuple)) else as_numpy(value, what)
