"""Rules of runs over several ranks: which keys of the config may differ between ranks. Imports no torch."""

from __future__ import annotations

from typing import Any

from thermocline.config.loader import flatten
from thermocline.config.schema import Config

MAY_DIFFER = frozenset(
    {
        # Paths may be mount points of a machine. Names and sizes of the files are compared instead (`Reader.identity`).
        *("data.train", "data.valid", "data.test"),
        # A folder on a disk of the rank's own machine.
        "tiers.ssd",
        # Machines may have different memory and cores. No result depends on budgets and threads of Thermocline.
        *("tiers.hbm", "tiers.mem", "tiers.mem_overcommit", "tiers.lookahead", "tiers.ssd_mem", "tiers.threads"),
        *("data.threads", "dist.bind"),
        # "auto" may be the same device as "cpu" or "cuda". Tables compare the device they train on.
        "tiers.device",
        # A path on the machine of the rank.
        "dist.topology",
        # Only rank 0 prints and writes metrics.
        *("train.display", "train.tensorboard"),
    }
)
"""All other keys determine the result, or the steps at which ranks communicate."""


def rank_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys of a config, or of one of its sections, that must be equal on all ranks, with their values.

    prefix   name of the section with a dot, such as "train."
    """
    resolved = config.resolve() if isinstance(config, Config) else config
    return {name: value for name, value in flatten(resolved, prefix) if name not in MAY_DIFFER}
