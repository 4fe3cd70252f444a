"""Measures this machine for `thermocline plan`, with the code that training runs. Takes about half a minute.

Costs of cores are processor time, so that other load disturbs them little; rates of disk and links are wall time.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from thermocline.batch import WorkingSet
from thermocline.data.stats import memory_of_machine
from thermocline.data.synth import SyntheticAds
from thermocline.models import ModelConfig, build
from thermocline.plan.hardware import Cpu, Disk, Gpu, Hardware, Links
from thermocline.plan.network import Work, work_of
from thermocline.tables.arrays import Keys
from thermocline.tables.mem import MemTier
from thermocline.tables.optimizers import Adagrad
from thermocline.tables.ssd import SsdStore
from thermocline.tables.table import Table
from thermocline.train import Trainer
from thermocline.train_config import TrainConfig

T = TypeVar("T")
PARTS = 6
"""Of a measurement."""
_KEYS, _FIELDS, _BATCH = 400_000, 26, 4096
_DIMS = (8, 64)
_DISK_KEYS, _DISK_CYCLES = 600_000, 200
_ROUNDS = 5
_BATCHES = 25


def measure(folder: str | os.PathLike[str] | None = None, advance: Callable[[], None] = lambda: None) -> Hardware:
    """All figures of this machine; `folder` is where its disk is measured; `advance` is called after each part."""

    def part(figures: T) -> T:
        advance()
        return figures

    rows = part(_rows())
    layers = part(_layers())
    steps = part(_steps(rows))
    disk = part(_disk(folder, rows["pull_row_ns"] * 1e-9))
    links = part(_links())
    gpu = part(_gpu())
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    cpu = Cpu(cores=len(os.sched_getaffinity(0)), memory=memory_of_machine(), **rows, **layers, **steps)
    source = f"measured {now}; the network's figures are those of two processes on this machine, over loopback"
    return Hardware(name=platform.machine(), source=source, cpu=cpu, disk=disk, links=links, gpu=gpu)


def _processor(work: Callable[[int], Any], rounds: int = _ROUNDS, calls: int = 6) -> float:
    """Processor seconds of one call, the median of rounds; calls of a round get numbers, to see different data."""
    work(0)
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        for number in range(calls):
            work(number)
        taken.append((time.process_time() - start) / calls)
    return float(np.median(taken))


# ---- rows


def _rows() -> dict[str, float]:
    """Costs per id and row; those that depend on a row's length by two lengths."""
    small, large = (_row_costs(dim) for dim in _DIMS)
    out = {name: (small[name] + large[name]) / 2 for name in ("dedup_id", "pull_row", "plan_id")}
    for name, once in (("pool", "id"), ("sum", "id"), ("apply", "row")):
        each = max(large[name] - small[name], 1e-12) / (_DIMS[1] - _DIMS[0])
        out[f"{name}_float"] = each
        out[f"{name}_{once}"] = max(small[name] - _DIMS[0] * each, 1e-11)
    return {f"{name}_ns": seconds * 1e9 for name, seconds in out.items()}


def _row_costs(dim: int) -> dict[str, float]:
    """Processor seconds per id or row of a training's kernels, in a training's order, on batches never seen before."""
    ads = SyntheticAds(keys=_KEYS, fields=_FIELDS, batch_size=_BATCH, tensors=False)
    tier = MemTier(dim, Adagrad(lr=0.01), budget=_KEYS * (8 * dim + 90) + (4 << 20))
    for piece in np.array_split(_all_keys(ads), 16):
        tier.push(piece, tier.initial_rows(piece))
    grad = np.full((_BATCH * _FIELDS, dim), 1e-3, np.float32)
    laps = _Laps()
    for number in range(_BATCHES):
        batch = ads.batch(number)
        laps.start()
        working_set = WorkingSet.of(batch.ids)
        laps.add("dedup_id", len(batch.ids))
        pins = tier.pin(working_set.keys)
        slots = pins.slots()
        laps.add("pull_row", len(slots))
        planned = tier.core.plan(slots, working_set.inverse, working_set.order, batch.offsets, None, False)
        laps.add("plan_id", len(batch.ids))
        tier.core.pool(planned[0], batch.offsets, None, False, np.empty_like(grad))
        laps.add("pool", len(batch.ids))
        sums = np.empty((len(slots), dim), np.float32)
        tier.core.sum_gradients(working_set.starts, planned[1], planned[2], grad, sums)
        laps.add("sum", len(batch.ids))
        tier.core.mark_dirty(slots)
        tier.apply_gradients(slots, sums)
        laps.add("apply", len(slots))
        pins.let_go()
        laps.add("pull_row", 0)
    return laps.costs()


