"""Folders of runs: state, config, and checks before training. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from thermocline.checkpoint.manifest import read_manifest
from thermocline.config.messages import nearest
from thermocline.config.resume import check_resume
from thermocline.config.schema import Config
from thermocline.data.features import Features
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.errors import ConfigError, StoreError
from thermocline.utils.untrusted_files import MAX_TEXT_BYTES, read_limited


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """State of the folder of a run at one moment. Rank 0 reads it for all ranks, so that all take the same decisions.

    Another process may change the folder at any time, and a file system may show an old state to another machine.
    """

    path: str
    has_run: bool
    """Whether it has at least one checkpoint after the start of the run."""
    has_begun: bool
    """Whether it has a run that ended before its first checkpoint."""
    saved_by_ranks: bool
    """Whether the newest readable checkpoint has one store per rank."""
    config: str | None
    """Text of config.toml."""
    features: Any
    """Content of features.json, if the folder has a run and the file."""

    @classmethod
    def read(cls, path: str | os.PathLike[str], runner: CollectiveRunner | None = None) -> Self:
        """Read the folder; over several ranks on rank 0 only. Collective."""
        runner = CollectiveRunner() if runner is None else runner
        name = os.fspath(path)
        return cls(path=name, **runner.broadcast("reading the run folder", lambda: _read(name)))

    def check(self, config: Config, *, resume: bool, runner: CollectiveRunner | None = None) -> list[str]:
        """Raise `ConfigError` if a run may not train in the folder; return the changes of a resumed run.

        Over several ranks rank 0's config decides for all: paths may differ between ranks. Collective.
        """
        runner = CollectiveRunner() if runner is None else runner
        changes, error = runner.broadcast("checking the run folder", lambda: self._check(config, resume))
        if error is not None:
            raise ConfigError(error)
        return changes

    def _check(self, config: Config, resume: bool) -> tuple[list[str], str | None]:
        """Return the changes and None, or the text of an error."""
        try:
            return self._changes(config, resume), None
        except ConfigError as error:
            return [], str(error)

    def _changes(self, config: Config, resume: bool) -> list[str]:
        if not self.has_run:
            return []
        if not resume:
            raise ConfigError(
                f"{self.path} already has a run: continue it with --resume (resume=True), or start a new one in "
                "another train.run_dir"
            )
        if self.config is None:
            raise _no_config(self.path)
        path = Path(self.path) / "config.toml"
        saved = Config.parse(self.config, name=str(path)).relocated(path.parent)
        return check_resume(saved.resolve(), config.resolve().with_absolute_ssd(), self.path)


def _read(path: str) -> dict[str, Any]:
    folder = Path(path)
    run, features, config = has_run(path), folder / "features.json", folder / "config.toml"
    return {
        "has_run": run,
        "has_begun": not run and any((folder / "checkpoints").glob("[0-9]*.json")),
        "saved_by_ranks": saved_by_ranks(path),
        "config": read_limited(config, MAX_TEXT_BYTES).decode(errors="replace") if config.exists() else None,
        "features": Features.load(features).saved() if run and features.exists() else None,
    }


def has_run(run_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder has a run with at least one checkpoint after its start."""
    return any(not _is_start(path) for path in (Path(run_dir) / "checkpoints").glob("[0-9]*.json"))


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


# ---- config


def config_of(run_dir: str | os.PathLike[str], sets: Sequence[str] = ()) -> Config:
    """Load the config of a run, with overrides.

    `dist.topology` is left out unless an override sets it: it describes the ranks that trained, and names a file of
    their machines.
    """
    path = Path(run_dir) / "config.toml"
    if not path.exists():
        raise _no_config(run_dir)
    text = read_limited(path, MAX_TEXT_BYTES).decode(errors="replace")
    config = Config.parse(text, sets, name=str(path)).relocated(path.parent)
    if "dist.topology" not in {override.partition("=")[0].replace(" ", "") for override in sets}:
        config = dataclasses.replace(config, dist=dataclasses.replace(config.dist, topology=None))
    return config


def _no_config(run_dir: str | os.PathLike[str]) -> ConfigError:
    path = Path(run_dir)
    runs = [p.parent.name for p in path.parent.glob("*/config.toml")] if path.parent.is_dir() else []
    hint = nearest(path.name, runs)
    return ConfigError(f"{run_dir} is not a run: it has no config.toml, which `thermocline train` writes{hint}")
