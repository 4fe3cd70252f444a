"""A disk that is really full, and one that is really read-only: small file systems, mounted in a namespace of ours."""

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
SCRIPT = Path(__file__).with_name("full_disk.py")

# A mount namespace of our own: nothing stays behind. Where we are not root, a user namespace gives the right to mount.
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount(kind: str, folder: Path) -> str:
    """Why not, or nothing."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    if kind == "ext4" and shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4"
    command = [*NAMESPACE, sys.executable, str(SCRIPT), kind, "probe", str(folder), "0"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else (probe.stderr.strip() or "refused").splitlines()[-1]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", ["full", "read-only"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_small_file_system(tmp_path: Path, kind: str, what: str) -> None:
    reason = can_mount(kind, tmp_path)
    if reason:
        pytest.skip(f"cannot mount {kind} here: {reason}")
    for case in range(CASES if what == "full" else 1):
        command = [*NAMESPACE, sys.executable, str(SCRIPT), kind, what, str(tmp_path), str(case)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"
