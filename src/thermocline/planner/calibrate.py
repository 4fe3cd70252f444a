"""Measures the hardware figures of this machine with the code that training runs, in about a minute.

Costs of cores are processor time, which other load on the machine affects little. Rates of disk, links and GPU are wall
time.
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
from thermocline.planner.calibrate_ranks import measure_ranks
from thermocline.planner.dense_timing import time_dense_network
from thermocline.planner.hardware import Cpu, Disk, Gpu, Hardware, LinkSpeeds
from thermocline.planner.op_counter import reference_network_seconds
from thermocline.planner.ssd_model import KEY_BYTES, LARGE_STORE_WRITES, merge_writes
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStats, SsdStore
from thermocline.training.callbacks import Callback
from thermocline.training.trainer import Trainer
from thermocline.utils.cpu_affinity import cores, limit_cores
from thermocline.utils.machine import memory_bytes
from thermocline.utils.malloc import keep_freed_memory

T = TypeVar("T")
PARTS = 8
"""Number of calls of `advance` by `measure`."""
_KEYS, _FIELDS, _BATCH = 400_000, 26, 4096
_DIMS = (8, 64)
"""Row lengths with a compiled kernel: two lengths give the cost per row and per float."""
_TAIL_DIM = 15
"""Row length without one: all of its floats are in the scalar tail."""
_BATCH_PAIRS = 25
"""Pairs of batches per row length: one with the fused update, one with separate sum and apply."""
_TRAINING_STEPS = 60
"""Timed steps of a training without significant rows or layers, after half as many untimed steps."""
_TRAINING_SIZES, _TRAINING_ROUNDS = (512, 16384), 3
_DISK_KEYS, _DISK_PULLS = 600_000, 120
_DISK_SETTINGS = ((32, 1200), (2, 1200), (64, 1200), (32, 300))
"""Row lengths and examples per batch: misses with many and few read requests and written pages per row."""
_PAGE_BYTES = 4096
_WRITE_BYTES = 1 << 27
_ROUNDS = 5


def measure(
    folder: str | os.PathLike[str] | None = None,
    advance: Callable[[], None] = lambda: None,
    *,
    num_cores: int | None = None,
) -> Hardware:
    """Measure all figures of this machine.

    folder      folder on the disk to measure; default: the temporary folder
    advance     called after each of `PARTS` parts
    num_cores   cores to measure on, as one of several ranks has; default: all
    """

    def part(figures: T) -> T:
        advance()
        return figures

    def limited() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if num_cores is None else _limit_cores(num_cores)

    keep_freed_memory()  # as training does
    with limited():
        # Three times with other measurements between, of which the lowest costs count: work of others that shares
        # caches and memory increases processor time, for dedup up to twice.
        row_costs = [part(_row_costs_of_lengths())]
        dense = {"dense_reference_ms": part(reference_network_seconds(3 * _ROUNDS)) * 1e3}
        row_costs.append(part(_row_costs_of_lengths()))
    ranks = part(measure_ranks())
    with limited():
        row_costs.append(part(_row_costs_of_lengths()))
        rows = _row_figures(row_costs)
        steps = part(_measure_steps(rows))
        disk = part(_measure_disk(folder, rows["pull_row_ns"] * 1e-9))
    link_speeds = {name: ranks.pop(name) for name in ("node_gbs", "node_us", "network_gbs", "network_us")}
    links = LinkSpeeds(**link_speeds, data_gbs=link_speeds["network_gbs"])
    gpu = part(_measure_gpu())
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    cpu = Cpu(cores=cores(), memory=memory_bytes(), **rows, **dense, **steps, **ranks)
    source = f"measured {now}; the network's figures are those of two processes on this machine, over loopback"
    return Hardware(name=platform.machine(), source=source, cpu=cpu, disk=disk, links=links, gpu=gpu)


@contextlib.contextmanager
def _limit_cores(count: int) -> Iterator[None]:
    """Limit this thread, its new threads and torch to `count` cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with limit_cores(count):
            yield
    finally:
        torch.set_num_threads(threads)


def _processor_seconds(work: Callable[[int], Any], calls: int) -> float:
    """Median processor time of one call; calls are numbered, so that each can use different data."""
    work(0)
    seconds = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        for number in range(calls):
            work(number)
        seconds.append((time.process_time() - start) / calls)
    return float(np.median(seconds))


# ---- rows


def _row_costs_of_lengths() -> list[dict[str, float]]:
    """Costs at the lengths that `_row_figures` needs."""
    return [_row_costs(dim) for dim in (*_DIMS, _TAIL_DIM)]


