"""Memory, descriptors and disk of the soak's processes, and their bounds, which are fixed before a soak."""

from __future__ import annotations

import dataclasses
import os

MEMORY_BEYOND_BUDGETS = 128 << 20
"""Anonymous memory of a rank beside its budgets and what it shares with the soak's process: torch, batches."""
DESCRIPTORS = 200
DISK = 400 << 20
"""Bytes of one lane: about 25,000 rows of at most 128 bytes, in up to 4 checkpoints, a log and served versions."""
REFERENCE_GROWTH = 48 << 20
"""Memory that the process of the reference may gain after its first comparison."""
REFERENCE_DESCRIPTORS = 4


def memory_of(pid: int) -> int:
    """Return the anonymous memory of a process in bytes; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def descriptors_of(pid: int) -> int:
    """Return the number of open files of a process; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time of this process, of its ended children and of the running ones in `pids`."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


@dataclasses.dataclass
class Peaks:
    """Largest samples of a soak."""

    memory_beyond_budgets: int = 0
    descriptors: int = 0
    disk: int = 0
    reference_growth: int = 0
    reference_descriptors_growth: int = 0
    all_processes: int = 0
    samples: int = 0

    def sample(self, pids: list[int], budget: int, baseline: int, others: list[int]) -> None:
        """Sample the ranks of an attempt, of which each has `budget` bytes.

        baseline   memory of the soak's process, which its forks share
        others     further processes of the soak
        """
        self.samples += 1
        total = baseline
        for pid in pids:
            memory = memory_of(pid) - baseline
            total += max(memory, 0)
            self.memory_beyond_budgets = max(self.memory_beyond_budgets, memory - budget)
            self.descriptors = max(self.descriptors, descriptors_of(pid))
        total += sum(max(memory_of(pid) - baseline, 0) for pid in others)
        self.all_processes = max(self.all_processes, total)

    def exceeded(self) -> list[str]:
        """Return one line per bound that a sample exceeds."""
        bounds = {
            "memory_beyond_budgets": MEMORY_BEYOND_BUDGETS,
            "descriptors": DESCRIPTORS,
            "disk": DISK,
            "reference_growth": REFERENCE_GROWTH,
            "reference_descriptors_growth": REFERENCE_DESCRIPTORS,
        }
        return [
            f"{name} is {getattr(self, name)}, above its bound {bound}"
            for name, bound in bounds.items()
            if getattr(self, name) > bound
        ]
