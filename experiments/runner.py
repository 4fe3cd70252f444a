"""Run the steps of experiments that have no cached result, then write the report.

An interrupted run also writes the report; the next run continues with the missing steps.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import thermocline
from experiments import registry, report
from experiments.experiment import STEP_SECONDS, Claim, Experiment, Setup, Step, StepContext
from experiments.results import ExperimentResults
from experiments.step_cache import StepCache, StepResult
from thermocline.cli.progress_bar import progress
from thermocline.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    page: Path
    """The report, or the folder of results where no page was written."""
    steps: int
    """Number of steps that this process ran."""
    claims: list[tuple[Claim, Setup]]
    """Claims of all finished experiments, each with the setup that it was measured with."""


def run(
    out: str | Path,
    experiments: Mapping[str, Experiment],
    setup: Setup,
    command: str = "",
    *,
    cache: str | Path,
    limit: float = STEP_SECONDS,
    this_machine: bool = False,
    page: bool = True,
) -> Outcome:
    """Run the missing steps of the experiments and write the report to `out`.

    command        recorded with each result
    cache          folder of step results
    limit          seconds of one call of a step
    this_machine   do not use results in `out` that another machine (with a GPU, with more cores) has completed
    page           False: write only the files of results, which needs no matplotlib
    """
    out, steps = Path(out), StepCache(Path(cache), command)
    plans = [_plan(name, experiment, setup, steps, out, this_machine) for name, experiment in experiments.items()]
    missing = {
        (plan.owner(step), step.name): step
        for plan in plans
        for step in plan.steps
        if plan.experiment.selects(step.name) and step.name not in plan.cached(steps)
    }
    try:
        _run_steps(missing, steps, limit)
    finally:
        chapters = [_chapter(plan, steps, out) for plan in plans]
        path = report.write(out, chapters) if page else out / "results"
    return Outcome(path, len(missing), _claims(chapters))


def rebuild(source: str | Path, out: str | Path | None = None) -> Outcome:
    """Write the report from the results of an earlier report, without running any step.

    out   folder of the new report; None replaces the earlier one
    """
    folder = Path(source) / "results"
    files = [ExperimentResults.read(folder, name) for name in registry.NAMES]
    earlier = [results for results in files if results is not None]
    if not earlier:
        raise ConfigError(f"--from is {source}: {folder} contains no results of an experiment")
    target = Path(source) if out is None else Path(out)
    if out is not None:
        for results in earlier:
            results.write(target / "results")
    chapters = [_finished_chapter(registry.load(results.experiment), results) for results in earlier]
    return Outcome(report.write(target, chapters), 0, _claims(chapters))


def _claims(chapters: Sequence[report.Chapter]) -> list[tuple[Claim, Setup]]:
    sections = [(chapter.section, chapter.setup) for chapter in chapters if chapter.section is not None]
    return [(claim, setup) for section, setup in sections for claim in section.claims]


# ---- plans


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Steps of one experiment for one setup, or the completed results of another machine."""

    name: str
    experiment: Experiment
    setup: Setup
    steps: Sequence[Step] = ()
    unavailable: str | None = None
    """Reason why the experiment cannot run on this machine."""
    completed: ExperimentResults | None = None
    earlier: Mapping[str, StepResult] = dataclasses.field(default_factory=dict)
    """Results in the folder of the report, of steps that are not run again."""

    def owner(self, step: Step) -> str:
        return step.owner or self.name

    def cached(self, cache: StepCache) -> dict[str, StepResult]:
        """Return the results of the finished steps by name."""
        results = {step.name: cache.get(self.owner(step), step) or self.earlier.get(step.name) for step in self.steps}
        return {name: result for name, result in results.items() if result is not None}


