"""CPU cores available to this process, a temporary limit on them, and NUMA nodes of cores and PCI devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SYSFS = Path("/sys")


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


def numa_nodes(sysfs: Path = _SYSFS) -> dict[int, set[int]]:
    """Return the cores of each NUMA node of this machine; nodes without cores are left out."""
    nodes = {}
    for path in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            found = _parse_cores((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if found:
            nodes[int(path.name.removeprefix("node"))] = found
    return dict(sorted(nodes.items()))


def pci_numa_node(bus_id: str, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node of a PCI device, such as "0000:3b:00.0"; None if the system does not state it."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the firmware does not state it


def _parse_cores(text: str) -> set[int]:
    """Parse a list of ranges: "0-3,8" is {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
