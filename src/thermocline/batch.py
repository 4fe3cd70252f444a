"""A batch of examples, and the working set of its keys."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys, Offsets, Slots, as_keys, as_numpy
from thermocline.core import core
from thermocline.utils.cpu_affinity import cores

_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()


_FEW_IDS = 8192
"""Waking another thread takes longer than the work on so few ids: less than 0.1 ms."""


@functools.cache
def _dedup(threads: int) -> core.Dedup:
    """Return the shared Dedup for a number of threads: it reuses its scratch memory between batches."""
    return core.Dedup(threads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """The unique keys of a batch and the positions of their occurrences; computed once per batch for all stages."""

    keys: Keys
    """The unique keys, in order of first occurrence."""
    inverse: Slots
    """Per id: its index in `keys`."""
    starts: Slots
    """Key u occurs at the positions order[starts[u] : starts[u + 1]]."""
    order: Slots
    """Positions in the ids, grouped by key, ascending within a key."""

    @classmethod
    def of(cls, ids: Any, *, threads: int | None = None) -> Self:
        """Deduplicate `ids` (uint64, or int64 bit patterns). The result does not depend on `threads`."""
        keys = as_keys(ids)
        return cls(*_dedup(1 if len(keys) <= _FEW_IDS else threads or cores()).run(keys))

    def __len__(self) -> int:
        return len(self.keys)


class BatchHandle(NamedTuple):
    """Number and sizes of a batch in a graph of torch.compile, which cannot have NumPy arrays in inference mode."""

    number: Any
    """The batch's number in this process: a tensor, so that graphs do not depend on it."""
    examples: int
    ids: int


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class Batch:
    """Examples in CSR layout: bag b = example * fields + field holds ids[offsets[b] : offsets[b + 1]].

    Ids are 64-bit keys, normally hashes of field and value, so that equal values of different fields differ. `dense`
    features and `label` are passed through to the model unchanged.
    """

    ids: Keys
    offsets: Offsets
    fields: int
    weights: Any = None
    """One float32 weight per id; None means that all weights are 1. A torch tensor that requires grad is kept as it is,
    and receives a gradient."""
    dense: Any = None
    label: Any = None
    position: Any = None
    """Reader position after this batch, as JSON; a reader resumes from it with `seek`."""
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """State that `tc.prefetch` prepared for this batch, by table."""
    names: tuple[str, ...] | None = None
    """Names of the fields, in order, which bags with field names read by; None: fields have only numbers."""
    order: Offsets | None = dataclasses.field(default=None, repr=False)
    """Positions of the ids in the values of `from_jagged`: ids[i] is values[order[i]]. Weights given to a bag have the
    order of the values."""
    time: npt.NDArray[np.int64] | None = None
    """Event time of each example, int64 seconds since 1970; None: the data has none."""
    handle: BatchHandle | None = dataclasses.field(init=False, repr=False)
    """How a graph of torch.compile refers to the batch; None: torch was imported after the batch was made."""

    def __post_init__(self) -> None:
        self.ids = as_keys(self.ids)
        self.offsets = _as_offsets(self.offsets, len(self.ids))
        if self.fields < 1 or (len(self.offsets) - 1) % self.fields:
            raise ValueError(
                f"{len(self.offsets) - 1} bags cannot be divided into examples of {self.fields} fields: the number of "
                "bags must be a multiple of fields, and fields at least 1"
            )
        if self.names is not None:
            self.names = tuple(self.names)
            _check_names(self.names, self.fields)
        if self.time is not None:
            self.time = _as_integers(self.time, "time")
            if len(self.time) != self.examples:
                raise ValueError(f"time has {len(self.time)} values: expected {self.examples}, one per example")
        if self.weights is not None:
            values = _as_weights(self.weights)
            if values.shape != self.ids.shape:
                raise ValueError(f"weights have shape {values.shape}: expected ({len(self.ids)},), one per id")
            if self.learned_weights is None:
                self.weights = values
        self.set_handle()

    def __setstate__(self, state: Any) -> None:
        """Restore a pickled or copied batch, with a number of its own."""
        attributes, fields = state  # attributes of a subclass, or None
        for name, value in {**(attributes or {}), **fields}.items():
            setattr(self, name, value)
        self.set_handle()

    def set_handle(self) -> None:
        """Give the batch a number of its own."""
        torch = sys.modules.get("torch")
        if torch is None:
            self.handle = None
            return
        number = next(_handles)
        self.handle = BatchHandle(torch.tensor(number), self.examples, len(self.ids))
        _by_handle[number] = self

    @property
    def learned_weights(self) -> Any:
        """`weights` if they are a tensor that requires grad, else None."""
        return self.weights if getattr(self.weights, "requires_grad", False) else None

    @property
    def examples(self) -> int:
        """Number of examples."""
        return (len(self.offsets) - 1) // self.fields

    def __len__(self) -> int:
        return self.examples

    @classmethod
    def from_lists(cls, examples: Sequence[Sequence[Any]], **more: Any) -> Self:
        """Build a batch from examples[example][field], each a list of ids or one id; negative ids are bit patterns.

        `more` sets the other attributes: weights (flat, one per id), dense, label, position, names,
        time.
        """
        fields = len(examples[0]) if examples else 1
        bags: list[Any] = []
        for n, example in enumerate(examples):
            if len(example) != fields:
                raise ValueError(f"example {n} has {len(example)} fields, but example 0 has {fields}")
            bags.extend([bag] if isinstance(bag, (int, np.integer)) else bag for bag in example)
        offsets = np.zeros(len(bags) + 1, np.int64)
        np.cumsum([len(bag) for bag in bags], out=offsets[1:])
        keys = (_as_pattern(key) for bag in bags for key in bag)
        ids = np.fromiter(keys, np.uint64, count=int(offsets[-1]))
        return cls(ids, offsets, fields, **more)

    @classmethod
    def from_jagged(cls, keys: Sequence[str], values: Any, lengths: Any, weights: Any = None, **more: Any) -> Self:
        """Build a batch from the parts of a KeyedJaggedTensor: `lengths` and `values` are field-major.

        `keys` become the names of the fields: a bag made with names reads them in any order. The batch has its ids and
        `weights` example by example. Weights given to a bag later, `bag(batch, weights)`, are field-major as here.
        """
        fields = len(keys)
        sizes = _as_integers(lengths, "lengths")
        ids = as_keys(values)
        if fields == 0 or len(sizes) % fields or (sizes < 0).any() or sizes.sum() != len(ids):
            raise ValueError(
                f"{len(sizes)} lengths with sum {sizes.sum()} do not match {fields} keys and {len(ids)} values: "
                "expected one length per key and example, none negative, with the number of values as sum"
            )
        factors = weights if getattr(weights, "requires_grad", False) or weights is None else _as_weights(weights)
        if factors is not None and tuple(factors.shape) != ids.shape:
            raise ValueError(f"weights have shape {tuple(factors.shape)}: expected ({len(ids)},), one per value")
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        # Transpose the bags from (field, example) to (example, field).
        source = np.arange(len(sizes)).reshape(fields, -1).T.reshape(-1)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes[source], out=offsets[1:])
        order = np.repeat(starts[:-1][source] - offsets[:-1], sizes[source]) + np.arange(len(ids))
        factors = None if factors is None else factors[order]
        return cls(ids[order], offsets, fields, factors, names=tuple(keys), order=order, **more)

    def select(self, fields: Sequence[int] | Sequence[str]) -> tuple[Keys, Offsets, Floats | None]:
        """Return ids, offsets and weights of these fields only, in the given order, example by example.

        Fields are numbers, or names if the batch has names.
        """
        weights = self.weights if self.learned_weights is None else _as_weights(self.weights)
        numbers = self._numbers(fields)
        if self._is_whole(numbers):
            return self.ids, self.offsets, weights
        positions, offsets = self._locate(numbers)
        return self.ids[positions], offsets, None if weights is None else weights[positions]

    def positions(self, fields: Sequence[int] | Sequence[str]) -> Offsets | None:
        """Return the positions of the ids that `select` returns among all ids; None: all ids, in order."""
        numbers = self._numbers(fields)
        return None if self._is_whole(numbers) else self._locate(numbers)[0]

    def _numbers(self, fields: Sequence[int] | Sequence[str]) -> Sequence[int]:
        named = bool(fields) and isinstance(fields[0], str)
        return _positions(self.names, tuple(fields)) if named else fields  # type: ignore[return-value]

    def _is_whole(self, fields: Sequence[int]) -> bool:
        return tuple(fields) == _first(self.fields)

    def _locate(self, fields: Sequence[int]) -> tuple[Offsets, Offsets]:
        """Return the positions of the ids of these fields, and their offsets."""
        for field in fields:
            if not 0 <= field < self.fields:
                raise IndexError(f"field {field} is out of range: the batch has {self.fields} fields")
        sizes = np.diff(self.offsets).reshape(-1, self.fields)[:, fields].reshape(-1)
        starts = self.offsets[:-1].reshape(-1, self.fields)[:, fields].reshape(-1)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1]), offsets


