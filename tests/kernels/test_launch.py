"""The short launch path: Triton is asked once per combination of types, alignments and constants."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch

from thermocline.kernels.launch import Kernel, compiling_only


class FakeTriton:
    """Stands for a jitted function: records which launches go through Triton, and which straight to the launcher."""

    def __init__(self) -> None:
        names = {"pointer": (False, False), "size": (False, False), "count": (True, False), "TILE": (False, True)}
        self.arg_names = list(names)
        self.params = [types.SimpleNamespace(do_not_specialize=d, is_constexpr=c) for d, c in names.values()]
        self.slow: list[Any] = []
        self.fast: list[Any] = []
        self.ahead: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.slow.append((grid, args, constants))
            name = len(self.slow)
            return types.SimpleNamespace(
                run=lambda *values: self.fast.append(values), function=f"function {name}", packed_metadata="metadata"
            )

        return launch

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
        if args[1] == 13:
            raise RuntimeError("this kernel cannot be compiled")
        self.ahead.append(threading.current_thread().name)
        return types.SimpleNamespace(
            run=lambda *values: self.fast.append(values), function="ahead", packed_metadata="metadata"
        )


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    return FakeTriton()


def test_a_known_combination_skips_triton(triton: FakeTriton) -> None:
    kernel, memory = Kernel(triton), torch.zeros(64)
    kernel[(3,)](memory, 5, 7, TILE=8, num_warps=1)
    kernel[(4, 2)](memory[4:], 6, 1, TILE=8, num_warps=1)
    assert len(triton.slow) == 1
    assert triton.fast == [(4, 2, 1, 99, "function 1", "metadata", None, None, None, memory.data_ptr() + 16, 6, 1, 8)]


@pytest.mark.parametrize(
    "other",
    [
        lambda m: ((m[1:], 5, 7), {"TILE": 8}),  # another alignment
        lambda m: ((m.view(torch.int32), 5, 7), {"TILE": 8}),  # another type
        lambda m: ((m, 1, 7), {"TILE": 8}),  # an integer that Triton compiles in
        lambda m: ((m, 16, 7), {"TILE": 8}),  # an integer whose divisibility Triton uses
        lambda m: ((m, 2**31, 7), {"TILE": 8}),  # 64 bits
        lambda m: ((m, 5, 2**63), {"TILE": 8}),  # unsigned
        lambda m: ((m, 5, 7), {"TILE": 16}),  # another constant
        lambda m: ((m, 5, 7), {"TILE": 8, "num_warps": 2}),
        lambda m: ((m, (0.5,), 7), {"TILE": 8}),
    ],
)
def test_another_combination_is_compiled(triton: FakeTriton, other: Any) -> None:
    kernel, memory = Kernel(triton), torch.zeros(64)
    kernel[(1,)](memory, 5, 7, TILE=8)
    args, constants = other(memory)
    kernel[(1,)](*args, **constants)
    kernel[(1,)](*args, **constants)
    assert len(triton.slow) == 2
    assert [values[4] for values in triton.fast] == ["function 2"]


def test_an_argument_by_name_is_refused(triton: FakeTriton) -> None:
    with pytest.raises(TypeError, match="by position"):
        Kernel(triton)[(1,)](torch.zeros(4), 5, count=7, TILE=8)


def test_kernels_are_compiled_ahead_without_a_launch(triton: FakeTriton) -> None:
    kernel, memory = Kernel(triton), torch.zeros(64)
    kernel[(1,)](memory, 5, 7, TILE=8)
    with compiling_only(2):
        for size in (5, 16, 16, 32):  # known; new; twice the same combination
            kernel[(1,)](memory, size, 7, TILE=8)
        other = threading.Thread(target=lambda: kernel[(1,)](memory, 5, 7, TILE=8))
        other.start()  # another thread launches meanwhile
        other.join()
    assert len(triton.slow) == 1
    assert len(triton.fast) == 1
    assert len(triton.ahead) == 1
    assert triton.ahead[0].startswith("thermocline-compile")
    kernel[(1,)](memory, 48, 7, TILE=8)
    kernel[(1,)](memory, 48, 7, TILE=8)
    assert len(triton.slow) == 1
    assert [values[4] for values in triton.fast] == ["function 1", "ahead", "ahead"]


def test_error_of_a_compilation_is_raised_by_its_launch(triton: FakeTriton) -> None:
    kernel, memory = Kernel(triton), torch.zeros(64)
    with compiling_only(1):
        kernel[(1,)](memory, 13, 7, TILE=8)
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        kernel[(1,)](memory, 13, 7, TILE=8)
