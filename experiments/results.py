"""What each step gave, kept as one JSON file per step: whole or not there, and found again by what it depends on.

The files know no machine's folders: copied elsewhere, a reproduction goes on there. Each says where and by which
command it was made. Beside the steps of an experiment that is complete, setup.json says for which setup: one that
needed another machine is not begun again here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, Self

import thermocline
from experiments import machine
from experiments.experiment import Json, Setup, Step
from thermocline.checkpoint.manifest import require_json
from thermocline.errors import CorruptionError
from thermocline.utils import atomic_file


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Of one step."""

    value: Json
    environment: dict[str, Any]
    seconds: float
    """Of work, breaks not counted."""


class Results:
    """The steps of one reproduction's folder."""

    def __init__(self, folder: Path, command: str) -> None:
        self._steps = folder / "steps"
        self._work = folder / "work"
        self._command = command

    @classmethod
    def open(cls, folder: str | Path, command: str = "") -> Self:
        """Makes the folder if it is not there. What is put is made by `command`."""
        made = cls(Path(folder), command)
        atomic_file.make_folder(made._steps)
        return made

    def get(self, experiment: str, step: Step) -> Result | None:
        """None: it is still to do, or was done with other settings."""
        path = self._path(experiment, step)
        try:
            record = json.loads(path.read_bytes())
            return Result(record["result"], record["environment"], record["seconds"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(f"{path} is damaged ({error}): remove it, and the step is done again") from None

    def put(self, experiment: str, step: Step, value: Json, seconds: float) -> Result:
        """Keeps a result; the step's own folder is no longer needed."""
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
        self.forget_work(experiment, step)
        return Result(value, environment, seconds)

    def complete(self, experiment: str, setup: Setup) -> None:
        """All steps of this setup are done."""
        path = self._steps / experiment / "setup.json"
        atomic_file.make_folder(path.parent)
        atomic_file.atomic_write(path, json.dumps(dataclasses.asdict(setup), indent=1).encode() + b"\n")

    def completed(self, experiment: str) -> Setup | None:
        """The setup that was last complete, on whatever machine."""
        path = self._steps / experiment / "setup.json"
        try:
            return Setup(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CorruptionError(f"{path} is damaged ({error}): remove it") from None

    def work(self, experiment: str, step: Step) -> Path:
        """The folder of a step that is not done."""
        folder = self._work / self._name(experiment, step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def spent(self, experiment: str, step: Step, more: float = 0.0) -> float:
        """Seconds of earlier calls of a step that is not done, with `more` added to them."""
        path = self.work(experiment, step) / "seconds.json"
        seconds = (json.loads(path.read_bytes()) if path.exists() else 0.0) + more
        if more:
            atomic_file.atomic_write(path, json.dumps(seconds).encode())
        return float(seconds)

    def forget_work(self, experiment: str, step: Step) -> None:
        """Removes that folder."""
        shutil.rmtree(self._work / self._name(experiment, step), ignore_errors=True)
        for folder in (self._work / experiment, self._work):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _path(self, experiment: str, step: Step) -> Path:
        return self._steps / f"{self._name(experiment, step)}.json"

    def _name(self, experiment: str, step: Step) -> str:
        """For eyes and for sure: the step's name, and a digest of all it depends on."""
        key = {"experiment": experiment, "step": step.name, "settings": dict(step.settings)}
        text = json.dumps({**key, "version": thermocline.__version__}, sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", step.name.lower()).strip("-")
        return f"{experiment}/{slug}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
