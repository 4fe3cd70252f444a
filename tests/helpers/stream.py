"""A small run on CSV files of a stream: its config, and files that appear by a rename."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CONFIG = """
[data]
train = "{folder}/in"
time = "at"
[model]
name = "deepfm"
dim = 4
hidden = [8]
[tiers]
device = "cpu"
mem = "16MB"
[train]
batch_size = 16
run_dir = "{folder}/run"
tensorboard = false
display = false
"""
"""To be formatted with `folder`. Options of [train] may follow."""


def write_file(path: Path, rows: Iterable[tuple[int, int, int, int]]) -> None:
    """Write examples, label, event time and two fields each; the file appears by a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}")
    temporary.write_text("\n".join(["label,at,a,b", *(",".join(map(str, row)) for row in rows), ""]))
    temporary.rename(path)