class _Laps:
    """Processor time between calls, by name, and what it was spent on."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._units: dict[str, int] = {}
        self._since = 0.0

    def start(self) -> None:
        self._since = time.process_time()

    def add(self, name: str, units: int) -> None:
        now = time.process_time()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._units[name] = self._units.get(name, 0) + units
        self._since = time.process_time()

    def costs(self) -> dict[str, float]:
        return {name: seconds / self._units[name] for name, seconds in self._seconds.items()}


def _all_keys(ads: SyntheticAds) -> Keys:
    places = ((field, rank) for field, count in enumerate(ads.keys) for rank in range(count))
    return np.fromiter((ads.key_of(*place) for place in places), np.uint64)


# ---- layers and steps


def _layers() -> dict[str, float]:
    width = 400
    plain = _Plain()
    hidden = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(3)]
    net = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 1))

    def both_ways(network: torch.nn.Module, examples: int = _BATCH) -> float:
        rows = torch.randn(examples, width, requires_grad=True)

        def once(number: int) -> None:
            network.zero_grad()
            rows.grad = None
            network(rows).sum().backward()

        return _processor(once)

    def counted(network: torch.nn.Module) -> Work:
        return work_of(network, lambda examples: torch.zeros(examples, width))

    written = both_ways(plain) / (_BATCH * counted(plain).floats)
    few = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    operation = both_ways(few, 1) / counted(few).operations
    work, taken = counted(net), both_ways(net)
    other = (_BATCH * work.floats + work.step_floats) * written + work.operations * operation
    product = max(taken - other, taken / 2) / (_BATCH * work.multiply_adds)
    parameter = torch.nn.Parameter(torch.randn(1_000_000))
    parameter.grad = torch.randn(1_000_000)
    adam = torch.optim.Adam([parameter])
    step = _processor(lambda i: adam.step()) / parameter.numel()
    return {
        "multiply_add_ns": product * 1e9,
        "written_float_ns": written * 1e9,
        "operation_us": operation * 1e6,
        "parameter_ns": step * 1e9,
    }


class _Plain(torch.nn.Module):
    """Operations that are no matrix products, as factorisation machines have them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.square() * rows + rows).relu().sum(1)


def _steps(rows: dict[str, float]) -> dict[str, float]:
    """What a training with next to no rows and layers costs beside them, by two sizes of batches."""

    def step_seconds(size: int) -> float:
        steps = 40
        ads = SyntheticAds(keys=1000, fields=1, batch_size=size, examples=size * steps)
        table = Table(1, Adagrad(lr=0.01), mem="4MB")
        model = build(ModelConfig(name="lr"), table, 1)
        dense = torch.optim.Adam(model.parameters())
        trainer = Trainer(model, dense, config=TrainConfig(display=False, log_every=steps))
        trainer.fit(ads)
        start = time.process_time()
        trainer.fit(ads)
        used = (time.process_time() - start) / steps
        known = sum(rows[name] for name in ("dedup_id_ns", "plan_id_ns", "pool_id_ns", "sum_id_ns")) * 1e-9
        return used - size * known - _processor(ads.batch, calls=steps)

    sizes = (512, 16384)
    small, large = (float(np.median([step_seconds(size) for _ in range(3)])) for size in sizes)
    each = max(large - small, 1e-9) / (sizes[1] - sizes[0])
    return {"example_ns": each * 1e9, "step_us": max(small - sizes[0] * each, 1e-6) * 1e6}


# ---- disk


