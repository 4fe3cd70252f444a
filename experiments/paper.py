"""The source's own figures, as printed: paper.json. They only stand beside ours, in columns and lines marked so."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def load() -> dict[str, Any]:
    """tables 1 to 4 of the talk; every number of it that this package knows."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text())
    return loaded
