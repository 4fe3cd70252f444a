"""Reference implementation of row statistics and expiry: one Python object per row, every row decayed at every expiry.

Shares no code with `row_statistics.py`, `expiry.py` and csrc/dram/statistics.h, which decay a row when it is next read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from thermocline.embedding.expiry import Expiry


@dataclasses.dataclass(slots=True)
class ReferenceStatistics:
    """Statistics of one row."""

    frequency: int = 0
    last_step: int = 0
    last_time: int = 0
    show: np.float32 = dataclasses.field(default_factory=np.float32)
    click: np.float32 = dataclasses.field(default_factory=np.float32)

    def occurred(self, labels: list[float], step: int, time: int) -> None:
        """Count the occurrences of a key in one step, given the label of each."""
        self.frequency = min(self.frequency + len(labels), 2**32 - 1)
        self.last_step, self.last_time = step, time
        clicks = sum(round(label * 65536) for label in labels)
        self.show = np.float32(self.show + np.float32(len(labels)))
        self.click = np.float32(self.click + np.float32(clicks / 65536))

    def decay(self, factor: float) -> None:
        """Multiply show and click."""
        for name in ("show", "click"):
            value = np.float32(getattr(self, name) * np.float32(factor))
            setattr(self, name, value if abs(value) >= 2.0**-100 else np.float32(0))


def part_of(key: int, parts: int) -> int:
    """Return the part of a key: the parts divide the values of its hash (csrc/util/hash.h) into equal ranges."""
    x = key ^ 0x9E3779B97F4A7C15
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> 33) * factor % 2**64
    return (x ^ x >> 33) * parts // 2**64


def expired_keys(
    rows: dict[int, Any],
    statistics: dict[int, ReferenceStatistics],
    dim: int,
    expiry: Expiry,
    step: int,
    newest: int,
    part: tuple[int, int],
) -> set[int]:
    """Return the keys to delete, after `decay`; rows[key][:dim] are the weights of all rows of a part (number, of how
    many)."""

    def share(total: int) -> int:
        number, parts = part
        return math.floor((number + 1) * total / parts) - math.floor(number * total / parts)

    def statistics_of(key: int) -> ReferenceStatistics:
        return statistics.get(key, ReferenceStatistics())  # a row that catches up exists before its first step

    def score(key: int) -> float:
        show, click = float(statistics_of(key).show), float(statistics_of(key).click)
        return (show - click) * expiry.nonclick_coeff + click * expiry.click_coeff

    def norm(key: int) -> float:
        total = 0.0
        for weight in rows[key][:dim]:
            total += float(weight) * float(weight)
        return math.sqrt(total)

    def condemned(key: int) -> bool:
        s = statistics_of(key)
        return (
            (expiry.unused_steps is not None and step - s.last_step > expiry.unused_steps)
            or (expiry.unused_seconds is not None and newest - s.last_time > expiry.unused_seconds)
            or (expiry.min_norm is not None and not norm(key) >= expiry.min_norm)
            or (expiry.min_score is not None and score(key) < expiry.min_score)
        )

    def place(key: int) -> tuple[float, int]:
        if expiry.order in ("score", "norm"):
            value = (score if expiry.order == "score" else norm)(key)
            return -math.inf if math.isnan(value) else value, key
        return float(getattr(statistics_of(key), str(expiry.order))), key

    ordered = sorted(rows, key=place)
    dead = [key for key in ordered if condemned(key)]
    while dead and len(rows) - len(dead) < share(expiry.min_rows):
        dead.pop()
    alive = [key for key in ordered if key not in set(dead)]
    if expiry.max_rows is not None:
        dead += alive[: max(0, len(alive) - share(expiry.max_rows))]
    return set(dead)
