"""The caches of types in Triton's interpreter: one object per type, and the same checks as without them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from thermocline.kernels import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled, not interpreted")


@triton.jit
def _sum_kernel(a, b, out, size_a: tl.constexpr, size_b: tl.constexpr):
    total = tl.load(a + tl.arange(0, size_a)) + tl.load(b + tl.arange(0, size_b))
    tl.store(out + tl.arange(0, size_a), total)


def add(a: list[int], b: list[int], dtype: torch.dtype = torch.int32) -> list[int]:
    out = torch.zeros(len(a), dtype=dtype)
    _sum_kernel[(1,)](torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out, len(a), len(b))
    return out.tolist()


def test_one_type_for_each_element_type_and_shape() -> None:
    first = core.block_type(tl.int32, [4, 2])
    assert core.block_type(tl.int32, core.tuple([4, core.constexpr(2)])) is first
    assert core.block_type(tl.float32, [4, 2]).with_element_ty(tl.int32) is first
    assert (first.shape.values, first.numel, first.element_ty, str(first.scalar)) == ([4, 2], 8, tl.int32, "int32")
    others = [core.block_type(tl.uint32, [4, 2]), core.block_type(tl.int32, [2, 4]), core.block_type(tl.int32, [8])]
    assert all(other != first for other in others)
    assert [other.shape.values for other in others] == [[4, 2], [2, 4], [8]]


def test_pointers_to_other_elements_are_other_types() -> None:
    blocks = [core.block_type(core.pointer_type(element), [4]) for element in (tl.int8, tl.float64)]
    assert [str(block.element_ty.element_ty) for block in blocks] == ["int8", "fp64"]
    assert [interpreter._get_np_dtype(block) for block in blocks] == [np.uint64, np.uint64]


@pytest.mark.parametrize("shape", [[3], [4, 6], []])
def test_a_refused_shape_stays_refused(shape: list[int]) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            core.block_type(tl.int32, shape)


def test_tensors_of_one_type_have_its_shape() -> None:
    for shape, numel in (([4, 2], 8), ([16], 16)):
        for _ in range(2):
            data = interpreter.TensorHandle(np.zeros(shape, np.int32), tl.int32)
            block = core.tensor(data, core.block_type(tl.int32, shape))
            assert ([size.value for size in block.shape], block.numel.value) == (shape, numel)
            assert (block.dtype, block.handle) == (tl.int32, data)
    scalar = core.tensor(interpreter.TensorHandle(np.zeros(1, np.int32), tl.int32), tl.int32)
    assert (len(scalar.shape), scalar.numel.value, scalar.type, scalar.dtype) == (0, 1, tl.int32, tl.int32)


def test_types_of_numpy() -> None:
    expected = {tl.int1: bool, tl.int64: np.int64, tl.uint8: np.uint8, tl.float16: np.float16, tl.bfloat16: np.uint16}
    for _ in range(2):
        for element, numpy_type in expected.items():
            assert interpreter._get_np_dtype(element) == numpy_type
            assert interpreter._get_np_dtype(core.block_type(element, [2])) == numpy_type


def test_shapes_are_still_broadcast_and_refused() -> None:
    assert add([1, 2, 3, 4], [10, 20, 30, 40]) == [11, 22, 33, 44]
    assert add([1, 2, 3, 4], [10]) == [11, 12, 13, 14]
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        add([1, 2, 3, 4], [1, 2])


def test_overflows_are_detected_where_assertions_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without assertions, which is the default of the interpreter and of the compiler, integers wrap."""
    assert add([2**31 - 1, 0], [1, 0]) == [-(2**31), 0]
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    with pytest.raises(InterpreterError, match="int32 overflow"):
        add([2**31 - 1, 0], [1, 0])
    assert add([2**31 - 1, 0], [1, 0], torch.int64) == [2**31, 0]


def test_the_language_is_restored_after_a_launch() -> None:
    before = tl.load, tl.core.tensor.__add__
    add([1], [2])
    assert (tl.load, tl.core.tensor.__add__) == before
    with pytest.raises(ValueError, match="Did you forget to add"):
        tl.arange(0, 2)
