"""The report: one page that needs nothing else, the tables and figures as files beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments import machine, svg, tables
from experiments.experiment import TOO_SMALL, Cell, Claim, Figure, Section, Setup, Table
from thermocline.utils import atomic_file

NAMED = 4
"""Steps that are named beside the machine that made them."""
_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;padding:12px;max-width:1240px;font:16px/1.5 system-ui,sans-serif;
  color:var(--ink);background:var(--page)}
:root{--page:#fff;--box:#f6f7f9;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--page:#15171a;--box:#1e2126}}
h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.3rem;margin:2.2rem 0 .4rem;line-height:1.25}
h3{font-size:1rem;margin:0 0 .3rem}p{margin:.4rem 0;max-width:80ch;overflow-wrap:anywhere}
nav ul{padding-left:1.2rem}a{color:var(--s0)}
.parts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px;align-items:start}
figure{margin:0;padding:10px;background:var(--box);border-radius:8px;min-width:0}figure.wide{grid-column:1/-1}
figure svg{display:block;width:100%;height:auto;max-width:640px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 9px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{vertical-align:bottom;white-space:normal;min-width:4.5rem}th:first-child,td:first-child{text-align:left;white-space:normal;min-width:7rem}
.paper{color:var(--soft);font-style:italic}.predicted{font-style:italic}
figcaption,.made{font-size:.8125rem;line-height:1.45;color:var(--soft);overflow-wrap:anywhere;margin-top:.4rem}
.claims{list-style:none;padding:0}.claims li{margin:.25rem 0;overflow-wrap:anywhere}
.holds::before{content:"✓ ";color:var(--s2)}.fails::before{content:"✗ ";color:var(--s6)}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One experiment on the page: its section, or why there is none."""

    name: str
    title: str
    section: Section | None
    setup: Setup
    """Of its steps: that of the machine which made them."""
    environments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Of its steps, by name."""
    missing: str = ""


def write(folder: Path, chapters: Sequence[Chapter], setup: Setup, command: str) -> Path:
    """Writes index.html, tables/ and figures/; returns the page."""
    for name in ("tables", "figures"):
        atomic_file.make_folder(folder / name)
    for chapter in chapters:
        made_by = _distinct(chapter.environments)
        about = {"command": command, "setup": dataclasses.asdict(chapter.setup), "made_by": made_by}
        for part in chapter.section.parts if chapter.section else ():
            stem = f"{chapter.name}-{part.name}"
            atomic_file.atomic_write(folder / "tables" / f"{stem}.json", tables.as_json(part, about))
            if isinstance(part, Table):
                atomic_file.atomic_write(folder / "tables" / f"{stem}.csv", tables.table_csv(part))
            else:
                atomic_file.atomic_write(folder / "tables" / f"{stem}.csv", tables.figure_csv(part))
                atomic_file.atomic_write(folder / "figures" / f"{stem}.svg", svg.draw(part, alone=True).encode())
    page = folder / "index.html"
    atomic_file.atomic_write(page, render(chapters, setup, command).encode())
    return page


def render(chapters: Sequence[Chapter], setup: Setup, command: str) -> str:
    """The page's HTML."""
    links = "".join(f'<li><a href="#{c.name}">{escape(c.title)}</a></li>' for c in chapters)
    body = "".join(_chapter(chapter) for chapter in chapters)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Thermocline: the sources' experiments</title><style>{svg.STYLE}{_STYLE}</style></head><body>"
        "<h1>The sources' experiments on Thermocline</h1>"
        f"<p>Made by <code>{escape(command)}</code>. {escape(_sizes(setup))}</p>"
        "<p>Figures are measured, unless a column, a line or a bar says that it is predicted, or the paper's own.</p>"
        f"<nav><ul>{links}</ul></nav>{body}</body></html>\n"
    )


def _sizes(setup: Setup) -> str:
    check = "" if setup.asserted else (
        f" {TOO_SMALL} Its speeds are of seconds, beside start-up and cold tiers: not to be compared with a full "
        "run's, nor with anyone's."
    )  # fmt: skip
    return (
        f"Models are the source's divided by {setup.scale:,.0f}; {_effort(setup)}; "
        f"seed {setup.seed}. Which machine made a figure stands below it.{check}"
    )


