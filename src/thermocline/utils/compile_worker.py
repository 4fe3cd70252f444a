"""A process that compiles kernels into Triton's cache: a line of JSON on stdin per kernel, a reply on stdout each.

Started by `compile_workers.py`. Ends with stdin, so also with the process that started it, and its forked children.
Loads Triton but no torch, which takes seconds: the modules of kernels use torch in functions that are not called here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import types
from typing import Any


class _Unused:
    """Stands for anything of torch that a module of kernels names while it is imported."""

    def __getattr__(self, name: str) -> _Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused()

    def __call__(self, *args: Any, **options: Any) -> _Unused:
        return _Unused()


class _UnusedTorch(types.ModuleType):
    def __getattr__(self, name: str) -> _Unused:
        return getattr(_Unused(), name)  # type: ignore[no-any-return]


class _Target:
    """In place of Triton's driver, which needs torch and a GPU: the GPU that kernels are compiled for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_kernel(module: str, name: str, target: list[Any], data: str) -> None:
    """Compile a kernel for a target and a specialization that Triton has serialized, unless the cache has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "_function", function)  # of `launch.Kernel`
    importlib.import_module("thermocline.kernels.cache_filling").hash_source(function)
    triton.runtime.driver.set_active(_Target(GPUTarget(*target)))
    function.device_caches.clear()  # made for the target before
    compiled = function.preload(data)
    if hasattr(driver, "make_launcher"):  # up to Triton 3.6: a C compiler builds a launcher per signature
        with contextlib.suppress(Exception):  # no C compiler, or no driver: the first launch explains it
            driver.CudaLauncher(compiled.src, compiled.metadata)


def _prepare(first: bool) -> None:
    """Load what every kernel needs. The first worker builds the library of Triton's driver, which all processes use."""
    importlib.import_module("thermocline.kernels.launch")
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime.cache import triton_key

    if first:
        with contextlib.suppress(Exception):
            CudaUtils()
    triton_key()


def main() -> None:
    """Compile until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers may print
    sys.modules["torch"] = _UnusedTorch("torch")
    with contextlib.suppress(Exception):  # the kernels fail for the same reason, and this process replies so
        _prepare(first=sys.argv[1:] == ["first"])
    for line in sys.stdin:
        try:
            compile_kernel(**json.loads(line))
            error = ""
        except Exception as failure:
            error = repr(failure)
        print(json.dumps({"error": error}), file=replies)
    os._exit(0)


if __name__ == "__main__":
    main()
