"""The report's page in Chromium: no errors, every figure visible, text readable on a phone and on a desktop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import helpers.browser as browser
import pytest

from experiments import registry, report as page, runner
from experiments.experiment import Claim, Experiment, Figure, Section, Series, Setup, Step, Table

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=browser.ABSENT)

MARKS = "[id*=-series-] path"
"""Selector of lines, markers and bars: not of grids and axes."""
LONG = "a rather long name of a line, of which one figure has several"

FIGURES = [
    Figure(
        name="lines", title="Lines", x_label="k", y_label="AUC", x_scale="log2",
        series=[Series(name=f"{LONG} {n}", x=[2**i for i in range(20)], y=[0.01 * n - 1 / (i + 5) for i in range(20)])
                for n in range(4)],
        vlines=[1024.0], vlines_label="end of a merge", hlines={"the bound of something long": -0.1},
    ),
    Figure(
        name="many", title="A title that is so long that it does not fit into one line of a narrow page",
        x_label="batches", y_label="bytes", y_scale="log10",
        series=[Series(name="s", x=list(range(300)), y=[10.0**(i / 30) for i in range(300)])],
    ),
    Figure(
        name="bars", title="Bars", x_label="model", y_label="examples/s", form="bars",
        series=[Series(name=name, x=list("ABCDE"), y=[1234.5, 99999.0, 3.0, None, 7e6], kind=kind)
                for name, kind in (("here", "measured"), ("plan", "predicted"), ("theirs", "paper"))],  # type: ignore[arg-type]
    ),
    Figure(
        name="stacked", title="Stacked", x_label="model", y_label="ms", form="stacked",
        series=[Series(name=f"stage {n}", x=list("ABCDE"), y=[n + 1.0] * 5) for n in range(5)],
    ),
]  # fmt: skip
TABLE = Table(
    name="table", title="A wide table", columns=[f"column {n} of many" for n in range(16)],
    rows=[[f"{LONG} {n}", *(123456.789 * n,) * 15] for n in range(8)], paper=["column 15 of many"],
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of figure, a wide table and claims; the real experiments are absent."""
    step = Step(name="one", settings={}, expected_seconds=1, run=lambda context: {})
    claims = [
        Claim(text=f"{LONG} holds {n}", holds=n > 0, detail="1 < 2", part="lines", asserted=n < 2) for n in range(3)
    ]
    section = Section(text=["Words. " * 60], parts=[TABLE, *FIGURES], claims=claims)
    made = Experiment(title="All kinds", steps=lambda setup: [step], section=lambda setup, results: section)
    others = {name: dataclasses.replace(registry.load(name), missing=lambda: "absent") for name in registry.NAMES}
    folder = tmp_path_factory.mktemp("report")
    return runner.run(folder, {"all": made, **others}, Setup(), "", cache=folder / "cache").page


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.started(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_readable(tab: browser.Browser, report: Path, width: int, dark: bool) -> None:
    tab.open(report, width=width, dark=dark)
    browser.check_readable(tab, width)
    shown = tab.value("[...document.querySelectorAll('figure')].map(f => [f.id, f.getBoundingClientRect().height])")
    assert [name for name, height in shown if height > 60] == [f"all-{part.name}" for part in (TABLE, *FIGURES)]
    drawn = tab.value(f"[...document.querySelectorAll('svg.plot')].map(s => s.querySelectorAll('{MARKS}').length)")
    assert len(drawn) == len(FIGURES)
    assert min(drawn) >= 1
    broken = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
    assert tab.value(broken) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_have_contrast_in_light_and_dark(tab: browser.Browser, report: Path, dark: bool) -> None:
    tab.open(report, width=1400, dark=dark)
    background = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark
    contrasts = browser.contrasts(tab, MARKS)
    assert len(contrasts) > 100
    assert [pair for pair in contrasts if pair[0] < 4.5] == []


def test_svg_files_open_without_errors(tab: browser.Browser, report: Path) -> None:
    for figure in FIGURES:
        tab.open(report.parent / "figures" / f"all-{figure.name}.svg", width=400, dark=True)
        assert browser.page_errors(tab) == []
        assert tab.value("document.documentElement.tagName") == "svg"
        assert tab.value("document.querySelectorAll('text').length") > 5


def test_the_checks_detect_errors_small_text_and_overflow(tab: browser.Browser, tmp_path: Path) -> None:
    chapter = page.Chapter(name="x", title="X", section=None, setup=Setup(), missing="nothing")
    html = page.render([chapter], {})
    bad = (
        '<script>throw new Error("oops")</script><p style="font-size:6px">tiny</p><div style="width:2000px">wide</div>'
    )
    (tmp_path / "bad.html").write_text(html.replace("</body>", bad + "</body>"))
    tab.open(tmp_path / "bad.html", width=400, dark=False)
    assert any("oops" in error for error in browser.page_errors(tab))
    measured = tab.value(browser.MEASURE)
    assert [6, "tiny"] in measured["texts"]
    assert measured["wide"] > 400
