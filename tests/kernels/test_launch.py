"""The short launch path: Triton is asked once per combination of types, alignments and constants."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest
import torch

from thermocline.kernels import launch
from thermocline.kernels.launch import OPEN, Kernel, RepeatedLaunch, compiling_only


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
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
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


def repeated(triton: FakeTriton, memory: torch.Tensor) -> RepeatedLaunch:
    return RepeatedLaunch(Kernel(triton), (memory, 5, OPEN), {"TILE": 8, "num_warps": 1})


def test_a_repeated_launch_has_its_own_open_arguments(triton: FakeTriton) -> None:
    memory = torch.zeros(64)
    launched = repeated(triton, memory)
    launched(3, 1, 7)
    launched(4, 2, 9)
    launched(1, 1, 2**31 - 1)
    assert len(triton.slow) == 1
    ends = [(x, y, 1, 99, "function 1", "metadata", None, None, None) for x, y in ((4, 2), (1, 1))]
    assert triton.fast == [(*ends[0], memory.data_ptr(), 5, 9, 8), (*ends[1], memory.data_ptr(), 5, 2**31 - 1, 8)]


def test_a_repeated_launch_asks_again_for_another_kind_of_argument(triton: FakeTriton) -> None:
    memory = torch.zeros(64)
    launched = RepeatedLaunch(Kernel(triton), (OPEN, 5, OPEN), {"TILE": 8, "num_warps": 1})
    launched(1, 1, memory, 7)
    launched(1, 1, memory[1:], 7)  # another alignment
    launched(1, 1, memory, 2**31)  # 64 bits
    launched(1, 1, memory, (1.0, 2.0))
    assert len(triton.slow) == 4
    launched(1, 1, memory[4:], 8)
    assert triton.fast[-1][4] == "function 1"
    assert triton.fast[-1][9:] == (memory.data_ptr() + 16, 5, 8, 8)


def test_a_repeated_launch_is_on_the_current_device(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = repeated(triton, torch.zeros(64))
    launched(1, 1, 7)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launched(1, 1, 7)
    assert len(triton.slow) == 2
    assert not triton.fast


def test_a_specialized_integer_is_never_repeated(triton: FakeTriton) -> None:
    launched = RepeatedLaunch(Kernel(triton), (torch.zeros(64), OPEN, 7), {"TILE": 8})
    for size in (5, 1, 16):  # three kernels
        launched(1, 1, size)
    assert len(triton.slow) == 3


def test_a_repeated_launch_compiles_only_in_that_mode(triton: FakeTriton) -> None:
    launched = repeated(triton, torch.zeros(64))
    with compiling_only(1):
        launched(1, 1, 7)
    assert not triton.slow
    assert not triton.fast
    launched(1, 1, 7)
    launched(1, 1, 7)
    assert not triton.slow
    assert [values[4] for values in triton.fast] == ["ahead", "ahead"]


def test_a_kernel_of_two_combinations_is_loaded_once(triton: FakeTriton) -> None:
    """Triton sets `run` before `function`: a second thread must not see a kernel that is being loaded."""
    loads = []

    class Slow:
        packed_metadata = "metadata"
        function: str | None = None
        loading = False

        @property
        def run(self) -> Any:
            if not self.loading:
                self.loading = True
                loads.append(1)
                time.sleep(0.05)
                self.function = "loaded"
            return triton.fast.append

    slow = Slow()
    triton.warmup = lambda *args, grid, **constants: slow  # type: ignore[method-assign]
    kernel, memory = Kernel(triton), torch.zeros(64)
    with compiling_only(2):
        kernel[(1,)](memory, 5, 7, TILE=8)
        kernel[(1,)](memory, 16, 7, TILE=8)
    handles = [kernel._compiling[key].result() for key in kernel._compiling]
    assert [part[1] for part in handles] == ["loaded", "loaded"]
    assert len(loads) == 1
