"""Models A to E, scaled, with the paper's ratios of HBM, DRAM and model size: speed, hit rates, SSD I/O and stages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import disk_probe, models_report
from experiments.experiment import Experiment, Json, Section, Setup, Step, StepContext
from thermocline.data.paper_models import PaperModel
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding import bulk_load
from thermocline.embedding.optimizers import RowWiseAdagrad
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStore

NAMES = ("A", "B", "C", "D", "E")
DEPTH = 4
OPTIMIZER, DENSE_LR = RowWiseAdagrad(lr=0.05), 1e-3
DRAM_SHARE = 0.4
"""DRAM of the cluster of Zhao et al. (2020), as a share of the bytes of model E's rows."""
BATCH_IDS = {"cpu": 1 << 18, "cuda": 1 << 21}
"""Ids per batch, if memory allows: a GPU needs a million ids to hide the cost of kernel launches."""
SECONDS = {"tiers": (45.0, 12.0), "memory": (20.0, 4.0)}
"""Training time per model in the full run, on a CPU and on a GPU. Rows that are all in one tier need no warm-up."""
POINTS = 60
"""Maximum number of points of a curve."""
WARM_UP = 8
"""Batches on a GPU before the measurement starts; its kernels are compiled by then."""
COMMIT_SECONDS = 6.0
"""Interval of the store's commits; there is at least one."""
_OVERHEAD = 64  # bytes per row of index and metadata
_PROBE_BYTES = 4 << 30  # size of the file that the disk probe reads
_FILL_RATE = 4e6  # rows per second that fill_store writes, approximately
_COMMIT_RESERVE = 120.0  # seconds of a step that are reserved for a commit


def preset(setup: Setup, name: str) -> str:
    """Return the name of a scaled model."""
    return f"{name}/{setup.scale:g}"


def batch_size(setup: Setup, plan: PaperModel) -> int:
    """Return the examples per batch for which the smaller tier holds all working sets in the pipeline."""
    top = min(plan.mem, plan.hbm) if setup.device == "cuda" else plan.mem
    capacity = 0.6 * top / (plan.row_bytes + _OVERHEAD) / (DEPTH + 1)
    ids = min(BATCH_IDS[setup.device], capacity / 0.7)
    return max(1, 1 << int(math.log2(max(1.0, ids / plan.nonzeros))))


def store_memory(plan: PaperModel) -> int:
    """Return the DRAM budget of the store's index and buffers."""
    return (16 << 20) + 8 * plan.keys


def dram_budget(plan: PaperModel) -> int:
    """Return "the DRAM's 40 %": of the bytes of the model's rows. Rows, their index and metadata, the look-ahead and
    buffers are inside; the index of the store (`store_memory`) is not."""
    return round(DRAM_SHARE * plan.keys * plan.row_bytes)


def fits_top_tier(setup: Setup, plan: PaperModel) -> bool:
    """Whether this machine can hold all rows in the top tier."""
    return plan.keys * (plan.row_bytes + _OVERHEAD) * 1.1 < setup.memory


def seconds(setup: Setup, side: str) -> float:
    """Return the training time."""
    return setup.seconds(*SECONDS[side])


def steps(setup: Setup) -> list[Step]:
    """Return one training per model and side; with a GPU also the disk probe, whose rate bounds the tiers."""
    made = [_disk_step(setup)] if setup.device == "cuda" else []
    for name in NAMES:
        plan = PaperModel.parse(preset(setup, name))
        sides = ["tiers", *(["memory"] if fits_top_tier(setup, plan) else [])]
        for side in sides:
            settings = {
                "preset": preset(setup, name), "side": side, "seconds": seconds(setup, side), "seed": setup.seed,
                "device": setup.device, "batch": batch_size(setup, plan), "depth": DEPTH,
                "commit_seconds": COMMIT_SECONDS, "optimizer": dataclasses.asdict(OPTIMIZER), "dense_lr": DENSE_LR,
                "store_memory": store_memory(plan), "cores": setup.cores,
            }  # fmt: skip

            def run(context: StepContext, plan: PaperModel = plan, side: str = side) -> Json | None:
                return _run(setup, plan, side, context)

            expected = 2 + seconds(setup, side) + plan.keys / _FILL_RATE
            made.append(Step(name=f"{name}, {side}", settings=settings, expected_seconds=expected, run=run))
    return made


