"""Run the notebooks of docs/notebooks in a temporary folder and store what they print: `python tools/notebooks.py`.

A notebook is JSON: no Jupyter is needed to run it. Cells print; the value of a last expression is not shown.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/notebooks"


def run(notebook: dict[str, Any], folder: Path) -> list[str]:
    """Run all code cells in a folder, in one namespace; return what each cell printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
                printed.append(out.getvalue())
    finally:
        os.chdir(before)
    return printed


def store(path: Path) -> None:
    """Run a notebook and replace its outputs."""
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        printed = run(notebook, Path(folder))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        output = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": count, "outputs": [output] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        print(notebook.name, flush=True)
        store(notebook)
