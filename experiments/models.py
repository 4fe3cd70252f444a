"""Models A to E, scaled, with the source's ratios of HBM, DRAM and model: speed, hit rates, SSD, disk and stages."""

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

from experiments import disk, models_report
from experiments.experiment import Experiment, Json, Section, Setup, Step, Work
from thermocline.data.paper_models import PaperModel
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding import bulk_load
from thermocline.embedding.optimizers import RowWiseAdagrad
from thermocline.tiers.dram import DramTier
from thermocline.tiers.ssd import SsdStore

NAMES = ("A", "B", "C", "D", "E")
DEPTH = 4
OPTIMIZER, DENSE_LR = RowWiseAdagrad(lr=0.05), 1e-3
BATCH_IDS = {"cpu": 1 << 18, "cuda": 1 << 21}
"""Ids of a batch where memory allows it: a GPU has as much to do for a launch as for a million ids."""
SECONDS = {"tiers": (45.0, 12.0), "memory": (20.0, 4.0)}
"""Of training in the full run, per model, on a CPU and on a GPU: rows that are all in one tier need no warming up."""
POINTS = 60
"""Of a curve at most."""
_OVERHEAD = 64  # bytes that a row takes beside itself: index, metadata
_PROBED = 4 << 30  # bytes of the file whose random reads are the disk's rate
_FILLS = 4e6  # rows a second that fill_store makes, about
_SPARE = 120.0  # seconds of a step that are kept for a commit
WARM = 8
"""Batches on a GPU before the time counts: its kernels are compiled by then."""
COMMIT_SECONDS = 6.0
"""The store commits as often, and once at least."""


def preset(setup: Setup, name: str) -> str:
    return f"{name}/{setup.scale:g}"


def batch_size(setup: Setup, plan: PaperModel) -> int:
    """Examples: as many as the smaller of the tiers holds the working sets in flight of."""
    top = min(plan.mem, plan.hbm) if setup.device == "cuda" else plan.mem
    room = 0.6 * top / (plan.row_bytes + _OVERHEAD) / (DEPTH + 1)
    ids = min(BATCH_IDS[setup.device], room / 0.7)
    return max(1, 1 << int(math.log2(max(1.0, ids / plan.nonzeros))))


def store_memory(plan: PaperModel) -> int:
    """DRAM of the store's index and buffers."""
    return (16 << 20) + 8 * plan.keys


def everything_fits(setup: Setup, plan: PaperModel) -> bool:
    return plan.keys * (plan.row_bytes + _OVERHEAD) * 1.1 < setup.memory


def seconds(setup: Setup, side: str) -> float:
    """Of training."""
    return setup.seconds(*SECONDS[side])


def steps(setup: Setup) -> list[Step]:
    """On a GPU also the disk's rate, which bounds what lies below it."""
    made = [_disk(setup)] if setup.device == "cuda" else []
    for name in NAMES:
        plan = PaperModel.parse(preset(setup, name))
        sides = ["tiers", *(["memory"] if everything_fits(setup, plan) else [])]
        for side in sides:
            settings = {
                "preset": preset(setup, name), "side": side, "seconds": seconds(setup, side), "seed": setup.seed,
                "device": setup.device, "batch": batch_size(setup, plan), "depth": DEPTH,
                "commit_seconds": COMMIT_SECONDS, "optimizer": dataclasses.asdict(OPTIMIZER), "dense_lr": DENSE_LR,
                "store_memory": store_memory(plan), "cores": setup.cores,
            }  # fmt: skip

            def run(work: Work, plan: PaperModel = plan, side: str = side) -> Json | None:
                return _run(setup, plan, side, work)

            expected = 2 + seconds(setup, side) + plan.keys / _FILLS
            made.append(Step(name=f"{name}, {side}", settings=settings, seconds=expected, run=run))
    return made


def _disk(setup: Setup) -> Step:
    """What this disk can do in a second."""

    def run(work: Work) -> Json:
        disk.write_file(work.folder / "file", size)
        large = disk.LARGE * disk.reads_per_second(work.folder, disk.LARGE)
        return {"reads_per_s": disk.reads_per_second(work.folder), "bytes_per_s": large}

    size = setup.count(_PROBED, 8 << 20)
    settings = {"bytes": size, "seconds": disk.SECONDS, "threads": disk.THREADS, "cores": setup.cores,
        "sizes": [disk.PAGE, disk.LARGE]}  # fmt: skip
    return Step(name="disk", settings=settings, seconds=10, run=run)


