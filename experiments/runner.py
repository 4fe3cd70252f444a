"""Steps one after the other: none is done twice, each is kept once it is done, and the page is written at any end."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from experiments import page, places
from experiments.experiment import STEP_SECONDS, Claim, Experiment, Setup, Step, Work
from experiments.results import Result, Results


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a reproduction came to."""

    page: Path
    steps: int
    """Done in this process."""
    claims: list[Claim]


def run(
    folder: str | Path,
    chosen: Mapping[str, Experiment | str],
    setup: Setup,
    command: str,
    *,
    limit: float = STEP_SECONDS,
    here: bool = False,
) -> Outcome:
    """Does what is still to do of the chosen experiments, and writes the report. Interrupted, it goes on next time.

    here   also what is complete for another machine (a GPU's, a larger one's) is done again on this one
    """
    results = Results.open(folder, command)
    plans = {name: _plan(name, found, setup, results, here) for name, found in chosen.items()}
    todo: dict[tuple[str, str], Step] = {}
    spent = []
    for plan in plans.values():
        for step in plan.steps:
            found = results.get(plan.home(step), step)
            if found is None:
                todo[plan.home(step), step.name] = step
            else:
                spent.append((step.seconds, found.seconds))
    done = 0
    try:
        with _Watch([(name, step) for (name, _), step in todo.items()], spent) as watch:
            for (name, _), step in todo.items():
                with watch.step(name, step) as tell:
                    result = _finish(results, name, step, limit, tell)
                watch.done(name, step, result.seconds)
                done += 1
    finally:
        chapters = [_chapter(plan, results) for plan in plans.values()]
        written = page.write(Path(folder), chapters, setup, command)
    claims = [claim for chapter in chapters if chapter.section for claim in chapter.section.claims]
    return Outcome(written, done, claims)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What an experiment is made of: its steps, and the setup that they belong to."""

    name: str
    experiment: Experiment | None
    missing: str
    setup: Setup
    steps: Sequence[Step] = ()

    def home(self, step: Step) -> str:
        return step.home or self.name

    def results(self, results: Results) -> dict[str, Result]:
        """Of those that are done, by name."""
        found = {step.name: results.get(self.home(step), step) for step in self.steps}
        return {name: result for name, result in found.items() if result is not None}


def _plan(name: str, found: Experiment | str, setup: Setup, results: Results, here: bool) -> _Plan:
    """For this machine; or, complete, for the machine where it was made, unless that lacked this one's GPU."""
    made = results.completed(name)
    if isinstance(found, str):
        other = places.load(name)
        plan = _Plan(name, None, found, setup)
    else:
        other = found
        plan = _Plan(name, found, "", setup, list(found.steps(setup)))
        names = [step.name for step in plan.steps]
        assert len(set(names)) == len(names), f"{name}: two steps have one name"
        if len(plan.results(results)) == len(plan.steps):
            return plan
    if (
        made is None
        or other is None
        or here
        or not made.asks_as(setup)
        or (made.device, setup.device) == ("cpu", "cuda")
    ):
        return plan
    elsewhere = _Plan(name, other, "", made, list(other.steps(made)))
    return elsewhere if len(elsewhere.results(results)) == len(elsewhere.steps) else plan


def _finish(results: Results, name: str, step: Step, limit: float, tell: Any) -> Result:
    """Calls a step until it is done; what it used up counts however it ends."""
    while True:
        start = time.monotonic()
        value = None
        try:
            value = step.run(Work(results.work(name, step), limit, tell))
        finally:
            spent = results.spent(name, step, time.monotonic() - start)
        if value is not None:
            return results.put(name, step, value, spent)


def _chapter(plan: _Plan, results: Results) -> page.Chapter:
    name, found = plan.name, plan.experiment
    if found is None:
        title = places.PLACES.get(name, name)
        return page.Chapter(name=name, title=title, section=None, setup=plan.setup, missing=plan.missing)
    got = plan.results(results)
    if len(got) < len(plan.steps):
        missing = f"{len(got)} of {len(plan.steps)} steps are done: the same command goes on."
        return page.Chapter(name=name, title=found.title, section=None, setup=plan.setup, missing=missing)
    results.complete(name, plan.setup)
    section = found.section(plan.setup, {step: result.value for step, result in got.items()})
    made = {step: result.environment for step, result in got.items()}
    return page.Chapter(name=name, title=found.title, section=section, setup=plan.setup, environments=made)


class _Watch:
    """A bar with the time left on a terminal, else a line per step. On stderr."""

    def __init__(self, todo: Sequence[tuple[str, Step]], spent: list[tuple[float, float]]) -> None:
        self._todo, self._spent, self._number = list(todo), spent, 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and self._todo:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            total = sum(step.seconds for _, step in self._todo)
            self._task = self._bar.add_task("reproducing", total=total, left=self._left(0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def step(self, name: str, step: Step) -> Iterator[Any]:
        before = sum(s.seconds for _, s in self._todo[: self._number])
        what = f"{name}: {step.name} ({self._number + 1} of {len(self._todo)})"

        def tell(share: float) -> None:
            if self._bar is not None:
                done = before + min(1.0, share) * step.seconds
                self._bar.update(self._task, description=what, completed=done, left=self._left(share))

        tell(0.0)
        yield tell

    def done(self, name: str, step: Step, seconds: float) -> None:
        self._spent.append((step.seconds, seconds))
        self._number += 1
        if self._bar is None:
            left = self._left(0)
            print(
                f"{self._number} of {len(self._todo)}: {name}: {step.name}, {seconds:.1f} s; {left}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _left(self, share: float) -> str:
        """By what steps were expected to take, and by how much they were off so far."""
        expected = [step.seconds for _, step in self._todo[self._number :]]
        ahead = sum(expected) - (share * expected[0] if expected else 0.0)
        planned, real = (sum(column) for column in zip(*self._spent, strict=True)) if self._spent else (1.0, 1.0)
        seconds = ahead * real / max(planned, 1e-9)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
