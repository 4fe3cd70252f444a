"""Plots: position and size of every mark for any numbers, marking of predicted and published series, stable SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from experiments import figures
from experiments.experiment import Figure, Series

NS = "{http://www.w3.org/2000/svg}"


def make(series: list[Series], **more: Any) -> Figure:
    return Figure(name="f", title="A < B", x_label="x & y", y_label="y", series=series, **more)


def positions(figure: Figure) -> list[tuple[float, float]]:
    """Return the points of the first line in pixels from the lower left corner, and check that the canvas has them."""
    canvas = figures.plot(figure)
    (axes,) = canvas.axes
    line = next(line for line in axes.lines if line.get_gid() == "series-0")
    points = [tuple(map(float, point)) for point in axes.transData.transform(line.get_xydata())]
    width, height = canvas.bbox.width, canvas.bbox.height
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    return points  # type: ignore[return-value]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e6, 1e6)), min_size=1, max_size=30, unique_by=lambda p: p[0])
)
def test_points_are_inside_the_canvas_and_in_order(points: list[tuple[float, float]]) -> None:
    pixels = positions(make([Series(name="s", x=[x for x, _ in points], y=[y for _, y in points])]))
    assert len(pixels) == len(points)
    for (x, y), (px, py) in zip(points, pixels, strict=True):
        for (x2, y2), (px2, py2) in zip(points, pixels, strict=True):
            assert x > x2 or px <= px2 + 0.11
            assert y > y2 or py <= py2 + 0.11


@pytest.mark.parametrize(("scale", "base"), [("linear", None), ("log2", 2), ("log10", 10)])
def test_positions_are_proportional_and_between_the_ticks(scale: Any, base: int | None) -> None:
    y = [1.0, 3.0, 64.0, 900.0]
    figure = make([Series(name="s", x=[1, 2, 3, 4], y=y)], y_scale=scale)
    heights = [py for _, py in positions(figure)]
    axes = figures.plot(figure).axes[0]
    ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    assert ticks[0] <= y[0]
    assert y[-1] <= ticks[-1] or scale == "log2"
    assert axes.get_ylim()[0] <= y[0] < y[-1] <= axes.get_ylim()[1]
    transform = (lambda v: v) if base is None else (lambda v: math.log(v, base))
    for value, height in zip(y, heights, strict=True):
        share = (transform(value) - transform(y[0])) / (transform(y[-1]) - transform(y[0]))
        assert abs(height - (heights[0] + share * (heights[-1] - heights[0]))) < 0.2


@pytest.mark.parametrize("form", ["bars", "stacked"])
def test_bars_have_the_heights_of_their_values(form: Any) -> None:
    series = [Series(name="a", x=["A", "B"], y=[10.0, 30.0]), Series(name="b", x=["A", "B"], y=[20.0, None])]
    axes = figures.plot(make(series, form=form)).axes[0]
    bars = {(bar.get_gid(), round(bar.get_x() + bar.get_width() / 2)): bar for bar in axes.patches}
    heights = {key: bar.get_height() for key, bar in bars.items()}
    assert heights == {("series-0", 0): 10.0, ("series-1", 0): 20.0, ("series-0", 1): 30.0}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["A", "B"]
    assert axes.get_ylim()[0] == 0
    second = bars["series-1", 0]
    assert second.get_y() == (10.0 if form == "stacked" else 0.0)
    first = bars["series-0", 0]
    assert (second.get_x() == first.get_x()) == (form == "stacked")
    assert form == "stacked" or second.get_x() == pytest.approx(first.get_x() + first.get_width())


def test_series_that_are_not_measured_have_a_mark_in_the_legend_and_another_style() -> None:
    kinds: Any = ("measured", "predicted", "paper")
    series = [Series(name=f"s{n}", x=[1, 2], y=[n, n + 1], kind=kind) for n, kind in enumerate(kinds)]
    figure = make(series, vlines=[1.5], vlines_label="a merge", hlines={"bound": 2.0})
    (legend,) = figures.plot(figure).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["s0", "s1 (predicted)", "s2 (Zhao 2026)", "a merge", "bound: 2"]
    root = ET.fromstring(figures.draw(figure, "f"))
    assert set(texts) <= {text.text for text in root.iter(f"{NS}text")}
    groups = {g.attrib["id"]: g for g in root.iter(f"{NS}g") if "id" in g.attrib}
    dashes = ["stroke-dasharray" in next(groups[f"f-series-{n}"].iter(f"{NS}path")).attrib["style"] for n in range(3)]
    assert dashes == [False, True, True]
    bars = [Series(name=s.name, x=["A"], y=[1.0], kind=s.kind) for s in series]
    assert [bar.get_alpha() for bar in figures.plot(make(bars, form="bars")).axes[0].patches] == [1.0, 0.55, 0.55]


def test_missing_values_are_left_out_and_an_empty_figure_is_drawn() -> None:
    assert len(positions(make([Series(name="s", x=[1, 2, 3], y=[1, None, 3])]))) == 2
    assert len(positions(make([Series(name="s", x=[1, 2, 3], y=[1, 0, 3])], y_scale="log10"))) == 2
    assert figures.draw(make([Series(name="s", x=[], y=[])]), "f")
    assert figures.draw(make([Series(name="s", x=["A"], y=[0.0])], form="bars"), "f")


def test_an_svg_file_has_title_label_and_colours_for_light_and_dark() -> None:
    text = figures.draw(make([Series(name="s", x=[1, 2], y=[1, 2])]), "stem")
    assert "prefers-color-scheme:dark" in text
    assert "A &lt; B" in text
    assert 'aria-label="A &lt; B: y against x &amp; y"' in text
    assert "<script" not in text
    root = ET.fromstring(text)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("stem-") for name in ids)
    assert "prefers-color-scheme" not in figures.inline(text)
    assert ET.fromstring(figures.inline(text)).attrib == root.attrib


def test_a_figure_always_gives_the_same_bytes() -> None:
    figure = make([Series(name="s", x=[1, 2], y=[1, 2])], vlines=[1.5], vlines_label="m")
    assert figures.draw(figure, "stem") == figures.draw(figure, "stem")
    assert "<dc:date>" not in figures.draw(figure, "stem")


@pytest.mark.parametrize(
    ("value", "scale", "text"),
    [
        (1024, "log2", "2¹⁰"), (0.5, "log2", "2⁻¹"), (1234567, "linear", "1.23M"), (1e9, "log10", "1G"),
        (0.70312, "linear", "0.7031"), (0.00001, "linear", "1.0e-05"), (999.96, "linear", "1k"), (3000, "log2", "3k"),
        (0, "linear", "0"), (16, "log2", "16"), (2.0**34, "log2", "2³⁴"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, scale: Any, text: str) -> None:
    assert figures.number_text(value, scale) == text
