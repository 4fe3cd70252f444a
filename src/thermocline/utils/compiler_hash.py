"""Computes the hash of Triton's own files once, on a thread, before the first kernel is compiled.

Triton looks kernels up in its cache by a key that contains this hash, which reads hundreds of megabytes: half a second,
and as often as threads ask for it at the same time. Reading and hashing release the interpreter lock.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start_hashing() -> None:
    """Start to compute the hash, if no earlier call has."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_hash, name="thermocline-compiler-hash", daemon=True)
            _thread.start()


def wait_for_hash() -> None:
    """Wait until a hash that was started is known. Without, the first kernel computes it."""
    if _thread is not None:
        _thread.join()


def _hash() -> None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # elsewhere in this version of Triton, which then computes it with its first kernel
        return
    triton_key()
