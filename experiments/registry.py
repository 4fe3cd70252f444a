"""The list of experiments, in the order of the page."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

from experiments.experiment import Experiment
from thermocline.config.messages import nearest
from thermocline.errors import ConfigError

NAMES = (
    "hashing",
    "quantization",
    "models",
    "steady",
    "auc_time",
    "nonzeros",
    "mpi_baseline",
    "scalability",
    "k_step",
)
"""Modules of this package with an `EXPERIMENT`."""


def load(name: str) -> Experiment:
    """Import one experiment."""
    experiment: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return experiment


def choose(only: Sequence[str]) -> dict[str, Experiment]:
    """Return the named experiments, or all of them if no name is given, in the order of the page.

    "NAME:STEP" selects one step of an experiment, or all steps whose names begin with STEP and a comma.
    """
    steps: dict[str, list[str]] = {}
    for words in only:
        name, _, step = words.partition(":")
        if name not in NAMES:
            raise ConfigError(
                f'--only: there is no experiment "{name}"{nearest(name, NAMES)}: choose from {", ".join(NAMES)}'
            )
        steps.setdefault(name, []).append(step)
    chosen = {name: load(name) for name in NAMES if not only or name in steps}
    return {
        name: dataclasses.replace(experiment, only=tuple(steps[name])) if all(steps.get(name, [""])) else experiment
        for name, experiment in chosen.items()
    }
