"""Everything that dereferences GPU memory, in Triton: one op per file, with its launcher and its plain-torch reference.

Importing this package makes Triton ready. Without a CUDA device that is its interpreter, which runs the same kernels on
CPU tensors, one program after the other: for tests, at small sizes. No environment variable is set or left behind.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
"""Whether the kernels run on CPU tensors, in Python."""


def _ready_triton() -> None:
    if not INTERPRETED:
        return
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and before != "1":
        knobs = sys.modules["triton"].knobs
        if not knobs.runtime.interpret:
            raise ImportError(
                "Triton was imported before thermocline.kernels and there is no CUDA device: its interpreter must be "
                "chosen first. Import thermocline.kernels earlier, or set TRITON_INTERPRET=1"
            )
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own library decides at import
    try:
        import triton
        import triton.language

        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True  # and its kernels when they are defined
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    _one_launch_at_a_time()


def _one_launch_at_a_time() -> None:
    """The interpreter keeps which program it is at in globals: launches from several threads must take turns."""
    from triton.runtime import interpreter

    launch, lock = interpreter.GridExecutor.__call__, threading.Lock()

    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = in_turn


_ready_triton()
