"""Folders of runs: what was trained there and with which config, and whether one may train there. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from thermocline.config.messages import nearest
from thermocline.config.resume import check_resume
from thermocline.config.schema import Config
from thermocline.errors import ConfigError, CorruptionError
from thermocline.utils import atomic_file


def has_run(run_dir: str | os.PathLike[str]) -> bool:
    """Whether something was trained and saved there; a run that ended before its first save is none."""
    return any(not _is_beginning(path) for path in (Path(run_dir) / "checkpoints").glob("[0-9]*.json"))


def has_begun(run_dir: str | os.PathLike[str]) -> bool:
    """Whether a run ended there before its first save."""
    return not has_run(run_dir) and any((Path(run_dir) / "checkpoints").glob("[0-9]*.json"))


def saved_by_ranks(run_dir: str | os.PathLike[str]) -> bool:
    """Whether the newest checkpoint there has the rows of several ranks, each in a store of its own."""
    for path in sorted((Path(run_dir) / "checkpoints").glob("[0-9]*.json"), reverse=True):
        try:
            return "ranks" in atomic_file.decode_manifest(path.read_bytes(), str(path))
        except (OSError, CorruptionError):
            continue  # the checkpoints say so themselves
    return False


def _is_beginning(manifest: Path) -> bool:
    try:
        return bool(atomic_file.decode_manifest(manifest.read_bytes(), str(manifest))["begin"])
    except (OSError, CorruptionError):
        return False  # damaged, or replaced meanwhile: the checkpoints say so themselves


def config_of(run_dir: str | os.PathLike[str], sets: Sequence[str] = ()) -> Config:
    """The config that a run was trained with, changed by overrides."""
    path = Path(run_dir) / "config.toml"
    if not path.exists():
        folder = path.parent.parent
        others = [p.parent.name for p in folder.glob("*/config.toml")] if folder.is_dir() else []
        hint = nearest(path.parent.name, others)
        raise ConfigError(f"{run_dir} is no run: it has no config.toml, which `thermocline train` writes{hint}")
    return Config.load(path, sets).relocated(path.parent)


def check_folder(config: Config, *, resume: bool) -> list[str]:
    """Before anything is loaded: whether a run may train in its folder. Returns what a resumed run changes."""
    run_dir = config.train.run_dir
    if not has_run(run_dir):
        return []
    if not resume:
        raise ConfigError(
            f"{run_dir} already has a run: --resume (resume=True) goes on with it, "
            "another train.run_dir begins a new one"
        )
    return check_resume(config_of(run_dir).resolve(), config.resolve().with_absolute_ssd(), run_dir)
