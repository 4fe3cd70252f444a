"""GPU kernels in Triton: one operation per file, with its kernel, launcher and plain-torch reference.

Importing this package selects Triton's interpreter if there is no CUDA device: it runs the same kernels on CPU tensors,
one program after another, which is only useful for tests at small sizes. Environment variables are left unchanged.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
"""Whether kernels run on CPU tensors, in Python."""


def _select_interpreter() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and before != "1" and not sys.modules["triton"].knobs.runtime.interpret:
        raise ImportError(
            "Triton was imported before thermocline.kernels, without a CUDA device and without its interpreter: "
            "import thermocline.kernels first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton's library when it is imported
    try:
        import triton
        import triton.language

        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True  # read when a kernel is defined
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    _patch_interpreter()


def _patch_interpreter() -> None:
    """Serialize the interpreter's launches, and patch `triton.language` once per launch and module.

    The interpreter keeps the current program in globals, so launches of several threads must not overlap; nor must the
    first launches of kernels, which parse their source (CPython 3.11 fails when two threads build syntax trees). It
    also patches `triton.language` on every call of a device function, which takes a third of a launch's time.
    """
    from triton.runtime import interpreter

    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()
    rewrite = interpreter.InterpretedFunction.rewrite
    patch_language = interpreter._patch_lang
    patched_modules: set[str] = set()  # of the current launch

    def serialized_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            patched_modules.clear()
            return launch(self, *args, **kwargs)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched_modules:
            patch_language(self.fn)
            patched_modules.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    def serialized_rewrite(self: Any) -> Any:
        with lock:
            return rewrite(self)

    interpreter.GridExecutor.__call__ = serialized_launch
    interpreter.InterpretedFunction.rewrite = serialized_rewrite
    interpreter.InterpretedFunction.__call__ = call_device_function


if INTERPRETED:
    _select_interpreter()
