"""Figures as SVG: lines, bars, stacked bars. Drawn 360 wide: text is readable on a telephone, and larger elsewhere.

Colours come from a style sheet that knows light and dark; `STYLE` is that sheet, for a page or a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from experiments.experiment import Axis, Figure, Series

WIDTH, PLOT = 360, 190
_FONT, _CHAR, _LINE = 12, 7.2, 16  # size, width of a character, height of a line
_TOP, _RIGHT, _BOTTOM = 26, 14, 40
_COLOURS = 8
_LIGHT = ("#0067a5", "#b34500", "#00785a", "#a6418a", "#8a6d00", "#3d3d9e", "#b3263f", "#5a5a5a")
_DARK = ("#6db8f2", "#ff9a5c", "#4fd1a5", "#e79bd3", "#e3c34a", "#a3a3ff", "#ff8598", "#bdbdbd")

STYLE = (
    ":root{" + "".join(f"--s{i}:{c};" for i, c in enumerate(_LIGHT)) + "--ink:#1d1f23;--soft:#5b6068;--rule:#d5d8dd}"
    "@media(prefers-color-scheme:dark){:root{"
    + "".join(f"--s{i}:{c};" for i, c in enumerate(_DARK))
    + "--ink:#e8eaed;--soft:#a9afb8;--rule:#3b4048}}"
    f"svg.plot{{font:{_FONT}px system-ui,sans-serif}}"
    ".plot text{fill:var(--ink)}.plot .soft{fill:var(--soft)}"
    ".plot .grid{stroke:var(--rule);stroke-width:1}.plot .frame{stroke:var(--soft);stroke-width:1}"
    ".plot .mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:1 3}"
    ".plot .level{stroke:var(--soft);stroke-width:1;stroke-dasharray:6 3}"
    ".plot path{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".plot .predicted{stroke-dasharray:6 4}.plot .paper{stroke-dasharray:2 3}"
    + "".join(f".plot .c{i}{{stroke:var(--s{i})}}.plot .f{i}{{fill:var(--s{i});stroke:none}}" for i in range(_COLOURS))
)

Place = Callable[[float], float]


def draw(figure: Figure, *, alone: bool = False) -> str:
    """The figure as an <svg> element; `alone`: with its title and its own style sheet, as a file."""
    top = _TOP + (_LINE * len(_wrapped(figure.title, WIDTH)) + 4 if alone else 0)
    body = _Canvas(top)
    if alone:
        for n, line in enumerate(_wrapped(figure.title, WIDTH)):
            body.text(2, 14 + n * _LINE, line, weight="600")
    drawn = _bars(body, figure) if figure.form != "lines" else _lines(body, figure)
    height = _legend(body, figure, drawn)
    sheet = f"<style>{STYLE}</style>" if alone else ""
    name = escape(f"{figure.title}: {figure.y} against {figure.x}")
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{name}">{sheet}{"".join(body.items)}</svg>'
    )


class _Canvas:
    def __init__(self, top: float) -> None:
        self.items: list[str] = []
        self.top, self.bottom = top, top + PLOT

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", css: str = "", weight: str = "") -> None:
        style = (f' class="{css}"' if css else "") + (f' font-weight="{weight}"' if weight else "")
        self.items.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.items.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')

    def axes(self, figure: Figure, ticks: Sequence[float], left: float, place: Place) -> None:
        """What both kinds share: the y axis with its name above it, the frame, and the x axis' name."""
        for tick in ticks:
            self.line(left, place(tick), WIDTH - _RIGHT, place(tick), "grid")
            self.text(left - 6, place(tick) + 4, label(tick, figure.y_axis), anchor="end")
        self.line(left, self.bottom, WIDTH - _RIGHT, self.bottom, "frame")
        self.text(2, self.top - 12, figure.y, css="soft")
        self.text((left + WIDTH - _RIGHT) / 2, self.bottom + 34, figure.x, anchor="middle", css="soft")
        for height in figure.levels.values():
            self.line(left, place(height), WIDTH - _RIGHT, place(height), "level")


