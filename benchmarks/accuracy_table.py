"""Table of pairs from the same start (accuracy.py --sides same_start,fuxictr) as markdown.

    python benchmarks/accuracy_table.py benchmarks/results/accuracy-paired-*.json
    python benchmarks/accuracy_table.py benchmarks/results/accuracy-paired-*.json --write docs/benchmarks/accuracy.md

--write replaces the table with this header on the page. Only seeds that both sides have count. A model is met if all
five seeds are there and their mean difference is within the tolerance; the standard error is that of the differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accuracy import MODELS, SAME_START, TOLERANCE, Run, select, standard_error

SEEDS = (2021, 2022, 2023, 2024, 2025)
TITLES = {"movielens": "MovieLens-100k", "frappe": "Frappe"}
NAMES = {"deepfm": "DeepFM", "dcnv2": "DCNv2"}
HEADER = (
    f"| data set | model | seeds | catch_up | FuxiCTR | behind (target <= {TOLERANCE}) | | of each seed, x 1e-4 "
    "| epochs: ours, FuxiCTR |"
)


def table_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: one of each data set and model, also of those without runs."""
    lines = [HEADER, "|---" * (HEADER.count("|") - 1) + "|"]
    found = {record["setup"].get("data", "movielens"): record["runs"] for record in records}
    for data in (data for data in TITLES if data in found):
        for model in MODELS:
            cells = [TITLES[data] if model == MODELS[0] else "", NAMES.get(model, model.upper())]
            cells += cells_of(found[data], model)
            lines.append("".join(f"| {cell} ".replace("|  ", "| ") for cell in cells) + "|")
    return lines


def cells_of(runs: Sequence[Run], model: str) -> list[str]:
    """Seeds, mean AUC of both sides, mean difference, verdict, differences, epochs."""
    sides = [{run["seed"]: run for run in select(runs, model, side)} for side in (SAME_START, "fuxictr")]
    seeds = [seed for seed in SEEDS if all(seed in side for side in sides)]
    if not seeds:
        return ["0", "", "", "", "not measured", "", ""]
    ours, theirs = ([side[seed]["auc"] for seed in seeds] for side in sides)
    behind = [b - a for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.mean(behind)
    error = "one seed" if len(seeds) == 1 else f"+- {standard_error(behind):.6f}"
    missing = [str(seed) for seed in SEEDS if seed not in seeds]
    verdict = "met" if mean <= TOLERANCE else "missed"
    if missing:
        verdict = f"{'within' if mean <= TOLERANCE else 'beyond'} so far, seeds missing: {' '.join(missing)}"
    epochs = [" ".join(str(side[seed]["epochs"]) for seed in seeds) for side in sides]
    means = [f"{statistics.mean(values):.5f}".removeprefix("0") for values in (ours, theirs)]
    return [
        str(len(seeds)),
        *means,
        f"{without_sign(f'{mean:.6f}')} {error}",
        verdict,
        " ".join(without_sign(f"{1e4 * value:.1f}") for value in behind),
        f"{epochs[0]}, equal" if epochs[0] == epochs[1] else ", ".join(epochs),
    ]


def without_sign(number: str) -> str:
    """Remove the sign of a number that was rounded to zero."""
    return number if float(number) else number.removeprefix("-")


def write_table(page: Path, lines: Sequence[str]) -> None:
    """Replace the table on the page: its header and the lines below that begin with `|`."""
    text = page.read_text(encoding="utf-8").splitlines()
    begin = text.index(HEADER)
    end = next((n for n in range(begin, len(text)) if not text[n].startswith("|")), len(text))
    page.write_text("\n".join([*text[:begin], *lines, *text[end:]]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--write", metavar="PAGE", type=Path, help="replace the table on this page")
    args = parser.parse_args()
    lines = table_of([json.loads(path.read_text()) for path in args.records])
    print("\n".join(lines))
    if args.write:
        write_table(args.write, lines)


if __name__ == "__main__":
    main()