def _effort(setup: Setup) -> str:
    return "the full training" if setup.effort == 1 else f"{setup.effort:g} of the full training"


def _chapter(chapter: Chapter) -> str:
    head = f'<section id="{chapter.name}"><h2>{escape(chapter.title)}</h2>'
    if chapter.section is None:
        return f'{head}<p class="missing">{escape(chapter.missing)}</p></section>'
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in chapter.section.text)
    made = _made(chapter)
    parts = "".join(_part(chapter.name, part, made) for part in chapter.section.parts)
    claims = _claims(chapter.section.claims, chapter.setup)
    return f'{head}{text}{claims}<div class="parts">{parts}</div></section>'


def _claims(claims: Sequence[Claim], setup: Setup) -> str:
    if not claims:
        return ""
    why = "" if setup.asserted else f"<p>{escape(TOO_SMALL)}</p>"
    return f'{why}<ul class="claims">{"".join(_claim(claim, setup) for claim in claims)}</ul>'


def _claim(claim: Claim, setup: Setup) -> str:
    """Whether it holds is a word: colours and signs do not reach everyone."""
    kind = ("holds" if claim.holds else "fails") if setup.asserted else "shown"
    word = claim.verdict(setup).capitalize()
    return f'<li class="{kind}"><strong>{word}</strong>: {escape(claim.text)}: {escape(claim.detail)}</li>'


def _part(chapter: str, part: Table | Figure, made: str) -> str:
    note = f"{escape(part.note)} " if part.note else ""
    if isinstance(part, Table):
        return (
            f'<figure class="wide" id="{chapter}-{part.name}"><h3>{escape(part.title)}</h3>'
            f'<div class="scroll" tabindex="0">{_grid(part)}</div>'
            f"<figcaption>{note}{_kinds(part)} {made}</figcaption></figure>"
        )
    return (
        f'<figure id="{chapter}-{part.name}"><h3>{escape(part.title)}</h3>{svg.draw(part)}'
        f"<figcaption>{note}{_kinds(part)} {made}</figcaption></figure>"
    )


def _grid(table: Table) -> str:
    kinds = [tables.kind_of(table, column) for column in table.columns]
    head = "".join(
        f'<th scope="col" class="{k}">{escape(h)}</th>' for h, k in zip(tables.heads(table), kinds, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f'<td class="{k}">{cell(c)}</td>' for c, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def cell(value: Cell) -> str:
    """As the page shows it; files have all digits."""
    match value:
        case None:
            return "-"
        case str():
            return escape(value)
        case int():
            return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _kinds(part: Table | Figure) -> str:
    """Which of its figures are what."""
    if isinstance(part, Table):
        kinds = [tables.kind_of(part, column) for column in part.columns]
    else:
        kinds = [series.kind for series in part.series]
    found = [name for name in ("measured", "predicted", "paper") if name in kinds]
    return "Shown: " + ", ".join({"paper": "the paper's own"}.get(name, name) for name in found) + "."


def _made(chapter: Chapter) -> str:
    """Commands and machines; of several, which made which steps."""
    several = _distinct(chapter.environments)
    size = f"Scale 1/{chapter.setup.scale:g}, {_effort(chapter.setup)}, seed {chapter.setup.seed}."
    lines = [f"<code>{escape(e['command'])}</code>: {escape(machine.words(e))}" for e in several]
    if len(several) > 1:
        lines = [f"{escape(_named(e['steps']))}: {line}" for e, line in zip(several, lines, strict=True)]
        size += " Its steps were made by several machines, builds or commands:"
    return f"{size} {' · '.join(lines)}"


def _named(steps: Sequence[str]) -> str:
    """All of a few; of many the first: the steps' own files say it of each."""
    if len(steps) <= NAMED:
        return "; ".join(steps)
    return f"{'; '.join(steps[:NAMED])} and {len(steps) - NAMED} more steps"


def _distinct(environments: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One per machine, build and command, with its steps and the date of the last of them."""
    found: dict[str, dict[str, Any]] = {}
    for step, environment in sorted(environments.items(), key=lambda item: str(item[1]["date"])):
        key = str({name: value for name, value in environment.items() if name != "date"})
        found[key] = {**environment, "steps": [*found.get(key, {}).get("steps", []), step]}
    return list(found.values())
