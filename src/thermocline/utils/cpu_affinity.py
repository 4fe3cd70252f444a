"""CPU cores available to this process, and a temporary limit on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def cores() -> int:
    """Number of cores in this process's affinity mask; a rank may have only part of the machine."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def limit_cores(count: int) -> Iterator[None]:
    """Limit the CPU affinity of this thread, and of threads and processes it starts, to `count` cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
