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

from thermocline.reproduce import page
from thermocline.reproduce.experiment import STEP_SECONDS, Claim, Experiment, Setup, Step, Work
from thermocline.reproduce.places import PLACES
from thermocline.reproduce.results import Result, Results


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
) -> Outcome:
    """Does what is still to do of the chosen experiments, and writes the report. Interrupted, it goes on next time."""
    results = Results.open(folder)
    plans = {name: list(found.steps(setup)) for name, found in chosen.items() if not isinstance(found, str)}
    _check(plans)
    todo = [(n, step) for n, steps in plans.items() for step in steps if results.get(n, step) is None]
    spent = [(step.seconds, r.seconds) for n, steps in plans.items() for step in steps if (r := results.get(n, step))]
    done = 0
    try:
        with _Watch(todo, spent) as watch:
            for name, step in todo:
                with watch.step(name, step) as tell:
                    result = _finish(results, name, step, limit, tell)
                watch.done(name, step, result.seconds)
                done += 1
    finally:
        chapters = [_chapter(name, found, setup, plans.get(name, []), results) for name, found in chosen.items()]
        written = page.write(Path(folder), chapters, setup, command)
    claims = [claim for chapter in chapters if chapter.section for claim in chapter.section.claims]
    return Outcome(written, done, claims)


def _check(plans: Mapping[str, Sequence[Step]]) -> None:
    for name, steps in plans.items():
        names = [step.name for step in steps]
        assert len(set(names)) == len(names), f"{name}: two steps have one name"


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


def _chapter(name: str, found: Experiment | str, setup: Setup, steps: list[Step], results: Results) -> page.Chapter:
    if isinstance(found, str):
        return page.Chapter(name=name, title=PLACES.get(name, name), section=None, environments=(), missing=found)
    title = found.title
    got = {step.name: result for step in steps if (result := results.get(name, step)) is not None}
    environments = [result.environment for result in got.values()]
    if len(got) < len(steps):
        missing = f"{len(got)} of {len(steps)} steps are done: the same command goes on."
        return page.Chapter(name=name, title=title, section=None, environments=environments, missing=missing)
    section = found.section(setup, {step: result.value for step, result in got.items()})
    return page.Chapter(name=name, title=title, section=section, environments=environments)


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
