"""A reproduction of made-up experiments: what is done is kept, what is cut short goes on, what is missing is said."""

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
from experiments import machine, page as page_module, places, runner
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
    Table,
    Work,
    parse_scale,
)
from thermocline.cli import commands

SETUP = Setup(scale=10.0)


class Squares:
    """Steps that count their calls; `fail` of them is cut short once, `long` takes three calls."""

    def __init__(self, count: int = 4, fail: int | None = None, long: int | None = None, factor: int = 1) -> None:
        self.count, self.fail, self.long, self.factor = count, fail, long, factor
        self.calls: list[int] = []
        self.experiment = Experiment(title="Squares & co", steps=self.steps, section=self.section)

    def steps(self, setup: Setup) -> list[Step]:
        return [
            Step(name=f"Square of {n}!", settings={"n": n, "factor": self.factor}, seconds=1.0, run=self.run_of(n))
            for n in range(self.count)
        ]

    def run_of(self, n: int) -> Any:
        def run(work: Work) -> Json | None:
            self.calls.append(n)
            assert work.folder.is_dir()
            assert work.left > 0
            work.tell(0.5)
            if n == self.fail:
                self.fail = None
                raise KeyboardInterrupt
            if n == self.long:
                path = work.folder / "so far"
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
                Figure(name="plot", title="A plot", x="n", y="n²", series=[line]),
            ],
            claims=[Claim(text="they rise", holds=squares == sorted(squares), detail="0 < 1")],
        )  # fmt: skip


def run(folder: Path, squares: Squares, **more: Any) -> runner.Outcome:
    return runner.run(folder, {"squares": squares.experiment, **more}, SETUP, "thermocline reproduce --made-up")


def test_everything_is_done_once_and_reported(tmp_path: Path) -> None:
    squares = Squares()
    outcome = run(tmp_path, squares, absent="There is no such thing.")
    assert squares.calls == [0, 1, 2, 3]
    assert (outcome.steps, [claim.holds for claim in outcome.claims]) == (4, [True])
    page = outcome.page.read_text()
    assert "Squares &amp; co" in page
    assert "What is &lt; 3?" in page
    assert "There is no such thing." in page
    assert "thermocline reproduce --made-up" in page
    assert machine.describe()["cpu"] in page
    assert f"build {machine.build()}" in page
    assert '<th scope="col" class="paper">theirs (the paper)</th>' in page
    assert '<th scope="col" class="predicted">guess (predicted)</th>' in page
    assert (tmp_path / "tables/squares-table.csv").read_text().splitlines() == [
        "n,square,guess (predicted),theirs (the paper)", "<0>,0,0.5,7", "<1>,1,0.5,7", "<2>,4,0.5,7", "<3>,9,0.5,7",
    ]  # fmt: skip
    record = json.loads((tmp_path / "tables/squares-table.json").read_text())
    assert record["kinds"] == {"n": "measured", "square": "measured", "guess": "predicted", "theirs": "paper"}
    assert record["about"]["command"] == "thermocline reproduce --made-up"
    assert record["about"]["made_by"][0]["cores"] == machine.describe()["cores"]
    assert (tmp_path / "tables/squares-plot.csv").read_text().splitlines()[1:3] == [
        "n < n²,measured,0,0",
        "n < n²,measured,1,1",
    ]
    assert (tmp_path / "figures/squares-plot.svg").exists()
    assert not (tmp_path / "work").exists()

    again = Squares()
    assert run(tmp_path, again).steps == 0
    assert again.calls == []


def test_a_run_that_was_cut_short_goes_on_here_or_elsewhere(tmp_path: Path) -> None:
    squares = Squares(fail=2)
    here, there = tmp_path / "here", tmp_path / "there"
    with pytest.raises(KeyboardInterrupt):
        run(here, squares)
    assert squares.calls == [0, 1, 2]
    assert "2 of 4 steps are done" in (here / "index.html").read_text()
    shutil.copytree(here, there)
    for folder in (here, there):
        rest = Squares()
        assert run(folder, rest).steps == 2
        assert rest.calls == [2, 3]
        assert "steps are done" not in (folder / "index.html").read_text()


