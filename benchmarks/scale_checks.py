"""Measurements for benchmarks/scale.py: the formulas of `planner/scale_model.py` at sizes that run in seconds."""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY

# isort: split
import dataclasses
import datetime
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from thermocline.distributed.group_setup import _needed_groups
from thermocline.distributed.row_exchange import RowExchange
from thermocline.distributed.topology import Topology
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.scale_model import COMMUNICATORS, Ranks, StoreShape, StoreSize, Traffic, manifest_bytes

BATCH = 50_000


class Check(NamedTuple):
    """A predicted and a measured figure. `least` and `most`: the bounds of measured / predicted that pass."""

    what: str
    predicted: float
    measured: float
    least: float
    most: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def passed(self) -> bool:
        return self.least <= self.ratio <= self.most


# ---- stores


def small_shape(row_bytes: int) -> StoreShape:
    """Options with which a store of 1e5 to 1e7 rows has the number of files and extents of a large one."""
    return StoreShape(
        row_bytes=row_bytes,
        partition_bytes=64 << 10,
        segment_bytes=256 << 10,
        min_log_bytes=32 << 10,
        write_buffer=128 << 10,
    )


def _open(path: Path, shape: StoreShape, mem_budget: int) -> tc.SsdStore:
    options = dataclasses.asdict(shape)
    return tc.SsdStore.open(path, mem_budget=mem_budget, background_merge=False, merge_threads=1, **options)


def _files_open(folder: Path) -> int:
    """Data files of a store that this process has open."""
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the descriptor of this listing
            continue
        count += target.startswith(str(folder)) and target.endswith(".tc")
    return count


