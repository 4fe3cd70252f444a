"""Segments of a batch against plain torch: every list and count, around every block boundary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import SIZES, random_slots, same_bits, slots_of_sizes
from hypothesis import given, strategies as st

from thermocline.kernels import INTERPRETED
from thermocline.kernels.segments import (
    capacities,
    find_segments,
    find_segments_reference,
    segment_views,
    segment_words,
)

DEVICE = "cpu" if INTERPRETED else "cuda"


def check(slots: torch.Tensor) -> None:
    result, expected = find_segments(slots), find_segments_reference(slots)
    same_bits(result.counts, expected.counts)
    segments, hot, blocks = expected.sizes
    assert all(size <= bound for size, bound in zip(expected.sizes, capacities(len(slots)), strict=True))
    same_bits(result.order, expected.order)
    same_bits(result.slots[:segments], expected.slots)
    same_bits(result.starts[: segments + 1], expected.starts)
    same_bits(result.hot[:hot], expected.hot)
    same_bits(result.hot_blocks[: hot + 1], expected.hot_blocks)
    same_bits(result.block_starts[:blocks], expected.block_starts)
    same_bits(result.block_ends[:blocks], expected.block_ends)


@pytest.mark.parametrize("size", SIZES)
def test_one_segment(size: int, device: str) -> None:
    check(torch.full((size,), 7, dtype=torch.int32, device=device))


@pytest.mark.parametrize("ids", [0, 1, 2, 64, 65, 511, 512, 513, 1024, 1600])
def test_all_different(ids: int, device: str) -> None:
    check(torch.randperm(ids, device=device).to(torch.int32))


def test_all_sizes_together(device: str) -> None:
    check(slots_of_sizes(SIZES * 3, np.random.default_rng(1), device))


def test_largest_number_of_blocks(device: str) -> None:
    """Segments of 65 ids have two blocks each."""
    check(slots_of_sizes([65] * 40, np.random.default_rng(2), device))


def test_largest_slot(device: str) -> None:
    check(torch.tensor([2**31 - 1, 0, 2**31 - 1, 5, 0], dtype=torch.int32, device=device))


@given(st.lists(st.integers(0, 6), max_size=400), st.integers(0, 3))
def test_random(ids: list[int], hot: int) -> None:
    slots = torch.tensor([*ids, *([9] * 70 * hot)], dtype=torch.int32)
    check(slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(len(ids)))].to(DEVICE))


def test_known_changes_only_sizes(device: str) -> None:
    segments = find_segments(slots_of_sizes(SIZES, np.random.default_rng(3), device))
    known = segments.known(1, 2, 3)
    assert known.sizes == (1, 2, 3)
    assert known.order is segments.order


def test_wrong_type_raises(device: str) -> None:
    with pytest.raises(ValueError, match="int32"):
        find_segments(torch.zeros(3, dtype=torch.int64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [1 << 20, (1 << 20) - 1, 3_000_001])
def test_large(ids: int, device: str) -> None:
    check(random_slots(ids, 1 << 20, np.random.default_rng(ids), device))
    check(torch.zeros(ids, dtype=torch.int32, device=device))


@pytest.mark.parametrize("ids", [0, 1, 700])
def test_lists_with_spare_capacity(ids: int, device: str) -> None:
    """Lists in given memory, with room for more ids, have the same content."""
    slots, capacity = slots_of_sizes([ids] if ids else [], np.random.default_rng(3), device), 1000
    memory = torch.full((segment_words(capacity),), -77, dtype=torch.int32, device=device)
    result, expected = find_segments(slots, memory, capacity), find_segments_reference(slots)
    assert tuple(result.counts.tolist()) == expected.sizes
    for name in ("order", "slots", "starts", "hot", "hot_blocks", "block_starts", "block_ends"):
        values = getattr(expected, name)
        assert torch.equal(getattr(result, name)[: len(values)], values), name
    views = segment_views(memory, capacity, capacity)
    assert torch.equal(views.counts, result.counts)
    assert views.sizes == capacities(capacity)


def test_ids_without_a_slot(device: str) -> None:
    """A window that does not fit has -1 for some ids: they are a segment like any other."""
    check(torch.tensor([-1] * 70 + [3, -1, 3], dtype=torch.int32, device=device))
    check(torch.full((5,), -1, dtype=torch.int32, device=device))
