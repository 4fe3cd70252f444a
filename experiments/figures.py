"""Plots as SVG, drawn with matplotlib: lines, bars, stacked bars.

A plot is 360 points wide, so that its text stays readable on a phone. Colours are CSS variables with a light and a dark
value: `STYLE` defines them for the page and for each SVG file. The same figure always gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from experiments.experiment import AxisScale, Figure, Series

WIDTH, PLOT_HEIGHT, LINE_HEIGHT = 360, 250, 17  # points; PLOT_HEIGHT includes both axes
LIGHT = ("#0067a5", "#b34500", "#00785a", "#a6418a", "#8a6d00", "#3d3d9e", "#b3263f", "#5a5a5a")
DARK = ("#6db8f2", "#ff9a5c", "#4fd1a5", "#e79bd3", "#e3c34a", "#a3a3ff", "#ff8598", "#bdbdbd")
INK, SOFT, RULE = "#1d1f23", "#5b6068", "#d5d8dd"

_VARIABLES = {**{colour: f"--s{n}" for n, colour in enumerate(LIGHT)}, INK: "--ink", SOFT: "--soft", RULE: "--rule"}
_DARK_VALUES = {
    **{f"--s{n}": c for n, c in enumerate(DARK)},
    "--ink": "#e8eaed",
    "--soft": "#a9afb8",
    "--rule": "#3b4048",
}


def _rule(values: dict[str, str]) -> str:
    return ":root{" + ";".join(f"{name}:{value}" for name, value in values.items()) + "}"


STYLE = (
    _rule({name: colour for colour, name in _VARIABLES.items()})
    + f"@media(prefers-color-scheme:dark){{{_rule(_DARK_VALUES)}}}"
)
"""Style sheet with the colours of all plots."""

_DASHES: dict[str, Any] = {"measured": "-", "predicted": (0, (4, 3)), "paper": (0, (1, 1.5))}
_MAX_MARKERS = 16
_LABEL_CHARACTERS = 42
_RC: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": ["DejaVu Sans"], "font.size": 12, "text.color": INK, "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "grid.color": RULE, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "ytick.major.size": 0, "lines.linewidth": 2, "lines.markersize": 5, "axes.axisbelow": True,
    "text.parse_math": False,
}  # fmt: skip


def draw(figure: Figure, stem: str) -> str:
    """Return the figure as an SVG document with its title and style sheet.

    stem   name of the file; it makes the element ids unique within the page
    """
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    settings: Any = {**_RC, "svg.hashsalt": stem}
    with mpl.rc_context(settings):
        plot(figure).savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    label = escape(f"{figure.title}: {figure.y_label} against {figure.x_label}", quote=True)
    svg = re.sub(
        r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', rf'<svg class="plot" role="img" aria-label="{label}"\1', svg
    )
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{stem}-", svg)
    svg = re.sub(r"(font: [^;\"]*?)'DejaVu Sans'", r"\1system-ui, sans-serif", svg)
    svg = re.sub("|".join(_VARIABLES), lambda match: f"var({_VARIABLES[match[0]]})", svg)
    return svg.replace(">", f">\n<style>{STYLE}</style>", 1)


def inline(svg: str) -> str:
    """Return a drawn figure without its style sheet, for a page that has it."""
    return re.sub(r"\n<style>.*?</style>", "", svg, count=1).strip()


def plot(figure: Figure) -> Canvas:
    """Draw a figure on a matplotlib canvas."""
    title = textwrap.wrap(figure.title, 44)
    labels = [_wrap(series.label) for series in figure.series]
    labels += [figure.vlines_label] if figure.vlines else []
    labels += [_wrap(f"{name}: {number_text(value)}") for name, value in figure.hlines.items()]
    columns = _legend_columns(labels)
    legend_lines = sum(label.count("\n") + 1 for label in labels) if columns == 1 else math.ceil(len(labels) / columns)
    height = PLOT_HEIGHT + LINE_HEIGHT * (len(title) + legend_lines) + 14
    canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
    canvas.get_layout_engine().set(w_pad=4 / 72, h_pad=5 / 72)  # type: ignore[call-arg, union-attr]
    canvas.suptitle("\n".join(title), x=0.012, ha="left", fontsize=13, fontweight="bold")
    axes = canvas.add_subplot()
    axes.set_title(figure.y_label, loc="left", fontsize=12, color=SOFT)
    axes.set_xlabel(figure.x_label)
    axes.grid(axis="y")
    handles = _draw_lines(axes, figure) if figure.form == "lines" else _draw_bars(axes, figure)
    for value in figure.vlines:
        mark = axes.axvline(value, color=SOFT, linewidth=1, linestyle=(0, (1, 3)), gid="vline")
        handles = [*handles[: len(figure.series)], mark]
    for value in figure.hlines.values():
        handles.append(axes.axhline(value, color=SOFT, linewidth=1.2, linestyle=(0, (6, 3)), gid="hline"))
    canvas.legend(
        handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=1.6, columnspacing=1.2,
        labelspacing=0.3, borderpad=0.2, handletextpad=0.6,
    )  # fmt: skip
    return canvas


def _wrap(label: str) -> str:
    return "\n".join(textwrap.wrap(label, _LABEL_CHARACTERS))


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max((len(label) for label in labels), default=0)
    return max(1, min(len(labels), _LABEL_CHARACTERS // (longest + 6)))


# ---- lines


def _draw_lines(axes: Axes, figure: Figure) -> list[Any]:
    handles: list[Any] = []
    points = [_points(series, figure) for series in figure.series]
    for n, (series, chosen) in enumerate(zip(figure.series, points, strict=True)):
        marker = "o" if len(chosen) <= _MAX_MARKERS else ""
        handles += axes.plot(
            [x for x, _ in chosen], [y for _, y in chosen], color=LIGHT[n % len(LIGHT)], marker=marker,
            linestyle=_DASHES[series.kind], clip_on=figure.y_from is not None, gid=f"series-{n}",
        )  # fmt: skip
    _scale_axis(axes.xaxis, figure.x_scale, [x for series in points for x, _ in series], tight=True)
    heights = [y for series in points for _, y in series] + [*figure.hlines.values()]
    if figure.y_from is not None:
        heights = [figure.y_from, *(y for y in heights if y > figure.y_from)]
    _scale_axis(axes.yaxis, figure.y_scale, heights)
    return handles


def _points(series: Series, figure: Figure) -> list[tuple[float, float]]:
    """Return the points with a value; a logarithmic axis cannot show 0."""
    points = [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True) if y is not None]
    return [
        (x, y) for x, y in points if (x > 0 or figure.x_scale == "linear") and (y > 0 or figure.y_scale == "linear")
    ]


# ---- bars


def _draw_bars(axes: Axes, figure: Figure) -> list[Any]:
    names = list(dict.fromkeys(str(x) for series in figure.series for x in series.x))
    count = 1 if figure.form == "stacked" else max(1, len(figure.series))
    width = 0.76 / count
    tops = dict.fromkeys(names, 0.0)
    handles: list[Any] = []
    for n, series in enumerate(figure.series):
        bars = [(str(x), float(y)) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        left = [names.index(name) - 0.38 + (0 if figure.form == "stacked" else n * width) for name, _ in bars]
        bottom = [tops[name] if figure.form == "stacked" else 0.0 for name, _ in bars]
        drawn = axes.bar(
            left, [value for _, value in bars], width, bottom, align="edge", color=LIGHT[n % len(LIGHT)],
            alpha=1.0 if series.kind == "measured" else 0.55, label=series.label,
        )  # fmt: skip
        for patch in drawn:
            patch.set_gid(f"series-{n}")
        for name, value in bars:
            tops[name] = tops[name] + value if figure.form == "stacked" else max(tops[name], value)
        handles.append(drawn)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)
    axes.tick_params(axis="x", length=0)
    lowest = [float(y) for series in figure.series for y in series.y if y]
    heights = [figure.y_from or min([0.0, *lowest, *figure.hlines.values()]), *tops.values(), *figure.hlines.values()]
    _scale_axis(axes.yaxis, figure.y_scale, heights if figure.y_scale == "linear" else [*lowest, *heights[1:]])
    return handles


# ---- axes


def _scale_axis(axis: Any, scale: AxisScale, values: Sequence[float], *, tight: bool = False) -> None:
    """Set scale, limits, ticks and labels. Limits are ticks, unless `tight` keeps the values' range."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value, scale)))
    set_limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
    if scale == "linear":
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
        axis.set_major_locator(locator)
        if values and not tight:
            low, high = min(values), max(values)
            if high - low <= 1e-9 * max(abs(low), abs(high), 1e-6):
                low, high = low - 0.5 if low < 0 else max(0.0, low - 0.5), high + 0.5
            ticks = locator.tick_values(low, high)
            set_limits(
                max((tick for tick in ticks if tick <= low), default=low),
                min((tick for tick in ticks if tick >= high), default=high),
            )
        return
    base = 2.0 if scale == "log2" else 10.0
    positive = [value for value in values if value > 0]
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log", base=base)
    axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value, scale)))
    axis.set_minor_locator(NullLocator())
    if positive:
        low, high = math.log(min(positive), base), math.log(max(positive), base)
        first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
        last = max(last, first + 1)
        step = max(1, math.ceil((last - first) / 6))
        axis.set_major_locator(FixedLocator([base**exponent for exponent in range(first, last + 1, step)]))
        margin = 0.02 * max(high - low, 1)
        set_limits(*((base ** (low - margin), base ** (high + margin)) if tight else (base**first, base**last)))


def number_text(value: float, scale: AxisScale = "linear") -> str:
    """Format a number in few characters: 1.23M, 0.7031, or 2¹⁰ for a large power of two on a log2 axis."""
    is_power = scale == "log2" and value > 0 and abs(math.log2(value) - round(math.log2(value))) < 1e-9
    if is_power and not 1 <= value < 1024:
        return "2" + str(round(math.log2(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.3g}{name}"
    return f"{value:.4g}" if size >= 1e-4 or size == 0 else f"{value:.1e}"
