"""Rules of resumed runs: which keys of the config may change."""

from __future__ import annotations

import dataclasses
from typing import Any

from thermocline.config.loader import flatten
from thermocline.config.messages import show_toml
from thermocline.config.publish import Publish
from thermocline.config.schema import Config
from thermocline.embedding.admission import Admission
from thermocline.embedding.expiry import Expiry
from thermocline.errors import ConfigError

MAY_CHANGE = frozenset(
    {
        *("data.valid", "data.test", "data.on_error", "data.threads", "data.follow_idle"),
        *("tiers.hbm", "tiers.mem", "tiers.mem_overcommit", "tiers.ssd", "tiers.ssd_mem", "tiers.policy"),
        "tiers.threads",
        *("tiers.lookahead", "tiers.expected_keys", "tiers.on_damage"),
        # Rules apply to the rows as they are.
        *("expiry", *(f"expiry.{field.name}" for field in dataclasses.fields(Expiry))),
        # Keys with a row stay admitted; the others continue with their counts if they are counted in the same way.
        *("admission", *(f"admission.{field.name}" for field in dataclasses.fields(Admission))),
        *("train.epochs", "train.steps", "train.clip_norm", "train.valid_every", "train.patience"),
        *("train.progressive_steps", "train.progressive_time", "train.max_time_jump"),
        "train.plateau_factor",
        *("train.checkpoint_every", "train.checkpoint_minutes", "train.keep", "train.depth", "train.pull_window"),
        # Parameters, rows and optimizer state of a checkpoint are fp32 for all of them.
        *("train.dense_precision", "train.compile"),
        *("train.log_every", "train.tensorboard", "train.display", "train.run_dir", "train.graphs"),
        *("dist.hops", "dist.overlap", "dist.topology", "dist.timeout", "dist.busy_timeout", "dist.bind"),
        *(f"publish.{field.name}" for field in dataclasses.fields(Publish)),  # it changes no bit of rows or weights
        "dist.dense_sync.exact",  # earlier builds saved their default, false
        *(f"train.schedule.{name}" for name in ("kind", "warmup_steps", "decay_steps", "factor", "floor")),
    }
)
"""All other keys determine the rows, the weights or the position in the data, which a checkpoint contains."""


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two resolved configs, with both values."""
    before, after = dict(flatten(old)), dict(flatten(new))
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def check_resume(old: Config, new: Config, run_dir: str) -> list[str]:
    """Return one line per key that a resumed run changes; raise `ConfigError` for a key that may not change."""
    found = differences(old, new)
    changes = {name: f"{name} from {show_toml(was)} to {show_toml(now)}" for name, (was, now) in found.items()}
    if refused := [text for name, text in changes.items() if name not in MAY_CHANGE]:
        raise ConfigError(
            f"{run_dir} was trained with another config: it cannot be resumed with {'; '.join(refused)}. "
            f"These keys may change: {', '.join(_sections_merged(MAY_CHANGE))}"
        )
    return list(changes.values())


def _sections_merged(names: frozenset[str]) -> list[str]:
    """Name the sections [train.schedule], [publish], [admission] and [expiry] instead of each of their keys."""
    merged = ("train.schedule", "publish", "admission", "expiry")
    return sorted({next((each for each in merged if name.startswith(f"{each}.")), name) for name in names})
