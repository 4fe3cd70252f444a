"""Runs of small made-up experiments: caching, resuming, reuse of another machine's results, reports and claims."""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import thermocline as tc
from experiments import __main__ as cli, figures, machine, registry, report, runner
from experiments.experiment import (
    TOO_SMALL,
    Claim,
    Experiment,
    Figure,
    Json,
    Section,
    Series,
    Setup,
    Step,
    StepContext,
    Table,
    parse_scale,
)
from experiments.results import ExperimentResults

SETUP = Setup(scale=10.0)
COMMAND = "python -m experiments --made-up"


class Squares:
    """Steps that count their calls; step `fail` is interrupted once, step `long` needs three calls."""

    def __init__(self, count: int = 4, fail: int | None = None, long: int | None = None, factor: int = 1) -> None:
        self.count, self.fail, self.long, self.factor = count, fail, long, factor
        self.calls: list[int] = []
        self.experiment = Experiment(title="Squares & co", steps=self.steps, section=self.section)

    def steps(self, setup: Setup) -> list[Step]:
        return [
            Step(
                name=f"Square of {n}!",
                settings={"n": n, "factor": self.factor},
                expected_seconds=1.0,
                run=self.function(n),
            )
            for n in range(self.count)
        ]

    def function(self, n: int) -> Any:
        def run(context: StepContext) -> Json | None:
            self.calls.append(n)
            assert context.folder.is_dir()
            assert context.seconds_left > 0
            context.report_progress(0.5)
            if n == self.fail:
                self.fail = None
                raise KeyboardInterrupt
            if n == self.long:
                path = context.folder / "so far"
                path.write_text(path.read_text() + "x" if path.exists() else "x")
                if len(path.read_text()) < 3:
                    return None
            return {"square": n * n * self.factor}

        return run

    def section(self, setup: Setup, results: Mapping[str, Json]) -> Section:
        squares = [results[f"Square of {n}!"]["square"] for n in range(self.count)]
        line = Series(name="n < n²", x=list(range(self.count)), y=squares)
        return Section(
            text=["What is < 3?"],
            parts=[
                Table(
                    name="table", title="Squares", columns=("n", "square", "guess", "theirs"),
                    rows=[(f"<{n}>", square, 0.5, 7) for n, square in enumerate(squares)],
                    paper=("theirs",), predicted=("guess",),
                ),
                Figure(name="plot", title="A plot", x_label="n", y_label="n²", series=[line]),
            ],
            claims=[Claim(text="they rise", holds=squares == sorted(squares), detail="0 < 1", part="plot")],
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time of matplotlib; test_figures.py tests the drawings."""
    monkeypatch.setattr(figures, "draw", lambda figure, stem: f'<svg class="plot" id="{stem}"></svg>')


def run(folder: Path, squares: Squares, setup: Setup = SETUP, **more: Experiment) -> runner.Outcome:
    return run_all(folder, {"squares": squares.experiment, **more}, setup, COMMAND)


def run_all(folder: Path, chosen: Mapping[str, Experiment], setup: Setup, command: str, **options: Any) -> Any:
    return runner.run(folder, chosen, setup, command, cache=folder / "cache", **options)


def absent(reason: str) -> Experiment:
    """Return an experiment that cannot run."""
    return dataclasses.replace(Squares().experiment, missing=lambda: reason)


def test_every_step_runs_once_and_is_reported(tmp_path: Path) -> None:
    squares = Squares()
    outcome = run(tmp_path, squares, absent=absent("there is no GPU"))
    assert squares.calls == [0, 1, 2, 3]
    assert (outcome.steps, [claim.holds for claim, _ in outcome.claims]) == (4, [True])
    page = outcome.page.read_text()
    assert "Squares &amp; co" in page
    assert "What is &lt; 3?" in page
    assert "Not run on this machine: there is no GPU." in page
    assert COMMAND in page
    assert machine.describe()["cpu"] in page
    assert f"build {machine.build()}" in page
    assert '<th scope="col" class="paper">theirs (Zhao 2026)</th>' in page
    assert '<th scope="col" class="predicted">guess (predicted)</th>' in page
    assert (tmp_path / "tables/squares-table.csv").read_text().splitlines() == [
        "n,square,guess (predicted),theirs (Zhao 2026)", "<0>,0,0.5,7", "<1>,1,0.5,7", "<2>,4,0.5,7", "<3>,9,0.5,7",
    ]  # fmt: skip
    record = json.loads((tmp_path / "tables/squares-table.json").read_text())
    assert record["kinds"] == {"n": "measured", "square": "measured", "guess": "predicted", "theirs": "paper"}
    assert record["about"]["made_by"][0]["command"] == COMMAND
    assert record["about"]["made_by"][0]["cores"] == machine.describe()["cores"]
    assert (tmp_path / "tables/squares-plot.csv").read_text().splitlines()[1:3] == [
        "n < n²,measured,0,0",
        "n < n²,measured,1,1",
    ]
    assert (tmp_path / "figures/squares-plot.svg").exists()
    assert not (tmp_path / "cache/work").exists()

    again = Squares()
    assert run(tmp_path, again).steps == 0
    assert again.calls == []


def test_an_interrupted_run_continues_here_or_in_a_copy(tmp_path: Path) -> None:
    squares = Squares(fail=2)
    here, copy = tmp_path / "here", tmp_path / "copy"
    with pytest.raises(KeyboardInterrupt):
        run(here, squares)
    assert squares.calls == [0, 1, 2]
    assert "2 of 4 steps are done" in (here / "index.html").read_text()
    shutil.copytree(here, copy)
    for folder in (here, copy):
        rest = Squares()
        assert run(folder, rest).steps == 2
        assert rest.calls == [2, 3]
        assert "steps are done" not in (folder / "index.html").read_text()


def test_a_step_of_several_calls_keeps_its_folder(tmp_path: Path) -> None:
    squares = Squares(long=1)
    run(tmp_path, squares)
    assert squares.calls == [0, 1, 1, 1, 2, 3]
    (record,) = [json.loads(p.read_text()) for p in (tmp_path / "cache/steps/squares").glob("square-of-1-*.json")]
    assert record["seconds"] > 0
    assert record["result"] == {"square": 1}


def test_other_settings_are_another_step(tmp_path: Path) -> None:
    run(tmp_path, Squares())
    other = Squares(factor=2)
    shutil.rmtree(tmp_path / "results")
    assert run(tmp_path, other).steps == 4
    assert len(list((tmp_path / "cache/steps/squares").glob("square-of-*.json"))) == 8


def test_a_damaged_result_is_an_error(tmp_path: Path) -> None:
    run(tmp_path, Squares())
    path = next((tmp_path / "cache/steps/squares").glob("square-of-2-*.json"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(tc.CorruptionError, match=r"square-of-2-\w+\.json is damaged .* remove it"):
        run(tmp_path, Squares())


def test_a_result_that_is_not_json_is_refused(tmp_path: Path) -> None:
    step = Step(name="one", settings={}, expected_seconds=1, run=lambda context: {"pair": (1, 2)})
    made = Experiment(title="", steps=lambda setup: [step], section=Squares().section)
    with pytest.raises(TypeError, match="the result of squares, one"):
        run_all(tmp_path, {"squares": made}, SETUP, "")


def test_only_the_first_of_many_steps_are_named() -> None:
    assert report.step_names(["a", "b", "c", "d"]) == "a; b; c; d"
    assert report.step_names([f"step {n}" for n in range(90)]) == "step 0; step 1; step 2; step 3 and 86 more steps"


def test_the_page_names_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Squares(fail=2))
    real = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: {**real, "cpu": "Another processor"})
    page = run(tmp_path, Squares()).page.read_text()
    assert "Several machines, builds or commands" in page
    command = f"<code>{COMMAND}</code>"
    assert f"Square of 2!; Square of 3!: {command}: Another processor" in page
    assert f"Square of 0!; Square of 1!: {command}: {real['cpu']}" in page
    made_by = json.loads((tmp_path / "tables/squares-plot.json").read_text())["about"]["made_by"]
    assert [(by["cpu"], by["steps"]) for by in made_by] == [
        (real["cpu"], ["Square of 0!", "Square of 1!"]),
        ("Another processor", ["Square of 2!", "Square of 3!"]),
    ]


class Speeds(Squares):
    """Steps that depend on the machine: on the setup's device and cores."""

    def steps(self, setup: Setup) -> list[Step]:
        made = {"device": setup.device, "cores": setup.cores}
        return [dataclasses.replace(s, settings={**s.settings, **made}) for s in super().steps(setup)]

    def section(self, setup: Setup, results: Mapping[str, Json]) -> Section:
        return dataclasses.replace(super().section(setup, results), text=[f"On {setup.device}, {setup.cores} cores."])


def test_results_of_a_gpu_are_kept_on_a_machine_without_one(tmp_path: Path) -> None:
    there, here = dataclasses.replace(SETUP, device="cuda", cores=16), dataclasses.replace(SETUP, cores=2)

    def go(setup: Setup, command: str, **options: Any) -> tuple[int, str]:
        chosen = {"speeds": Speeds().experiment, "squares": Squares().experiment}
        only = {"speeds": chosen["speeds"]} if setup.device == "cuda" else chosen
        outcome = run_all(tmp_path, only, setup, command, **options)
        return outcome.steps, outcome.page.read_text()

    assert go(there, "there")[0] == 4
    steps, page = go(here, "here")
    assert steps == 4  # the squares
    assert "On cuda, 16 cores." in page
    assert "<code>there</code>" in page
    assert "<code>here</code>" in page
    assert go(dataclasses.replace(here, seed=1), "another seed")[0] == 4  # not those of seed 0
    steps, page = go(here, "again", this_machine=True)
    assert steps == 0  # the made-up steps do not depend on the seed: the line above ran them
    assert "On cpu, 2 cores." in page


@pytest.mark.parametrize("change", [{"version": "0.0.1"}, {"steps": 3}, {"device": "cuda"}])
def test_results_of_another_version_or_other_steps_or_without_the_gpu_are_not_used(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run(tmp_path, Speeds())
    shutil.rmtree(tmp_path / "cache")
    assert run(tmp_path, Speeds()).steps == 0
    shutil.rmtree(tmp_path / "cache")
    path = tmp_path / "results/squares.json"
    if "version" in change:
        text = path.read_text()
        path.write_text(text.replace(f'"thermocline": "{tc.__version__}"', '"thermocline": "0.0.1"'))
    setup = dataclasses.replace(SETUP, device=change.get("device", "cpu"))
    count = change.get("steps", 4)
    assert run(tmp_path, Speeds(count=count), setup).steps == count


def test_an_unfinished_run_of_a_gpu_starts_again_without_one(tmp_path: Path) -> None:
    there, here = dataclasses.replace(SETUP, device="cuda", cores=16), dataclasses.replace(SETUP, cores=2)
    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path, {"speeds": Speeds(fail=2).experiment}, there, "")
    outcome = run_all(tmp_path, {"speeds": Speeds().experiment}, here, "")
    assert outcome.steps == 4
    assert "On cpu, 2 cores." in outcome.page.read_text()
    assert run_all(tmp_path, {"speeds": Speeds().experiment}, there, "").steps == 2


def test_a_step_of_two_experiments_runs_once(tmp_path: Path) -> None:
    first = Squares()
    second = Squares()
    shared = [dataclasses.replace(step, owner="squares") for step in first.steps(SETUP)]
    using = Experiment(title="Uses them", steps=lambda setup: shared, section=second.section)
    outcome = run_all(tmp_path, {"squares": first.experiment, "using": using}, SETUP, "")
    assert first.calls == [0, 1, 2, 3]
    assert outcome.page.read_text().count('class="plot"') == 2
    assert run_all(tmp_path / "alone", {"using": using}, SETUP, "").steps == 4


# ---- rebuilding a report


def test_a_report_is_rebuilt_from_its_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuild in place, and in another folder, which can be rebuilt too: every file has the same bytes."""
    monkeypatch.setattr(registry, "NAMES", ("squares",))
    monkeypatch.setattr(registry, "load", lambda name: Squares().experiment)
    run(tmp_path / "a", Squares(fail=None))
    shutil.rmtree(tmp_path / "a/cache")
    before = contents(tmp_path / "a")
    for name in ("index.html", "tables", "figures"):
        path = tmp_path / "a" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    outcome = runner.rebuild(tmp_path / "a")
    assert (outcome.steps, len(outcome.claims)) == (0, 1)
    assert contents(tmp_path / "a") == before
    runner.rebuild(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "b") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_survive_a_round_trip(tmp_path: Path) -> None:
    run(tmp_path, Squares())
    results = ExperimentResults.read(tmp_path / "results", "squares")
    assert results is not None
    assert results.values == {f"Square of {n}!": {"square": n * n} for n in range(4)}
    assert results.setup == SETUP
    assert all(env["commit"] == machine.commit() and env["date"] for env in results.environments.values())
    results.write(tmp_path / "copy")
    assert (tmp_path / "copy/squares.json").read_bytes() == (tmp_path / "results/squares.json").read_bytes()
    assert ExperimentResults.read(tmp_path / "results", "cubes") is None


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda text: text[:-9], tc.CorruptionError, r"squares\.json is damaged .* remove it"),
        (lambda text: text.replace('"seconds"', '"secs"'), tc.CorruptionError, r"squares\.json is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 9'), tc.ConfigError, "has format 9: this version reads"),
    ],
)
def test_damaged_or_newer_results_are_an_error(
    tmp_path: Path, damage: Any, kind: type[Exception], message: str
) -> None:
    run(tmp_path, Squares())
    path = tmp_path / "results/squares.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(kind, match=message):
        ExperimentResults.read(tmp_path / "results", "squares")


def test_a_folder_without_results_cannot_be_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(tc.ConfigError, match="contains no results"):
        runner.rebuild(tmp_path)


# ---- claims


def test_a_claim_that_fails_is_marked_in_words(tmp_path: Path) -> None:
    page = run(tmp_path, Squares(factor=-1)).page.read_text()
    assert "<strong>Does not hold</strong>: they rise" in page
    assert "<strong>Holds</strong>" not in page
    assert "0 of 1 claims hold" in page
    assert '<a href="#squares-plot">They rise</a>' in page
    assert TOO_SMALL not in html.unescape(page)


def test_a_small_run_judges_no_claim(tmp_path: Path) -> None:
    small = dataclasses.replace(SETUP, judges_claims=False)
    for factor, words in ((-1, "not seen at this size"), (1, "seen at this size")):
        outcome = run(tmp_path / words, Squares(factor=factor), small)
        page = html.unescape(outcome.page.read_text())
        assert f"<strong>{words.capitalize()}</strong>: they rise" in page
        assert TOO_SMALL in page
        assert "hold</strong>" not in page
        assert "claims hold" not in page


def test_the_command_prints_claims_and_fails_only_in_the_full_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Squares(factor=-1)
    assert not cli.report_outcome(run(tmp_path / "a", failing, dataclasses.replace(SETUP, judges_claims=False)))
    out = capsys.readouterr().out
    assert "not seen at this size: they rise" in out
    assert TOO_SMALL in out
    assert cli.report_outcome(run(tmp_path / "b", failing))
    out = capsys.readouterr().out
    assert "does not hold: they rise" in out
    assert TOO_SMALL not in out


def test_a_copied_tree_names_the_commit_it_was_copied_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(machine.__file__).parents[1] / "benchmarks", folder := tmp_path / "benchmarks",
                    ignore=shutil.ignore_patterns("results", "COMMIT", "__pycache__"))  # fmt: skip
    monkeypatch.setattr(machine, "_HERE", tmp_path / "experiments")
    assert machine._recorded_commit() is None
    (folder / "COMMIT").write_text("abc1234 another-digest\n")
    assert machine._recorded_commit() is None
    digest = machine.sys.modules["benchmarks_common"].source_digest()
    (folder / "COMMIT").write_text(f"abc1234 {digest}\n")
    assert machine._recorded_commit() == "abc1234"


# ---- independent steps


class Measurements(Squares):
    """Squares whose section shows the finished steps."""

    def __init__(self, only: tuple[str, ...] = (), factor: int = 1) -> None:
        super().__init__(count=3, factor=factor)
        self.experiment = dataclasses.replace(self.experiment, independent=True, only=only)

    def section(self, setup: Setup, results: Mapping[str, Json]) -> Section:
        rows = [(name, result["square"]) for name, result in results.items()]
        return Section(text=[], parts=[Table(name="table", title="Squares", columns=("n", "square"), rows=rows)])


def test_selected_steps_run_alone_and_join_earlier_results(tmp_path: Path) -> None:
    """Every run has a cache of its own, as on a machine that starts bare; only the results are copied."""

    def measure(number: int, *, this_machine: bool = False) -> list[int]:
        squares = Measurements((f"Square of {number}!",), factor=1 + this_machine)
        chosen = {"squares": squares.experiment}
        cache = tmp_path / f"cache-{number}-{this_machine}"
        runner.run(tmp_path / "out", chosen, SETUP, COMMAND, cache=cache, this_machine=this_machine, page=False)
        return squares.calls

    def results() -> dict[str, Json]:
        found = ExperimentResults.read(tmp_path / "out/results", "squares")
        assert found is not None
        return found.values

    assert measure(2) == [2]
    assert measure(1) == [1]
    assert results() == {"Square of 1!": {"square": 1}, "Square of 2!": {"square": 4}}
    assert measure(2) == []  # in the results, though not in this cache
    assert measure(2, this_machine=True) == [2]
    assert results() == {"Square of 1!": {"square": 1}, "Square of 2!": {"square": 8}}
    assert not (tmp_path / "out/index.html").exists()


def test_a_part_of_a_name_selects_no_step() -> None:
    experiment = dataclasses.replace(Squares().experiment, only=("image", "A"))
    assert experiment.selects("image, LR")
    assert experiment.selects("A")
    assert not experiment.selects("images")
    assert not experiment.selects("AB")


# ---- names and sizes


def test_names_of_experiments() -> None:
    assert {"hashing", "models", "auc_time", "nonzeros"} <= set(registry.NAMES)
    assert all(registry.load(name).title for name in registry.NAMES)
    assert list(registry.choose([])) == list(registry.NAMES)
    assert list(registry.choose(["models", "hashing"])) == ["hashing", "models"]  # in the order of the page
    with pytest.raises(tc.ConfigError, match=r'there is no experiment "hasing".*did you mean "hashing"'):
        registry.choose(["hasing"])
    selected = registry.choose(["steady:E", "steady:D", "hashing", "models:A", "models"])
    assert {name: experiment.only for name, experiment in selected.items()} == {
        "hashing": (),
        "models": (),
        "steady": ("E", "D"),
    }


def test_the_recorded_command_repeats_the_run() -> None:
    options: dict[str, Any] = {"quick": False, "scale": None, "effort": None, "seed": 0, "names": []}
    assert cli.command_line(**options) == "python -m experiments"
    options |= {"quick": True, "scale": "1/50", "effort": 0.5, "seed": 3, "names": ["models", "k_step"]}
    expected = "python -m experiments --quick --scale 1/50 --effort 0.5 --seed 3 --only models,k_step"
    assert cli.command_line(**options) == expected


def test_sizes_of_runs() -> None:
    assert parse_scale("1/1000") == 1000
    assert parse_scale(" 1 / 2.5e3") == 2500
    for text in ("1000", "1/0.5", "2/1000", "1/x", "1/1e999", ""):
        with pytest.raises(tc.ConfigError, match="--scale is"):
            parse_scale(text)
    options: dict[str, Any] = {"scale": None, "effort": None, "seed": 3, "device": "cpu"}
    full, quick = Setup.from_options(quick=False, **options), Setup.from_options(quick=True, **options)
    assert (full.scale, full.effort, full.judges_claims, full.seed) == (1000, 1, True, 3)
    assert (quick.scale, quick.effort, quick.judges_claims) == (100_000, 0.1, False)
    assert not Setup.from_options(quick=False, **{**options, "effort": 0.5}).judges_claims
    with pytest.raises(tc.ConfigError, match="--effort is 2"):
        Setup.from_options(quick=True, **{**options, "effort": 2.0})
    with pytest.raises(tc.ConfigError, match='--device is "tpu"'):
        Setup.from_options(quick=True, **{**options, "device": "tpu"})
