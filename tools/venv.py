"""Install the requirements of pyproject.toml, pinned by constraints.txt, into .venv, unless they are installed.

Standard library only: it runs before anything is installed. torch is installed first, so that no other requirement
selects another build. The package itself is linked by a .pth file to src/, where `cmake` builds its C++ module.
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
    """Return the required packages, and the optional ones of the baselines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = ("dev", "experiments", "docs")
    optional = [requirement for name in names for requirement in extras[name]]
    return [*extras["torch"], *project["dependencies"], *optional], extras["baselines"]


def digest(required: list[str]) -> str:
    text = "\n".join([sys.version, str(ROOT), *required, (ROOT / "constraints.txt").read_text()])
    return hashlib.sha256(text.encode()).hexdigest()


def install(required: list[str], baselines: list[str]) -> None:
    python = VENV / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    pip += ["--no-compile"]  # Python compiles the modules that it imports; pip compiles all 13,000, on one core
    for group in (required[:1], required[1:]):
        print("installing", *group, flush=True)
        subprocess.run([*pip, *group], check=True)
    print("installing", *baselines, flush=True)
    if subprocess.run([*pip, *baselines]).returncode:
        print("not installed: the MPI baseline cannot run, and its tests are skipped", flush=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "thermocline_source.pth").write_text(f"{ROOT / 'src'}\n")


def main() -> None:
    required, baselines = requirements()
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make waits for the first
        if STAMP.exists() and STAMP.read_text() == digest([*required, *baselines]):
            return
        install(required, baselines)
        STAMP.write_text(digest([*required, *baselines]))


if __name__ == "__main__":
    main()
