"""Figures: what is drawn is where the numbers say, for any numbers; as XML, light and dark."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, strategies as st

from experiments import svg
from experiments.experiment import Figure, Series

NS = "{http://www.w3.org/2000/svg}"


def drawn(figure: Figure) -> ET.Element:
    return ET.fromstring(svg.draw(figure))


def figure(series: list[Series], **more: Any) -> Figure:
    return Figure(name="f", title="A < B", x="x & y", y="y", series=series, **more)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e6, 1e6)), min_size=1, max_size=30, unique_by=lambda p: p[0]),
    st.booleans(),
)
def test_points_lie_inside_and_in_order(points: list[tuple[float, float]], alone: bool) -> None:
    series = Series(name="s", x=[x for x, _ in points], y=[y for _, y in points])
    root = ET.fromstring(svg.draw(figure([series]), alone=alone))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{NS}circle")]
    assert len(dots) == len(points)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in dots)
    for (x, y), (px, py) in zip(points, dots, strict=True):
        for (x2, y2), (px2, py2) in zip(points, dots, strict=True):
            assert x > x2 or px <= px2 + 0.11
            assert y > y2 or py >= py2 - 0.11


@pytest.mark.parametrize(("axis", "base"), [("linear", None), ("log2", 2), ("log10", 10)])
def test_a_points_place_is_its_value_between_the_ticks(axis: Any, base: int | None) -> None:
    y = [1.0, 3.0, 64.0, 900.0]
    root = drawn(figure([Series(name="s", x=[1, 2, 3, 4], y=y)], y_axis=axis))
    dots = [float(c.attrib["cy"]) for c in root.iter(f"{NS}circle")]
    lines = [line for line in root.iter(f"{NS}line") if line.attrib["class"] == "grid"]
    high, low = (float(f(lines, key=lambda e: float(e.attrib["y1"])).attrib["y1"]) for f in (min, max))
    scale = (lambda v: v) if base is None else (lambda v: math.log(v, base))
    for value, place in zip(y, dots, strict=True):
        share = (scale(value) - scale(y[0])) / (scale(y[-1]) - scale(y[0]))
        assert abs(place - (dots[0] + share * (dots[-1] - dots[0]))) < 0.2
        assert high - 0.1 <= place <= low + 0.1


@pytest.mark.parametrize("form", ["bars", "stacked"])
def test_heights_of_bars_are_in_proportion(form: Any) -> None:
    series = [Series(name="a", x=["A", "B"], y=[10.0, 30.0]), Series(name="b", x=["A", "B"], y=[20.0, None])]
    rects = [r for r in drawn(figure(series, form=form)).iter(f"{NS}rect") if r.find(f"{NS}title") is not None]
    heights = {r.findtext(f"{NS}title"): float(r.attrib["height"]) for r in rects}
    assert set(heights) == {"A, a: 10", "A, b: 20", "B, a: 30"}
    assert abs(heights["B, a: 30"] - 3 * heights["A, a: 10"]) < 0.3
    assert abs(heights["A, b: 20"] - 2 * heights["A, a: 10"]) < 0.3
    if form == "stacked":
        tops = {r.findtext(f"{NS}title"): float(r.attrib["y"]) for r in rects}
        assert abs(tops["A, b: 20"] + heights["A, b: 20"] - tops["A, a: 10"]) < 0.2


def test_what_is_not_measured_says_so_and_looks_so() -> None:
    kinds: Any = ("measured", "predicted", "paper")
    series = [Series(name=f"s{n}", x=[1, 2], y=[n, n + 1], kind=kind) for n, kind in enumerate(kinds)]
    root = drawn(figure(series, marks=[1.5], marked="a merge", levels={"bound": 2.0}))
    texts = [text.text for text in root.iter(f"{NS}text")]
    assert {"s0", "s1 (predicted)", "s2 (the paper)", "a merge", "bound: 2"} <= set(texts)
    assert [p.attrib["class"] for p in root.iter(f"{NS}path")][:3] == ["c0 measured", "c1 predicted", "c2 paper"]


def test_missing_values_are_left_out_and_none_at_all_is_fine() -> None:
    root = drawn(figure([Series(name="s", x=[1, 2, 3], y=[1, None, 3])]))
    assert len(list(root.iter(f"{NS}circle"))) == 2
    assert drawn(figure([Series(name="s", x=[], y=[])])) is not None
    assert drawn(figure([Series(name="s", x=["A"], y=[0.0])], form="bars")) is not None


def test_a_file_of_its_own_has_title_and_colours_for_light_and_dark() -> None:
    text = svg.draw(figure([Series(name="s", x=[1, 2], y=[1, 2])]), alone=True)
    assert "prefers-color-scheme:dark" in text
    assert "A &lt; B" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("value", "axis", "text"),
    [
        (1024, "log2", "2¹⁰"), (0.5, "log2", "2⁻¹"), (1234567, "linear", "1.23M"), (1e9, "log10", "1G"),
        (0.70312, "linear", "0.7031"), (0.00001, "linear", "1.0e-05"), (999.96, "linear", "1k"), (3000, "log2", "3k"),
        (0, "linear", "0"),
    ],
)  # fmt: skip
def test_numbers_as_words(value: float, axis: Any, text: str) -> None:
    assert svg.label(value, axis) == text