def _disk_step(setup: Setup) -> Step:
    """Measure reads/s and bytes/s of the disk."""

    def run(context: StepContext) -> Json:
        disk_probe.write_file(context.folder / "file", size)
        bytes_per_s = disk_probe.LARGE * disk_probe.reads_per_second(context.folder, disk_probe.LARGE)
        return {"reads_per_s": disk_probe.reads_per_second(context.folder), "bytes_per_s": bytes_per_s}

    size = setup.count(_PROBE_BYTES, 8 << 20)
    settings = {"bytes": size, "seconds": disk_probe.SECONDS, "threads": disk_probe.THREADS, "cores": setup.cores,
        "sizes": [disk_probe.PAGE, disk_probe.LARGE]}  # fmt: skip
    return Step(name="disk", settings=settings, expected_seconds=10, run=run)


def _run(setup: Setup, plan: PaperModel, side: str, context: StepContext) -> Json | None:
    """Train one model whose rows are all in the lowest tier before the first batch."""
    import torch

    from experiments import training
    from thermocline.models import ModelConfig, build

    # With all cores generating data, the thread that feeds the GPU takes twice as long: use half of them.
    threads = max(1, setup.cores // 2) if setup.device == "cuda" else None
    name, size = f"{plan.name}/{plan.scale:g}", batch_size(setup, plan)
    ads = SyntheticAds.preset(name, batch_size=size, seed=setup.seed, threads=threads)
    folder, tiers = context.folder / "rows", side == "tiers"
    with contextlib.closing(training.make_table(plan.dim, OPTIMIZER, setup, hbm=1 << 20, mem=8 << 20)) as small:
        if tiers and not fill_store(folder, small.dram, ads, store_memory(plan), context):
            return None
    budgets = whole_budgets(setup, plan)
    if tiers:
        budgets = {"hbm": plan.hbm, "mem": plan.mem, "ssd": folder, "ssd_mem": store_memory(plan)}
    with contextlib.closing(training.make_table(plan.dim, OPTIMIZER, setup, **budgets)) as table:
        if not tiers:
            bulk_load.fill_top(table, bulk_load.pieces(ads, 1 << 20))
        torch.manual_seed(setup.seed)
        config = ModelConfig(name="dnn", dim=plan.dim, hidden=plan.hidden, dropout=0.0, batch_norm=False)
        model = build(config, table, plan.fields)
        if table.hbm is not None:
            model.to(table.hbm.device)
        counters = _Counters(table, max(0.2, min(seconds(setup, side), context.seconds_left - 30)), context)
        dense = [torch.optim.Adam(model.parameters(), lr=DENSE_LR)]
        stages = training.train_stream(ads, table, model, dense, depth=DEPTH, after=counters.after_batch)
        record = counters.record(stages)
    shutil.rmtree(folder, ignore_errors=True)
    return {**record, "plan": json.loads(json.dumps(dataclasses.asdict(plan))), "batch_examples": ads.batch_size}


def whole_budgets(setup: Setup, plan: PaperModel) -> dict[str, Any]:
    """Return budgets that hold all rows in the top tier."""
    dram = round(plan.keys * (plan.row_bytes + _OVERHEAD) * 1.1) + (64 << 20)
    if setup.device != "cuda":
        return {"hbm": 0, "mem": dram}
    from thermocline.tiers.hbm import bytes_for

    return {"hbm": bytes_for(round(1.02 * plan.keys), plan.dim + 1) + (64 << 20), "mem": 4 << 30}


def fill_store(folder: Path, tier: DramTier, ads: SyntheticAds, memory: int, context: StepContext) -> bool:
    """Write a row for every key to SSD, continuing after an interruption; return False when time is over."""
    total = sum(ads.keys)
    with SsdStore.open(folder, row_bytes=tier.row_bytes, mem_budget=memory) as store:
        done = int(store.note or b"0")
        if done == total:
            return True

        def after(done: int) -> bool:
            context.report_progress(0.5 * done / total)
            return context.seconds_left > _COMMIT_RESERVE

        done = bulk_load.fill_store(store, ads, tier.initial_rows, done=done, after=after)
        commit(store, str(done).encode())
        return done == total


def commit(store: SsdStore, note: bytes) -> None:
    """Commit, and release all older epochs."""
    store.commit(note)
    for epoch in store.epochs[:-1]:
        store.release(epoch)


class _Counters:
    """Counters of all tiers after every batch, summarised as the points of curves."""

    def __init__(self, table: Any, seconds: float, context: StepContext) -> None:
        self._table, self._seconds, self._context = table, seconds, context
        self._rows: list[dict[str, float]] = []
        self._examples: list[int] = []
        self._commits = 0
        self._stored = 0 if table.store is None else len(table.store)  # read here: later it would scan the log
        self._warm_up = WARM_UP if table.hbm is not None and table.hbm.device.type == "cuda" else 0
        self._warm_up_seconds = 0.0
        self._begin = time.perf_counter()
        self._start = self._read(())

    def after_batch(self, batch: Any, logits: Any, ready: Any) -> bool:
        """Read the counters and commit when it is time; return whether the training continues."""
        self._examples.append(batch.examples)
        self._rows.append(self._read(ready.stats))
        if len(self._rows) <= self._warm_up:
            self._warm_up_seconds = time.perf_counter() - self._begin
            return True
        elapsed = time.perf_counter() - self._begin - self._warm_up_seconds
        self._context.report_progress(0.5 + 0.5 * elapsed / self._seconds)
        if self._table.store is not None and elapsed > (self._commits + 1) * min(COMMIT_SECONDS, self._seconds / 2):
            commit(self._table.store, self._table.store.note)
            self._commits += 1
        return elapsed < self._seconds or len(self._rows) < 4

    def _read(self, stages: Sequence[Any]) -> dict[str, float]:
        mem, store, hbm = self._table.dram.stats(), self._table.store, self._table.hbm
        counts = {"seconds": time.perf_counter() - self._begin, "mem_hits": mem.hits, "mem_all": mem.hits + mem.misses}
        counts["pull_seconds"] = next((s.busy_seconds for s in stages if s.name == "pull"), 0.0)
        if hbm is not None:
            top = hbm.stats()
            counts |= {"hbm_hits": top.ids - top.misses, "hbm_all": top.ids}
            counts |= {"mem_hits": mem.read_hits, "mem_all": mem.reads}
        if store is not None:
            ssd = store.stats()
            counts |= {"bytes_read": ssd.bytes_read, "bytes_written": ssd.bytes_written, "merges": ssd.merges}
            counts |= {"disk_bytes": ssd.disk_bytes, "merged": ssd.merge_bytes_read + ssd.merge_bytes_written}
            counts["reads"] = ssd.reads
        return counts

    def record(self, stages: Sequence[Any]) -> dict[str, Json]:
        """Return the speed of the second half, when hot rows have reached the top tier, and curves of the whole."""
        n = len(self._rows)
        half = n // 2
        seconds = self._rows[-1]["seconds"] - self._rows[half - 1]["seconds"]
        cuts = sorted({round(i * n / min(POINTS, n)) for i in range(1, min(POINTS, n) + 1)})
        points = []
        before, first = self._start, 0
        for cut in cuts:
            now = self._rows[cut - 1]
            change = {name: now[name] - before.get(name, 0) for name in now if name != "disk_bytes"}
            points.append({"batch": cut, "batches": cut - first, **change, "disk_bytes": now.get("disk_bytes", 0)})
            before, first = now, cut
        store, mem = self._table.store, self._table.dram.stats()
        return {
            "batches": n,
            "examples_per_s": sum(self._examples[half:]) / seconds,
            "points": points,
            "stage_ms": {stage.name: stage.busy_seconds / max(1, stage.items) * 1000 for stage in stages},
            "rows": self._stored,
            "row_bytes": self._table.dram.row_bytes,
            "mem_budget": mem.budget,
            "hbm_budget": 0 if self._table.hbm is None else self._table.hbm.budget,
            "store_mem": 0 if store is None else store.stats().mem_total,
        }


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show the results: models_report.py."""
    tiers = {name: results[f"{name}, tiers"] for name in NAMES}
    memory = {name: results[f"{name}, memory"] for name in NAMES if f"{name}, memory" in results}
    return models_report.section(setup, tiers, memory, results.get("disk"), COMMIT_SECONDS)


EXPERIMENT = Experiment(title="Models A to E: speed, tiers, disk and stages", steps=steps, section=section)
