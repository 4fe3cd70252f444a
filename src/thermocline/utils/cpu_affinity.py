"""How many cores this process may use, and how it uses fewer for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def cores() -> int:
    """Those it is bound to: a rank may have a part of the machine."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def bound(count: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile, runs on so many of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
