"""The report's page in a real Chromium: no error, every figure there, text readable on a telephone and on a desk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.browser as browser
import pytest

from experiments import page, places, runner
from experiments.experiment import Experiment, Figure, Section, Series, Setup, Step, Table

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=browser.ABSENT)

LONG = "a rather long name for a line of which there are several in one figure"

FIGURES = [
    Figure(
        name="lines", title="Lines", x="k", y="AUC", x_axis="log2",
        series=[Series(name=f"{LONG} {n}", x=[2**i for i in range(20)], y=[0.01 * n - 1 / (i + 5) for i in range(20)])
                for n in range(4)],
        marks=[1024.0], marked="a merge ended", levels={"the bound of something long": -0.1},
    ),
    Figure(
        name="many", title="A title that is so long that it does not fit into one line of a narrow page", x="batches",
        y="bytes", y_axis="log10",
        series=[Series(name="s", x=list(range(300)), y=[10.0**(i / 30) for i in range(300)])],
    ),
    Figure(
        name="bars", title="Bars", x="model", y="examples/s", form="bars",
        series=[Series(name=name, x=list("ABCDE"), y=[1234.5, 99999.0, 3.0, None, 7e6], kind=kind)
                for name, kind in (("measured", "measured"), ("rival", "predicted"), ("theirs", "paper"))],  # type: ignore[arg-type]
    ),
    Figure(
        name="stacked", title="Stacked", x="model", y="ms", form="stacked",
        series=[Series(name=f"stage {n}", x=list("ABCDE"), y=[n + 1.0] * 5) for n in range(5)],
    ),
]  # fmt: skip
TABLE = Table(
    name="table", title="A wide table", columns=[f"column {n} of many" for n in range(16)],
    rows=[[f"{LONG} {n}", *(123456.789 * n,) * 15] for n in range(8)], paper=["column 15 of many"],
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an experiment with every kind of figure and a wide table; the others are absent."""
    step = Step(name="one", settings={}, seconds=1, run=lambda work: {})
    section = Section(text=["Words. " * 60], parts=[TABLE, *FIGURES])
    made = Experiment(title="All kinds", steps=lambda setup: [step], section=lambda setup, results: section)
    chosen: dict[str, Any] = {"all": made, **dict.fromkeys(places.PLACES, "absent")}
    return runner.run(tmp_path_factory.mktemp("report"), chosen, Setup(), "thermocline reproduce").page


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
    drawn = tab.value("[...document.querySelectorAll('svg.plot')].map(s => s.querySelectorAll('path,rect').length)")
    assert len(drawn) == len(FIGURES)
    assert min(drawn) >= 1


# Relative luminance, as WCAG has it, of a text and of what lies behind it.
CONTRAST = """(() => {
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(", 0)") && c !== "transparent") return c;
  } return "rgb(255,255,255)"; };
  return [...document.querySelectorAll("p,h1,h2,h3,td,th,figcaption,svg text,svg path,svg circle,svg rect")].map(e => {
    const style = getComputedStyle(e), svg = e.closest("svg");
    const paint = svg ? (style.fill !== "none" ? style.fill : style.stroke) : style.color;
    const [a, b] = [light(paint), light(behind(svg ? svg.parentElement : e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + " " + e.getAttribute("class")];
  });
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_stand_out_in_light_and_dark(tab: browser.Browser, report: Path, dark: bool) -> None:
    tab.open(report, width=1400, dark=dark)
    background = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark
    contrasts = tab.value(CONTRAST)
    assert len(contrasts) > 100
    assert [pair for pair in contrasts if pair[0] < 4.5] == []


def test_figures_as_files_are_readable_too(tab: browser.Browser, report: Path) -> None:
    for figure in FIGURES:
        tab.open(report.parent / "figures" / f"all-{figure.name}.svg", width=400, dark=True)
        assert browser.troubles(tab) == []
        assert tab.value("document.documentElement.tagName") == "svg"
        assert tab.value("document.querySelectorAll('text').length") > 5


def test_the_test_sees_what_is_wrong(tab: browser.Browser, report: Path, tmp_path: Path) -> None:
    """A page with a script that fails, small text and a wide box."""
    chapter = page.Chapter(name="x", title="X", section=None, setup=Setup(), missing="nothing")
    html = page.render([chapter], dataclasses.replace(Setup(), seed=1), "c")
    bad = (
        '<script>throw new Error("oops")</script><p style="font-size:6px">tiny</p><div style="width:2000px">wide</div>'
    )
    (tmp_path / "bad.html").write_text(html.replace("</body>", bad + "</body>"))
    tab.open(tmp_path / "bad.html", width=400, dark=False)
    assert any("oops" in trouble for trouble in browser.troubles(tab))
    measured = tab.value(browser.MEASURE)
    assert [6, "tiny"] in measured["texts"]
    assert measured["wide"] > 400