def test_a_step_that_takes_several_calls_keeps_its_folder(tmp_path: Path) -> None:
    squares = Squares(long=1)
    run(tmp_path, squares)
    assert squares.calls == [0, 1, 1, 1, 2, 3]
    (record,) = [json.loads(p.read_text()) for p in (tmp_path / "steps/squares").glob("square-of-1-*.json")]
    assert record["seconds"] > 0
    assert record["result"] == {"square": 1}


def test_other_settings_are_another_step(tmp_path: Path) -> None:
    run(tmp_path, Squares())
    other = Squares(factor=2)
    assert run(tmp_path, other).steps == 4
    assert len(list((tmp_path / "steps/squares").glob("square-of-*.json"))) == 8


def test_a_damaged_result_is_told(tmp_path: Path) -> None:
    run(tmp_path, Squares())
    path = next((tmp_path / "steps/squares").glob("square-of-2-*.json"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(tc.CorruptionError, match=r"square-of-2-\w+\.json is damaged .* remove it"):
        run(tmp_path, Squares())


def test_a_result_that_is_no_json_is_refused(tmp_path: Path) -> None:
    step = Step(name="one", settings={}, seconds=1, run=lambda work: {"pair": (1, 2)})
    made = Experiment(title="", steps=lambda setup: [step], section=Squares().section)
    with pytest.raises(TypeError, match="the result of squares, one"):
        runner.run(tmp_path, {"squares": made}, SETUP, "")


def test_of_many_steps_the_first_are_named() -> None:
    assert page_module._named(["a", "b", "c", "d"]) == "a; b; c; d"
    assert page_module._named([f"step {n}" for n in range(90)]) == "step 0; step 1; step 2; step 3 and 86 more steps"


def test_several_machines_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Squares(fail=2))
    real = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: {**real, "cpu": "Another processor"})
    page = run(tmp_path, Squares()).page.read_text()
    assert "several machines, builds or commands" in page
    command = "<code>thermocline reproduce --made-up</code>"
    assert f"Square of 2!; Square of 3!: {command}: Another processor" in page
    assert f"Square of 0!; Square of 1!: {command}: {real['cpu']}" in page
    made_by = json.loads((tmp_path / "tables/squares-plot.json").read_text())["about"]["made_by"]
    assert [(by["cpu"], by["steps"]) for by in made_by] == [
        (real["cpu"], ["Square of 0!", "Square of 1!"]),
        ("Another processor", ["Square of 2!", "Square of 3!"]),
    ]


class Speeds(Squares):
    """What depends on the machine: the setup's device and cores."""

    def steps(self, setup: Setup) -> list[Step]:
        made = {"device": setup.device, "cores": setup.cores}
        return [dataclasses.replace(s, settings={**s.settings, **made}) for s in super().steps(setup)]

    def section(self, setup: Setup, results: Mapping[str, Json]) -> Section:
        return dataclasses.replace(super().section(setup, results), text=[f"On {setup.device}, {setup.cores} cores."])


def test_what_a_gpu_has_completed_is_not_done_again_without_one(tmp_path: Path) -> None:
    there, here = dataclasses.replace(SETUP, device="cuda", cores=16), dataclasses.replace(SETUP, cores=2)

    def go(setup: Setup, command: str, **options: Any) -> tuple[int, str]:
        chosen = {"speeds": Speeds().experiment, "squares": Squares().experiment}
        only = {"speeds": chosen["speeds"]} if setup.device == "cuda" else chosen
        outcome = runner.run(tmp_path, only, setup, command, **options)
        return outcome.steps, outcome.page.read_text()

    assert go(there, "there")[0] == 4
    steps, page = go(here, "here")
    assert steps == 4  # the squares
    assert "On cuda, 16 cores." in page
    assert "<code>there</code>" in page
    assert "<code>here</code>" in page
    assert go(dataclasses.replace(here, seed=1), "another seed")[0] == 4  # not those of seed 0
    steps, page = go(here, "again", here=True)
    assert steps == 0  # the line before has done them: made-up steps know no seed
    assert "On cpu, 2 cores." in page