def _row_figures(measured: list[list[dict[str, float]]]) -> dict[str, float]:
    """Costs per id, row and float, as fields of `Cpu`, from the lowest of the costs measured.

    A cost is fixed + floats * per float at two row lengths with a compiled kernel; the excess at a row length without
    one is the cost of the scalar tail.
    """
    short, long, tail = (
        {name: min(costs[name] for costs in of_length) for name in of_length[0]}
        for of_length in zip(*measured, strict=True)
    )
    for of_length in (short, long, tail):  # together, sum and apply cost as much as the fused update
        separate = of_length["sum"] + of_length["unique_share"] * of_length["apply"]
        of_length |= {name: of_length[name] * of_length["update"] / separate for name in ("sum", "apply")}
    costs = {name: short[name] for name in ("dedup_id", "pull_row", "plan_id")}  # independent of the row length
    # Rows of Adagrad: as many floats of state as weights.
    for name, unit, floats_per_weight in (("pool", "id", 1), ("sum", "id", 1), ("apply", "row", 2)):
        per_float = max(long[name] - short[name], 1e-12) / (_DIMS[1] - _DIMS[0]) / floats_per_weight
        fixed = max(short[name] - _DIMS[0] * floats_per_weight * per_float, 1e-11)
        costs |= {f"{name}_float": per_float, f"{name}_{unit}": fixed}
        excess = tail[name] - fixed - _TAIL_DIM * floats_per_weight * per_float
        costs[f"{name}_tail"] = max(excess, 1e-12) / _TAIL_DIM
    return {f"{name}_ns": seconds * 1e9 for name, seconds in costs.items()}


