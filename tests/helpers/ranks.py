"""Runs a function as several ranks: processes of this machine, joined by Gloo over loopback, one torch thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Nodes = tuple[tuple[int, ...], ...]


def play(nodes: Nodes, function: Callable[..., Any], *args: Any, seconds: float = 180.0) -> list[Any]:
    """`function(groups, *args)` on every rank of `nodes`; what each returned, by rank.

    The function lies in a module that a new process can import. A rank that fails or takes too long fails the test.
    """
    results = []
    for rank, (how, value) in enumerate(outcomes(nodes, function, *args, seconds=seconds)):
        if how != "fine":
            raise AssertionError(f"rank {rank} {how}:\n{value}")
        results.append(value)
    return results


def outcomes(nodes: Nodes, function: Callable[..., Any], *args: Any, seconds: float = 180.0) -> list[tuple[str, Any]]:
    """The same for ranks that may fail: ("fine", what it returned), ("failed", its traceback) or ("died", None)."""
    world = sum(map(len, nodes))
    context = multiprocessing.get_context("forkserver")
    _start_server(context)
    results: list[Any] = [None] * world
    with tempfile.TemporaryDirectory(prefix="thermocline-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, folder, rank, nodes, seconds, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            _receive(pipes, results, seconds)
        finally:
            for process in processes:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
    return results


def _start_server(context: Any) -> None:
    """Once: the process that all ranks are forked from. It has loaded what takes long, and has not touched a GPU."""
    import torch

    # The first optimizer imports torch._dynamo: more than a second, of every rank.
    loaded = [
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "thermocline.distributed.dense_sync",
        "thermocline.training.trainer",
    ]
    context.set_forkserver_preload(loaded)
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # torch._dynamo imports Triton, which decides there
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)


def _receive(pipes: Sequence[Connection], results: list[Any], seconds: float) -> None:
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=seconds)
        if not ready:
            late = sorted(waiting.values())
            raise AssertionError(f"ranks {late} have not ended in {seconds} s: they hang, or the machine is very busy")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                fine, value = pickle.loads(pipe.recv_bytes())
                results[rank] = ("fine" if fine else "failed", value)
            except EOFError:
                results[rank] = ("died", None)


def _rank(
    pipe: Connection, folder: str, rank: int, nodes: Nodes, seconds: float, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.topology import Topology

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = sum(map(len, nodes))
    try:
        store, limit = dist.FileStore(str(Path(folder) / "store"), world), timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        groups = Groups.make(Topology(world, rank, nodes), timeout=seconds)
        answer = True, function(groups, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own way hands over files of a process that may be gone