def test_a_gpus_run_that_was_cut_short_is_begun_here(tmp_path: Path) -> None:
    there, here = dataclasses.replace(SETUP, device="cuda", cores=16), dataclasses.replace(SETUP, cores=2)
    with pytest.raises(KeyboardInterrupt):
        runner.run(tmp_path, {"speeds": Speeds(fail=2).experiment}, there, "")
    outcome = runner.run(tmp_path, {"speeds": Speeds().experiment}, here, "")
    assert outcome.steps == 4
    assert "On cpu, 2 cores." in outcome.page.read_text()
    assert runner.run(tmp_path, {"speeds": Speeds().experiment}, there, "").steps == 2


def test_a_step_of_two_experiments_is_done_once(tmp_path: Path) -> None:
    first = Squares()
    second = Squares()
    shared = [dataclasses.replace(step, home="squares") for step in first.steps(SETUP)]
    using = Experiment(title="Uses them", steps=lambda setup: shared, section=second.section)
    outcome = runner.run(tmp_path, {"squares": first.experiment, "using": using}, SETUP, "")
    assert first.calls == [0, 1, 2, 3]
    assert outcome.page.read_text().count('class="plot"') == 2
    assert runner.run(tmp_path / "alone", {"using": using}, SETUP, "").steps == 4


def test_claims_that_fail_say_so_in_words(tmp_path: Path) -> None:
    page = run(tmp_path, Squares(factor=-1)).page.read_text()
    assert "<strong>Does not hold</strong>: they rise" in page
    assert "<strong>Holds</strong>" not in page
    assert TOO_SMALL not in html.unescape(page)


def test_a_small_run_judges_no_claim(tmp_path: Path) -> None:
    """Neither on the page nor in the output: both say that it is too small, and what judges."""
    small = dataclasses.replace(SETUP, asserted=False)
    for factor, words in ((-1, "not seen at this size"), (1, "seen at this size")):
        chosen = {"squares": Squares(factor=factor).experiment}
        outcome = runner.run(tmp_path / words, chosen, small, "")
        page = html.unescape(outcome.page.read_text())
        assert f"<strong>{words.capitalize()}</strong>: they rise" in page
        assert TOO_SMALL in page
        assert "hold</strong>" not in page


def test_what_the_command_says_of_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "choose", lambda only: {"squares": Squares(factor=-1).experiment})
    assert not commands.reproduce(tmp_path / "a", dataclasses.replace(SETUP, asserted=False), [], "", here=False)
    out = capsys.readouterr().out
    assert "not seen at this size: they rise" in out
    assert TOO_SMALL in out
    assert commands.reproduce(tmp_path / "b", SETUP, [], "", here=False)
    out = capsys.readouterr().out
    assert "does not hold: they rise" in out
    assert TOO_SMALL not in out


# ---- names and sizes


def test_names_of_experiments() -> None:
    assert {"hashing", "models", "auc_time", "nonzeros"} <= set(places.present())
    assert set(places.present()) <= set(places.PLACES)
    assert list(places.choose(["models", "hashing"])) == ["hashing", "models"]  # in the page's order
    with pytest.raises(tc.ConfigError, match=r'there is no experiment "hasing".*did you mean "hashing"'):
        places.choose(["hasing"])
    for name in set(places.PLACES) - set(places.present()):
        with pytest.raises(tc.ConfigError, match=f"'{name}' is not in this version"):
            places.choose([name])


def test_scales() -> None:
    assert parse_scale("1/1000") == 1000
    assert parse_scale(" 1 / 2.5e3") == 2500
    for text in ("1000", "1/0.5", "2/1000", "1/x", "1/1e999", ""):
        with pytest.raises(tc.ConfigError, match="--scale is"):
            parse_scale(text)
    options: dict[str, Any] = {"scale": None, "effort": None, "seed": 3, "device": "cpu"}
    full, quick = Setup.of(quick=False, **options), Setup.of(quick=True, **options)
    assert (full.scale, full.effort, full.asserted, full.seed) == (1000, 1, True, 3)
    assert (quick.scale, quick.effort, quick.asserted) == (100_000, 0.1, False)
    assert not Setup.of(quick=False, **{**options, "effort": 0.5}).asserted
    with pytest.raises(tc.ConfigError, match="--effort is 2"):
        Setup.of(quick=True, **{**options, "effort": 2.0})
    with pytest.raises(tc.ConfigError, match='--device is "tpu"'):
        Setup.of(quick=True, **{**options, "device": "tpu"})
