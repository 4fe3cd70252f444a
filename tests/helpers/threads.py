"""Threads that a test has started."""

from __future__ import annotations

import threading

_earlier: set[threading.Thread] = set()
"""Threads of tables and readers that earlier tests on this worker left to the garbage collector."""


def start_counting() -> None:
    """Ignore all threads that run now."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def our_threads() -> list[str]:
    """Names of the package's threads started since `start_counting`."""
    running = set(threading.enumerate()) - _earlier
    return [thread.name for thread in running if thread.name.startswith("thermocline-")]
