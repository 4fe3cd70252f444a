"""The short launch path: Triton is asked once per combination of types, alignments and constants."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from thermocline.kernels.launch import Kernel


class FakeTriton:
    """Stands for a jitted function: records which launches go through Triton, and which straight to the launcher."""

    def __init__(self) -> None:
        names = {"pointer": (False, False), "size": (False, False), "count": (True, False), "TILE": (False, True)}
        self.arg_names = list(names)
        self.params = [types.SimpleNamespace(do_not_specialize=d, is_constexpr=c) for d, c in names.values()]
        self.slow: list[Any] = []
        self.fast: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.slow.append((grid, args, constants))
            name = len(self.slow)
            return types.SimpleNamespace(
                run=lambda *values: self.fast.append(values), function=f"function {name}", packed_metadata="metadata"
            )

        return launch


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
