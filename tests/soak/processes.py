"""Processes of the soak: each rank of an attempt, of a check and of the reference is a fork of the soak's process.

The soak's process has imported everything and runs no threads, so that an attempt starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thermocline as tc
import thermocline.training.trainer  # once, before the forks
from thermocline import serving
from thermocline.embedding.state_dict import dense_state_dict
from thermocline.serving.snapshot import StoredRows
from thermocline.utils import atomic_file

WORLDS = 8  # largest number of ranks
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
Arrays = dict[str, Any]


class Shared:
    """Numbers that the soak's process and its forks share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (WORLDS + 1))

    def __getitem__(self, index: int) -> int:
        return int.from_bytes(self._memory[8 * index : 8 * index + 8], "little")

    def __setitem__(self, index: int, value: int) -> None:
        self._memory[8 * index : 8 * index + 8] = value.to_bytes(8, "little")


class Progress(tc.Callback):
    """Records the step of a rank in `Shared`."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def on_start(self, trainer: Any) -> None:
        self.shared[self.rank] = trainer.progress.step

    def on_step(self, trainer: Any, loss: object) -> None:
        self.shared[self.rank] = trainer.progress.step


class Ranks:
    """Forked processes, one per rank. Output and tracebacks go to `log`."""

    def __init__(self, world: int, log: Path, work: Callable[[int], None], env: dict[str, str] | None = None) -> None:
        port = _free_port()
        self.log = log
        self.codes: dict[int, int] = {}
        """Exit code of each ended rank; negative: the signal."""
        self.pids = [self._fork(rank, world, port, work, env or {}) for rank in range(world)]

    def _fork(self, rank: int, world: int, port: int, work: Callable[[int], None], env: dict[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the soak's process
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update(env)
            if world > 1:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
                )  # fmt: skip
            torch.set_num_threads(1)
            work(rank)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> bool:
        """Collect ended ranks; return whether all have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def alive(self) -> list[int]:
        """Return the pids of the ranks that run."""
        return [pid for rank, pid in enumerate(self.pids) if rank not in self.codes]

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all."""
        for index, pid in enumerate(self.pids):
            if index not in self.codes and rank in (None, index):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all ranks and wait for them."""
        self.send(signal.SIGKILL)
        while not self.poll():
            time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def set_failpoint(text: str) -> None:
    """Kill this process at a failpoint, "point:count": of the store through the environment, or of Python."""
    point, _, count = text.partition(":")
    os.environ["THERMOCLINE_KILL_AT"] = text
    atomic_file._kill_at, atomic_file._left = point, int(count)


# ---- state of a run


def state_of(run: tc.Run) -> Arrays:
    """Return all rows of this rank in key order, with statistics, and the dense state."""
    table = run.table
    pieces = list(table.backend.rows(table.checkpoint_store, 65536))
    keys, rows = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    order = np.argsort(keys)
    keys, rows = keys[order], np.ascontiguousarray(rows[order])
    assert len(np.unique(keys)) == len(keys), "a key is stored twice"
    state: Arrays = {"keys": keys, "rows": rows[:, : table.spec.trained_floats]}
    for name, values in table.spec.statistics.unpack(rows, table.backend.statistics).items():
        state[f"statistics {name}"] = values
    for name, value in dense_state_dict(run.model).items():
        state[f"dense {name}"] = value.detach().cpu().numpy()
    for number, optimizer in enumerate(run.optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                state[f"optimizer {number} {index} {name}"] = torch.as_tensor(value).cpu().numpy()
    state["steps"], state["dim"] = np.array([table.step_count]), np.array([table.dim])
    state["random"] = torch.get_rng_state().numpy()
    return state


def published_state(folder: Path) -> Arrays:
    """Return step, keys and weights of the current version: its base with all deltas after it."""
    with serving.open(folder) as snapshot:
        snapshot.verify()
        (view,) = snapshot.state.views.values()
        pieces = list(StoredRows(view))
        keys = np.concatenate([piece.keys for piece in pieces])
        rows = np.concatenate([piece.rows for piece in pieces])
        order = np.argsort(keys)
        assert np.array_equal(snapshot.find(keys)[0].view(np.uint8).reshape(len(keys), -1), rows)
        return {"step": np.array([snapshot.version.step]), "keys": keys[order], "weights": rows[order]}


def save_state(path: Path, state: Arrays) -> None:
    """Write arrays to a file that appears by a rename."""
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **state)
    temporary.rename(path)


def load_state(path: Path) -> Arrays:
    """Read the arrays of `save_state`."""
    with np.load(path) as file:
        return dict(file)


# ---- work of a rank


def train(config: tc.Config, shared: Shared, rank: int, failpoint: str = "") -> None:
    """Train from the last checkpoint to the end of the config."""
    if failpoint:
        set_failpoint(failpoint)
    resume = (Path(config.train.run_dir) / "config.toml").exists()
    with tc.Run(config, resume=resume) as run:
        run.fit(resume=resume, callbacks=[Progress(shared, rank)])


class Restored(tc.Callback):
    """Writes the restored state: at its end, `fit` replaces dense models of ranks by their mean."""

    def __init__(self, run: tc.Run, output: Path) -> None:
        self.run, self.output = run, output

    def on_start(self, trainer: Any) -> None:
        assert trainer.finished, f"the run is at step {trainer.progress.step}, before its end"
        save_state(self.output, state_of(self.run))


def check(config: tc.Config, output: Path, rank: int) -> None:
    """Restore the finished run in a new process, verify every page of its store, and write its state.

    Rank 0 writes the published rows too, in which `serving` finds those of all ranks.
    """
    with tc.Run(config, resume=True) as run:
        run.fit(resume=True, callbacks=[Restored(run, output.with_suffix(f".{rank}.npz"))])
        run.table.dram.check()
        assert run.table.store is not None
        run.table.store.check()
    if rank == 0:
        assert config.publish.folder is not None
        save_state(output.with_suffix(".published.npz"), published_state(Path(config.publish.folder)))


class Pause(tc.Callback):
    """Writes the state at the target step, and waits there for the next target."""

    def __init__(self, run: tc.Run, output: Path, shared: Shared, rank: int) -> None:
        self.run, self.output, self.shared, self.rank = run, output, shared, rank

    def on_start(self, trainer: Any) -> None:
        self._wait(0)

    def on_step(self, trainer: Any, loss: object) -> None:
        step = trainer.progress.step
        self.shared[self.rank] = step
        if step == self.shared[WORLDS]:
            save_state(self.output.with_suffix(f".{step}.{self.rank}.npz"), state_of(self.run))
            self._wait(step)

    def _wait(self, step: int) -> None:
        while self.shared[WORLDS] <= step:
            time.sleep(0.05)


def refer(config: tc.Config, output: Path, shared: Shared, rank: int) -> None:
    """Train without interruption; `shared[WORLDS]` is the step to stop at and to write the state of."""
    with contextlib.suppress(KeyboardInterrupt), tc.Run(config) as run:
        run.fit(callbacks=[Pause(run, output, shared, rank)])
