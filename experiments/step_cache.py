"""Results of finished steps, one JSON file each, found by the step's settings.

A file is either complete or absent, and contains no path of the machine: a copied cache works elsewhere. Each result
names the machine, the build and the command that made it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import thermocline
from experiments import machine
from experiments.experiment import Json, Step
from thermocline.checkpoint.manifest import require_json
from thermocline.errors import CorruptionError
from thermocline.utils import atomic_file


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step, with its origin."""

    value: Json
    environment: dict[str, Any]
    seconds: float
    """Running time of the step, without interruptions."""


class StepCache:
    """The step results below one folder."""

    def __init__(self, folder: Path, command: str = "") -> None:
        """Create the folder if it is absent. `command` is recorded with each new result."""
        self._steps = folder / "steps"
        self._work = folder / "work"
        self._command = command
        atomic_file.make_folder(self._steps)

    def get(self, experiment: str, step: Step) -> StepResult | None:
        """Return a step's result, or None if no step with these settings is finished."""
        path = self._path(experiment, step)
        try:
            record = json.loads(path.read_bytes())
            return StepResult(record["result"], record["environment"], record["seconds"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(f"{path} is damaged ({error}): remove it to run the step again") from None

    def put(self, experiment: str, step: Step, value: Json, seconds: float) -> StepResult:
        """Store a result and remove the step's working folder."""
        require_json(value, f"the result of {experiment}, {step.name}")
        environment = {**machine.describe(), "command": self._command}
        record = {
            "experiment": experiment,
            "step": step.name,
            "settings": dict(step.settings),
            "environment": environment,
            "seconds": seconds,
            "result": value,
        }
        path = self._path(experiment, step)
        atomic_file.make_folder(path.parent)
        atomic_file.atomic_write(path, json.dumps(record, indent=1).encode() + b"\n")
        self._remove_working_folder(experiment, step)
        return StepResult(value, environment, seconds)

    def working_folder(self, experiment: str, step: Step) -> Path:
        """Return the folder of an unfinished step; it is created if it is absent."""
        folder = self._work / self._name(experiment, step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def add_seconds(self, experiment: str, step: Step, seconds: float) -> float:
        """Add running time to an unfinished step; return the sum over all its calls."""
        path = self.working_folder(experiment, step) / "seconds.json"
        total = (json.loads(path.read_bytes()) if path.exists() else 0.0) + seconds
        atomic_file.atomic_write(path, json.dumps(total).encode())
        return float(total)

    def _remove_working_folder(self, experiment: str, step: Step) -> None:
        shutil.rmtree(self._work / self._name(experiment, step), ignore_errors=True)
        for folder in (self._work / experiment, self._work):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _path(self, experiment: str, step: Step) -> Path:
        return self._steps / f"{self._name(experiment, step)}.json"

    def _name(self, experiment: str, step: Step) -> str:
        """Combine the step's name with a digest of everything that its result depends on."""
        key = {"experiment": experiment, "step": step.name, "settings": dict(step.settings)}
        text = json.dumps({**key, "version": thermocline.__version__}, sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", step.name.lower()).strip("-")
        return f"{experiment}/{slug}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