def _plan(name: str, experiment: Experiment, setup: Setup, cache: StepCache, out: Path, this_machine: bool) -> _Plan:
    """Plan the steps for this machine, unless another machine has completed the same request."""
    unavailable = experiment.missing()
    plan = _Plan(name, experiment, setup, unavailable=unavailable)
    if unavailable is None:
        plan = dataclasses.replace(plan, steps=list(experiment.steps(setup)))
        names = [step.name for step in plan.steps]
        assert len(set(names)) == len(names), f"{name}: two steps have the same name"
        if len(plan.cached(cache)) == len(plan.steps):
            return plan
    earlier = ExperimentResults.read(out / "results", name)
    if earlier is None or not _usable(earlier, experiment, setup):
        return plan
    if experiment.independent and earlier.setup.device == setup.device:
        kept = {n: step for n, step in earlier.steps.items() if not this_machine or not experiment.selects(n)}
        return dataclasses.replace(plan, earlier=kept)
    return plan if this_machine else _Plan(name, experiment, earlier.setup, completed=earlier)


def _usable(earlier: ExperimentResults, experiment: Experiment, setup: Setup) -> bool:
    """Whether earlier results answer the request: same sizes, version and steps, and no GPU is added."""
    found, steps = set(earlier.steps), {step.name for step in experiment.steps(earlier.setup)}
    return (
        earlier.setup.same_request(setup)
        and (earlier.setup.device, setup.device) != ("cpu", "cuda")
        and {step.environment["thermocline"] for step in earlier.steps.values()} == {thermocline.__version__}
        and (found <= steps if experiment.independent else found == steps)
    )


# ---- steps


def _run_steps(missing: Mapping[tuple[str, str], Step], cache: StepCache, limit: float) -> None:
    """Run the steps in order, with a progress bar in expected seconds and, without a terminal, a line per step."""
    total = sum(round(step.expected_seconds) for step in missing.values())
    with progress("experiments", total, "expected seconds") as advance:
        for number, ((owner, _), step) in enumerate(missing.items(), 1):
            done = 0

            def on_progress(share: float, step: Step = step) -> None:
                nonlocal done
                more = round(min(1.0, share) * round(step.expected_seconds)) - done
                if more > 0:
                    done += more
                    advance(more)

            result = _finish(cache, owner, step, limit, on_progress)
            on_progress(1.0)
            if not sys.stderr.isatty():
                line = f"{number} of {len(missing)}: {owner}: {step.name}, {result.seconds:.1f} s"
                print(line, file=sys.stderr, flush=True)


def _finish(cache: StepCache, owner: str, step: Step, limit: float, on_progress: Callable[[float], None]) -> StepResult:
    """Call a step until it returns a result; the running time counts even if a call fails."""
    while True:
        start = time.monotonic()
        value = None
        try:
            value = step.run(StepContext(cache.working_folder(owner, step), limit, on_progress))
        finally:
            seconds = cache.add_seconds(owner, step, time.monotonic() - start)
        if value is not None:
            return cache.put(owner, step, value, seconds)


# ---- chapters


def _chapter(plan: _Plan, cache: StepCache, out: Path) -> report.Chapter:
    if plan.completed is not None:
        return _finished_chapter(plan.experiment, plan.completed)
    cached = plan.cached(cache)
    reason = ""
    if plan.unavailable is not None:
        reason = f"Not run on this machine: {plan.unavailable}."
    elif len(cached) < len(plan.steps) and not (plan.experiment.independent and cached):
        reason = f"{len(cached)} of {len(plan.steps)} steps are done: run the same command to continue."
    if reason:
        return report.Chapter(
            name=plan.name, title=plan.experiment.title, section=None, setup=plan.setup, missing=reason
        )
    results = ExperimentResults(plan.name, plan.setup, cached)
    results.write(out / "results")
    return _finished_chapter(plan.experiment, results)


def _finished_chapter(experiment: Experiment, results: ExperimentResults) -> report.Chapter:
    return report.Chapter(
        name=results.experiment,
        title=experiment.title,
        section=experiment.section(results.setup, results.values),
        setup=results.setup,
        environments=results.environments,
    )