def check_store(folder: Path, rows: int, row_bytes: int) -> tuple[list[Check], dict[str, float]]:
    """Fill a store, update it until merging is in its steady state, and compare; return also the cost of opening it."""
    shape, rng = small_shape(row_bytes), np.random.default_rng(rows)
    size, path = StoreSize(shape, rows), folder / f"{rows}-{row_bytes}"
    keys = rng.permutation(rows).astype(np.uint64)
    with _open(path, shape, 1 << 30) as store:
        for first in range(0, rows, BATCH):
            part = keys[first : first + BATCH]
            store.put(part, np.zeros((len(part), row_bytes), np.uint8))
        store.merge()
        merged = store.stats()
        per_flush = max(1, shape.write_buffer // shape.entry_bytes)
        zeros = np.zeros((per_flush, row_bytes), np.uint8)
        for _ in range(int(2.5 * shape.max_log_ratio * rows / per_flush) + 1):
            store.put(rng.choice(keys, per_flush, replace=rows < per_flush), zeros)
        store.commit()
        stats, files = store.stats(), _files_open(path)
        segments = len(list(path.glob("log-*.tc")))
    manifest = max(file.stat().st_size for file in path.glob("MANIFEST-*"))
    extents = (manifest - manifest_bytes(stats.partitions, segments, 0)) / 40
    least, most = size.partitions
    checks = [
        Check("base bytes", size.base_bytes, merged.base_bytes, 0.95, 1.25),
        Check("index after merging: fences, filter, records", _merged_index(size), merged.mem_index, 0.8, 1.25),
        Check("index with the log", size.index_bytes, stats.mem_index, 0.6, 1.25),
        Check("log bytes", size.log_bytes, stats.log_bytes, 0.4, 1.6),
        Check("partitions, of the largest number", most, stats.partitions, 0.5 * least / (most / 2), 1.0),
        Check("open data files, of the largest number", size.open_files, files, 0.3, 1.0),
        Check("extents", size.extents, extents, 0.4, 1.6),
        Check("manifest bytes, of the largest number", size.manifest_bytes, manifest, 0.4, 1.1),
    ]
    start, wall = time.process_time(), time.perf_counter()
    with _open(path, shape, 1 << 30):
        opened = {"processor_s": time.process_time() - start, "wall_s": time.perf_counter() - wall}
    return checks, {**opened, "log_rows": stats.rows_in_log, "partitions": stats.partitions}


def _merged_index(size: StoreSize) -> float:
    least, most = size.partitions
    return size.fence_bytes + size.filter_bytes + (least + most) / 2 * 400


def extents_and_writes(folder: Path, rows: int, mem_budget: int) -> tuple[float, int]:
    """(bytes that merges write per byte put, merges) of updates whose log wants 2.4 times 4,096 extents."""
    shape = dataclasses.replace(small_shape(16), filter_bits=0)
    per_put = max(1, int(shape.max_log_ratio * rows / (2.4 * 4096)))
    shape = dataclasses.replace(shape, write_buffer=per_put * shape.entry_bytes)  # every put is an extent
    rng, path = np.random.default_rng(0), folder / f"extents-{mem_budget}"
    with _open(path, shape, mem_budget) as store:
        store.load(np.arange(rows, dtype=np.uint64), np.zeros((rows, 16), np.uint8))
        before, zeros = store.stats(), np.zeros((per_put, 16), np.uint8)
        for _ in range(int(2 * shape.max_log_ratio * rows / per_put)):
            store.put(rng.integers(0, rows, per_put, dtype=np.uint64), zeros)
        after = store.stats()
    written = after.merge_bytes_written - before.merge_bytes_written
    return written / (after.bytes_put - before.bytes_put), after.merges - before.merges


# ---- ranks


def check_connections(ranks: Ranks) -> Check:
    """Compare the groups that a rank of this job would make with the formula. Starts nothing."""
    size = ranks.per_node
    nodes = tuple(tuple(range(n * size, (n + 1) * size)) for n in range(ranks.nodes))
    topology = Topology(ranks.world, ranks.world // 2, nodes)
    planned = sum(len(group) - 1 for group in _needed_groups(topology, set()) if topology.rank in group)
    return Check(f"connections of a rank, {ranks.world} ranks", ranks.connections, COMMUNICATORS * planned, 1, 1)


class _GlooGroups:
    """Gloo's group of all ranks, once for each of them, in this process."""

    def __init__(self, world: int) -> None:
        self.world, self._store = world, dist.HashStore()
        self._groups: list[Any] = [None] * world
        in_threads(world, self._connect)

    def _connect(self, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=120)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        self._groups[rank] = dist.ProcessGroupGloo(self._store, rank, self.world, options)

    def gather(self, rank: int) -> None:
        self._groups[rank].allgather([[torch.zeros(1) for _ in range(self.world)]], [torch.zeros(1)]).wait()

    def all_to_all(self, rank: int) -> None:
        ones = [1] * self.world
        self._groups[rank].alltoall_base(torch.zeros(self.world), torch.zeros(self.world), ones, ones).wait()


def check_connection_memory(world: int) -> Check:
    """Compare the memory that the groups of all ranks take, per connection, with the most of the formula."""
    before, groups = 0, []
    for _ in range(2):  # the first takes memory that the process needs once, and keeps it
        before = _resident_bytes()
        groups.append(_GlooGroups(world))
        in_threads(world, groups[-1].all_to_all)
    per_connection = (_resident_bytes() - before) / (world * (world - 1))
    ranks = Ranks(world, 1)
    most = ranks.connection_bytes / ranks.connections
    return Check(f"memory per connection of {world} ranks, of the most", most, per_connection, 0.1, 1.0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_sockets(world: int) -> list[Check]:
    """Create Gloo's group of `world` ranks in this process: descriptors per rank after all-gather, then all-to-all."""
    before = len(os.listdir("/proc/self/fd"))
    gloo = _GlooGroups(world)
    listening = len(os.listdir("/proc/self/fd"))
    in_threads(world, gloo.gather)
    gathered = len(os.listdir("/proc/self/fd"))
    in_threads(world, gloo.all_to_all)
    total = len(os.listdir("/proc/self/fd"))
    return [
        Check(f"descriptors of a group of {world}, without connections", 4, (listening - before) / world, 1, 1),
        Check(f"connections after an all-gather of {world}", 2, (gathered - listening) / world, 1, 1),
        Check(f"connections after an all-to-all of {world}", world - 1, (total - listening) / world, 1, 1),
    ]


def in_threads(count: int, run: Callable[[int], None]) -> None:
    """Call run(0), run(1), ... on threads at the same time; raise the first exception."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _PlayedGroup:
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(len(ranks), timeout=300)
        self.box: dict[int, list[torch.Tensor]] = {}


class PlayedCommunicator:
    """The collectives that `RowExchange` uses, between threads; counts messages to other ranks."""

    def __init__(self, rank: int, groups: dict[str, _PlayedGroup]) -> None:
        self.rank, self.groups, self.messages = rank, groups, 0

    def send_buffer(self, group: str, size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def all_to_all(
        self, group: str, message: torch.Tensor, send: list[int], receive: list[int] | None, doing: str
    ) -> list[torch.Tensor]:
        played = self.groups[group]
        others = len(played.ranks) - 1
        # Between nodes Gloo sends the sizes first if the receiver does not know them; shared memory has them.
        self.messages += others * (2 if receive is None and group != "node" else 1)
        played.box[self.rank] = list(torch.split(message, send))
        played.barrier.wait()
        mine = played.ranks.index(self.rank)
        pieces = [played.box[rank][mine] for rank in played.ranks]
        played.barrier.wait()
        return pieces


def _read_zeros(indices: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()


def check_traffic(ranks: Ranks, *, batch: int, dim: int) -> list[Check]:
    """Play one step of all ranks in threads: keys, rows and gradients of synthetic ads through `RowExchange`."""
    ads = tc.SyntheticAds(keys=1_000_000, fields=8, nonzeros=16, batch_size=batch, seed=3)
    per_node = ranks.per_node
    nodes = tuple(tuple(range(n * per_node, (n + 1) * per_node)) for n in range(ranks.nodes))
    node_groups = [_PlayedGroup(node) for node in nodes]
    peer_groups = [_PlayedGroup(tuple(node[i] for node in nodes)) for i in range(per_node)]
    comms = [
        PlayedCommunicator(rank, {"node": node_groups[rank // per_node], "peers": peer_groups[rank % per_node]})
        for rank in range(ranks.world)
    ]
    exchanges = [RowExchange(Topology(ranks.world, rank, nodes), threads=1) for rank in range(ranks.world)]
    keys = [tc.WorkingSet.of(ads.batch(rank).ids, threads=1).keys for rank in range(ranks.world)]

    def step(rank: int) -> None:
        comm: Any = comms[rank]
        exchange, traffic = exchanges[rank], exchanges[rank].traffic
        [route] = exchange.plan(comm, [keys[rank]], traffic.keys)
        rows = torch.zeros(len(route.keys), dim)
        exchange.fetch_rows(comm, route, _read_zeros, rows, traffic.rows)
        exchange.reduce_gradients(comm, route, rows, None, traffic.gradients)

    in_threads(ranks.world, step)
    distribution = KeyDistribution.zipf(ads.keys, ads.zipf, 16)
    predicted = Traffic(ranks, dim, distribution.unique_keys(batch), distribution.unique_keys(batch * per_node))
    counters = [(t.keys, t.rows, t.gradients) for t in (exchange.traffic for exchange in exchanges)]
    within = sum(c.bytes_within for three in counters for c in three) / ranks.world
    between = sum(c.bytes_between for three in counters for c in three) / ranks.nodes
    name = f"{ranks.nodes} x {per_node} ranks"
    return [
        Check(f"messages of a rank and step, {name}", ranks.messages(), comms[0].messages, 1, 1),
        Check(f"bytes within the node, per rank, {name}", predicted.within_per_rank, within, 0.9, 1.1),
        Check(f"bytes between nodes, per node, {name}", predicted.between_per_node, between, 0.9, 1.1),
    ]
