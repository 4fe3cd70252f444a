"""Install the package from its sdist into fresh environments that have only the declared requirements."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name src/
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"

USE = """
import sys, tempfile, numpy as np, thermocline as tc
assert "site-packages" in tc.__file__, tc.__file__
with tempfile.TemporaryDirectory() as folder, tc.SsdStore.open(folder + "/s", row_bytes=8, mem_budget="16MB") as store:
    store.put([7], np.full((1, 8), 3, np.uint8))
    assert store.commit() == 1 and store.get([7])[1].sum() == 24
print("torch" in sys.modules, tc.__version__)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def with_dependencies(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Distributions of this environment that the requirements name, and all that those require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            pending += [Requirement(text) for text in found[requirement.name].requires or []]
    return found


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """Create a virtual environment with links to the installed requirements, and nothing else; returns its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    site = next(folder.glob("lib/python*/site-packages"))
    for distribution in with_dependencies(requirements).values():
        tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


@pytest.mark.timeout(600)
def test_install_into_a_fresh_environment(tmp_path: Path) -> None:
    """Linking the requirements takes no download, and still fails if one is not declared."""
    builder = make_environment(tmp_path / "builder", PROJECT["build-system"]["requires"])
    run(builder, "-c", SDIST, tmp_path)
    (sdist,) = tmp_path.glob("thermocline-*.tar.gz")
    # The build is not optimized, to save time; all other tests use the optimized one.
    fast = ("--no-deps", "--no-build-isolation", "--config-settings=cmake.build-type=None")
    run(*PIP, "--python", builder, "wheel", *fast, "--wheel-dir", tmp_path, sdist)
    (wheel,) = tmp_path.glob("thermocline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    typed = {"thermocline/__init__.pyi", "thermocline/py.typed", "thermocline/core/_core.pyi"}
    assert typed | {"thermocline/watch/watch.html", "thermocline/watch/watch.js"} <= set(names)

    python = make_environment(tmp_path / "venv", PROJECT["project"]["dependencies"])
    run(*PIP, "--python", python, "install", "--no-deps", wheel)
    run(*PIP, "--python", python, "check")
    assert run(python, "-c", USE, cwd=tmp_path).split()[0] == "False"
