"""`ServedRows`: which rows of a table a version has, by a score of each row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys
from thermocline.errors import require
from thermocline.serving.version import TableFile

Piece = tuple[Keys, Floats]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedRows:
    """A threshold and a cap. The score of a row is the L2 norm of its weights (`score`).

    Rows with equal scores at the cap are served in hash order.
    """

    min_norm: float = 0.0
    """Rows with a smaller norm are not served."""
    max_rows: int | None = None
    """At most this number of rows is served, those with the largest norms."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.min_norm) and self.min_norm >= 0, "min_norm", self.min_norm, "0 or more")
        require(self.max_rows is None or self.max_rows >= 1, "max_rows", self.max_rows, "at least 1")

    @classmethod
    def of(cls, table: TableFile) -> ServedRows:
        """Return the rule that a version was published with."""
        return cls(min_norm=table.min_norm, max_rows=table.max_rows)

    @staticmethod
    def score(weights: Floats) -> Floats:
        """Return float32[n]: a function of each row alone, so that the score of an unchanged row does not change."""
        wide = weights.astype(np.float64)
        norms: Floats = np.sqrt((wide * wide).sum(axis=1)).astype(np.float32)
        return norms

    @property
    def by_row(self) -> bool:
        """Whether a row is served or not whatever the other rows are: without a cap."""
        return self.max_rows is None

    def keeps(self, weights: Floats) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which rows reach the threshold."""
        if self.min_norm == 0:
            return np.ones(len(weights), np.bool_)
        return self.score(weights) >= np.float32(self.min_norm)

    def select(self, rows: Callable[[], Iterable[Piece]]) -> Iterator[Piece]:
        """Yield the served rows of a stream that is in hash order.

        With a cap the stream is read twice, in memory for 4 bytes per row.
        """
        if self == ALL_ROWS:
            yield from rows()
            return
        if self.by_row:
            for keys, weights in rows():
                kept = self.keeps(weights)
                yield keys[kept], weights[kept]
            return
        assert self.max_rows is not None
        scores = np.concatenate([np.empty(0, np.float32), *(self.score(weights) for _, weights in rows())])
        scores = scores[scores >= np.float32(self.min_norm)]
        least, ties = np.float32(self.min_norm), len(scores)  # rows of score `least` that are still served
        if len(scores) > self.max_rows:
            least = np.partition(scores, len(scores) - self.max_rows)[len(scores) - self.max_rows]
            ties = self.max_rows - int((scores > least).sum())
        del scores
        for keys, weights in rows():
            score = self.score(weights)
            tied = score == least
            kept = (score > least) | (tied & (np.cumsum(tied) <= ties))
            ties -= int((tied & kept).sum())
            yield keys[kept], weights[kept]


ALL_ROWS = ServedRows()
