"""Two ranks of this machine: what shared memory and Gloo carry, and what exchanging rows and averaging costs cores.

`measure_pair` starts them as processes of their own (`python -m thermocline.planner.calibrate_ranks`), one torch thread
each, as torchrun does. They run the code that training runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from thermocline.batch import WorkingSet
from thermocline.config.dense_sync import DenseSync
from thermocline.data.synthetic import SyntheticAds
from thermocline.distributed.communicator import Communicator, Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.launch import child_environment
from thermocline.distributed.row_exchange import RowExchange, TrafficCounter
from thermocline.distributed.row_reduce import take_rows
from thermocline.distributed.sharded_table import ShardedTable
from thermocline.distributed.topology import Topology
from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.optimizers import RowWiseAdagrad
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.pipeline.prefetch import prefetch

DIMS = (8, 64)
BATCH, FEW = 4096, 16
"""Examples of a step that shows costs per key, and of one that shows what is left without keys."""
FLOATS, MESSAGE = 1_000_000, 2_000_000
TIMES = 9
STEPS = 200
"""Of the training that shows what is left without keys."""


def measure_pair(limit: float = 120.0) -> dict[str, float]:
    """Of an all-to-all within the node and by Gloo, and the figures of `hardware.Cpu` about ranks."""
    local = {**child_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "thermocline.planner.calibrate_ranks", str(Path(name) / "meet")]
        pair = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True, env=local) for n in range(2)]
        both = []
        try:
            for rank in pair:
                text = rank.communicate(timeout=limit)[0]
                if rank.returncode:
                    raise ThermoclineError(f"two ranks on this machine: one ended with {rank.returncode}, as it says")
                both.append(json.loads(text))
        finally:
            for rank in pair:
                rank.kill()
                rank.wait()
    return {figure: sum(found[figure] for found in both) / 2 for figure in both[0]}


def main(meeting: str, rank: int) -> None:
    """One of the two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    groups = Groups.make(Topology(2, rank, ((0, 1),)), timeout=60.0)
    small, large = (_step(groups, dim, BATCH) for dim in DIMS)
    few = _step(groups, DIMS[0], FEW)
    each = max(large["exchange"] - small["exchange"], 1e-12) / (DIMS[1] - DIMS[0]) / large["keys"]
    keys = (small["keys"] - few["keys"]) / 1e9
    found = {
        "ask_key_ns": (small["ask"] - few["ask"]) / keys,
        "ask_us": few["ask"] * 1e6,
        "exchange_key_ns": (small["exchange"] - few["exchange"]) / keys - DIMS[0] * each * 1e9,
        "exchange_float_ns": each * 1e9,
        "exchange_us": max(few["exchange"], _more(groups) - few["ask"]) * 1e6,
    }
    none, many = (_average(groups, count) for count in (FEW, FLOATS))
    found |= {"average_us": none * 1e6, "average_float_ns": (many - none) / FLOATS * 1e9}
    for link in ("node", "network"):
        found |= {f"{link}_us": _wall(groups.train, 1, 50) * 1e6}
        found |= {f"{link}_gbs": 4 * MESSAGE / _wall(groups.train, MESSAGE, TIMES) / 1e9}
        groups.train.shm = None  # what is between nodes goes by Gloo
    print(json.dumps({name: max(value, 1e-3) for name, value in found.items()}))
    dist.destroy_process_group()


def _step(groups: Groups, dim: int, examples: int) -> dict[str, float]:
    """Processor seconds of a step's exchanges, by this rank, and its unique keys."""
    exchange = RowExchange(groups.topology, threads=1)
    comm, rank = groups.train, groups.topology.rank
    ads = SyntheticAds(keys=400_000, fields=26, batch_size=examples, tensors=False)
    asked, moved, keys = [], [], []
    for number in range(TIMES):
        mine = WorkingSet.of(ads.batch(2 * number + rank).ids, threads=1).keys
        start = time.process_time()
        comm.all_gather(np.zeros(2, np.int64), "agreeing on the next window")
        (route,) = exchange.plan(comm, [mine], TrafficCounter())
        asked.append(time.process_time() - start)
        owned = torch.ones(len(route.owned), dim)
        rows = torch.empty(len(mine), dim)
        start = time.process_time()
        exchange.fetch_rows(comm, route, functools.partial(take_rows, owned), rows, TrafficCounter())
        exchange.reduce_gradients(comm, route, rows, None, TrafficCounter())
        moved.append(time.process_time() - start)
        keys.append(len(mine))
    return {"ask": float(np.median(asked)), "exchange": float(np.median(moved)), "keys": float(np.mean(keys))}


def _more(groups: Groups) -> float:
    """Processor seconds that a step of next to nothing takes more over two ranks than in one process."""
    optimizer = RowWiseAdagrad(lr=0.01)
    taken = []
    for ranks in (False, True):
        own = {"groups": groups} if ranks else {}
        kind: Any = ShardedTable if ranks else Table
        with contextlib.closing(kind(DIMS[0], optimizer, mem=64 << 20, threads=1, **own)) as table:
            bag = EmbeddingBag(table, 26)
            ads = SyntheticAds(keys=10_000, fields=26, batch_size=FEW, examples=(20 + STEPS) * FEW)
            times = []
            with prefetch(ads, table) as ready:
                for batch in ready:
                    torch.autograd.backward(bag(batch).sum())
                    table.step()
                    times.append(time.process_time())
            taken.append((times[-1] - times[19]) / STEPS)
    return taken[1] - taken[0]


def _average(groups: Groups, count: int) -> float:
    """Processor seconds of averaging so many gradients."""
    parameter = torch.nn.Parameter(torch.zeros(count))
    parameter.grad = torch.ones(count)
    sync = DenseParameters.make([parameter], [], groups, DenseSync())
    return _median(sync.after_backward, time.process_time)


def _wall(comm: Communicator, floats: int, times: int) -> float:
    """Seconds of an all-to-all of so many floats from each to each."""
    out, into = torch.ones(2 * floats), torch.empty(2 * floats)
    sizes = [4 * floats, 4 * floats]

    def swap() -> None:
        pieces = comm.all_to_all("node", out.view(torch.uint8), sizes, sizes, "measuring the link")
        torch.cat([piece.view(torch.float32) for piece in pieces], out=into)

    return _median(swap, time.perf_counter, times)


def _median(work: Callable[[], Any], clock: Callable[[], float], times: int = TIMES) -> float:
    taken = []
    for _ in range(times):
        dist.barrier()
        start = clock()
        work()
        taken.append(clock() - start)
    return float(np.median(taken))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
