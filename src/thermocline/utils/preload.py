"""Loads torch's shared libraries on a thread, while the main thread imports other modules and opens the data."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from pathlib import Path


def preload_torch() -> None:
    """Start to load torch's libraries; `import torch` then finds them loaded. Nothing to do without torch.

    `ctypes` releases the interpreter lock while it loads, `import` does not. The thread is no daemon: a process that
    exits early waits until the libraries are loaded, because their constructors must not run beside its destructors.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "lib"
        threading.Thread(target=_load, args=(folder,), name="thermocline-preload").start()


def _load(folder: Path) -> None:
    """Load what `import torch` loads, in its order and with its visibility."""
    with contextlib.suppress(OSError):  # another layout of torch: `import torch` loads, or explains
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libtorch_python.so"))
