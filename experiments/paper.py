"""Numbers as printed by Zhao (2026), tables 1 to 4: paper.json. The report shows them beside measured ones."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def load() -> dict[str, Any]:
    """Return tables 1 to 4 of the talk *Massive-Scale Neural Network Training*."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text())
    return loaded