def batch_of_handle(number: int) -> Batch:
    """Return the batch of this process that has the handle."""
    return _by_handle[number]


@functools.lru_cache(maxsize=256)
def _first(fields: int) -> tuple[int, ...]:
    return tuple(range(fields))


@functools.lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...], fields: int) -> None:
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"names are {_shown(names)}: names of fields must be text")
    if len(names) != fields:
        raise ValueError(f"{len(names)} names for {fields} fields, {_shown(names)}: give one name per field")
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"names have {twice!r} twice: names of fields must be unique")


@functools.lru_cache(maxsize=256)
def _positions(names: tuple[str, ...] | None, fields: tuple[str, ...]) -> tuple[int, ...]:
    """Return the positions of named fields among the fields of a batch. Cached: a loader's batches share one tuple."""
    if names is None:
        raise ValueError(
            f"the bag reads fields {_shown(fields)}, but the batch has no field names: make it with names=..., or make "
            "the bag with field numbers"
        )
    missing = [field for field in fields if field not in names]
    if missing:
        raise ValueError(
            f"the bag reads fields {_shown(fields)}, but the batch has {_shown(names)}: {_shown(missing)} missing; use "
            "equal names in the batch and in the bag"
        )
    return tuple(names.index(field) for field in fields)


def _shown(names: Sequence[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _as_pattern(key: Any) -> int:
    number = operator.index(key)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"id {number} does not fit 64 bits: hash it first")
    return number % 2**64


def _as_integers(value: Any, name: str) -> Offsets:
    array = _as_array(value, name)
    if array.size == 0:
        array = array.astype(np.int64)  # an empty list becomes float64
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} have shape {array.shape} and dtype {array.dtype}: expected one dimension of integers")
    return np.ascontiguousarray(array).astype(np.int64, copy=False)


def _as_offsets(offsets: Any, ids: int) -> Offsets:
    array = _as_integers(offsets, "offsets")
    if len(array) == 0 or array[0] != 0 or array[-1] != ids or (np.diff(array) < 0).any():
        raise ValueError(f"offsets must begin with 0, never decrease, and end with the number of ids, {ids}")
    return array


def _as_weights(weights: Any) -> Floats:
    array = _as_array(weights, "weights")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"weights have dtype {array.dtype}: they must be numbers")
    return np.ascontiguousarray(array, np.float32)


def _as_array(value: Any, name: str) -> npt.NDArray[Any]:
    return np.asarray(value) if isinstance(value, (list, tuple)) else as_numpy(value, name)
