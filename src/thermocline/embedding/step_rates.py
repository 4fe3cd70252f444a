"""`StepRates`: the learning rates of a table's last steps, which rows that catch up need (`lazy="catch_up"`).

Such a row stores, in the last word of its state, the number of the last step that it includes, as an integer; an
initial row is as of step 0. Before a row is read, the steps that it missed are replayed, each as an optimizer step with
gradient 0 and with the step's own rate (csrc/dram/kernels.h, `catch_up`): at most the last `catch_up_steps` of them.

A training batch catches its rows up in place, in its first forward pass and again in the step, where the number of the
step is known: how far ahead rows were pulled changes nothing. Evaluation catches up copies. Rows in stores, checkpoints
and publications are as of the last batch that trained them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from thermocline.arrays import Floats
from thermocline.embedding.optimizers import Adam, Optimizer, PartialRowWiseAdam
from thermocline.errors import FormatError, ThermoclineError

RateRuns = Sequence[tuple[float, int]]
"""Consecutive steps of equal rate: (rate, number of steps), oldest first."""

_LAST_STEP = 2**31 - 1


class StepRates:
    """Rates of the last `limit` steps of a table."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.limit = optimizer.catch_up_steps
        """Largest number of missed steps that are replayed."""
        self.step = 0
        """Number of the last step."""
        self.ring: Floats = np.zeros((2, self.limit), np.float32)
        """Constants of step n at index n % limit: step size of Adam, else learning rate; bias correction of Adam."""
        self._rates: deque[float] = deque(maxlen=self.limit)

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepRates | None:
        """Return an empty list of rates; None: rows of this optimizer do not catch up."""
        return cls(optimizer) if optimizer.catches_up else None

    def add(self, step: int, rate: float) -> None:
        """Record the rate of the next step."""
        if step != self.step + 1 or step > _LAST_STEP:
            raise ThermoclineError(
                f"step {step} follows step {self.step}: rows that catch up (lazy) need consecutive steps up to 2^31 - 1"
            )
        self.step = step
        self._rates.append(float(rate))
        self._set(step, rate)

    def _set(self, step: int, rate: float) -> None:
        optimizer = self._optimizer
        size, bias = rate, 1.0
        if isinstance(optimizer, Adam | PartialRowWiseAdam):
            correction, bias = optimizer.corrections(step)
            size = rate / correction
        self.ring[:, step % self.limit] = size, bias

    def by_step(self) -> dict[int, float]:
        """Return the rate of each step."""
        return dict(enumerate(self._rates, self.step - len(self._rates) + 1))

    def runs(self) -> list[tuple[float, int]]:
        """Return all rates, to save them."""
        return [(rate, len(list(same))) for rate, same in itertools.groupby(self._rates)]

    def restore(self, step: int, runs: RateRuns, table: str) -> None:
        """Continue after step `step`, whose rates were saved. Raises `FormatError` if rates are missing."""
        saved = sum(count for _, count in runs)
        if saved != min(step, self.limit):
            raise FormatError(
                f"table {table!r}: rows as of step {step} have the rates of {saved} steps saved, but lazy = "
                f'"catch_up" needs those of the last {min(step, self.limit)}: open rows that were saved with it'
            )
        rates = [rate for rate, count in runs for _ in range(count)]
        self.step = step
        self._rates = deque(rates, maxlen=self.limit)
        for number, rate in enumerate(rates, step - len(rates) + 1):
            self._set(number, rate)


def parse_runs(saved: Any) -> RateRuns:
    """Check saved runs, as JSON; empty if there are none."""
    if not isinstance(saved, Iterable) or isinstance(saved, (str, bytes)):
        return ()
    runs = []
    for run in saved:
        match run:
            case [float() | int() as rate, int() as count] if count > 0 and math.isfinite(rate):
                runs.append((float(rate), count))
            case _:
                raise FormatError(f"saved learning rates have an entry {run!r}: expected [rate, number of steps]")
    return runs
