"""The report: one HTML page without external files, and every table and figure as CSV, JSON and SVG files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments import machine, paper
from experiments.experiment import PRINTED, TOO_SMALL, Cell, Claim, Figure, Kind, Section, Setup, Table
from thermocline.utils import atomic_file

NAMED_STEPS = 4
"""Maximum number of steps that are named beside the machine that ran them."""
_KINDS = {"measured": "measured", "predicted": "predicted", "paper": f"numbers of {PRINTED}"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One experiment on the page: its section, or the reason why there is none."""

    name: str
    title: str
    section: Section | None
    setup: Setup
    """Setup of the machine that ran the steps."""
    environments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Machine, build and command of each step, by step name."""
    missing: str = ""

    @property
    def parts(self) -> Sequence[Table | Figure]:
        """Tables and figures."""
        return self.section.parts if self.section else ()

    def stem(self, part: Table | Figure) -> str:
        """Return the file name of a part without its extension; it is also the part's id on the page."""
        return f"{self.name}-{part.name}"

    def shown_in(self, claim: Claim) -> Table | Figure:
        """Return the table or figure that shows a claim."""
        return next(part for part in self.parts if part.name == claim.part)


def write(folder: Path, chapters: Sequence[Chapter]) -> Path:
    """Write index.html, tables/ and figures/ below a folder; return the path of the page."""
    from experiments import figures  # needs matplotlib, which a machine that only measures may lack

    for name in ("tables", "figures"):
        atomic_file.make_folder(folder / name)
    drawings: dict[str, str] = {}
    for chapter in chapters:
        about = {"setup": chapter.setup.record(), "made_by": group_steps(chapter.environments)}
        for part in chapter.parts:
            stem = chapter.stem(part)
            atomic_file.atomic_write(folder / "tables" / f"{stem}.json", part_json(part, about))
            atomic_file.atomic_write(folder / "tables" / f"{stem}.csv", part_csv(part))
            if isinstance(part, Figure):
                drawings[stem] = figures.draw(part, stem)
                atomic_file.atomic_write(folder / "figures" / f"{stem}.svg", drawings[stem].encode())
    page = folder / "index.html"
    atomic_file.atomic_write(page, render(chapters, drawings).encode())
    return page


# ---- files


def part_csv(part: Table | Figure) -> bytes:
    """Return a table's rows, or a figure's points, below one line of column names."""
    if isinstance(part, Table):
        return _csv(part.headings, part.rows)
    points = [
        (series.name, series.kind, x, y) for series in part.series for x, y in zip(series.x, series.y, strict=True)
    ]
    return _csv(("series", "kind", part.x_label, part.y_label), points)


def part_json(part: Table | Figure, about: Mapping[str, Any]) -> bytes:
    """Return all fields of a table or figure, the origin of its numbers, and `about`."""
    kinds = {"kinds": dict(zip(part.columns, part.kinds, strict=True))} if isinstance(part, Table) else {}
    return json.dumps({**dataclasses.asdict(part), **kinds, "about": about}, indent=1).encode() + b"\n"


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return out.getvalue().encode()


# ---- page


def render(chapters: Sequence[Chapter], drawings: Mapping[str, str]) -> str:
    """Return the page's HTML. `drawings` are the SVG documents of all figures by file stem."""
    from experiments import figures

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"cell": cell_text, "kinds": kinds_text, "made_by": provenance, "size": size_text}
    claims = [(chapter, claim) for chapter in chapters if chapter.section for claim in chapter.section.claims]
    return environment.get_template("report.html.j2").render(
        chapters=chapters,
        claims=claims,
        judged=[claim for chapter, claim in claims if chapter.setup.judges_claims],
        drawings={stem: Markup(figures.inline(svg)) for stem, svg in drawings.items()},
        references=paper.load()["references"],
        size=_common_size(chapters),
        style=Markup(figures.STYLE),
        too_small=TOO_SMALL,
    )


def cell_text(value: Cell) -> str:
    """Format a table cell for the page; the files contain all digits."""
    match value:
        case None:
            return "-"
        case str():
            return value
        case int():
            return f"{value:,}"
    for least, form in ((1000, ",.0f"), (1, ".4g"), (1e-2, ".4f"), (1e-6, ".6f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return f"{value:.4g}"


def kinds_text(kinds: Sequence[Kind]) -> str:
    """Name the origins of a part's numbers, or return nothing if all are measured."""
    if set(kinds) <= {"measured"}:
        return ""
    return "Shown: " + ", ".join(text for kind, text in _KINDS.items() if kind in kinds) + "."


def size_text(setup: Setup) -> str:
    """Describe scale, effort and seed."""
    effort = "full training" if setup.effort == 1 else f"{setup.effort:g} of the full training"
    return f"Scale 1/{setup.scale:,.0f}, {effort}, seed {setup.seed}"


def _common_size(chapters: Sequence[Chapter]) -> str:
    """Describe the size of the run, if all chapters have the same."""
    sizes = {size_text(chapter.setup) for chapter in chapters}
    return sizes.pop() if len(sizes) == 1 else "The experiments differ in size: see the end of each section"


def provenance(chapter: Chapter) -> list[dict[str, str]]:
    """Return the machine, command and steps of each group of steps of a chapter."""
    groups = group_steps(chapter.environments)
    return [
        {
            "steps": step_names(group["steps"]) if len(groups) > 1 else "",
            "command": group["command"],
            "machine": machine.summary(group),
        }
        for group in groups
    ]


def step_names(steps: Sequence[str]) -> str:
    """Name all of a few steps, or the first of many."""
    if len(steps) <= NAMED_STEPS:
        return "; ".join(steps)
    return f"{'; '.join(steps[:NAMED_STEPS])} and {len(steps) - NAMED_STEPS} more steps"


def group_steps(environments: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group steps by machine, build and command; the date of a group is that of its last step."""
    groups: dict[str, dict[str, Any]] = {}
    for step, environment in sorted(environments.items(), key=lambda item: str(item[1]["date"])):
        constant = {name: value for name, value in environment.items() if name != "date"}
        steps = groups.get(str(constant), {}).get("steps", [])
        groups[str(constant)] = {**constant, "date": environment["date"], "steps": [*steps, step]}
    return list(groups.values())
