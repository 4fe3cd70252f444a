"""Statistics of rows: how often, when and with which labels a key occurred. Opt-in, kept in every tier and checkpoint.

The words of the statistics are the last ones of a row; a step updates them together with the row, from sums of integers
per key. csrc/dram/statistics.h defines the arithmetic to the bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Doubles, Floats, Offsets
from thermocline.core import core
from thermocline.errors import ThermoclineError

if TYPE_CHECKING:
    from thermocline.batch import Batch
    from thermocline.embedding.batch_plan import Gradient

Statistic = Literal["frequency", "last_step", "last_time", "show", "click"]
NAMES: tuple[Statistic, ...] = get_args(Statistic)
_WORDS = {"frequency": 1, "last_step": 1, "last_time": 2, "show": 1, "click": 1}
_TYPES = dict(zip(NAMES, (np.uint32, np.uint32, np.int64, np.float32, np.float32), strict=True))
_PREFIX = b'{"statistics": '
CLICK_UNIT = 2.0**-16
"""Labels are summed as integer multiples of this."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowStatistics:
    """Which statistics the rows of a table have, in their order in a row."""

    names: tuple[Statistic, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str] | RowStatistics | None) -> RowStatistics:
        """Return the statistics with these names, in any order."""
        if names is None or isinstance(names, RowStatistics):
            return names or cls()
        if isinstance(names, str):
            raise TypeError(f"statistics is {names!r}: it must be a list, such as [{names!r}]")
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ValueError(f"statistics has {unknown[0]!r}: the statistics of rows are {', '.join(NAMES)}")
        if len(set(names)) != len(names):
            raise ValueError(f"statistics is {list(names)}: it must have each name once")
        return cls(tuple(name for name in NAMES if name in names))

    def __bool__(self) -> bool:
        return bool(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def decays(self) -> bool:
        """Whether a row has a last word: the number of decays that its show and click include."""
        return "show" in self or "click" in self

    @property
    def mask(self) -> int:
        """Bits of RowLayout::statistics in csrc/dram/row_layout.h."""
        return sum(1 << NAMES.index(name) for name in self.names)

    @property
    def words(self) -> int:
        """Words of four bytes per row."""
        return sum(_WORDS[name] for name in self.names) + self.decays

    @property
    def bytes(self) -> int:
        """Bytes per row."""
        return 4 * self.words

    def unpack(self, rows: Floats, state: StatisticsState) -> dict[str, npt.NDArray[Any]]:
        """Return the statistics of rows, float32[n, floats of a row], by name; show and click as decayed by now."""
        words = np.ascontiguousarray(rows[:, rows.shape[1] - self.words :])
        values: dict[str, npt.NDArray[Any]] = {}
        first = 0
        for name in self.names:
            part = np.ascontiguousarray(words[:, first : first + _WORDS[name]])
            values[name] = part.view(_TYPES[name]).reshape(-1)
            first += _WORDS[name]
        if self.decays:
            done = np.ascontiguousarray(words[:, -1]).view(np.uint32)
            for name in ("show", "click"):
                if name in values:
                    state.step(1).decay(done, values[name])
        return values


NO_STATISTICS = RowStatistics()


def scores(values: Mapping[str, npt.NDArray[Any]], nonclick_coeff: float, click_coeff: float) -> Doubles:
    """Return (show - click) * nonclick_coeff + click * click_coeff of each row; `values`: of `RowStatistics.unpack`."""
    show, click = values["show"].astype(np.float64), values["click"].astype(np.float64)
    result: Doubles = (show - click) * nonclick_coeff + click * click_coeff
    return result


@dataclasses.dataclass(slots=True, eq=False)
class StatisticsState:
    """State of a table, beside its rows, that their statistics depend on."""

    newest: int | None = None
    """Newest event time of all steps."""
    step_time: int = 0
    """Newest event time of the batches of the current step."""
    runs: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Decays of show and click so far: (number of decays up to the end of the run, factor of each in the run)."""

    @property
    def decays(self) -> int:
        """Number of decays so far."""
        return self.runs[-1][0] if self.runs else 0

    def add_decay(self, factor: float) -> None:
        """Multiply show and click of all rows, when they are next read or changed."""
        factor = float(np.float32(factor))
        count = self.decays + 1
        if self.runs and self.runs[-1][1] == factor:
            self.runs.pop()
        self.runs.append((count, factor))

    def step(self, number: int) -> core.StatisticsStep:
        """Return what the core needs to update rows in step `number`."""
        return core.make_statistics_step(min(number, 2**32 - 1), self.step_time, self.runs)

    def set_time(self, time: int | None) -> None:
        """Set the event time of the current step; None: its batches have no example."""
        if time is not None:
            self.newest = time if self.newest is None else max(self.newest, time)
        self.step_time = self.newest or 0 if time is None else time

    # ---- in files

    def to_json(self, statistics: RowStatistics) -> dict[str, Any]:
        """Return the names and this state as JSON."""
        return {"names": list(statistics.names), "newest": self.newest, "decays": self.runs}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take the state of `to_json`; None: that of a new table."""
        saved = saved or {}
        self.newest, self.step_time = saved.get("newest"), 0
        self.runs = [(int(end), float(factor)) for end, factor in saved.get("decays", [])]

    def append_to(self, note: bytes, statistics: RowStatistics) -> bytes:
        """Append a line with this state to the note of a commit; none for rows without statistics."""
        if not statistics:
            return note
        return note + b"\n" + json.dumps({"statistics": self.to_json(statistics)}).encode()


def parse_statistics(note: bytes) -> dict[str, Any] | None:
    """Return the JSON that `StatisticsState.append_to` added to the note of a commit."""
    for line in reversed(note.split(b"\n")[-3:]):
        if line.startswith(_PREFIX):
            saved: dict[str, Any] = json.loads(line)["statistics"]
            return saved
    return None


# ---- from batches


def limited_time(times: Offsets, watermark: int | None, max_jump: int | None) -> int:
    """Return the newest of event times, but at most `max_jump` seconds after the watermark; without a watermark, after
    the oldest of them."""
    newest = int(times.max())
    if max_jump is None:
        return newest
    return min(newest, (int(times.min()) if watermark is None else watermark) + max_jump)


def time_range(table: str, batches: Sequence[Batch]) -> Offsets:
    """Return the oldest and the newest event time of batches; none if they have no example."""
    batches = [batch for batch in batches if batch.examples]
    for batch in batches:
        if batch.time is None:
            raise ValueError(
                f"table {table!r} keeps the statistic last_time, but a batch has no event time: set Batch.time to the "
                "seconds of each example (data.time in a config), or leave last_time out of statistics"
            )
    times = [batch.time for batch in batches if batch.time is not None]
    return np.array([min(t.min() for t in times), max(t.max() for t in times)] if times else [], np.int64)


def example_click_units(table: str, gradients: Sequence[Gradient]) -> Offsets:
    """Return `click_units`, but one per example if all examples have the same number of rows of the gradients."""
    first = gradients[0]
    if len(gradients) > 1 or first.spec.pooling == "none":
        return click_units(table, gradients)
    key = "click units"
    if key not in first.batch.prepared:
        first.batch.prepared[key] = _label_units(table, first.batch)
    units: Offsets = first.batch.prepared[key]
    return units


def click_units(table: str, gradients: Sequence[Gradient]) -> Offsets:
    """Return the label of the example of each row of the concatenated gradients, int64 in multiples of CLICK_UNIT."""
    units = [_units_of(table, gradient) for gradient in gradients]
    return units[0] if len(units) == 1 else np.concatenate(units)


def _units_of(table: str, gradient: Gradient) -> Offsets:
    batch, spec = gradient.batch, gradient.spec
    key = ("click units", spec.fields, spec.pooling == "none")
    if key not in batch.prepared:
        units = _label_units(table, batch)
        if spec.pooling == "none":
            offsets = batch.select(spec.fields)[1]
            batch.prepared[key] = np.repeat(np.repeat(units, len(spec.fields)), np.diff(offsets))
        else:
            batch.prepared[key] = np.repeat(units, len(spec.fields))
    cached: Offsets = batch.prepared[key]
    if len(cached) != len(gradient.values):
        raise ThermoclineError(
            f"table {table!r} keeps the statistic click and has admission: a bag with pooling 'none' cannot count "
            "labels then. Leave click out of statistics"
        )
    return cached


def _label_units(table: str, batch: Batch) -> Offsets:
    label = batch.label
    if label is None:
        raise ValueError(
            f"table {table!r} keeps the statistic click, but a batch has no label: set Batch.label, or leave click out "
            "of statistics"
        )
    label = label.detach().cpu().numpy() if hasattr(label, "detach") else np.asarray(label)
    if label.size != batch.examples:
        raise ValueError(
            f"table {table!r} keeps the statistic click, which needs one label per example: the label has shape "
            f"{label.shape} for {batch.examples} examples"
        )
    units: Offsets = np.rint(np.nan_to_num(label.reshape(-1).astype(np.float64)) / CLICK_UNIT).astype(np.int64)
    return units
