"""Makes .venv hold what pyproject.toml and constraints.txt ask for; does nothing when it already does.

Standard library only: it runs before anything is installed. torch goes first, by itself, so that the pinned build is
the one that stays. The package is not installed but linked (a .pth file to src/): `cmake` builds its module in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".complete"


def requirements() -> tuple[list[str], list[str]]:
    """What all need, and what only the rivals need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*extras["torch"], *project["dependencies"], *extras["dev"], *extras["experiments"]], extras["baselines"]


def digest(wanted: list[str]) -> str:
    text = "\n".join([sys.version, str(ROOT), *wanted, (ROOT / "constraints.txt").read_text()])
    return hashlib.sha256(text.encode()).hexdigest()


def install(wanted: list[str], rivals: list[str]) -> None:
    python = VENV / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    for group in (wanted[:1], wanted[1:]):
        print("installing", *group, flush=True)
        subprocess.run([*pip, *group], check=True)
    print("installing", *rivals, flush=True)
    if subprocess.run([*pip, *rivals]).returncode:
        print("left out: the MPI baseline cannot run, and its tests are skipped", flush=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "thermocline_source.pth").write_text(f"{ROOT / 'src'}\n")


def main() -> None:
    wanted, rivals = requirements()
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits for the first
        if STAMP.exists() and STAMP.read_text() == digest([*wanted, *rivals]):
            return
        install(wanted, rivals)
        STAMP.write_text(digest([*wanted, *rivals]))


if __name__ == "__main__":
    main()