# ---- lines


def _lines(canvas: _Canvas, figure: Figure) -> float:
    points = [_points(series) for series in figure.series]
    xs = [x for series in points for x, _ in series] or [0.0, 1.0]
    ys = [y for series in points for _, y in series] + list(figure.levels.values()) or [0.0, 1.0]
    low, high, y_ticks = _range(ys, figure.y_axis)
    left = _left(y_ticks, figure.y_axis)
    place_y = _placed(low, high, canvas.bottom, canvas.top, figure.y_axis)
    canvas.axes(figure, y_ticks, left, place_y)
    x_low, x_high, x_ticks = _range(xs, figure.x_axis, tight=True)
    place_x = _placed(x_low, x_high, left + 6, WIDTH - _RIGHT - 6, figure.x_axis)
    for tick in x_ticks:
        canvas.line(place_x(tick), canvas.bottom, place_x(tick), canvas.bottom + 4, "frame")
        canvas.text(place_x(tick), canvas.bottom + 17, label(tick, figure.x_axis), anchor="middle")
    for mark in figure.marks:
        canvas.line(place_x(mark), canvas.top, place_x(mark), canvas.bottom, "mark")
    for n, (series, chosen) in enumerate(zip(figure.series, points, strict=True)):
        colour = n % _COLOURS
        path = " ".join(f"{'M' if i == 0 else 'L'}{place_x(x):.1f} {place_y(y):.1f}" for i, (x, y) in enumerate(chosen))
        canvas.items.append(f'<path class="c{colour} {series.kind}" d="{path}"/>')
        for x, y in chosen if len(chosen) <= 40 else ():
            told = escape(f"{series.name}: {label(x, figure.x_axis)}, {label(y, figure.y_axis)}")
            dot = f'<circle class="f{colour}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3">'
            canvas.items.append(f"{dot}<title>{told}</title></circle>")
    return canvas.bottom + _BOTTOM


def _points(series: Series) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True) if y is not None]


# ---- bars


def _bars(canvas: _Canvas, figure: Figure) -> float:
    names = list(dict.fromkeys(str(x) for series in figure.series for x in series.x))
    values = [dict(zip(map(str, series.x), series.y, strict=True)) for series in figure.series]
    stacked = figure.form == "stacked"
    tops = [sum(v.get(name) or 0.0 for v in values) for name in names] if stacked else []
    heights = tops or [y for v in values for y in v.values() if y is not None]
    low, high, ticks = _range([0.0 if figure.y_axis == "linear" else min(heights), *heights], figure.y_axis)
    left = _left(ticks, figure.y_axis)
    place = _placed(low, high, canvas.bottom, canvas.top, figure.y_axis)
    canvas.axes(figure, ticks, left, place)
    width = (WIDTH - _RIGHT - left) / max(len(names), 1)
    share = width * 0.76 / (1 if stacked else max(len(values), 1))
    for i, name in enumerate(names):
        begin = left + i * width + width * 0.12
        canvas.text(left + (i + 0.5) * width, canvas.bottom + 17, name, anchor="middle")
        base = low
        for n, series in enumerate(figure.series):
            value = values[n].get(name)
            if value is None:
                continue
            foot, head = (base, base + value) if stacked else (low, value)
            base = head if stacked else base
            x = begin if stacked else begin + n * share
            told = escape(f"{name}, {series.name}: {label(value, figure.y_axis)}")
            high = max(0.0, place(foot) - place(head))
            box = f'x="{x:.1f}" y="{place(head):.1f}" width="{share:.1f}" height="{high:.1f}"'
            faint = "" if series.kind == "measured" else ' opacity="0.55"'
            canvas.items.append(f'<rect class="f{n % _COLOURS}" {box}{faint}><title>{told}</title></rect>')
    return canvas.bottom + _BOTTOM


