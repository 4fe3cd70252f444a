"""Raises glibc malloc's thresholds so that freed buffers are reused.

A training step frees its activations and gradients, and the next step allocates the same sizes. With glibc's defaults
the freed memory returns to the kernel, which clears every page again on the next access: up to a fifth of a step's
processor time.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 1 << 30
"""Free bytes at the end of the heap below which nothing returns to the kernel."""
_LARGEST = 32 << 20
"""Largest allocation served from the heap: glibc's maximum. Larger ones are mapped and unmapped individually."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_freed_memory() -> bool:
    """Raise the thresholds for the rest of this process; return whether it was done.

    Does nothing without glibc, or if the environment already configures malloc.
    """
    configured = any(name in os.environ for name in _SETTINGS)
    if configured or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or os.name != "posix":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
