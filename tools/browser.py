"""Install Debian's Chromium for the tests of the live page and the report, where that is possible. Never fails.

Standard library only, like venv.py. Without a browser those tests are skipped with a message.
"""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 240  # seconds


def apt(*words: str) -> bool:
    """Run apt-get; return whether it succeeded in time."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run = subprocess.run(["apt-get", "-qq", *words], env=environment, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def main() -> None:
    if any(map(shutil.which, NAMES)):
        return
    skipped = "the tests of the live page and of the report are skipped"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"chromium is not installed, and installing it needs apt-get and root: {skipped}", flush=True)
        return
    print("installing chromium", flush=True)
    install = ("install", "-y", "--no-install-recommends", "chromium")
    if not apt(*install) and not (apt("update") and apt(*install)):
        print(f"apt-get cannot install chromium: {skipped}", flush=True)


if __name__ == "__main__":
    main()
