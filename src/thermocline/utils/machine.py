"""Properties of the machine this process runs on."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


_reserved: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
"""Name and DRAM budget of every open table of this process whose budget was checked."""


def reserve_memory(owner: Any, name: str, needed: int) -> None:
    """Count a budget that `require_memory` has accepted, until `release_memory` or the end of its owner."""
    _reserved[owner] = name, needed


def release_memory(owner: Any) -> None:
    """Do not count the owner's budget any more."""
    _reserved.pop(owner, None)


def require_memory(needed: int, *, name: str, override: str) -> None:
    """Raise ValueError if the DRAM budgets of this process and its peers exceed the machine's memory.

    name       the setting or settings that ask for `needed` bytes
    override   how to allow it
    Budgets that `reserve_memory` counts are added. Ranks that torchrun started on this machine (LOCAL_WORLD_SIZE) are
    taken to ask for the same.
    """
    memory, ranks = memory_bytes(), local_ranks()
    if (needed + sum(size for _, size in list(_reserved.values()))) * ranks > memory:
        gc.collect()  # tables that nothing refers to, but that are parts of cycles
    others = list(_reserved.values())
    total = needed + sum(size for _, size in others)
    if total * ranks <= memory:
        return
    text = f"{name} is {format_size(needed)}"
    advice = "lower it"
    if others and needed * ranks <= memory:
        shown = ", ".join(f"{other} {format_size(size)}" for other, size in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        text += f", and open tables of this process have {shown}{more}: {format_size(total)} together"
        advice = "lower them, close() tables that are not needed any more"
    if ranks > 1:
        text += f", {format_size(total * ranks)} for {plural(ranks, 'rank')} on this machine"
    raise ValueError(
        f"{text}, but the machine has {format_size(memory)} of memory: {advice}, or set {override} to exceed the "
        "memory on purpose"
    )


def local_ranks() -> int:
    """Return the number of ranks on this machine that torchrun states; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1
