"""Properties of the machine this process runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from thermocline.utils.text_format import format_size, plural

_CGROUPS = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Bytes of DRAM: physical memory, or the limit of this process's control group if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(Path("/proc/self/cgroup"), _CGROUPS)])


def _cgroup_limits(groups: Path, root: Path) -> Iterator[int]:
    """Yield the memory limits of the process's control groups and of all groups above them, of version 1 and 2."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.lstrip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                limit = (group / name).read_text().strip()
            except OSError:  # a container sees its own group as the root
                continue
            if limit != "max":
                yield int(limit)


def require_memory(needed: int, *, name: str, override: str) -> None:
    """Raise ValueError if the DRAM budgets of this process and its peers exceed the machine's memory.

    name       the setting or settings that ask for `needed` bytes
    override   how to allow it
    Ranks that torchrun started on this machine (LOCAL_WORLD_SIZE) are taken to ask for the same.
    """
    memory, ranks = memory_bytes(), _local_ranks()
    if needed * ranks <= memory:
        return
    total = "" if ranks == 1 else f", {format_size(needed * ranks)} for {plural(ranks, 'rank')} on this machine"
    raise ValueError(
        f"{name} is {format_size(needed)}{total}, but the machine has {format_size(memory)} of memory: lower it, or "
        f"set {override} to exceed the memory on purpose"
    )


def _local_ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1
