"""`pip install .` on a machine that has nothing but a compiler: a fresh environment, a wheel of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

USE = """
import sys, tempfile, numpy as np, thermocline as tc
assert "site-packages" in tc.__file__, tc.__file__
with tempfile.TemporaryDirectory() as folder, tc.SsdStore.open(folder + "/s", row_bytes=8, mem_budget="16MB") as store:
    store.put([7], np.full((1, 8), 3, np.uint8))
    assert store.commit() == 1 and store.get([7])[1].sum() == 24
print("torch" in sys.modules, tc.__version__)
"""


@pytest.mark.timeout(600)
def test_pip_install_into_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run([*pip, "-c", "constraints.txt", "."], cwd=ROOT, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    used = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    assert used.stdout.split()[0] == "False"