def _run(setup: Setup, plan: PaperModel, side: str, work: Work) -> Json | None:
    """One model: every row exists, in the lowest tier, before the first batch."""
    import torch

    from experiments.training import stream, table as make_table
    from thermocline.models import ModelConfig, build

    # Beside a GPU half of the cores make data: with all of them busy the thread that feeds it takes twice as long.
    threads = max(1, setup.cores // 2) if setup.device == "cuda" else None
    name, size = f"{plan.name}/{plan.scale:g}", batch_size(setup, plan)
    ads = SyntheticAds.preset(name, batch_size=size, seed=setup.seed, threads=threads)
    folder, tiers = work.folder / "rows", side == "tiers"
    with contextlib.closing(make_table(plan.dim, OPTIMIZER, setup, hbm=1 << 20, mem=8 << 20)) as small:
        if tiers and not _fill(folder, small.dram, ads, store_memory(plan), work):
            return None
    budgets = _whole(setup, plan)
    if tiers:
        budgets = {"hbm": plan.hbm, "mem": plan.mem, "ssd": folder, "ssd_mem": store_memory(plan)}
    with contextlib.closing(make_table(plan.dim, OPTIMIZER, setup, **budgets)) as table:
        if not tiers:
            bulk_load.fill_top(table, bulk_load.pieces(ads, 1 << 20))
        torch.manual_seed(setup.seed)
        config = ModelConfig(name="dnn", dim=plan.dim, hidden=plan.hidden, dropout=0.0, batch_norm=False)
        model = build(config, table, plan.fields)
        if table.hbm is not None:
            model.to(table.hbm.device)
        log = _Log(table, max(0.2, min(seconds(setup, side), work.left - 30)), work)
        dense = [torch.optim.Adam(model.parameters(), lr=DENSE_LR)]
        stages = stream(ads, table, model, dense, depth=DEPTH, after=log.after)
        record = log.record(stages)
    shutil.rmtree(folder, ignore_errors=True)
    return {**record, "plan": json.loads(json.dumps(dataclasses.asdict(plan))), "batch_examples": ads.batch_size}


def _whole(setup: Setup, plan: PaperModel) -> dict[str, Any]:
    """Budgets that hold all rows in the top tier; what of DRAM is then below HBM holds nothing."""
    dram = round(plan.keys * (plan.row_bytes + _OVERHEAD) * 1.1) + (64 << 20)
    if setup.device != "cuda":
        return {"hbm": 0, "mem": dram}
    from thermocline.tiers.hbm import bytes_for

    return {"hbm": bytes_for(round(1.02 * plan.keys), plan.dim + 1) + (64 << 20), "mem": 4 << 30}


def _fill(folder: Path, tier: DramTier, ads: SyntheticAds, memory: int, work: Work) -> bool:
    """A row on SSD for every key. One that was cut short goes on. False: time is up."""
    total = sum(ads.keys)
    with SsdStore.open(folder, row_bytes=tier.row_bytes, mem_budget=memory) as store:
        done = int(store.note or b"0")
        if done == total:
            return True

        def after(done: int) -> bool:
            work.tell(0.5 * done / total)
            return work.left > _SPARE

        done = bulk_load.fill_store(store, ads, tier.initial_rows, done=done, after=after)
        _commit(store, str(done).encode())
        return done == total


def _commit(store: SsdStore, note: bytes) -> None:
    """Only the newest is kept."""
    store.commit(note)
    for epoch in store.epochs[:-1]:
        store.release(epoch)


class _Log:
    """Counters after every batch, then gathered into a few points."""

    def __init__(self, table: Any, seconds: float, work: Work) -> None:
        self._table, self._seconds, self._work = table, seconds, work
        self._rows: list[dict[str, float]] = []
        self._examples: list[int] = []
        self._commits = 0
        self._stored = 0 if table.store is None else len(table.store)  # now, when there is no log to read through
        self._warm = WARM if table.hbm is not None and table.hbm.device.type == "cuda" else 0
        self._warmed = 0.0  # seconds until then
        self._begin = time.perf_counter()
        self._start = self._counters(())

    def after(self, batch: Any, logits: Any, stages: Sequence[Any]) -> bool:
        self._examples.append(batch.examples)
        self._rows.append(self._counters(stages))
        if len(self._rows) <= self._warm:
            self._warmed = time.perf_counter() - self._begin
            return True
        elapsed = time.perf_counter() - self._begin - self._warmed
        self._work.tell(0.5 + 0.5 * elapsed / self._seconds)
        if self._table.store is not None and elapsed > (self._commits + 1) * min(COMMIT_SECONDS, self._seconds / 2):
            _commit(self._table.store, self._table.store.note)
            self._commits += 1
        return elapsed < self._seconds or len(self._rows) < 4

    def _counters(self, stages: Sequence[Any]) -> dict[str, float]:
        mem, store, hbm = self._table.dram.stats(), self._table.store, self._table.hbm
        counts = {"seconds": time.perf_counter() - self._begin, "mem_hits": mem.hits, "mem_all": mem.hits + mem.misses}
        counts["pull_seconds"] = next((s.busy_seconds for s in stages if s.name == "pull"), 0.0)
        if hbm is not None:
            top = hbm.stats()
            counts |= {"hbm_hits": top.ids - top.misses, "hbm_all": top.ids}
            counts |= {"mem_hits": mem.read_hits, "mem_all": mem.reads}
        if store is not None:
            below = store.stats()
            counts |= {"bytes_read": below.bytes_read, "bytes_written": below.bytes_written, "merges": below.merges}
            counts |= {"disk_bytes": below.disk_bytes, "merged": below.merge_bytes_read + below.merge_bytes_written}
            counts["reads"] = below.reads
        return counts

    def record(self, stages: Sequence[Any]) -> dict[str, Json]:
        """Speed of the second half, when hot rows have risen; curves over all of it."""
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
    tiers = {name: results[f"{name}, tiers"] for name in NAMES}
    memory = {name: results[f"{name}, memory"] for name in NAMES if f"{name}, memory" in results}
    return models_report.section(setup, tiers, memory, results.get("disk"), COMMIT_SECONDS)


EXPERIMENT = Experiment(title="Models A to E: speed, tiers, disk and stages", steps=steps, section=section)
