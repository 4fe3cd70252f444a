"""Kernels with a short path from Python to the driver, launch options that keep results bit-exact, and tile shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from thermocline.kernels import INTERPRETED
from thermocline.kernels.cache_filling import fill_cache, hash_source
from thermocline.utils.compile_workers import workers
from thermocline.utils.compiler_hash import wait_for_hash

_KNOWN_OPTIONS = {field.name for field in dataclasses.fields(CUDAOptions)}

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""No fused multiply-add, and no flush of subnormal numbers to zero: every operation is rounded separately."""
if "enable_reflect_ftz" in _KNOWN_OPTIONS:
    EXACT["enable_reflect_ftz"] = False


_compilers: dict[int, ThreadPoolExecutor] = {}
"""By thread: where it compiles instead of launching, see `compiling_only`."""


_loading = threading.Lock()
"""Held while a kernel is loaded: Triton sets `run` before `function`, and two combinations may share a kernel."""


@contextlib.contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Launches of this thread in the context run nothing: their kernels are compiled, on several threads.

    Worker processes compile what Triton's cache lacks; the threads wait for them, and load the kernels. A later launch
    waits for its own kernel only. An error of a compilation is raised by that launch.
    """
    with workers.used(), ThreadPoolExecutor(threads, "thermocline-compile") as pool:
        _compilers[threading.get_ident()] = pool
        try:
            yield
        finally:
            del _compilers[threading.get_ident()]


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel: `triton.jit` with a shorter launch. Arguments that are no constexpr are passed by position."""
    if function is None:
        return lambda function: kernel(function, **options)
    compiled = triton.jit(function, **options)
    return compiled if INTERPRETED else Kernel(compiled)


