"""Measures link speeds and the processor time of row exchange and all-reduce, with two ranks on this machine.

`measure_ranks` starts two processes (`python -m thermocline.planner.calibrate_ranks`) with one torch thread each, as
torchrun does. They run the code that training runs.
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
from typing import Any, NamedTuple

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
from thermocline.utils.malloc import keep_freed_memory

DIMS = (8, 64)
BATCH, SMALL_BATCH = 4096, 16
"""Examples per step: many keys show the cost per key, few keys the fixed cost."""
FLOATS, MESSAGE_FLOATS = 1_000_000, 2_000_000
REPEATS = 9
TRAINING_STEPS, WARMUP_STEPS = 200, 20


def measure_ranks(
    timeout: float = 120.0, *, repeats: int = REPEATS, training_steps: int = TRAINING_STEPS
) -> dict[str, float]:
    """Measure the figures of `LinkSpeeds` (without data_gbs) and the fields of `Cpu` for several ranks.

    timeout          seconds per rank
    repeats          measurements per figure, of which the median counts
    training_steps   timed steps of the training that shows the fixed cost of a step over ranks

    Raise ThermoclineError if a rank fails.
    """
    env = {**child_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "thermocline.planner.calibrate_ranks", str(Path(folder) / "rendezvous")]
        command += [str(repeats), str(training_steps)]
        ranks = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True, env=env) for n in range(2)]
        figures = []
        try:
            for rank in ranks:
                output = rank.communicate(timeout=timeout)[0]
                if rank.returncode:
                    raise ThermoclineError(
                        f"measuring two ranks failed: a rank exited with status {rank.returncode}, see its error above"
                    )
                figures.append(json.loads(output))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return {name: sum(of_rank[name] for of_rank in figures) / 2 for name in figures[0]}


def main(rendezvous: str, repeats: int, training_steps: int, rank: int) -> None:
    """Measure as one of the two ranks and print the figures as JSON."""
    keep_freed_memory()  # as training does
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    topology = Topology(2, rank, ((0, 1),))
    groups = Groups.make(topology, timeout=60.0)
    sockets = Groups.make(topology, timeout=60.0, shared=False)  # messages use Gloo, as between nodes
    short, long = (_exchange_costs(groups, dim, BATCH, repeats) for dim in DIMS)
    fixed = _exchange_costs(groups, DIMS[0], SMALL_BATCH, repeats)
    per_float = max(long.exchange - short.exchange, 1e-12) / (DIMS[1] - DIMS[0]) / long.keys
    keys = (short.keys - fixed.keys) / 1e9
    figures = {
        "route_key_ns": (short.route - fixed.route) / keys,
        "route_us": fixed.route * 1e6,
        "exchange_key_ns": (short.exchange - fixed.exchange) / keys - DIMS[0] * per_float * 1e9,
        "exchange_float_ns": per_float * 1e9,
        "exchange_us": max(fixed.exchange, _step_overhead(groups, training_steps) - fixed.route) * 1e6,
    }
    latency, total = (_allreduce_seconds(groups, count, repeats) for count in (SMALL_BATCH, FLOATS))
    figures |= {"allreduce_us": latency * 1e6, "allreduce_float_ns": (total - latency) / FLOATS * 1e9}
    for link, comm in (("node", groups.train), ("network", sockets.train)):
        figures[f"{link}_us"] = _all_to_all_seconds(comm, 1, 50) * 1e6
        seconds = _all_to_all_seconds(comm, MESSAGE_FLOATS, repeats)
        figures[f"{link}_gbs"] = 4 * MESSAGE_FLOATS / seconds / 1e9
    print(json.dumps({name: max(value, 1e-3) for name, value in figures.items()}))
    dist.destroy_process_group()


class _ExchangeCosts(NamedTuple):
    """Median processor seconds of one step on this rank."""

    route: float
    """Send keys to their owners."""
    exchange: float
    """Exchange rows and gradients."""
    keys: float
    """Mean number of unique keys."""


def _exchange_costs(groups: Groups, dim: int, examples: int, repeats: int) -> _ExchangeCosts:
    exchange = RowExchange(groups.topology, threads=1)
    comm, rank = groups.train, groups.topology.rank
    ads = SyntheticAds(keys=400_000, fields=26, batch_size=examples, tensors=False)
    route_seconds, exchange_seconds, key_counts = [], [], []
    for number in range(repeats):
        keys = WorkingSet.of(ads.batch(2 * number + rank).ids, threads=1).keys
        start = time.process_time()
        comm.all_gather(np.zeros(2, np.int64), "agreeing on the next window")
        (route,) = exchange.plan(comm, [keys], TrafficCounter())
        route_seconds.append(time.process_time() - start)
        owned = torch.ones(len(route.owned), dim)
        rows = torch.empty(len(keys), dim)
        start = time.process_time()
        exchange.fetch_rows(comm, route, functools.partial(take_rows, owned), rows, TrafficCounter())
        exchange.reduce_gradients(comm, route, rows, None, TrafficCounter())
        exchange_seconds.append(time.process_time() - start)
        key_counts.append(len(keys))
    return _ExchangeCosts(
        float(np.median(route_seconds)), float(np.median(exchange_seconds)), float(np.mean(key_counts))
    )


def _step_overhead(groups: Groups, steps: int) -> float:
    """Processor seconds per step of a small training over two ranks, minus those in one process."""
    seconds = []
    for table_class, options in ((Table, {"per_rank": True}), (ShardedTable, {"groups": groups})):
        make_table: Any = table_class
        table = make_table(DIMS[0], RowWiseAdagrad(lr=0.01), mem=64 << 20, threads=1, **options)
        with contextlib.closing(table):
            bag = EmbeddingBag(table, 26)
            examples = (WARMUP_STEPS + steps) * SMALL_BATCH
            ads = SyntheticAds(keys=10_000, fields=26, batch_size=SMALL_BATCH, examples=examples)
            times = []
            with prefetch(ads, table) as batches:
                for batch in batches:
                    torch.autograd.backward(bag(batch).sum())
                    table.step()
                    times.append(time.process_time())
            seconds.append((times[-1] - times[WARMUP_STEPS - 1]) / steps)
    return seconds[1] - seconds[0]


def _allreduce_seconds(groups: Groups, count: int, repeats: int) -> float:
    """Processor seconds to average `count` gradients."""
    parameter = torch.nn.Parameter(torch.zeros(count))
    parameter.grad = torch.ones(count)
    sync = DenseParameters.make([parameter], [], groups, DenseSync())
    sync.begin()
    return _median_seconds(sync.after_backward, time.process_time, repeats)


def _all_to_all_seconds(comm: Communicator, floats: int, repeats: int) -> float:
    """Wall seconds of an all-to-all of `floats` floats per pair of ranks."""
    source, target = torch.ones(2 * floats), torch.empty(2 * floats)
    sizes = [4 * floats, 4 * floats]

    def exchange() -> None:
        pieces = comm.all_to_all("node", source.view(torch.uint8), sizes, sizes, "measuring the link")
        torch.cat([piece.view(torch.float32) for piece in pieces], out=target)

    return _median_seconds(exchange, time.perf_counter, repeats)


def _median_seconds(work: Callable[[], Any], clock: Callable[[], float], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = clock()
        work()
        seconds.append(clock() - start)
    return float(np.median(seconds))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
