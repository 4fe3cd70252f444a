"""Folders of runs: state, config, and checks before training. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from thermocline.checkpoint.manifest import read_manifest
from thermocline.config.messages import nearest
from thermocline.config.resume import check_resume
from thermocline.config.schema import Config
from thermocline.errors import ConfigError, StoreError
from thermocline.utils.untrusted_files import MAX_TEXT_BYTES, read_limited


def has_run(run_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder has a run with at least one checkpoint after its start."""
    return any(not _is_start(path) for path in (Path(run_dir) / "checkpoints").glob("[0-9]*.json"))


def has_begun(run_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder has a run that ended before its first checkpoint."""
    return not has_run(run_dir) and any((Path(run_dir) / "checkpoints").glob("[0-9]*.json"))


def saved_by_ranks(run_dir: str | os.PathLike[str]) -> bool:
    """Whether the newest readable checkpoint has the rows of several ranks, one store per rank."""
    for path in sorted((Path(run_dir) / "checkpoints").glob("[0-9]*.json"), reverse=True):
        try:
            return "ranks" in read_manifest(path)
        except (OSError, StoreError):
            continue  # opening the checkpoint reports the damage
    return False


def _is_start(manifest: Path) -> bool:
    try:
        return bool(read_manifest(manifest)["begin"])
    except (OSError, StoreError):
        return False  # damaged or replaced meanwhile; opening the checkpoint reports damage


def config_of(run_dir: str | os.PathLike[str], sets: Sequence[str] = ()) -> Config:
    """Load the config of a run, with overrides."""
    path = Path(run_dir) / "config.toml"
    if not path.exists():
        folder = path.parent.parent
        runs = [p.parent.name for p in folder.glob("*/config.toml")] if folder.is_dir() else []
        hint = nearest(path.parent.name, runs)
        raise ConfigError(f"{run_dir} is not a run: it has no config.toml, which `thermocline train` writes{hint}")
    text = read_limited(path, MAX_TEXT_BYTES).decode(errors="replace")
    return Config.parse(text, sets, name=str(path)).relocated(path.parent)


def check_folder(config: Config, *, resume: bool) -> list[str]:
    """Raise `ConfigError` if a run may not train in its folder; return the changes of a resumed run."""
    run_dir = config.train.run_dir
    if not has_run(run_dir):
        return []
    if not resume:
        raise ConfigError(
            f"{run_dir} already has a run: continue it with --resume (resume=True), or start a new one in another "
            "train.run_dir"
        )
    return check_resume(config_of(run_dir).resolve(), config.resolve().with_absolute_ssd(), run_dir)
