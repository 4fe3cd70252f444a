"""How many cores this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Those it is bound to: a rank may have a part of the machine."""
    return len(os.sched_getaffinity(0))
