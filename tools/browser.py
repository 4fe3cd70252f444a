"""Installs Debian's chromium for the test of the report's page, where that is possible; else says why not. Never fails.

Standard library only, as venv.py. Without a browser that test is skipped, and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 240


def apt(*words: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run = subprocess.run(["apt-get", "-qq", *words], env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def main() -> None:
    if any(map(shutil.which, NAMES)):
        return
    skipped = "the test of the report's page is skipped"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"no chromium here, and no right to install it: {skipped}", flush=True)
        return
    print("installing chromium", flush=True)
    install = ("install", "-y", "--no-install-recommends", "chromium")
    if not apt(*install) and not (apt("update") and apt(*install)):
        print(f"left out, apt-get cannot install it: {skipped}", flush=True)


if __name__ == "__main__":
    main()
