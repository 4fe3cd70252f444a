"""The MPI rival on this machine's cores: a config trained by `baselines/mpi_ps`, which a source tree has."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import thermocline
from experiments.processes import events_of
from thermocline.config.schema import Config
from thermocline.utils import atomic_file


def missing() -> str | None:
    """Why it cannot run here; none: it can."""
    launch = _launch()
    if launch is None:
        return "baselines/mpi_ps is not here: only a source tree has it"
    why: str | None = launch.missing()
    return why


def _launch() -> Any:
    """How the rival is started; none: it is not here."""
    root = str(Path(thermocline.__file__).parents[2])
    if importlib.util.find_spec("baselines") is None and root not in sys.path:
        sys.path.append(root)  # a source tree whose package is on the path, but not the tree itself
    if importlib.util.find_spec("baselines") is None:
        return None
    return importlib.import_module("baselines.mpi_ps.launch")


def train(
    config: Config, ranks: int, folder: Path, limit: float, *, seconds: float | None = None
) -> list[dict[str, Any]]:
    """The events of its metrics.jsonl: as a `thermocline train` of the same config writes them, with "seconds".

    It begins anew, whatever an earlier call has left.
    limit     of the whole, after which it is an error
    seconds   of training, if it is not to go on to the config's end
    """
    launch = _launch()
    shutil.rmtree(folder / "rival", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rival.toml"
    atomic_file.atomic_write(path, config.to_toml().encode())
    arguments = ["-m", "baselines.mpi_ps", str(path), "--set", f"train.run_dir={folder / 'rival'}"]
    arguments += ["--seconds", str(seconds)] if seconds is not None else []
    command, what = launch.command(ranks, arguments), f"the MPI rival with {ranks} ranks"
    return events_of(what, command, launch.environment(), folder / "rival", limit)
