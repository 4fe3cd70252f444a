"""Sparse updates against plain torch: equal bits for every dim, optimizer, pooling, precision and segment size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels import (
    SIZES,
    Arena,
    exact_segments,
    floats,
    random_offsets,
    random_slots,
    same_bits,
    slots_of_sizes,
)
from hypothesis import given, settings, strategies as st

from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from thermocline.embedding.precision import Precision
from thermocline.kernels import INTERPRETED
from thermocline.kernels.codec import Codec
from thermocline.kernels.gradient_index import index_gradients, index_gradients_reference
from thermocline.kernels.optimizer_rules import OptimizerStep, StoredStep
from thermocline.kernels.segments import find_segments
from thermocline.kernels.update import (
    apply_gradients,
    sum_gradients,
    sum_gradients_reference,
    update_rows,
    update_rows_reference,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
OPTIMIZERS: list[Optimizer] = [
    SGD(lr=0.1),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.01),
    PartialRowWiseAdam(lr=0.01),
]
DIMS = [1, 3, 16, 19, 64, 128, 130]


def check(
    slots: torch.Tensor,
    dim: int,
    optimizer: Optimizer,
    random: np.random.Generator,
    *,
    offsets: torch.Tensor | None = None,
    weighted: bool = False,
    mean: bool = False,
    steps: int = 2,
    known: bool = True,
    grad: torch.Tensor | None = None,
) -> Arena:
    """Run the kernel and plain torch from the same rows; compares the whole arena, with unused rows and gaps."""
    device = str(slots.device.type)
    arena = Arena(max(int(slots.max()) + 4 if len(slots) else 4, 4), dim, optimizer.state_floats(dim), random, device)
    twin = arena.copy()
    segments = exact_segments(slots) if known else find_segments(slots)
    weights = floats((len(slots),), random, device) if weighted else None
    rows, coefs = index_gradients(len(slots), segments.order, offsets, weights, mean, device)
    bags = len(slots) if offsets is None else len(offsets) - 1
    for number in range(1, steps + 1):
        g = floats((bags, dim), random, device) if grad is None else grad
        step = OptimizerStep.of(optimizer, number, lr=0.03 * number, scale=0.7)
        update_rows(arena.weights, arena.state, segments, g, rows, coefs, step)
        update_rows_reference(twin.weights, twin.state, segments, g, rows, coefs, step)
        same_bits(arena.all, twin.all)
    return arena


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_dim_and_optimizer(optimizer: Optimizer, dim: int, device: str) -> None:
    random = np.random.default_rng(dim)
    check(slots_of_sizes([1, 2, 5, 66], random, device), dim, optimizer, random, steps=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_size_of_segment(optimizer: Optimizer, device: str) -> None:
    random = np.random.default_rng(3)
    slots = slots_of_sizes(SIZES, random, device)
    check(slots, 8, optimizer, random, steps=1)
    check(slots, 8, optimizer, random, steps=1, known=False)


@pytest.mark.parametrize("blocks", [31, 32, 33, 65])
def test_block_counts_around_the_unrolled_loop(blocks: int, device: str) -> None:
    random = np.random.default_rng(blocks)
    check(slots_of_sizes([64 * blocks, 64 * blocks - 1, 64 * blocks + 1], random, device), 4, SGD(), random, steps=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:1] + OPTIMIZERS[-1:], ids=lambda o: type(o).__name__)
def test_poolings(optimizer: Optimizer, pooling: str, weighted: bool, device: str) -> None:
    random = np.random.default_rng(7)
    slots = slots_of_sizes([1] * 12 + [2, 4, 64, 65, 130], random, device)
    offsets = None if pooling == "none" else random_offsets(len(slots), random, device)
    check(slots, 12, optimizer, random, offsets=offsets, weighted=weighted, mean=pooling == "mean")


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(weight_decay=0.1),
        Adagrad(weight_decay=0.1, eps=0.0, initial_accumulator=0.2),
        RowWiseAdagrad(weight_decay=0.1),
        Adam(weight_decay=0.1, beta1=0.0, beta2=0.5),
        PartialRowWiseAdam(weight_decay=0.1, beta1=0.0, beta2=0.5),
    ],
    ids=lambda o: type(o).__name__,
)
def test_weight_decay(optimizer: Optimizer, device: str) -> None:
    random = np.random.default_rng(5)
    check(slots_of_sizes([1, 2, 70], random, device), 10, optimizer, random)


@pytest.mark.parametrize("keys", [1, 2, 3, 7, 8, 9, 17])
def test_keys_around_a_tile(keys: int, device: str) -> None:
    random = np.random.default_rng(keys)
    check(slots_of_sizes([1] * keys, random, device), 16, SGD(), random)
    check(slots_of_sizes([65] * keys, random, device), 16, SGD(), random, steps=1)


def test_empty_batch(device: str) -> None:
    check(torch.zeros(0, dtype=torch.int32, device=device), 4, SGD(), np.random.default_rng(0))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("size", [1e-20, 3e-23, 1e-39, 1e-44])
def test_tiny_gradients_are_not_flushed_to_zero(optimizer: Optimizer, size: float, device: str) -> None:
    random = np.random.default_rng(9)
    slots = slots_of_sizes([1, 3, 66], random, device)
    grad = (floats((len(slots), 8), random, device).double() * size).float()
    arena = check(slots, 8, optimizer, random, grad=grad)
    if isinstance(optimizer, Adam):
        assert arena.state is not None
        rows = slots.long().unique()
        assert (arena.state[rows, :8] != 0).any()


def test_minus_zero_is_kept(device: str) -> None:
    segments = exact_segments(torch.zeros(70, dtype=torch.int32, device=device))
    grads = torch.full((70, 4), -0.0, device=device)
    same_bits(sum_gradients(segments, grads, None, None), torch.full((1, 4), -0.0, device=device))


def test_nan_stays_in_its_row(device: str) -> None:
    slots = torch.tensor([0, 1, 2, 1], dtype=torch.int32, device=device)
    weights = torch.ones(4, 8, device=device)
    grads = torch.ones(4, 8, device=device)
    grads[3, 5] = float("nan")
    update_rows(weights, None, exact_segments(slots), grads, None, None, OptimizerStep.of(SGD(), 1))
    assert weights.isnan().nonzero().tolist() == [[1, 5]]


def test_sum_then_apply_equals_update(device: str) -> None:
    random = np.random.default_rng(11)
    slots = slots_of_sizes([1, 2, 5, 64, 65, 130], random, device)
    segments = exact_segments(slots)
    grads = floats((len(slots), 20), random, device)
    sums = sum_gradients(segments, grads, None, None)
    same_bits(sums, sum_gradients_reference(segments, grads, None, None))
    for optimizer in OPTIMIZERS:
        arena = Arena(40, 20, optimizer.state_floats(20), random, device)
        twin = arena.copy()
        step = OptimizerStep.of(optimizer, 3)
        update_rows(arena.weights, arena.state, segments, grads, None, None, step)
        apply_gradients(twin.weights, twin.state, segments.slots[: len(sums)], sums, step)
        same_bits(arena.all, twin.all)


@settings(max_examples=settings().max_examples // 4)  # each example has several launches
@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(0, 3), st.integers(1, 20), st.booleans())
def test_random(ids: list[int], kind: int, dim: int, weighted: bool) -> None:
    random = np.random.default_rng(len(ids))
    hot = [11] * (70 * (len(ids) % 3))
    slots = torch.from_numpy(random.permutation(np.array(ids + hot, np.int32))).to(DEVICE)
    offsets = random_offsets(len(slots), random, DEVICE) if len(ids) % 2 else None
    mean = offsets is not None and len(ids) % 4 == 1
    check(slots, dim, OPTIMIZERS[kind], random, offsets=offsets, weighted=weighted, mean=mean, known=dim % 2 == 0)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_half_precision_rows(optimizer: Optimizer, dtype: torch.dtype, rounding: str, device: str) -> None:
    """Rows of half-precision weights and fp32 state."""
    random = np.random.default_rng(13)
    slots = slots_of_sizes([1, 2, 64, 66], random, device)
    dim, state = 12, optimizer.state_floats(12)
    arena = torch.zeros(20, 2 * dim + 4 * state + 4, dtype=torch.uint8, device=device)
    arena.view(dtype)[:, :dim] = floats((20, dim), random, device).to(dtype)
    twin = arena.clone()
    keys = torch.from_numpy(random.integers(-(2**63), 2**63, 20)).to(device)
    segments = exact_segments(slots)
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    codec = Codec.of(Precision(kind=kind, rounding=rounding), dim, keys, -123456789)  # type: ignore[arg-type]

    def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole = rows.view(torch.float32)[:, dim // 2 : dim // 2 + state]
        return rows.view(dtype)[:, :dim], whole if state else None

    for number in (1, 2):
        grads = floats((len(slots), dim), random, device)
        step = OptimizerStep.of(optimizer, number)
        update_rows(*parts(arena), segments, grads, None, None, step, codec)
        update_rows_reference(*parts(twin), segments, grads, None, None, step, codec)
        same_bits(arena, twin)


def test_wrong_arguments_raise(device: str) -> None:
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    segments, rows, step = exact_segments(slots), torch.ones(3, 4, device=device), OptimizerStep.of(Adam(), 1)
    grads = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match="state has 0 floats per row: this optimizer needs 8"):
        update_rows(rows, None, segments, grads, None, None, step)
    with pytest.raises(ValueError, match=r"must be contiguous float32\[.., 4\]"):
        update_rows(rows, None, segments, torch.ones(2, 5, device=device), None, None, OptimizerStep.of(SGD(), 1))
    with pytest.raises(ValueError, match="pass the codec"):
        update_rows(rows.half(), None, segments, grads, None, None, OptimizerStep.of(SGD(), 1))
    with pytest.raises(ValueError, match="steps count from 1"):
        OptimizerStep.of(SGD(), 0)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize("ids", [0, 1, 2, 1023, 1024, 1025])
def test_index_gradients(ids: int, pooling: str, weighted: bool, ordered: bool, device: str) -> None:
    random = np.random.default_rng(ids)
    offsets = None if pooling == "none" else random_offsets(ids, random, device)
    weights = floats((ids,), random, device) if weighted else None
    order = torch.randperm(ids, device=device).to(torch.int32) if ordered else None
    rows, coefs = index_gradients(ids, order, offsets, weights, pooling == "mean", device)
    expected_rows, expected_coefs = index_gradients_reference(ids, order, offsets, weights, pooling == "mean", device)
    same_bits(rows, expected_rows)
    assert (coefs is None) == (expected_coefs is None)
    if coefs is not None and expected_coefs is not None:
        same_bits(coefs, expected_coefs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 64, 100, 128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_large(optimizer: Optimizer, dim: int, device: str) -> None:
    random = np.random.default_rng(17)
    slots = random_slots(400_000, 200_000, random, device)
    first = check(slots, dim, optimizer, np.random.default_rng(19), weighted=dim == 64)
    for known in (True, False):  # races would change bits
        again = check(slots, dim, optimizer, np.random.default_rng(19), weighted=dim == 64, known=known)
        same_bits(first.all, again.all)


@pytest.mark.gpu
def test_one_key_a_million_times(device: str) -> None:
    random = np.random.default_rng(23)
    check(torch.zeros(1_000_001, dtype=torch.int32, device=device), 32, Adam(), random, steps=1)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    arena = torch.zeros(2**31 // 384 + 5, 384, device=device)
    last = len(arena) - 1
    slots = torch.tensor([last] * 70 + [last - 1], dtype=torch.int32, device=device)
    grads = torch.ones(71, 128, device=device)
    step = OptimizerStep.of(Adam(), 1)
    update_rows(arena[:, :128], arena[:, 128:], exact_segments(slots), grads, None, None, step)
    assert (arena[last - 1 :] != 0).all()
    assert int(arena[: last - 1].count_nonzero()) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_constants_in_device_memory(optimizer: Optimizer, kind: Any, device: str) -> None:
    """A recorded launch reads the constants of each step from memory: the same bits as passed by value."""
    random, dim, sizes = np.random.default_rng(11), 8, [1, 2, 66]
    slots = slots_of_sizes(sizes, random, device)
    keys = torch.arange(2 * len(sizes) + 4, device=device) * 977
    codec = Codec.of(Precision.of(kind), dim, keys, 5)
    by_value = floats((len(keys), codec.words + optimizer.state_floats(dim)), random, device).abs()
    stored = by_value.clone()
    memory = torch.zeros(StoredStep.WORDS, dtype=torch.int32, device=device)
    segments = exact_segments(slots)
    for number in (1, 2):
        grads = floats((len(slots), dim), random, device)
        step = OptimizerStep.of(optimizer, number, lr=0.03 * number, scale=0.7)
        memory.copy_(torch.from_numpy(step.words()))
        in_memory = StoredStep(step.optimizer, step.weight_decay, memory)
        update_rows(codec.weights(by_value), codec.state(by_value), segments, grads, None, None, step, codec)
        update_rows(codec.weights(stored), codec.state(stored), segments, grads, None, None, in_memory, codec)
        same_bits(by_value, stored)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:1] + OPTIMIZERS[2:3], ids=lambda o: type(o).__name__)
def test_changed_rows_are_marked(optimizer: Optimizer, device: str) -> None:
    random = np.random.default_rng(12)
    slots = slots_of_sizes([1, 2, 66, 130], random, device)
    arena = Arena(16, 40, optimizer.state_floats(40), random, device)
    expected = torch.full((16,), 7, dtype=torch.uint8, device=device)
    expected[slots.long()] = 1
    step, grads = OptimizerStep.of(optimizer, 1), floats((len(slots), 40), random, device)
    for segments in (find_segments(slots), exact_segments(slots)):
        dirty = torch.full((16,), 7, dtype=torch.uint8, device=device)
        update_rows(arena.weights, arena.state, segments, grads, None, None, step, None, dirty)
        assert torch.equal(dirty, expected)
    dirty = torch.full((16,), 7, dtype=torch.uint8, device=device)
    sums = sum_gradients(segments, grads, None, None)
    apply_gradients(arena.weights, arena.state, segments.slots[: len(sums)], sums, step, None, dirty)
    assert torch.equal(dirty, expected)