class Kernel:
    """A kernel of Triton whose launches skip Triton's dispatch, which takes several times as long as the launch.

    Triton compiles a kernel per combination of argument types, alignments and constants. The first launch of each
    combination goes through Triton, which returns the compiled kernel; later ones go straight to its C launcher.
    """

    __slots__ = ("_compiled", "_compiling", "_constants", "_function", "_specialized")

    def __init__(self, function: Any) -> None:
        self._function = function
        self._specialized = [not parameter.do_not_specialize for parameter in function.params]
        self._constants = [parameter.is_constexpr for parameter in function.params]
        self._compiled: dict[Any, tuple[Any, ...]] = {}
        self._compiling: dict[Any, Future[tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.launch(grid, args, constants)

        return launch

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch on the current stream of the current device."""
        device = torch.cuda.current_device()
        combination, values = self._combination(device, args, constants)
        known = self._compiled.get(combination)
        if _compilers and (pool := _compilers.get(threading.get_ident())) is not None:
            if known is None and combination not in self._compiling:
                self._compiling[combination] = pool.submit(self._compile_only, device, grid, args, constants)
            return
        if known is None and (compiling := self._compiling.get(combination)) is not None:
            known = self._compiled[combination] = compiling.result()
        if known is None:
            self._compiled[combination] = self._compile(grid, args, constants)
            return
        run, function, metadata, tail = known
        x, y = grid[0], grid[1] if len(grid) > 1 else 1
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(x, y, 1, stream, function, metadata, None, None, None, *values, *tail)

    def _combination(
        self, device: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Return what the choice of a compiled kernel depends on, and the arguments with addresses for tensors."""
        key: list[Any] = [device, *constants, *constants.values()]
        values = []
        for arg, specialized in zip(args, self._specialized, strict=False):
            if isinstance(arg, torch.Tensor):
                pointer = arg.data_ptr()
                key += (arg.dtype, pointer % 16 == 0)
                values.append(pointer)
            else:
                key.append(_kind(arg, specialized))
                values.append(arg)
        return tuple(key), values

    def handles(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Any, Any, list[Any]] | None:
        """Return what a launch with these arguments calls, and all its values; None: it was not launched before."""
        combination, values = self._combination(torch.cuda.current_device(), args, constants)
        known = self._compiled.get(combination)
        if known is None:
            return None
        run, function, metadata, tail = known
        return run, function, metadata, [*values, *tail]

    def specializes(self, argument: int) -> bool:
        """Whether a kernel is compiled for each of several kinds of an integer at this position."""
        return self._specialized[argument]

    def _compile(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Launch through Triton; return the C launcher, its handles, and the values of the constants."""
        tail = self._tail(args, constants)
        wait_for_hash()
        hash_source(self._function)
        with _loading:
            return _handles(self._function[grid](*args, **constants), tail)

    def _compile_only(
        self, device: int, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Compile and load without a launch; return the same as `_compile`."""
        torch.cuda.set_device(device)
        tail = self._tail(args, constants)
        wait_for_hash()
        hash_source(self._function)
        fill_cache(self._function, grid, args, constants)
        compiled = self._function.warmup(*args, grid=grid, **constants)
        with _loading:
            return _handles(compiled, tail)

    def _tail(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values of the arguments after `args`."""
        names = self._function.arg_names[len(args) :]
        if not all(self._constants[len(args) :]) or not all(name in constants for name in names):
            raise TypeError(f"{self._function.arg_names}: pass all but constexpr arguments by position")
        return tuple(constants[name] for name in names)


OPEN = object()
"""Stands for an argument of a `RepeatedLaunch` that each launch has its own value of."""


class RepeatedLaunch:
    """A kernel with all its arguments but the open ones: a launch costs the host a third of one of `Kernel`.

    Open arguments are tensors of one dtype, integers that are not specialized, and tuples of floats, or tensors in
    place of these. Fixed tensors are kept alive.
    """

    __slots__ = ("_args", "_constants", "_device", "_handles", "_kernel", "_open", "_types")

    def __init__(self, kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
        self._kernel, self._args, self._constants = kernel, list(args), constants
        self._open = [i for i, arg in enumerate(args) if arg is OPEN]
        self._handles: tuple[Any, Any, Any, list[Any]] | None = None
        self._types: list[type] = []
        self._device = -1

    def __call__(self, x: int, y: int, *given: Any) -> None:
        """Launch x times y programs on the current stream with these values of the open arguments, in order."""
        values = self._values(given)
        if values is None:
            self._launch_first(x, y, given)
        else:
            run, function, metadata, _ = self._handles  # type: ignore[misc]
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            run(x, y, 1, stream, function, metadata, None, None, None, *values)

    def _values(self, given: tuple[Any, ...]) -> list[Any] | None:
        """Return all values of a launch; None: another compiled kernel may be needed than that of the last launch."""
        if self._handles is None or self._device != torch._C._cuda_getDevice() or _compilers:
            return None
        values = self._handles[3].copy()
        for i, value, kind in zip(self._open, given, self._types, strict=True):
            if isinstance(value, torch.Tensor):
                pointer = values[i] = value.data_ptr()
                if pointer % 16 or kind is not torch.Tensor:
                    return None
            elif type(value) is not kind or (isinstance(value, int) and not -(2**31) <= value < 2**31):
                return None
            else:
                values[i] = value
        return values

    def _launch_first(self, x: int, y: int, given: tuple[Any, ...]) -> None:
        args = self._args.copy()
        for i, value in zip(self._open, given, strict=True):
            args[i] = value
        self._kernel[(x, y)](*args, **self._constants)
        if INTERPRETED or _compilers:
            return
        for i, value in zip(self._open, given, strict=True):
            if isinstance(value, torch.Tensor):
                if value.data_ptr() % 16:
                    return
            elif isinstance(value, int) and (self._kernel.specializes(i) or not -(2**31) <= value < 2**31):
                return
        self._handles = self._kernel.handles(tuple(args), self._constants)
        self._types = [torch.Tensor if isinstance(value, torch.Tensor) else type(value) for value in given]
        self._device = torch.cuda.current_device()


def _handles(compiled: Any, tail: tuple[Any, ...]) -> tuple[Any, ...]:
    run = compiled.run  # first: it loads the kernel
    return run, compiled.function, compiled.packed_metadata, tail


def _kind(arg: Any, specialized: bool) -> Any:
    """Return what Triton's choice of a compiled kernel depends on, for an argument that is no tensor."""
    if isinstance(arg, tuple):
        return tuple(_kind(part, specialized) for part in arg)
    if not isinstance(arg, int):
        return type(arg)
    width = 32 if -(2**31) <= arg < 2**31 else 63 if -(2**63) <= arg < 2**63 else 64
    return (type(arg), width, specialized and arg == 1, specialized and arg % 16 == 0)


@triton.jit
def stored_int(value, STORED: tl.constexpr):
    """int32: `value` itself, or loaded from int64[1] in device memory if STORED, for launches that are recorded."""
    number = value
    if STORED:
        number = tl.load(value).to(tl.int32)
    return number


def row_block(dim: int) -> int:
    """Columns of a tile that holds rows of `dim` elements: the next power of two."""
    return int(triton.next_power_of_2(dim))


def tile_rows(dim: int, elements: int) -> int:
    """Rows of a tile of about `elements` elements; at most 128, which a warp can hold in registers."""
    return max(1, min(128, elements // row_block(dim)))


def blocks(count: int, size: int) -> int:
    """Number of tiles of `size` items for `count` items; at least 1, because a grid must not be empty."""
    return max(1, -(-count // size))


def stream_ahead(device: torch.device) -> torch.cuda.Stream | None:
    """High-priority stream for small kernels that training waits for; None on a CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