# ---- legend


def _legend(canvas: _Canvas, figure: Figure, y: float) -> float:
    """Below the plot, as many lines as it takes; returns the height of the whole."""
    entries: list[tuple[str, str]] = []
    for n, series in enumerate(figure.series):
        kind = "" if series.kind == "measured" else f" ({'the paper' if series.kind == 'paper' else series.kind})"
        colour = n % _COLOURS
        swatch = (
            f'<path class="c{colour} {series.kind}" d="M0 -4H18"/>'
            if figure.form == "lines"
            else f'<rect class="f{colour}" x="3" y="-10" width="12" height="11"/>'
        )
        entries.append((swatch, series.name + kind))
    if figure.marks:
        entries.append(('<line class="mark" x1="9" x2="9" y1="-11" y2="2"/>', figure.marked))
    for name, value in figure.levels.items():
        entries.append(('<line class="level" x1="0" x2="18" y1="-4" y2="-4"/>', f"{name}: {label(value, 'linear')}"))
    x, y = 4.0, y + 14
    for swatch, text in entries:
        lines = _wrapped(text, WIDTH - 30)
        width = 24 + _CHAR * max(map(len, lines)) + 12
        if x > 4 and x + width > WIDTH:
            x, y = 4.0, y + _LINE + 2
        canvas.items.append(f'<g transform="translate({x:.1f} {y:.1f})">{swatch}</g>')
        for n, line in enumerate(lines):
            canvas.text(x + 24, y + n * _LINE, line)
        y += (len(lines) - 1) * _LINE
        x += width
    return y + 10


# ---- axes


def _range(values: Sequence[float], axis: Axis, *, tight: bool = False) -> tuple[float, float, list[float]]:
    """From, to, and the ticks between. `tight`: the values' own ends, not those of ticks."""
    low, high = min(values), max(values)
    if axis != "linear":
        base = 2.0 if axis == "log2" else 10.0
        low, high = (math.log(max(v, 1e-300), base) for v in (low, high))
        first, last = (math.ceil(low - 1e-9), math.floor(high + 1e-9)) if tight else (math.floor(low), math.ceil(high))
        if last <= first:
            first, last = math.floor(low), math.ceil(high) + (math.ceil(high) == math.floor(low))
        step = max(1, math.ceil((last - first) / (5 if tight else 6)))
        ticks = [base**e for e in range(first, last + 1, step)]
        if tight:
            return base**low, base ** (high if high > low else low + 1), [t for t in ticks if t <= base**high * 1.0001]
        return base**first, base**last, ticks
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-6):
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / (4 if tight else 5)
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(n * step, 12) for n in range(first, last + 1)]
    if tight:
        return low, high, [tick for tick in ticks if low - 1e-9 * step <= tick <= high + 1e-9 * step]
    return ticks[0], ticks[-1], ticks


def _placed(low: float, high: float, start: float, end: float, axis: Axis) -> Place:
    if axis == "linear":
        return lambda v: start + (v - low) / (high - low) * (end - start)
    floor, ceiling = math.log(low), math.log(high)
    return lambda v: start + (math.log(max(v, low)) - floor) / (ceiling - floor) * (end - start)


def _left(ticks: Sequence[float], axis: Axis) -> float:
    return 12 + _CHAR * max(len(label(tick, axis)) for tick in ticks)


def label(value: float, axis: Axis = "linear") -> str:
    """A number as short as it can be said: 2¹⁰ on an axis of powers of two, 1.2M, 0.7031."""
    if axis == "log2" and value > 0 and abs(math.log2(value) - round(math.log2(value))) < 1e-9:
        return "2" + str(round(math.log2(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.3g}{name}"
    return f"{value:.4g}" if size >= 1e-4 or size == 0 else f"{value:.1e}"


def _wrapped(text: str, width: float) -> list[str]:
    """Lines of whole words that fit."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and len(longer) * _CHAR > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]