def _disk(folder: str | os.PathLike[str] | None, pull_row: float) -> Disk:
    """The cycle of a training: a working set is pulled, its missing rows read, others evicted, the log merged."""
    dim, cycles = 24, _DISK_CYCLES
    ads = SyntheticAds(keys=_DISK_KEYS, fields=16, batch_size=1200, tensors=False)
    keys = _all_keys(ads)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        with SsdStore.open(Path(name) / "store", row_bytes=8 * dim, mem_budget="64MB", min_log_bytes="4MB") as store:
            tier = MemTier(dim, Adagrad(lr=0.01), budget=40 * _DISK_KEYS + (1 << 20), store=store)
            for first in range(0, len(keys), 50_000):
                piece = keys[first : first + 50_000]
                store.put(piece, tier.initial_rows(piece).view(np.uint8).reshape(len(piece), -1))
            store.merge()
            wanted = [WorkingSet.of(ads.batch(number).ids).keys for number in range(2 * cycles)]
            for number, some in enumerate(wanted):
                if number == cycles:  # memory is full and merging has begun
                    before, start, stats = tier.stats(), time.process_time(), store.stats()
                pins = tier.pin(some)
                tier.core.mark_dirty(pins.slots())
                pins.let_go()
            after, used, ended = tier.stats(), time.process_time() - start, store.stats()
        missed, hit = after.misses - before.misses, after.hits - before.hits
        amplification = (ended.bytes_written - stats.bytes_written) / (ended.bytes_put - stats.bytes_put)
        miss = (used - hit * pull_row) / missed
        file = Path(name) / "written"
        data = np.random.default_rng(0).bytes(1 << 24)
        rates = []
        for _ in range(3):
            begin = time.perf_counter()
            with file.open("wb") as out:
                for _ in range(8):
                    out.write(data)
                out.flush()
                os.fsync(out.fileno())
            rates.append(8 * len(data) / (time.perf_counter() - begin) / 1e9)
    return Disk(
        read_us=max(ended.read_cost_us, 1e-3),
        page_us=max(ended.page_cost_us, 1e-3),
        page_bytes=4096,
        write_gbs=float(np.median(rates)),
        write_amplification=amplification,
        miss_row_ns=miss * 1e9,
    )


# ---- links

_EXCHANGE = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
def seconds(floats, times):
    out, into, best = torch.ones(2 * floats), torch.empty(2 * floats), []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(into, out)
        best.append(time.perf_counter() - start)
    return sorted(best)[times // 2]
print(seconds(1, 50), 4 * 2_000_000 / seconds(2_000_000, 9))
dist.destroy_process_group()
"""


def _links() -> Links:
    """All-to-all of two processes over Gloo: latency, and bytes a second each sends to the other."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-c", _EXCHANGE, str(Path(name) / "meet")]
        local = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=local) for rank in range(2)
        ]
        out = [rank.communicate(timeout=120)[0] for rank in ranks]
    latency, rate = (float(word) for word in out[0].split())
    figures = {"us": latency * 1e6, "gbs": rate / 1e9}
    return Links(
        node_gbs=figures["gbs"],
        node_us=figures["us"],
        network_gbs=figures["gbs"],
        network_us=figures["us"],
        data_gbs=figures["gbs"],
    )


# ---- GPU


def _gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())

    def seconds(work: Callable[[], Any], calls: int = 20) -> float:
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source)
    copied = 8 * source.numel() / seconds(lambda: target.copy_(source))
    rows, index = source.view(-1, 16), torch.randint(0, source.numel() // 16, (1 << 21,), device=device)
    gathered = 4 * 16 * len(index) / seconds(lambda: rows[index])
    a = torch.randn(4096, 4096, device=device)
    flops = 2 * 4096**3 / seconds(lambda: a @ a)
    host = torch.empty(1 << 26, pin_memory=True)
    sent = 4 * host.numel() / seconds(lambda: target[: host.numel()].copy_(host, non_blocking=True))
    small = torch.ones(8, device=device)
    launch = seconds(lambda: small.add_(1), 1000)
    return Gpu(
        count=torch.cuda.device_count(),
        memory=torch.cuda.mem_get_info()[1],
        hbm_gbs=copied / 1e9,
        random_gbs=gathered / 1e9,
        tflops=flops / 1e12,
        step_us=200 * launch * 1e6,  # a step of ours launches about so many kernels
        host_gbs=sent / 1e9,
    )
