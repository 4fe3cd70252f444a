"""A full and a read-only disk: small file systems, mounted in a new mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

LONG = os.environ.get("THERMOCLINE_LONG") == "1"
CASES = 200 if LONG else 10
PARTS = 10 if LONG else 1
"""Tests over which the cases are distributed, so that each takes minutes."""
SCRIPT = Path(__file__).with_name("full_disk.py")

# The mounts end with the namespace. Without root, a user namespace permits mounting.
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def seeds_of(part: int) -> range:
    """Return the seeds of one part of the cases."""
    return range(part * CASES // PARTS, (part + 1) * CASES // PARTS)


def mount_error(kind: str, folder: Path) -> str:
    """Return the reason why mounting fails, or an empty string."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    if kind == "ext4" and shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4 is not installed"
    command = [*NAMESPACE, sys.executable, str(SCRIPT), kind, "probe", str(folder), "0"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else (probe.stderr.strip() or "refused").splitlines()[-1]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("case", "seeds"), [*(("full", seeds_of(part)) for part in range(PARTS)), ("read-only", range(1))]
)
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_small_file_system(tmp_path: Path, kind: str, case: str, seeds: range) -> None:
    reason = mount_error(kind, tmp_path)
    if reason:
        pytest.skip(f"cannot mount {kind} here: {reason}")
    for seed in seeds:
        command = [*NAMESPACE, sys.executable, str(SCRIPT), kind, case, str(tmp_path), str(seed)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"
