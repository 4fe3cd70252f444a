"""`tc.Batch` from lists, CSR arrays and the parts of a KeyedJaggedTensor; selection of fields; errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import thermocline as tc

EXAMPLES = [[[1, 2], [], [7]], [[], [2**64 - 1], 5], [[3], [3, 3], [2**63]]]  # 5: a field given as one id
IDS = [1, 2, 7, 2**64 - 1, 5, 3, 3, 3, 2**63]
OFFSETS = [0, 2, 2, 3, 3, 4, 5, 6, 8, 9]

fields_of_ids = st.integers(1, 4).flatmap(
    lambda fields: st.lists(
        st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=fields, max_size=fields), max_size=6
    )
)


def as_lists(batch: tc.Batch) -> list[list[list[int]]]:
    """Convert a batch back to examples[example][field]."""
    bags = [batch.ids[a:b].tolist() for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    return [bags[n * batch.fields : (n + 1) * batch.fields] for n in range(batch.examples)]


def test_from_lists() -> None:
    label = torch.tensor([0.0, 1.0, 0.0])
    batch = tc.Batch.from_lists(EXAMPLES, label=label, dense="as given", position={"row": 3})
    assert batch.ids.dtype == np.uint64
    assert batch.ids.tolist() == IDS
    assert batch.offsets.tolist() == OFFSETS
    assert (batch.fields, batch.examples, len(batch)) == (3, 3, 3)
    assert batch.label is label
    assert batch.dense == "as given"
    assert batch.position == {"row": 3}
    assert batch.weights is None


def test_from_lists_accepts_arrays_negative_ids_and_weights() -> None:
    bags = [[np.array([1, 2], np.uint64), torch.tensor([-1])], [np.int64(-2), ()]]
    batch = tc.Batch.from_lists(bags, weights=[1, 0.5, 2, 3])
    assert batch.ids.tolist() == [1, 2, 2**64 - 1, 2**64 - 2]
    assert batch.offsets.tolist() == [0, 2, 3, 4, 4]
    assert batch.weights is not None
    assert batch.weights.dtype == np.float32
    assert batch.weights.tolist() == [1, 0.5, 2, 3]


def test_empty_batches() -> None:
    for batch in (tc.Batch.from_lists([]), tc.Batch.from_jagged(["a", "b"], [], []), tc.Batch([], [0], 26)):
        assert (len(batch), len(batch.ids)) == (0, 0)


@given(fields_of_ids)
def test_from_lists_round_trip(examples: list[list[list[int]]]) -> None:
    assert as_lists(tc.Batch.from_lists(examples)) == examples


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        (IDS, OFFSETS),
        (np.array(IDS, np.uint64), np.array(OFFSETS)),
        (np.array(IDS, np.uint64).view(np.int64), np.array(OFFSETS, np.int32)),
        (np.array(IDS, np.uint64), np.array(OFFSETS, np.uint32)),
        (torch.from_numpy(np.array(IDS, np.uint64).view(np.int64)), torch.tensor(OFFSETS)),
    ],
    ids=["lists", "numpy", "bit patterns", "unsigned", "torch"],
)
def test_csr_arrays(ids: Any, offsets: Any) -> None:
    batch = tc.Batch(ids, offsets, 3)
    assert batch.ids.tolist() == IDS
    assert batch.offsets.dtype == np.int64
    assert as_lists(batch) == as_lists(tc.Batch.from_lists(EXAMPLES))


def test_csr_arrays_are_not_copied() -> None:
    ids, offsets, weights = np.arange(4, dtype=np.int64), np.array([0, 1, 4]), np.ones(4, np.float32)
    batch = tc.Batch(ids, offsets, 2, weights)
    assert np.shares_memory(batch.ids, ids)
    assert np.shares_memory(batch.offsets, offsets)
    assert np.shares_memory(batch.weights, weights)  # type: ignore[arg-type]


# ---- KeyedJaggedTensor: values and lengths are field-major


def reference_jagged(keys: list[str], values: list[int], lengths: list[int], weights: list[float]) -> Any:
    examples = len(lengths) // len(keys)
    by_field: list[list[list[tuple[int, float]]]] = []
    rest = list(zip(values, weights, strict=True))
    for field in range(len(keys)):
        bags = []
        for n in lengths[field * examples : (field + 1) * examples]:
            bags.append(rest[:n])
            rest = rest[n:]
        by_field.append(bags)
    moved = [[by_field[field][example] for field in range(len(keys))] for example in range(examples)]
    ids = [[[key for key, _ in bag] for bag in example] for example in moved]
    return ids, [weight for example in moved for bag in example for _, weight in bag]


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=24), st.booleans(), st.booleans())
def test_from_jagged_against_a_reference(fields: int, lengths: list[int], tensors: bool, weighted: bool) -> None:
    keys = [f"f{n}" for n in range(fields)]
    lengths = lengths[: len(lengths) // fields * fields]
    values = [2**63 - 5 + n for n in range(sum(lengths))]
    weights = [0.5 * n for n in range(len(values))]
    examples, moved_weights = reference_jagged(keys, values, lengths, weights)
    if tensors:
        signed = torch.from_numpy(np.array(values, np.uint64).view(np.int64))
        given_weights = torch.tensor(weights) if weighted else None
        batch = tc.Batch.from_jagged(keys, signed, torch.tensor(lengths, dtype=torch.int32), given_weights, label="y")
    else:
        batch = tc.Batch.from_jagged(keys, values, lengths, weights if weighted else None, label="y")
    assert batch.fields == fields
    assert as_lists(batch) == examples
    assert batch.label == "y"
    if weighted:
        assert batch.weights is not None
        assert batch.weights.tolist() == moved_weights
    else:
        assert batch.weights is None


# ---- selection of fields


@given(st.data())
def test_select_against_a_reference(data: st.DataObject) -> None:
    examples = data.draw(fields_of_ids)
    batch = tc.Batch.from_lists(examples)
    batch.weights = np.arange(len(batch.ids), dtype=np.float32)
    position = iter(range(len(batch.ids)))
    positions = [[[next(position) for _ in bag] for bag in example] for example in examples]
    chosen = data.draw(st.lists(st.integers(0, batch.fields - 1), min_size=1, max_size=5))  # any order, with repeats
    ids, offsets, weights = batch.select(chosen)
    assert ids.tolist() == [key for example in examples for field in chosen for key in example[field]]
    assert np.diff(offsets).tolist() == [len(example[field]) for example in examples for field in chosen]
    assert weights is not None
    assert weights.tolist() == [n for example in positions for field in chosen for n in example[field]]


def test_select_of_all_fields_does_not_copy() -> None:
    batch = tc.Batch.from_lists(EXAMPLES)
    ids, offsets, weights = batch.select(range(3))
    assert ids is batch.ids
    assert offsets is batch.offsets
    assert weights is None


def test_select_of_a_missing_field() -> None:
    batch = tc.Batch.from_lists(EXAMPLES)
    for field in (3, -1):
        with pytest.raises(IndexError, match=f"field {field} is out of range: the batch has 3 fields"):
            batch.select([0, field])


def test_event_time() -> None:
    batch = tc.Batch.from_lists([[1], [2]], time=torch.tensor([5, 2**40]))
    assert batch.time is not None
    assert (batch.time.dtype, batch.time.tolist()) == (np.int64, [5, 2**40])
    assert tc.Batch.from_lists([[1]]).time is None
    with pytest.raises(ValueError, match="time has 1 values: expected 2, one per example"):
        tc.Batch.from_lists([[1], [2]], time=[5])


def test_copy_shares_arrays() -> None:
    batch = tc.Batch.from_lists(EXAMPLES, label=[1, 2, 3])
    other = copy.copy(batch)
    other.prepared = {}
    assert other != batch
    assert other.ids is batch.ids
    assert other.label is batch.label
    assert other.prepared is not batch.prepared


# ---- errors

ONE = np.array([1], np.uint64)


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: tc.Batch(IDS, OFFSETS, 2), ValueError, "9 bags cannot be divided into examples of 2 fields"),
        (lambda: tc.Batch(IDS, OFFSETS, 0), ValueError, "0 fields"),
        (lambda: tc.Batch(IDS, [], 1), ValueError, "begin with 0"),
        (lambda: tc.Batch(IDS, [1, 9], 1), ValueError, "begin with 0"),
        (lambda: tc.Batch(IDS, [0, 8], 1), ValueError, "end with the number of ids, 9"),
        (lambda: tc.Batch(IDS, [0, 5, 4, 9], 1), ValueError, "never decrease"),
        (lambda: tc.Batch(IDS, [0.0, 9.0], 1), ValueError, "float64"),
        (lambda: tc.Batch(IDS, np.zeros((2, 2), np.int64), 1), ValueError, r"shape \(2, 2\)"),
        (lambda: tc.Batch(ONE.astype(np.int32), [0, 1], 1), TypeError, "int32"),
        (lambda: tc.Batch(ONE.reshape(1, 1), [0, 1], 1), ValueError, "one-dimensional"),
        (
            lambda: tc.Batch(ONE, [0, 1], 1, [1.0, 2.0]),
            ValueError,
            r"weights have shape \(2,\): expected \(1,\), one per id",
        ),
        (lambda: tc.Batch(ONE, [0, 1], 1, ["one"]), TypeError, "weights"),
        (lambda: tc.Batch(ONE, {0, 1}, 1), TypeError, "offsets is a set"),
        (lambda: tc.Batch.from_lists([[[1]], [[1], [2]]]), ValueError, "example 1 has 2 fields, but example 0 has 1"),
        (lambda: tc.Batch.from_lists([[[0.5]]]), TypeError, "float"),
        (lambda: tc.Batch.from_lists([[[1, 2**64 + 1]]]), ValueError, "18446744073709551617 does not fit 64 bits"),
        (lambda: tc.Batch.from_lists([[[-(2**63) - 1]]]), ValueError, "-9223372036854775809 does not fit 64 bits"),
        (lambda: tc.Batch.from_jagged([], [], []), ValueError, "0 keys"),
        (lambda: tc.Batch.from_jagged(["a", "b"], [1], [1]), ValueError, "1 lengths .* 2 keys"),
        (lambda: tc.Batch.from_jagged(["a"], [1, 2], [1]), ValueError, "sum 1 .* 2 values"),
        (lambda: tc.Batch.from_jagged(["a"], [1, 2], [3, -1]), ValueError, "lengths"),
        (lambda: tc.Batch.from_jagged(["a"], [1], [1.0]), ValueError, "float64"),
        (
            lambda: tc.Batch.from_jagged(["a"], [1], [1], [1.0, 2.0]),
            ValueError,
            r"shape \(2,\): expected \(1,\), one per val",
        ),
    ],
)
def test_errors(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()