def _row_costs(dim: int) -> dict[str, float]:
    """Processor seconds per id or row of the kernels of a training step, in its order, on batches not seen before.

    "unique_share" is the number of rows per id.

    The kernels use as many threads as a training, and a network runs between pooling and update: both affect caches.
    """
    ads = SyntheticAds(keys=_KEYS, fields=_FIELDS, batch_size=_BATCH, tensors=False)
    tier = DramTier(dim, Adagrad(lr=0.01), budget=_KEYS * (8 * dim + 90) + (4 << 20))
    for piece in np.array_split(_all_keys(ads), 16):
        tier.push(piece, tier.initial_rows(piece))
    network = torch.nn.Sequential(torch.nn.Linear(_FIELDS * dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    laps, unique_share = _Laps(), 0.0
    for number in range(2 * _BATCH_PAIRS):
        fused = number % 2 == 1
        if not fused:
            laps.start()
        batch = ads.batch(number)
        laps.add("read", 1)
        working_set = WorkingSet.of(batch.ids)
        laps.add("dedup_id", len(batch.ids))
        pins = tier.pin(working_set.keys)
        slots = pins.slots()
        laps.add("pull_row", len(slots))
        id_slots, grad_rows, coefs = tier.core.plan(
            slots, working_set.inverse, working_set.order, batch.offsets, None, False
        )
        laps.add("plan_id", len(batch.ids))
        pooled = np.empty((_BATCH * _FIELDS, dim), np.float32)
        tier.core.pool(id_slots, batch.offsets, None, False, pooled)
        laps.add("pool", len(batch.ids))
        inputs = torch.from_numpy(pooled).view(_BATCH, -1).requires_grad_()
        network(inputs).sum().backward()
        assert inputs.grad is not None
        grad = inputs.grad.view(-1, dim).numpy()
        laps.add("network", 1)
        tier.core.mark_dirty(slots)
        if fused:  # as in training
            tier.core.update(slots, working_set.starts, grad_rows, coefs, grad, tier.step(number, None, 1.0))
            laps.add("update", len(batch.ids))
            unique_share += len(slots) / len(batch.ids) / _BATCH_PAIRS
        else:
            sums = np.empty((len(slots), dim), np.float32)
            tier.core.sum_gradients(working_set.starts, grad_rows, coefs, grad, sums)
            laps.add("sum", len(batch.ids))
            tier.apply_gradients(slots, sums)
            laps.add("apply", len(slots))
        pins.release()
        laps.add("pull_row", 0)
    return laps.medians() | {"unique_share": unique_share}


class _Laps:
    """Processor time per unit of work, by name; the median over measured groups counts."""

    def __init__(self) -> None:
        self._groups: list[dict[str, list[float]]] = []
        self._last = 0.0

    def start(self) -> None:
        """Begin a new group."""
        self._groups.append({})
        self._last = time.process_time()

    def add(self, name: str, units: int) -> None:
        """Add the processor time since the previous call, and `units` of work, to `name` in the current group."""
        seconds_and_units = self._groups[-1].setdefault(name, [0.0, 0.0])
        seconds_and_units[0] += time.process_time() - self._last
        seconds_and_units[1] += units
        self._last = time.process_time()

    def medians(self) -> dict[str, float]:
        """Seconds per unit."""

        def per_unit(name: str) -> list[float]:
            return [group[name][0] / group[name][1] for group in self._groups]

        return {name: float(np.median(per_unit(name))) for name in self._groups[0]}


def _all_keys(ads: SyntheticAds) -> Keys:
    return ads.some_keys(0, sum(ads.keys))


# ---- steps


def _measure_steps(rows: dict[str, float]) -> dict[str, float]:
    """Costs of a training beside rows and layers: logistic regression on one field, at two batch sizes."""
    config = ModelConfig(name="lr")

    def step_seconds(size: int) -> tuple[float, float]:
        """Remaining processor seconds per step of (the training thread, the prefetch threads)."""
        steps = _TRAINING_STEPS
        ads = SyntheticAds(keys=1000, fields=1, batch_size=size)
        table = Table(1, Adagrad(lr=0.01), mem="4MB", threads=1)
        model = build(config, table, 1)
        dense = torch.optim.Adam(model.parameters())
        clock = _StepClock((steps // 2, steps + steps // 2))
        settings = TrainConfig(display=False, log_every=10**6, steps=2 * steps)
        Trainer(model, dense, config=settings, callbacks=[clock]).fit(ads)
        total, trainer = ((after - before) / steps for before, after in zip(*clock.times, strict=True))
        timing = time_dense_network(config, 1, 0, size, "adam", torch.get_num_threads())
        dense_seconds = timing.network.caller + timing.optimizer.caller
        row_seconds = size * (rows["pool_id_ns"] + rows["sum_id_ns"]) * 1e-9
        plan_seconds = size * (rows["dedup_id_ns"] + rows["plan_id_ns"]) * 1e-9
        read_seconds = _processor_seconds(ads.batch, calls=steps)
        return trainer - row_seconds - dense_seconds, total - trainer - plan_seconds - read_seconds

    small, large = (
        np.median([step_seconds(size) for _ in range(_TRAINING_ROUNDS)], axis=0) for size in _TRAINING_SIZES
    )
    per_example = max(float(large[0] - small[0]), 1e-9) / (_TRAINING_SIZES[1] - _TRAINING_SIZES[0])
    per_step = max(float(small[0]) - _TRAINING_SIZES[0] * per_example, 1e-6)
    prefetch = max(float(small[1]), 1e-6)
    return {"example_ns": per_example * 1e9, "step_us": per_step * 1e6, "prefetch_us": prefetch * 1e6}


class _StepClock(Callback):
    """Records processor time of all threads and of the training thread after the given steps."""

    def __init__(self, at: tuple[int, int]) -> None:
        self._at, self.times = at, list[tuple[float, float]]()

    def on_step(self, trainer: Any, loss: object) -> None:
        if trainer.progress.step in self._at:
            self.times.append((time.process_time(), time.thread_time()))


# ---- disk


def _measure_disk(folder: str | os.PathLike[str] | None, pull_row: float) -> Disk:
    """Costs of the SSD store, with long and short rows, in large and small batches."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        measured = [
            _measure_misses(Path(name) / f"store{number}", dim, batch, pull_row)
            for number, (dim, batch) in enumerate(_DISK_SETTINGS)
        ]
        write_gbs = _measure_writes(Path(name) / "written")
    row, read, write = _fit_misses(measured)
    long = measured[0]
    return Disk(
        read_us=max(long.stats.read_cost_us, 1e-3),
        page_us=max(long.stats.page_cost_us, 1e-3),
        page_bytes=_PAGE_BYTES,
        write_gbs=write_gbs,
        write_amplification=long.write_amplification
        * LARGE_STORE_WRITES
        / merge_writes(_store_bytes(_DISK_SETTINGS[0][0]), 0),
        miss_row_ns=row * 1e9,
        miss_read_ns=read * 1e9,
        miss_write_ns=write * 1e9,
        miss_thread_share=max(long.thread_share, 1e-3),
    )


def _store_bytes(dim: int) -> int:
    return _DISK_KEYS * (8 * dim + KEY_BYTES)


class _MissCost(NamedTuple):
    """Cost of one row missing in DRAM, and of the row evicted for it."""

    seconds: float
    """Processor seconds, all threads."""
    thread_share: float
    """Fraction of them on the pulling thread."""
    reads: float
    """Read requests."""
    pages_written: float
    """Pages written by log and merges."""
    write_amplification: float
    stats: SsdStats


def _fit_misses(measured: list[_MissCost]) -> tuple[float, float, float]:
    """Return the seconds of a row, a read request and a written page: the least relative squares, none negative."""
    counts = np.array([[1.0, miss.reads, miss.pages_written] for miss in measured])
    relative = counts / np.array([[miss.seconds] for miss in measured])
    costs = np.full(3, 1e-9)
    used = [0, 1, 2]
    while used:
        found = np.linalg.lstsq(relative[:, used], np.ones(len(measured)), rcond=None)[0]
        if found.min() > 0:
            costs[used] = found
            break
        used.pop(int(found.argmin()))
    return tuple(np.maximum(costs, 1e-9).tolist())


def _measure_misses(path: Path, dim: int, batch: int, pull_row: float) -> _MissCost:
    """Pull working sets through a DRAM tier of a quarter of the rows, until it evicts and the store merges."""
    ads = SyntheticAds(keys=_DISK_KEYS, fields=16, batch_size=batch, tensors=False)
    keys = _all_keys(ads)
    with SsdStore.open(path, row_bytes=8 * dim, mem_budget="64MB", min_log_bytes=8 * dim * _DISK_KEYS // 32) as store:
        tier = DramTier(dim, Adagrad(lr=0.01), budget=(8 * dim + 60) * _DISK_KEYS // 4, store=store)
        for first in range(0, len(keys), 50_000):
            piece = keys[first : first + 50_000]
            store.put(piece, tier.initial_rows(piece).view(np.uint8).reshape(len(piece), -1))
        store.merge()
        working_sets = [WorkingSet.of(ads.batch(number).ids).keys for number in range(2 * _DISK_PULLS)]
        for number, working_set in enumerate(working_sets):
            if number == _DISK_PULLS:  # DRAM is full and merging has begun
                tier_before, store_before = tier.stats(), store.stats()
                start, thread_start = time.process_time(), time.thread_time()
            pins = tier.pin(working_set)
            tier.core.mark_dirty(pins.slots())
            pins.release()
        seconds, thread_seconds = time.process_time() - start, time.thread_time() - thread_start
        tier_after, store_after = tier.stats(), store.stats()
    misses, hits = tier_after.misses - tier_before.misses, tier_after.hits - tier_before.hits
    written = store_after.bytes_written - store_before.bytes_written
    return _MissCost(
        seconds=(seconds - hits * pull_row) / misses,
        thread_share=thread_seconds / seconds,
        reads=(store_after.reads - store_before.reads) / misses,
        pages_written=written / _PAGE_BYTES / misses,
        write_amplification=written / max(1, store_after.bytes_put - store_before.bytes_put),
        stats=store_after,
    )


def _measure_writes(file: Path) -> float:
    """GB/s of large writes, synced."""
    data = np.random.default_rng(0).bytes(_WRITE_BYTES // 8)
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


_LAUNCHES_PER_STEP = 200
"""Kernel launches of a training step, about."""


def _measure_gpu() -> Gpu | None:
    """Rates of the current GPU; None without CUDA."""
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
    copy_rate = 8 * source.numel() / seconds(lambda: target.copy_(source))
    rows, index = source.view(-1, 16), torch.randint(0, source.numel() // 16, (1 << 21,), device=device)
    gather_rate = 4 * 16 * len(index) / seconds(lambda: rows[index])
    a = torch.randn(4096, 4096, device=device)
    flop_rate = 2 * 4096**3 / seconds(lambda: a @ a)
    host = torch.empty(1 << 26, pin_memory=True)
    host_rate = 4 * host.numel() / seconds(lambda: target[: host.numel()].copy_(host, non_blocking=True))
    small = torch.ones(8, device=device)
    launch = seconds(lambda: small.add_(1), 1000)
    return Gpu(
        count=torch.cuda.device_count(),
        memory=torch.cuda.mem_get_info()[1],
        hbm_gbs=copy_rate / 1e9,
        random_gbs=gather_rate / 1e9,
        tflops=flop_rate / 1e12,
        step_us=_LAUNCHES_PER_STEP * launch * 1e6,
        host_gbs=host_rate / 1e9,
    )
