"""update_statistics: counts the occurrences of a step in the statistics of rows (csrc/dram/statistics.h).

The statistics are the last words of a row. Sums per key are integers, so their order does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from thermocline.kernels.launch import EXACT, blocks, kernel
from thermocline.kernels.segments import Segments

_ITEMS = 128
_HEAD = 5
"""Words of a `StoredStatistics` before its runs."""
_LEAST = tl.constexpr(2.0**-100)
_CLICK_UNIT = tl.constexpr(2.0**-16)


@dataclasses.dataclass(frozen=True, slots=True)
class StatisticsStep:
    """One step of the statistics of rows."""

    names: Sequence[str]
    """The statistics that rows have."""
    words: int
    """Words of the statistics at the end of a row."""
    number: int
    time: int
    runs: Sequence[tuple[int, float]]
    """Decays so far: (number of decays up to the end of the run, factor of each in the run)."""

    @property
    def decays(self) -> int:
        """Number of decays so far."""
        return self.runs[-1][0] if self.runs else 0

    def content(self) -> npt.NDArray[np.int32]:
        """Return the words of a `StoredStatistics`. Raises ValueError if there are more runs than it has place for."""
        if len(self.runs) > StoredStatistics.RUNS:
            raise ValueError(f"{len(self.runs)} runs of decays: a stored step has place for {StoredStatistics.RUNS}")
        words = np.zeros(StoredStatistics.WORDS, np.int64)
        words[:_HEAD] = self.number, self.time, self.time >> 32, self.decays, len(self.runs)
        words[_HEAD : _HEAD + len(self.runs)] = [end for end, _ in self.runs]
        stored = words.astype(np.int32)
        stored[_HEAD + StoredStatistics.RUNS :][: len(self.runs)].view(np.float32)[:] = [run[1] for run in self.runs]
        return stored


@dataclasses.dataclass(frozen=True, slots=True)
class StoredStatistics:
    """A `StatisticsStep` in device memory, for launches that are recorded once and replayed for every step."""

    RUNS: ClassVar[int] = 64
    """Most runs of decays."""
    WORDS: ClassVar[int] = _HEAD + 2 * RUNS

    names: Sequence[str]
    words: int
    memory: torch.Tensor
    """int32[WORDS]: number, time (two words), decays, number of runs; then the ends of runs, then their factors."""


@kernel(do_not_specialize=["first", "count", "runs", "number", "time_low", "time_high", "decays"])
def _statistics_kernel(
    words, slots, occurrences, limit, ends, factors, stored, first, count, runs, number, time_low, time_high, decays,
    FREQUENCY: tl.constexpr, LAST_STEP: tl.constexpr, LAST_TIME: tl.constexpr, SHOW: tl.constexpr, CLICK: tl.constexpr,
    STRIDE: tl.constexpr, STORED: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    if STORED:
        number = tl.load(stored)
        time_low = tl.load(stored + 1)
        time_high = tl.load(stored + 2)
        decays = tl.load(stored + 3)
        runs = tl.load(stored + 4)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item < tl.minimum(count, tl.load(limit))
    slot = tl.load(slots + item, mask=live, other=0).to(tl.int64)
    times = tl.load(occurrences + 2 * item, mask=live, other=0)
    at = words + slot * STRIDE + first
    if FREQUENCY:
        before = tl.load(at, mask=live, other=0).to(tl.int64) & 0xFFFFFFFF
        total = tl.minimum(before + times, 0xFFFFFFFF)
        tl.store(at, total.to(tl.int32), mask=live)
        at += 1
    if LAST_STEP:
        tl.store(at, tl.zeros([ITEMS], tl.int32) + number, mask=live)
        at += 1
    if LAST_TIME:
        tl.store(at, tl.zeros([ITEMS], tl.int32) + time_low, mask=live)
        tl.store(at + 1, tl.zeros([ITEMS], tl.int32) + time_high, mask=live)
        at += 2
    if SHOW or CLICK:
        last = at + (1 if SHOW else 0) + (1 if CLICK else 0)
        show = at
        click = last - 1
        done = tl.load(last, mask=live, other=0)
        shows = tl.load(show, mask=live, other=0).to(tl.float32, bitcast=True)
        clicks = tl.load(click, mask=live, other=0).to(tl.float32, bitcast=True)
        for run in range(runs):
            end = tl.load(ends + run)
            factor = tl.load(factors + run)
            most = tl.max(tl.where(live, end - done, 0), axis=0)
            for _ in range(most):
                due = done < end
                shows = tl.where(due, shows * factor, shows)
                shows = tl.where(due & (tl.abs(shows) < _LEAST), 0.0, shows)
                clicks = tl.where(due, clicks * factor, clicks)
                clicks = tl.where(due & (tl.abs(clicks) < _LEAST), 0.0, clicks)
                done += due.to(tl.int32)
        if SHOW:
            shows = shows + times.to(tl.float32)
            tl.store(show, shows.to(tl.int32, bitcast=True), mask=live)
        if CLICK:
            units = tl.load(occurrences + 2 * item + 1, mask=live, other=0)
            clicks = clicks + (units.to(tl.float64) * _CLICK_UNIT).to(tl.float32)
            tl.store(click, clicks.to(tl.int32, bitcast=True), mask=live)
        tl.store(last, tl.zeros([ITEMS], tl.int32) + decays, mask=live)


def count_occurrences(segments: Segments, grad_rows: torch.Tensor | None, units: torch.Tensor | None) -> torch.Tensor:
    """int64[segments.sizes[0], 2]: occurrences of each segment, and the sum of their labels.

    grad_rows   int32[ids], in the order of `segments.order`: the row of the gradients of each occurrence; None for
                `segments.order` itself
    units       int64: label of each row of the gradients, in multiples of `CLICK_UNIT`; None: all 0
    Rows past segments.counts[0] are undefined.
    """
    count = segments.sizes[0]
    rows = segments.order if grad_rows is None else grad_rows
    starts = segments.starts[: count + 1].long().clamp(0, len(rows))  # elements past the segments are undefined
    result = torch.zeros(count, 2, dtype=torch.int64, device=starts.device)
    result[:, 0] = starts.diff()
    if units is not None:
        sums = torch.zeros(len(rows) + 1, dtype=torch.int64, device=starts.device)
        # Of a recorded step, elements past the ids are undefined: their sums are not used.
        torch.cumsum(units[rows.long().clamp(0, len(units) - 1)], 0, out=sums[1:])
        result[:, 1] = sums[starts[1:]] - sums[starts[:-1]]
    return result


def update_statistics(
    arena: torch.Tensor, slots: torch.Tensor, occurrences: torch.Tensor, limit: torch.Tensor | None,
    step: StatisticsStep | StoredStatistics,
) -> None:  # fmt: skip
    """Apply the occurrences of one step to rows slots[i] of the arena, in place. No slot may repeat.

    occurrences   int64[n, 2], of `count_occurrences`
    limit         the number of slots on the device, in its first element; None: n
    """
    count = len(occurrences)
    if count == 0:
        return
    if limit is None:
        limit = torch.full((1,), count, dtype=torch.int32, device=arena.device)
    ends, factors, stored = limit, arena, limit  # placeholders
    scalars: tuple[int, ...] = (0, 0, 0, 0, 0)
    if isinstance(step, StoredStatistics):
        stored, ends = step.memory, step.memory[_HEAD:]
        factors = step.memory[_HEAD + step.RUNS :].view(torch.float32)
    else:
        scalars = len(step.runs), *map(_signed, (step.number, step.time, step.time >> 32, step.decays))
        if step.runs:
            ends = torch.tensor([end for end, _ in step.runs], dtype=torch.int32, device=arena.device)
            factors = torch.tensor([factor for _, factor in step.runs], device=arena.device)
    names = step.names
    _statistics_kernel[(blocks(count, _ITEMS),)](
        arena.view(torch.int32), slots, occurrences, limit, ends, factors, stored, arena.shape[1] - step.words, count,
        *scalars,
        FREQUENCY="frequency" in names, LAST_STEP="last_step" in names, LAST_TIME="last_time" in names,
        SHOW="show" in names, CLICK="click" in names, STRIDE=arena.stride(0),
        STORED=isinstance(step, StoredStatistics), ITEMS=_ITEMS, num_warps=4, **EXACT,
    )  # fmt: skip


def update_statistics_reference(
    arena: torch.Tensor, slots: torch.Tensor, occurrences: torch.Tensor, step: StatisticsStep
) -> None:
    """`update_statistics` in plain torch."""
    words = arena.view(torch.int32)
    rows, at = slots[: len(occurrences)].long(), arena.shape[1] - step.words
    times, units = occurrences[:, 0], occurrences[:, 1]
    if "frequency" in step.names:
        total = ((words[rows, at].long() & 0xFFFFFFFF) + times).clamp(max=0xFFFFFFFF)
        words[rows, at] = total.to(torch.int32)
        at += 1
    if "last_step" in step.names:
        words[rows, at] = _signed(step.number)
        at += 1
    if "last_time" in step.names:
        words[rows, at], words[rows, at + 1] = _signed(step.time), _signed(step.time >> 32)
        at += 2
    for name, added in (("show", times.to(torch.float32)), ("click", (units.double() * 2.0**-16).to(torch.float32))):
        if name in step.names:
            values, done = arena[rows, at].clone(), words[rows, -1].clone()
            for end, factor in step.runs:
                while (due := done < end).any():
                    values[due] = values[due] * factor
                    values[due & (values.abs() < 2.0**-100)] = 0
                    done[due] += 1
            arena[rows, at] = values + added
            at += 1
    if "show" in step.names or "click" in step.names:
        words[rows, -1] = _signed(step.decays)


def _signed(value: int) -> int:
    """Return the lowest 32 bits of an integer as int32."""
    return (value + 2**31) % 2**32 - 2**31
