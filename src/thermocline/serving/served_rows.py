"""`ServedRows`: which rows of a table a version has, by the norm and the statistics of each row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Floats, Keys, Mask
from thermocline.embedding.row_statistics import scores
from thermocline.errors import require
from thermocline.serving.version import TableFile

Piece = tuple[Keys, Floats]
Statistics = Mapping[str, npt.NDArray[Any]]
"""Statistics of rows by name (`table.read_statistics`); those that a rule needs are enough."""
Candidates = tuple[Keys, Floats, Statistics]
"""Keys, weights and statistics of rows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedRows:
    """Thresholds and a cap. A row is served if it reaches all thresholds; the cap keeps those with the largest norms.

    Rows with equal norms at the cap are served in hash order.
    """

    min_norm: float = 0.0
    """Rows whose weights have a smaller L2 norm are not served; above 0, neither are rows whose norm is NaN."""
    max_rows: int | None = None
    """At most this number of rows is served, those with the largest norms; NaN counts as smaller than any norm."""
    min_frequency: int = 0
    """Rows whose key occurred less often in training are not served. Needs the statistic frequency."""
    min_score: float | None = None
    """Rows with a smaller score, (show - click) * nonclick_coeff + click * click_coeff with decays as of now, are not
    served. Needs the statistics show and click."""
    nonclick_coeff: float = 0.1
    """Weight of an occurrence without a click in the score."""
    click_coeff: float = 1.0
    """Weight of a click in the score."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.min_norm) and self.min_norm >= 0, "min_norm", self.min_norm, "0 or more")
        require(self.max_rows is None or self.max_rows >= 1, "max_rows", self.max_rows, "at least 1")
        require(self.min_frequency >= 0, "min_frequency", self.min_frequency, "0 or more")
        for name in ("min_score", "nonclick_coeff", "click_coeff"):
            value = getattr(self, name)
            require(value is None or math.isfinite(value), name, value, "a finite number")

    @classmethod
    def of(cls, table: TableFile) -> ServedRows:
        """Return the rule that a version was published with."""
        return cls(**{field.name: getattr(table, field.name) for field in dataclasses.fields(cls)})

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the statistics that the rule reads."""
        score = () if self.min_score is None else ("show", "click")
        return (*(("frequency",) if self.min_frequency else ()), *score)

    def check(self, statistics: Collection[str]) -> None:
        """Raise `ValueError` if the rule needs a statistic that rows do not have."""
        for name in self.needs:
            if name not in statistics:
                rule = "min_frequency" if name == "frequency" else "min_score"
                raise ValueError(
                    f"{rule} is {getattr(self, rule)}: it needs the statistic {name!r}, but rows have "
                    f"{sorted(statistics)}: add it to statistics (rows.statistics in a config)"
                )

    @staticmethod
    def norms(weights: Floats) -> Floats:
        """Return float32[n]: a function of each row alone, so that the norm of an unchanged row does not change."""
        wide = weights.astype(np.float64)
        norms: Floats = np.sqrt((wide * wide).sum(axis=1)).astype(np.float32)
        return norms

    @property
    def by_row(self) -> bool:
        """Whether a row is served or not whatever the other rows are: without a cap."""
        return self.max_rows is None

    def keeps(self, candidates: Candidates, always: int | None = None) -> Mask:
        """Return bool[n]: which rows reach the thresholds. `always`: a key that does in any case."""
        keys, weights, statistics = candidates
        kept: Mask = np.ones(len(keys), np.bool_)
        if self.min_norm:
            kept &= self.norms(weights) >= np.float32(self.min_norm)
        if self.min_frequency:
            kept &= statistics["frequency"] >= self.min_frequency
        if self.min_score is not None:
            kept &= scores(statistics, self.nonclick_coeff, self.click_coeff) >= self.min_score
        if always is not None:
            kept |= keys == np.uint64(always)
        return kept

    def select(self, rows: Callable[[], Iterable[Candidates]], always: int | None = None) -> Iterator[Piece]:
        """Yield the served rows of a stream that is in hash order. `always`: a key that is served in any case.

        With a cap the stream is read twice, in memory for 4 bytes per row.
        """
        if self.by_row:
            for candidates in rows():
                keys, weights, _ = candidates
                kept = self.keeps(candidates, always)
                yield (keys, weights) if kept.all() else (keys[kept], weights[kept])
            return
        assert self.max_rows is not None
        places = np.concatenate([np.empty(0, np.float32), *(self._places(piece, always)[0] for piece in rows())])
        least, ties = np.float32(-np.inf), 0  # rows of this place that are still served: no row has the place -inf
        if len(places) > self.max_rows:
            least = np.partition(places, len(places) - self.max_rows)[len(places) - self.max_rows]
            ties = self.max_rows - int((places > least).sum())
        del places
        for candidates in rows():
            keys, weights, _ = candidates
            place, kept = self._places(candidates, always)
            keys, weights = keys[kept], weights[kept]
            tied = place == least
            chosen = (place > least) | (tied & (np.cumsum(tied) <= ties))
            ties -= int((tied & chosen).sum())
            yield keys[chosen], weights[chosen]

    def _places(self, candidates: Candidates, always: int | None) -> tuple[Floats, Mask]:
        """Return the norms of the rows that reach the thresholds, and which rows these are.

        The norm of `always` is infinite, that of a row whose norm is NaN is -1.
        """
        keys, weights, _ = candidates
        kept = self.keeps(candidates, always)
        places = self.norms(weights[kept])
        places[np.isnan(places)] = -1
        if always is not None:
            places[keys[kept] == np.uint64(always)] = np.inf
        return places, kept


ALL_ROWS = ServedRows()
