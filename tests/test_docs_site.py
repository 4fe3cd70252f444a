"""The docs site builds without a warning and names the whole public API; the notebooks run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import thermocline as tc

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def load_tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed: `make test` installs it (pip install 'thermocline[docs]')",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stderr
    reference = "".join(path.read_text() for path in (tmp_path / "api").glob("*.html"))
    documented = set(re.findall(r'id="thermocline\.(?:\w+\.)*(\w+)"', reference))
    modules = {name for name in tc.__all__ if isinstance(getattr(tc, name), ModuleType)}
    assert set(tc.__all__) - modules - {"__version__"} - documented == set()
    assert [name for name in modules if not (tmp_path / "api" / f"{name}.html").exists()] == []
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)"', page.read_text())
        loaded += re.findall(r'<link[^>]* href="(https?:[^"]*)"', page.read_text())
        assert loaded == [], page
    assert "training" in (tmp_path / "notebooks/first-model.html").read_text()


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["beyond-memory", "first-model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_print_as_stored(path: Path, tmp_path: Path) -> None:
    """Figures of a training differ in the last digits between machines: words are compared, not numbers."""
    notebook = json.loads(path.read_text())
    printed = load_tool("notebooks").run(notebook, tmp_path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    stored = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    assert [re.findall(r"[a-zA-Z]+", text) for text in printed] == [re.findall(r"[a-zA-Z]+", text) for text in stored]
    assert any(re.search(r"AUC", text) for text in printed)
