"""Properties of the machine this process runs on."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Bytes of physical DRAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
