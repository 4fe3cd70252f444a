"""Results of a finished experiment as one JSON file, from which its part of the report can be rebuilt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from experiments.experiment import Json, Setup
from experiments.step_cache import StepResult
from thermocline.errors import ConfigError, CorruptionError
from thermocline.utils import atomic_file

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentResults:
    """Setup and step results of one finished experiment."""

    experiment: str
    setup: Setup
    steps: Mapping[str, StepResult]
    """By step name."""

    @property
    def values(self) -> dict[str, Json]:
        """Results by step name."""
        return {name: step.value for name, step in self.steps.items()}

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """Machines, builds and commands by step name."""
        return {name: step.environment for name, step in self.steps.items()}

    def write(self, folder: Path) -> None:
        """Write `<folder>/<experiment>.json`. Environments are stored once, without the date."""
        environments: list[dict[str, Any]] = []
        steps = []
        for name, step in self.steps.items():
            environment = {key: value for key, value in step.environment.items() if key != "date"}
            if environment not in environments:
                environments.append(environment)
            steps.append(
                {
                    "step": name,
                    "environment": environments.index(environment),
                    "date": step.environment["date"],
                    "seconds": step.seconds,
                    "result": step.value,
                }
            )
        record = {
            "format": FORMAT,
            "experiment": self.experiment,
            "setup": self.setup.record(),
            "environments": environments,
        }
        # One line per step: differences between two versions of the file stay readable.
        lines = ",\n  ".join(json.dumps(step, ensure_ascii=False) for step in steps)
        text = json.dumps(record, indent=1, ensure_ascii=False)[:-2] + f',\n "steps": [\n  {lines}\n ]\n}}\n'
        atomic_file.make_folder(folder)
        atomic_file.atomic_write(folder / f"{self.experiment}.json", text.encode())

    @classmethod
    def read(cls, folder: Path, experiment: str) -> Self | None:
        """Read `<folder>/<experiment>.json`, or return None if it does not exist."""
        path = folder / f"{experiment}.json"
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != FORMAT:
                raise ConfigError(f"{path} has format {record['format']}: this version reads format {FORMAT}")
            steps = {
                step["step"]: StepResult(
                    step["result"],
                    {**record["environments"][step["environment"]], "date": step["date"]},
                    step["seconds"],
                )
                for step in record["steps"]
            }
            return cls(record["experiment"], Setup(**record["setup"]), steps)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CorruptionError(f"{path} is damaged ({error!r}): remove it to run the experiment again") from None
