"""Names of all failpoints: the string literals in calls of failpoint(), in C++ and in Python."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def failpoints() -> list[str]:
    """Return the failpoints of the store, which `THERMOCLINE_KILL_AT=point:count` names."""
    files = [*(ROOT / "csrc" / "ssd").glob("*.cc"), ROOT / "csrc" / "util" / "fs.cc"]
    return _names(file for file in files if not file.name.endswith("_test.cc"))


def python_failpoints() -> list[str]:
    """Return the failpoints of checkpoints and publishing, which the same variable names."""
    return _names((ROOT / "src").rglob("*.py"))


def _names(files: Iterable[Path]) -> list[str]:
    points: set[str] = set()
    for file in files:
        for call in re.findall(r"failpoint\(([^;\n]*)\)", file.read_text()):
            points.update(re.findall(r'"([a-z_]+\.[a-z_]+)"', call))
    return sorted(points)
