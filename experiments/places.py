"""Which experiments belong to a reproduction, in the order of the page. One without a file is absent."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from experiments.experiment import Experiment
from thermocline.config.messages import nearest
from thermocline.errors import ConfigError

PLACES = {
    "hashing": "Hashing into fewer bins: tables 1 and 2 of the source",
    "quantization": "Rows of few bits: AUC and bytes, fixed against stochastic rounding",
    "models": "Models A to E: speed, tiers, disk and stages",
    "auc_time": "AUC over time",
    "nonzeros": "Time of the top tier against nonzeros",
    "rival": "Against the MPI parameter server: speed-up and cost-normalised speed-up",
    "scalability": "Scalability over ranks, measured and predicted",
    "k_step": "k-step Adam: AUC and time against k",
}
"""Name of the module -> what it shows."""


def find(name: str) -> Experiment | str:
    """The experiment of a place, or why there is none."""
    experiment = load(name)
    if experiment is None:
        return "This version does not have this experiment."
    why: str | None = getattr(importlib.import_module(f"experiments.{name}"), "missing", lambda: None)()
    return experiment if why is None else f"Not on this machine: {why}."


def load(name: str) -> Experiment | None:
    """The experiment of a place, whether or not it can run on this machine; none: there is none."""
    if name not in present():
        return None
    experiment: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return experiment


def choose(only: Sequence[str]) -> dict[str, Experiment | str]:
    """Those named, or all; of the absent ones, why. Naming one that this version does not have is an error."""
    for name in only:
        if name not in PLACES:
            raise ConfigError(
                f'there is no experiment "{name}"{nearest(name, PLACES)}: there are {", ".join(present())}'
            )
        if name not in present():
            raise ConfigError(f"experiment {name!r} is not in this version: there are {', '.join(present())}")
    return {name: find(name) for name in PLACES if not only or name in only}


def present() -> list[str]:
    """The names of those that are there."""
    return [name for name in PLACES if importlib.util.find_spec(f"experiments.{name}") is not None]
