"""Runs a function on several ranks: forked processes on this machine, Gloo over loopback, one torch thread each."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.triton_types import cache_types

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

Nodes = tuple[tuple[int, ...], ...]


def run_ranks(nodes: Nodes, function: Callable[..., Any], *args: Any, seconds: float = 180.0) -> list[Any]:
    """Call `function(groups, *args)` on every rank of `nodes` and return the results, by rank.

    The function must be importable by a new process. A rank that raises, exits or takes longer than `seconds` fails the
    test.
    """
    results = []
    for rank, (status, value) in enumerate(run_failing_ranks(nodes, function, *args, seconds=seconds)):
        if status != "ok":
            raise AssertionError(f"rank {rank} {status}:\n{value}")
        results.append(value)
    return results


def run_failing_ranks(
    nodes: Nodes, function: Callable[..., Any], *args: Any, seconds: float = 180.0
) -> list[tuple[str, Any]]:
    """Call `function` on every rank and return ("ok", result), ("raised", traceback) or ("killed", None), by rank."""
    world = sum(map(len, nodes))
    context = multiprocessing.get_context("forkserver")
    _start_forkserver(context)
    outcomes: list[Any] = [None] * world
    with tempfile.TemporaryDirectory(prefix="thermocline-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(sender, folder, rank, nodes, seconds, function, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            _receive(pipes, outcomes, seconds)
        finally:
            for process in processes:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
    return outcomes


def groups_without_shm(groups: Groups) -> tuple[Groups, list[str]]:
    """Create the groups of the same ranks where memfds fail for want of descriptors. Returns the warnings too."""
    from thermocline.distributed.communicator import Groups

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    create, os.memfd_create = os.memfd_create, refuse
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = Groups.make(groups.topology, timeout=groups.timeout)
    finally:
        os.memfd_create = create
    return made, [str(warning.message) for warning in caught]


def _start_forkserver(context: Any) -> None:
    """Start the process that ranks are forked from, once. It imports the slow modules and does not touch a GPU."""
    import torch

    context.set_forkserver_preload(["helpers.rank_imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # helpers is on pytest's path
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")  # torch._dynamo imports Triton, which reads it once
        forkserver.ensure_running()


def _receive(pipes: Sequence[Connection], outcomes: list[Any], seconds: float) -> None:
    pending = dict(zip(pipes, range(len(pipes)), strict=True))
    while pending:
        ready = wait(list(pending), timeout=seconds)
        if not ready:
            late = sorted(pending.values())
            raise AssertionError(f"ranks {late} did not end within {seconds} s: they hang, or the machine is very busy")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
                outcomes[rank] = ("ok" if succeeded else "raised", value)
            except EOFError:
                outcomes[rank] = ("killed", None)


def _run_rank(
    pipe: Connection, folder: str, rank: int, nodes: Nodes, seconds: float, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.topology import Topology

    if os.environ.get("TRITON_INTERPRET") == "1":  # set by _start_forkserver
        cache_types()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = sum(map(len, nodes))
    try:
        store, timeout = dist.FileStore(str(Path(folder) / "store"), world), timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        groups = Groups.make(Topology(world, rank, nodes), timeout=seconds)
        answer = True, function(groups, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = False, traceback.format_exc()
    # Pickled by value: torch's own reduction passes file descriptors of a process that may have exited.
    pipe.send_bytes(pickle.dumps(answer))
