"""Trainings that are several processes: started, waited for, and ended with all of theirs if they take too long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError

_GRACE = 10.0  # seconds that a launcher gets to end its processes


def events_of(
    what: str, command: Sequence[str], environment: Mapping[str, str], run_dir: Path, limit: float
) -> list[dict[str, Any]]:
    """Runs a launcher (torchrun, mpirun) to its end; the events of the run's metrics.jsonl."""
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C reaches us, and we end the launcher, which ends its processes.
    with subprocess.Popen(
        command, env=dict(environment), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as launcher:
        try:
            _, told = launcher.communicate(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            _end(launcher)
            raise ThermoclineError(f"{what} did not end within {limit:.0f} s: a smaller --effort trains less") from None
        except BaseException:
            _end(launcher)
            raise
    if launcher.returncode:
        # Launchers have much to say after the line that tells why.
        cause = [line for line in told.splitlines() if line.startswith(("thermocline: ", "error: "))][:1]
        raise ThermoclineError(f"{what} failed: {cause[0] if cause else told.strip()[-1000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _end(launcher: subprocess.Popen[str]) -> None:
    launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
