"""Measures this machine for `thermocline plan`, with the code that training runs. Takes about half a minute.

Costs of cores are processor time, so that other load disturbs them little; rates of disk and links are wall time.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from thermocline.arrays import Keys
from thermocline.batch import WorkingSet
from thermocline.config.train import TrainConfig
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.optimizers import Adagrad
from thermocline.embedding.table import Table
from thermocline.models import ModelConfig, build
from thermocline.planner.calibrate_ranks import measure_pair
from thermocline.planner.dense_timing import inside_training
from thermocline.planner.hardware import Cpu, Disk, Gpu, Hardware, Links
from thermocline.planner.op_counter import reference_seconds
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStats, SsdStore
from thermocline.training.callbacks import Callback
from thermocline.training.trainer import Trainer
from thermocline.utils.cpu_affinity import cores, limit_cores
from thermocline.utils.machine import memory_bytes
from thermocline.utils.malloc import keep_freed_memory

T = TypeVar("T")
PARTS = 6
"""Of a measurement."""
_KEYS, _FIELDS, _BATCH = 400_000, 26, 4096
_DIMS = (8, 64)
"""Row lengths with kernels of their own."""
_ODD = 15
"""One without, whose floats are all beyond the last whole sixteen."""
_DISK_KEYS, _DISK_CYCLES, _DISK_DIMS = 600_000, 120, (32, 2)
_PAGE = 4096
_ROUNDS = 5
_BATCHES = 25


def measure(
    folder: str | os.PathLike[str] | None = None,
    advance: Callable[[], None] = lambda: None,
    *,
    on: int | None = None,
) -> Hardware:
    """All figures of this machine.

    folder    where its disk is measured
    advance   called after each part
    on        so many of its cores, as one of several ranks has; none: all
    """

    def part(figures: T) -> T:
        advance()
        return figures

    keep_freed_memory()  # as training does
    with contextlib.nullcontext() if on is None else _bound(on):
        rows = part(_rows())
        layers = {"network_ms": part(reference_seconds(3 * _ROUNDS)) * 1e3}
        steps = part(_steps(rows))
        disk = part(_disk(folder, rows["pull_row_ns"] * 1e-9))
    pair = part(measure_pair())
    measured = {name: pair.pop(name) for name in ("node_gbs", "node_us", "network_gbs", "network_us")}
    links = Links(**measured, data_gbs=measured["network_gbs"])
    gpu = part(_gpu())
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    cpu = Cpu(cores=cores(), memory=memory_bytes(), **rows, **layers, **steps, **pair)
    source = f"measured {now}; the network's figures are those of two processes on this machine, over loopback"
    return Hardware(name=platform.machine(), source=source, cpu=cpu, disk=disk, links=links, gpu=gpu)


@contextlib.contextmanager
def _bound(count: int) -> Iterator[None]:
    """To so many cores, torch's threads, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with limit_cores(count):
            yield
    finally:
        torch.set_num_threads(threads)


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
    """Costs per id and row; those that depend on a row's length by two lengths, and one without a kernel of its own."""
    small, large, odd = (_row_costs(dim) for dim in (*_DIMS, _ODD))
    out = {name: small[name] for name in ("dedup_id", "pull_row", "plan_id")}  # whatever the rows' length
    for name, once, floats in (("pool", "id", 1), ("sum", "id", 1), ("apply", "row", 2)):  # Adagrad's rows: two halves
        each = max(large[name] - small[name], 1e-12) / (_DIMS[1] - _DIMS[0]) / floats
        fixed = max(small[name] - _DIMS[0] * floats * each, 1e-11)
        out |= {f"{name}_float": each, f"{name}_{once}": fixed}
        out[f"{name}_tail"] = max(odd[name] - fixed - _ODD * floats * each, 1e-12) / _ODD
    return {f"{name}_ns": seconds * 1e9 for name, seconds in out.items()}


