"""What a step frees stays with the process: glibc gives large arrays back to the kernel, and faults them in again.

A step frees its activations and gradients and allocates as many a moment later. Left to itself, glibc unmaps them or
cuts the heap, and the kernel clears every page anew: up to a fifth of a step's processor time.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30
"""Bytes at the heap's end that may be free before any go back."""
_LARGEST = 32 << 20
"""Bytes of an array that comes from the heap: glibc allows no more. Larger ones are mapped and unmapped each."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_freed_memory() -> bool:
    """From now on, in this process; whether it was done: not without glibc, nor if the environment says otherwise."""
    told = any(name in os.environ for name in _SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if told or os.name != "posix":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
