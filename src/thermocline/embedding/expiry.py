"""Expiry: rules that delete rows at given steps. The rules are functions of the rows and the step alone.

An expiry begins after a step whose number is a multiple of `Expiry.every`, and takes `Expiry.parts` steps: after each,
the rows of one part of the keys, by hash, are tested and deleted. Each is a barrier: batches after it see the deleted
rows as never trained, whatever was loaded ahead. The part is a function of the step alone, so results do not depend on
tiers, depth, look-ahead or saves, and nothing is pending between two steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Doubles, Floats, Keys, Mask
from thermocline.embedding.key_hash import KeyPart
from thermocline.embedding.row_statistics import RowStatistics, Statistic, StatisticsState, scores
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import require

_MOST_PARTS = 1000
_ROWS_OF_PART = 10_000
"""Rows of `max_rows` and `min_rows` per part, at least: smaller parts would differ much in size."""

Order = Literal["score", "last_step", "last_time", "frequency", "norm"]
_NEEDS: dict[Order, tuple[Statistic, ...]] = {
    "score": ("show", "click"),
    "last_step": ("last_step",),
    "last_time": ("last_time",),
    "frequency": ("frequency",),
    "norm": (),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """Rules that delete rows. A row is deleted if any rule with a value applies; then the limits of rows."""

    every: int
    """Steps between the begins of two expiries: they follow the steps whose number is a multiple of it."""
    spread: int | None = None
    """Steps that an expiry takes, at most `every`: after each, an equal part of the keys, by hash, is tested. None:
    `every`, at most 1,000 and at most one step per 10,000 rows of `max_rows` and `min_rows`."""
    unused_steps: int | None = None
    """Delete rows that no step has changed for more than this many steps. Needs the statistic last_step."""
    unused_seconds: int | None = None
    """Delete rows whose last_time is more than this many seconds of event time before the newest one of the table.
    Needs the statistic last_time."""
    min_norm: float | None = None
    """Delete rows whose weights have an L2 norm below this, or NaN: a step cannot repair such a row. 0: only these."""
    min_score: float | None = None
    """Delete rows whose score, after the decay, is below this (Paddle: delete_threshold). The score is
    (show - click) * nonclick_coeff + click * click_coeff. Needs the statistics show and click."""
    decay: float = 1.0
    """Factor of show and click of every row at each expiry, before rows are tested (Paddle: show_click_decay_rate)."""
    nonclick_coeff: float = 0.1
    """Weight of an occurrence without a click in the score (Paddle: nonclk_coeff)."""
    click_coeff: float = 1.0
    """Weight of a click in the score."""
    max_rows: int | None = None
    """Keep at most this many rows, over all ranks: further ones go in `order`. Each part of the keys has its share."""
    min_rows: int = 0
    """Keep at least this many rows, over all ranks, although rules apply to them: those that come last in `order`. Each
    part of the keys keeps its share."""
    order: Order | None = None
    """Which rows go first, for `max_rows` and `min_rows`: those with the lowest value, of equal ones the smallest key;
    with "norm", rows whose norm is NaN before all others.
    None: the first of score, last_step, last_time, frequency and norm that the statistics of the table allow."""

    def __post_init__(self) -> None:
        def check(name: str, rule: str, whole: bool, low: float, *, optional: bool = True) -> None:
            value = getattr(self, name)
            if value is None and optional:
                return
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            require(number and low <= value < math.inf, f"Expiry.{name}", value, rule)

        check("every", "a number of steps from 1", True, 1, optional=False)
        check("spread", "a number of steps from 1", True, 1)
        fine = self.spread is None or self.spread <= self.every
        require(fine, "Expiry.spread", self.spread, f"at most every, {self.every} steps")
        check("unused_steps", "a number of steps from 0", True, 0)
        check("unused_seconds", "a number of seconds from 0", True, 0)
        check("min_norm", "a finite number, not negative", False, 0)
        check("min_score", "a finite number", False, -math.inf)
        check("decay", "a number above 0 and up to 1", False, 0, optional=False)
        require(0 < self.decay <= 1, "Expiry.decay", self.decay, "a number above 0 and up to 1")
        check("nonclick_coeff", "a finite number", False, -math.inf, optional=False)
        check("click_coeff", "a finite number", False, -math.inf, optional=False)
        check("max_rows", "a number of rows from 1", True, 1)
        check("min_rows", "a number of rows from 0", True, 0, optional=False)
        fine = self.max_rows is None or self.min_rows <= self.max_rows
        require(fine, "Expiry.min_rows", self.min_rows, f"at most max_rows, {self.max_rows}")
        fine = self.order is None or self.order in get_args(Order)
        require(fine, "Expiry.order", self.order, f"one of {', '.join(get_args(Order))}")
        rules = (self.unused_steps, self.unused_seconds, self.min_norm, self.min_score, self.max_rows)
        if self.decay == 1 and all(rule is None for rule in rules):
            raise ValueError("Expiry has no rule: give at least one, such as unused_steps=10000")

    @property
    def parts(self) -> int:
        """Number of steps, and of parts of the keys, of one expiry."""
        if self.spread is not None:
            return self.spread
        limits = [rows for rows in (self.max_rows, self.min_rows) if rows]
        return max(1, min(self.every, _MOST_PARTS, *(rows // _ROWS_OF_PART for rows in limits)))

    def part_after(self, step: int) -> KeyPart | None:
        """Return the part of the keys that is tested after this step; None: none."""
        number = step % self.every
        return KeyPart(number, self.parts) if step >= self.every and number < self.parts else None

    def next_turn(self, step: int) -> int:
        """Return the first step, from this one on, after which a part is tested."""
        if step < self.every:
            return self.every
        number = step % self.every
        return step if number < self.parts else step - number + self.every

    @property
    def weights(self) -> bool:
        """Whether rules need the weights of rows, not only their statistics."""
        limited = self.max_rows is not None or self.min_rows > 0
        return self.min_norm is not None or (limited and self.order in (None, "norm"))

    def checked(self, statistics: RowStatistics) -> Expiry:
        """Return the rules with their order. Raises `ValueError` if a rule needs a statistic that rows do not have."""
        uses = {
            "unused_steps": (self.unused_steps is not None, ("last_step",)),
            "unused_seconds": (self.unused_seconds is not None, ("last_time",)),
            "min_score": (self.min_score is not None, ("show", "click")),
            "decay": (self.decay != 1, ("show", "click")),
            "order": (self.order is not None, _NEEDS[self.order or "norm"]),
        }
        for name, (used, needed) in uses.items():
            missing = [statistic for statistic in needed if statistic not in statistics]
            if used and missing:
                raise ValueError(
                    f"Expiry.{name} is {getattr(self, name)!r}: it needs the statistic {missing[0]!r}, but rows have "
                    f"{list(statistics.names)}: add it to statistics (rows.statistics in a config)"
                )
        if self.order is not None:
            return self
        found = next(name for name, needed in _NEEDS.items() if all(s in statistics for s in needed))
        return dataclasses.replace(self, order=found)


@dataclasses.dataclass(slots=True)
class Expired:
    """Counters of the expiries of a table, of this process."""

    runs: int = 0
    """Expiries that have ended."""
    rows: int = 0
    """Rows deleted in all."""
    last_rows: int = 0
    """Rows deleted by the last expiry that this process has run from begin to end."""
    last_kept: int | None = None
    """Rows that this expiry has tested and kept; None: there was none."""
    seconds: float = 0.0
    """Time of all expiries."""
    _parts: list[tuple[int, int]] = dataclasses.field(default_factory=list, repr=False)
    """Rows deleted and kept of each part of the current expiry."""

    def add(self, part: KeyPart, rows: int, kept: int, seconds: float) -> None:
        """Count one part of an expiry."""
        self.rows, self.seconds = self.rows + rows, self.seconds + seconds
        if part.number == 0:
            self._parts.clear()
        self._parts.append((rows, kept))
        if part.number + 1 == part.parts:
            self.runs += 1
            if len(self._parts) == part.parts:
                self.last_rows, self.last_kept = map(sum, zip(*self._parts, strict=True))


class Selection:
    """Chooses the rows to delete, at one step, in one part of the keys: a `backend.Select`."""

    def __init__(
        self,
        expiry: Expiry,
        spec: TableSpec,
        state: StatisticsState,
        step: int,
        part: KeyPart,
        total: Callable[[int], int] = lambda count: count,
    ) -> None:
        """Decay comes first, with the first part: it changes `state`. `expiry` has an order.

        total   returns the sum of a count over all ranks; collective over ranks
        """
        self.expiry = expiry
        self.part = part
        self._spec = spec
        self._state = state
        self._step = step
        self._max_rows = None if expiry.max_rows is None else part.share(expiry.max_rows)
        self._min_rows = part.share(expiry.min_rows)
        self._total = total
        self.rows = 0
        """Rows that were tested."""
        self._begin = time.perf_counter()
        if expiry.decay != 1 and part.number == 0:
            state.add_decay(expiry.decay)

    @property
    def seconds(self) -> float:
        """Time since the selection was made."""
        return time.perf_counter() - self._begin

    def __call__(self, pieces: Iterator[tuple[Keys, Floats]]) -> Keys:
        limited = self.expiry.max_rows is not None or self.expiry.min_rows > 0
        keys, places, condemned = [np.empty(0, np.uint64)], [np.empty(0)], [np.empty(0, np.bool_)]
        for piece, rows in pieces:
            self.rows += len(piece)
            values = self._spec.statistics.unpack(rows, self._state)
            dead = self._rules(rows, values)
            chosen = slice(None) if limited else dead
            keys.append(piece[chosen].copy())
            if limited:
                condemned.append(dead)
                places.append(self._places(rows, values))
        if not limited:
            return np.concatenate(keys)
        return self._limit(np.concatenate(keys), np.concatenate(places), np.concatenate(condemned))

    def _rules(self, rows: Floats, values: dict[str, npt.NDArray[Any]]) -> Mask:
        expiry = self.expiry
        dead = np.zeros(len(rows), np.bool_)
        if expiry.unused_steps is not None:
            dead |= self._step - values["last_step"].astype(np.int64) > expiry.unused_steps
        if expiry.unused_seconds is not None and self._state.newest is not None:
            dead |= self._state.newest - values["last_time"] > expiry.unused_seconds
        if expiry.min_norm is not None:
            dead |= ~(self._norms(rows) >= expiry.min_norm)
        if expiry.min_score is not None:
            dead |= self._scores(values) < expiry.min_score
        return dead

    def _places(self, rows: Floats, values: dict[str, npt.NDArray[Any]]) -> Doubles:
        """Return the value of each row in the order of deletion."""
        if self.expiry.order == "score":
            return self._scores(values)
        if self.expiry.order == "norm":
            norms = self._norms(rows)
            return np.where(np.isnan(norms), -np.inf, norms)
        return values[str(self.expiry.order)].astype(np.float64)

    def _scores(self, values: dict[str, npt.NDArray[Any]]) -> Doubles:
        return scores(values, self.expiry.nonclick_coeff, self.expiry.click_coeff)

    def _norms(self, rows: Floats) -> Doubles:
        """Return L2 norms: squares added in the order of the elements, so that no bit depends on the machine."""
        total = np.zeros(len(rows))
        for column in rows[:, : self._spec.dim].T:
            total += np.square(column, dtype=np.float64)
        norms: Doubles = np.sqrt(total)
        return norms

    def _limit(self, keys: Keys, places: Doubles, condemned: Mask) -> Keys:
        """Apply the floor to rows that rules condemn, then the cap to the others."""
        order = np.lexsort((keys, places))
        keys, places, condemned = keys[order], places[order], condemned[order]
        rows, listed = self._total(len(keys)), self._total(int(condemned.sum()))
        spared = max(0, min(listed, self._min_rows - (rows - listed)))
        dead = np.zeros(len(keys), np.bool_)
        dead[np.flatnonzero(condemned)[: self._first(places[condemned], keys[condemned], listed - spared)]] = True
        if self._max_rows is not None:
            excess = max(0, rows - (listed - spared) - self._max_rows)
            dead[np.flatnonzero(~dead)[: self._first(places[~dead], keys[~dead], excess)]] = True
        return keys[dead]

    def _first(self, places: Doubles, keys: Keys, count: int) -> int:
        """Return how many of the first `count` rows of all ranks, by place and then key, are of this process.

        places, keys   of this process, in that order
        Counts rows up to a bound, over all ranks, and halves the range of the bound: at most 128 times.
        """
        if count == 0:
            return 0
        bits = (places + 0.0).view(np.uint64)  # no negative zero
        negative = bits >> np.uint64(63) != 0
        ordered = np.where(negative, ~bits, bits | np.uint64(1 << 63))  # integers in the order of the places
        bound = self._bound(ordered, count)
        first, last = np.searchsorted(ordered, bound, "left"), np.searchsorted(ordered, bound, "right")
        ties = keys[first:last]
        bound = self._bound(ties, count - self._total(int(first)))
        return int(first + np.searchsorted(ties, bound, "right"))

    def _bound(self, ascending: npt.NDArray[np.uint64], count: int) -> np.uint64:
        """Return the least value up to which all ranks together have at least `count` values."""
        low, high = 0, 2**64 - 1
        while low < high:
            middle = (low + high) // 2
            if self._total(int(np.searchsorted(ascending, np.uint64(middle), "right"))) >= count:
                high = middle
            else:
                low = middle + 1
        return np.uint64(low)