def _row_costs(dim: int) -> dict[str, float]:
    """Processor seconds per id or row of a training's kernels, in a training's order, on batches never seen before.

    With as many threads as a training has, and a network between pooling and update, as there: both cost caches.
    """
    ads = SyntheticAds(keys=_KEYS, fields=_FIELDS, batch_size=_BATCH, tensors=False)
    tier = DramTier(dim, Adagrad(lr=0.01), budget=_KEYS * (8 * dim + 90) + (4 << 20))
    for piece in np.array_split(_all_keys(ads), 16):
        tier.push(piece, tier.initial_rows(piece))
    network = torch.nn.Sequential(torch.nn.Linear(_FIELDS * dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    laps, unique = _Laps(), 0.0
    for number in range(2 * _BATCHES):
        if number % 2 == 0:
            laps.start()
        batch = ads.batch(number)
        laps.add("read", 1)
        working_set = WorkingSet.of(batch.ids)
        laps.add("dedup_id", len(batch.ids))
        pins = tier.pin(working_set.keys)
        slots = pins.slots()
        laps.add("pull_row", len(slots))
        planned = tier.core.plan(slots, working_set.inverse, working_set.order, batch.offsets, None, False)
        laps.add("plan_id", len(batch.ids))
        pooled = np.empty((_BATCH * _FIELDS, dim), np.float32)
        tier.core.pool(planned[0], batch.offsets, None, False, pooled)
        laps.add("pool", len(batch.ids))
        inputs = torch.from_numpy(pooled).view(_BATCH, -1).requires_grad_()
        network(inputs).sum().backward()
        assert inputs.grad is not None
        grad = inputs.grad.view(-1, dim).numpy()
        laps.add("network", 1)
        tier.core.mark_dirty(slots)
        if number % 2:  # as training does it, in one go
            tier.core.update(slots, working_set.starts, planned[1], planned[2], grad, tier.step(number, None, 1.0))
            laps.add("update", len(batch.ids))
            unique += len(slots) / len(batch.ids) / _BATCHES
        else:  # what of it is ids' and what rows'
            sums = np.empty((len(slots), dim), np.float32)
            tier.core.sum_gradients(working_set.starts, planned[1], planned[2], grad, sums)
            laps.add("sum", len(batch.ids))
            tier.apply_gradients(slots, sums)
            laps.add("apply", len(slots))
        pins.release()
        laps.add("pull_row", 0)
    costs = laps.costs()
    apart = costs["sum"] + unique * costs["apply"]
    return costs | {name: costs[name] * costs["update"] / apart for name in ("sum", "apply")}


class _Laps:
    """Processor time between calls, by name, and what it was spent on; per batch, of which the median counts."""

    def __init__(self) -> None:
        self._batches: list[dict[str, list[float]]] = []
        self._since = 0.0

    def start(self) -> None:
        self._batches.append({})
        self._since = time.process_time()

    def add(self, name: str, units: int) -> None:
        """What was done since the last call; several of one name in a batch add up."""
        spent = self._batches[-1].setdefault(name, [0.0, 0.0])
        spent[0] += time.process_time() - self._since
        spent[1] += units
        self._since = time.process_time()

    def costs(self) -> dict[str, float]:
        def each(name: str) -> list[float]:
            return [batch[name][0] / batch[name][1] for batch in self._batches]

        return {name: float(np.median(each(name))) for name in self._batches[0]}


def _all_keys(ads: SyntheticAds) -> Keys:
    places = ((field, rank) for field, count in enumerate(ads.keys) for rank in range(count))
    return np.fromiter((ads.key_of(*place) for place in places), np.uint64)


# ---- steps


def _steps(rows: dict[str, float]) -> dict[str, float]:
    """What a training with next to no rows and layers costs beside them, by two sizes of batches."""
    settings = ModelConfig(name="lr")

    def step_seconds(size: int) -> tuple[float, float]:
        steps = 60
        ads = SyntheticAds(keys=1000, fields=1, batch_size=size)
        table = Table(1, Adagrad(lr=0.01), mem="4MB", threads=1)
        model = build(settings, table, 1)
        dense = torch.optim.Adam(model.parameters())
        clock = _StepClock((steps // 2, steps + steps // 2))
        config = TrainConfig(display=False, log_every=10**6, steps=2 * steps)
        Trainer(model, dense, config=config, callbacks=[clock]).fit(ads)
        used, trained = ((after - before) / steps for before, after in zip(*clock.times, strict=True))
        known = (rows["pool_id_ns"] + rows["sum_id_ns"]) * 1e-9
        layers = inside_training(settings, 1, 0, size, "adam", torch.get_num_threads())
        ahead = used - trained - size * (rows["dedup_id_ns"] + rows["plan_id_ns"]) * 1e-9
        own = layers.network.own + layers.optimizer.own
        return trained - size * known - own, ahead - _processor(ads.batch, calls=steps)

    sizes = (512, 16384)
    small, large = (np.median([step_seconds(size) for _ in range(3)], axis=0) for size in sizes)
    each = max(float(large[0] - small[0]), 1e-9) / (sizes[1] - sizes[0])
    fixed = max(float(small[0]) - sizes[0] * each, 1e-6)
    return {"example_ns": each * 1e9, "step_us": fixed * 1e6, "ahead_us": max(float(small[1]), 1e-6) * 1e6}


class _StepClock(Callback):
    """Processor time at some steps: of all threads, and of the one that trains."""

    def __init__(self, at: tuple[int, int]) -> None:
        self._at, self.times = at, list[tuple[float, float]]()

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step in self._at:
            self.times.append((time.process_time(), time.thread_time()))


# ---- disk


def _disk(folder: str | os.PathLike[str] | None, pull_row: float) -> Disk:
    """Two cycles, of long rows and of short ones, of which many share a page, tell costs of rows and pages apart."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        long, short = (_cycle(Path(name) / f"store{dim}", dim, pull_row) for dim in _DISK_DIMS)
        rate = _write_rate(Path(name) / "written")
    # Seconds of a missing row are a + pages * b, by two kinds of rows.
    page = max((long.seconds - short.seconds) / (long.pages - short.pages), 1e-9)
    row = max(short.seconds - short.pages * page, 1e-9)
    return Disk(
        read_us=max(long.stats.read_cost_us, 1e-3),
        page_us=max(long.stats.page_cost_us, 1e-3),
        page_bytes=_PAGE,
        write_gbs=rate,
        write_amplification=long.amplification,
        miss_row_ns=row * 1e9,
        miss_page_ns=page * 1e9,
        miss_own=max(long.own, 1e-3),
    )


class _Cycle(NamedTuple):
    """Of one missing row, which another left for."""

    seconds: float
    """Of processors."""
    own: float
    """The share of them that is the pulling thread's."""
    pages: float
    """Read, and written by the store and its merging."""
    amplification: float
    stats: SsdStats


def _cycle(path: Path, dim: int, pull_row: float) -> _Cycle:
    """As training does it: a working set is pulled, its missing rows read, others evicted, the log merged."""
    ads = SyntheticAds(keys=_DISK_KEYS, fields=16, batch_size=1200, tensors=False)
    keys = _all_keys(ads)
    with SsdStore.open(path, row_bytes=8 * dim, mem_budget="64MB", min_log_bytes=8 * dim * _DISK_KEYS // 32) as store:
        tier = DramTier(dim, Adagrad(lr=0.01), budget=(8 * dim + 60) * _DISK_KEYS // 4, store=store)
        for first in range(0, len(keys), 50_000):
            piece = keys[first : first + 50_000]
            store.put(piece, tier.initial_rows(piece).view(np.uint8).reshape(len(piece), -1))
        store.merge()
        wanted = [WorkingSet.of(ads.batch(number).ids).keys for number in range(2 * _DISK_CYCLES)]
        for number, some in enumerate(wanted):
            if number == _DISK_CYCLES:  # memory is full and merging has begun
                before, stats = tier.stats(), store.stats()
                start, own = time.process_time(), time.thread_time()
            pins = tier.pin(some)
            tier.core.mark_dirty(pins.slots())
            pins.release()
        used, own = time.process_time() - start, time.thread_time() - own
        after, ended = tier.stats(), store.stats()
    missed, hit = after.misses - before.misses, after.hits - before.hits
    written = ended.bytes_written - stats.bytes_written
    pages = ended.pages_read - stats.pages_read + written / _PAGE
    amplification = written / (ended.bytes_put - stats.bytes_put)
    return _Cycle((used - hit * pull_row) / missed, own / used, pages / missed, amplification, ended)


def _write_rate(file: Path) -> float:
    """GB/s of large writes, synced."""
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
    return float(np.median(rates))


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
