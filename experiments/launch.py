"""Training jobs of several processes: torchrun for Thermocline's ranks, mpirun for the MPI baseline."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines.mpi_ps import launch as mpi_launch
from thermocline.config.data import Data, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train
from thermocline.distributed.launch import child_environment
from thermocline.errors import ThermoclineError
from thermocline.utils import atomic_file

Event = dict[str, Any]
"""One line of a run's metrics.jsonl."""

_GRACE = 10.0  # seconds between SIGTERM to the launcher and SIGKILL to its process group


def one_core_config(synth: Synth, *, dim: int, hidden: tuple[int, ...], batch: int, log_every: int) -> Config:
    """Configure a DNN on generated data for ranks with one thread each and all rows in DRAM."""
    return Config(
        data=Data(format="synth", synth=synth, threads=1),
        model=ModelConfig(
            name="dnn", dim=dim, hidden=hidden, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        tiers=Tiers(device="cpu", mem=synth.keys * 200 + (64 << 20), threads=1),
        train=Train(
            batch_size=batch, optimizer="adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3, seed=synth.seed,
            torch_threads=1, log_every=log_every, checkpoint_minutes=None, display=False, tensorboard=False,
        ),
    )  # fmt: skip


def train_ranks(config: Config, ranks: int, folder: Path, limit: float) -> list[Event]:
    """Train a config from the start with torchrun on this machine; return the events of metrics.jsonl.

    limit   seconds after which the job is ended with an error
    """
    path, run_dir = _prepare(config, folder, "ranks")
    job = ["-m", "thermocline", "train", str(path), "--set", f"train.run_dir={run_dir}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_job(f"{ranks} ranks", [sys.executable, *launcher, *job], child_environment(), run_dir, limit)


def mean_speed(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the examples/s over all logs except the first one, which includes the start-up."""
    logs = [event for event in events if event["event"] == "train"][1:]
    return float(len(logs) / sum(1 / event["examples_per_s"] for event in logs))


def mpi_missing() -> str | None:
    """Return the reason why the MPI baseline cannot run on this machine, or None."""
    return mpi_launch.missing()


def train_mpi(
    config: Config, ranks: int, folder: Path, limit: float, *, seconds: float | None = None, prepared: int = 0
) -> list[Event]:
    """Train a config from the start with `baselines/mpi_ps`; return the events of metrics.jsonl.

    limit     seconds after which the job is ended with an error
    seconds   length of the training; None trains to the end of the config
    prepared  batches generated before the training and repeated, with a row for every key; 0: generated as needed
    """
    path, run_dir = _prepare(config, folder, "mpi")
    arguments = ["-m", "baselines.mpi_ps", str(path), "--set", f"train.run_dir={run_dir}"]
    arguments += ["--seconds", str(seconds)] if seconds is not None else []
    arguments += ["--prepared", str(prepared)] if prepared else []
    command = mpi_launch.command(ranks, arguments)
    return run_job(f"the MPI baseline with {ranks} ranks", command, mpi_launch.environment(), run_dir, limit)


def _prepare(config: Config, folder: Path, name: str) -> tuple[Path, Path]:
    """Write the config file and remove the run folder of an earlier call; return both paths."""
    run_dir = folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    atomic_file.atomic_write(path, config.to_toml().encode())
    return path, run_dir


def run_job(
    name: str, command: Sequence[str], environment: Mapping[str, str], run_dir: Path, limit: float
) -> list[Event]:
    """Run a launcher to its end; return the events of the run's metrics.jsonl.

    A launcher that exceeds `limit` seconds is ended together with all its processes.
    """
    pipe = subprocess.PIPE
    # In its own session the launcher does not receive Ctrl-C: this process ends it, and it ends its children.
    with subprocess.Popen(
        command, env=dict(environment), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as launcher:
        try:
            _, stderr = launcher.communicate(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            _end(launcher)
            raise ThermoclineError(f"{name}: no end within {limit:.0f} s; a smaller --effort trains less") from None
        except BaseException:
            _end(launcher)
            raise
    if launcher.returncode:
        # Launchers print many lines after the one with the cause.
        cause = [line for line in stderr.splitlines() if line.startswith(("thermocline: ", "error: "))][:1]
        raise ThermoclineError(f"{name} failed: {cause[0] if cause else stderr.strip()[-1000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _end(launcher: subprocess.Popen[str]) -> None:
    launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
