"""Extension of griffe for the docs site: docstrings as Markdown.

Docstrings name arguments in aligned columns, `name   meaning`, with indented continuation lines, which become tables:
Markdown would join them into one paragraph. Brackets, as in float32[n, dim], are text and not links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIRST = re.compile(r"(\*{0,2}[A-Za-z_][\w., *]*?) {2,}(\S.*)")


def to_markdown(text: str) -> str:
    """Replace blocks of `name   meaning` lines by tables, and escape brackets outside of code."""
    text = "".join(part if part.startswith("`") else part.replace("[", "\\[") for part in re.split(r"(`[^`]*`)", text))
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        rows = _rows(block.split("\n"))
        out.append(block if rows is None else _table(rows))
    return "\n\n".join(out)


def _rows(lines: list[str]) -> list[tuple[str, str]] | None:
    """Return names and meanings of a block, or None if it is other text."""
    first = [len(line) - len(line.lstrip()) for line in lines]
    rows: list[tuple[str, str]] = []
    for line, indent in zip(lines, first, strict=True):
        match = _FIRST.fullmatch(line.strip())
        if indent == first[0] and match is not None:
            rows.append((match[1], match[2]))
        elif rows and indent > first[0]:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return None
    return rows


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in rows)
    return "\n".join(["| name | meaning |", "|---|---|", *cells])


class DocstringTables(griffe.Extension):
    """Applies `to_markdown` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
