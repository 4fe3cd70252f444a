"""Models A to E in the steady state: tiers, all rows in the top tier, MPI baseline and disk, in one stretch.

One step measures one model on one machine without interruption:

prepare   generate the batches of a cycle, in page-locked memory beside a GPU; write the initial row of every key to SSD
tiers     place the most popular rows in HBM and the next ones in DRAM; train until the look-ahead has grown to its full
          size, then measure for the longer of SECONDS and HORIZONS horizons
disk      read the store's files at random, also with the mean size of the reads just measured
memory    train with all rows in the top tier
cold      train again, from empty tiers above the store: a curve
rival     train with the MPI baseline, all rows in DRAM, once per number of ranks

Training is that of `tc.Trainer` with its defaults: on a GPU recorded steps (CUDA graphs) and fused Adam.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import disk_probe, machine, models, mpi_baseline, popularity, steady_report
from experiments.experiment import Experiment, Json, Section, Setup, Step, StepContext
from experiments.steady_meter import SteadyMeter, resident_bytes
from thermocline.batch import Batch
from thermocline.data.paper_models import PaperModel
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding import bulk_load
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.utils import atomic_file

NAMES = models.NAMES
CYCLE = 1000
"""Batches generated before the clock and repeated, where there is no look-ahead."""
CYCLE_HORIZONS = steady_report.CYCLE_HORIZONS
"""Length of the cycle in horizons, where there is a look-ahead."""
CYCLE_BYTES = 24 << 30
"""Most memory of the ids of a cycle, which are page-locked beside a GPU; at most a quarter of the machine's memory."""
AHEAD_BYTES_PER_ID = 5.5
"""Least bytes that the look-ahead keeps per id of a batch: 4, and 4 per key of the batch. 5.9 were measured for E."""
SECONDS = 60.0
"""Least seconds of a measurement after the ramp-up."""
COLD_SECONDS = 30.0
"""Seconds of the curve from a cold start."""
RAMP_SECONDS = 60.0
"""Most seconds of the ramp-up; the result contains the seconds it took."""
RIVAL_SKIP, RIVAL_SHORT = 3.0, 15.0
"""Seconds of the MPI baseline's training before its measurement begins; and of its measurement with all but the least
number of ranks. The fastest one counts; the least number was the fastest for E on 16 cores."""
PARTS = "parts.json"
"""File in the step's folder: the measurements so far, for the case that a time limit ends the process."""
COMMIT_SECONDS = 20.0
"""Interval of the store's commits."""
LIMITS = (SECONDS, COLD_SECONDS, RAMP_SECONDS, RIVAL_SKIP, RIVAL_SHORT, COMMIT_SECONDS)
DEPTH, PULL_WINDOW = models.DEPTH, 2
"""Windows in flight, and batches per window of HBM."""
_ROW_OVERHEAD = 40  # bytes of index and metadata per row in DRAM
_SMALL_STORE = 8 << 20  # a store with smaller files is probed on a file of this size


def dram(plan: PaperModel) -> int:
    """Return the DRAM budget of every model: that of model E at the same scale, "the DRAM's 40 %"."""
    return models.dram_budget(PaperModel.parse(f"E/{plan.scale:g}"))


def lookahead(setup: Setup, plan: PaperModel) -> int | str:
    """Return the setting of the look-ahead: 0 where HBM and DRAM hold all rows, so that nothing is read from SSD."""
    above = 0
    if setup.device == "cuda":
        from thermocline.tiers.hbm import row_capacity

        above = row_capacity(plan.hbm, plan.dim + 1)
    if plan.keys - above <= dram(plan) // (plan.row_bytes + _ROW_OVERHEAD):
        return 0
    return int(setup.lookahead) if setup.lookahead.isdigit() else setup.lookahead


def cycle(setup: Setup, plan: PaperModel) -> int:
    """Return the number of batches that are generated before the clock: ten of the longest possible horizons, or 1,000
    without a look-ahead, within `CYCLE_BYTES`."""
    ids = models.batch_size(setup, plan) * plan.nonzeros
    limits = LookAheadLimits.of(lookahead(setup, plan), dram(plan), plan.row_bytes)
    longest = CYCLE
    if limits is not None:
        longest = math.ceil(limits.bytes / (AHEAD_BYTES_PER_ID * ids))
        longest = CYCLE_HORIZONS * min(longest, limits.batches or longest)
    return setup.count(min(longest, min(CYCLE_BYTES, setup.dram // 4) // (8 * ids)), 8)


def steps(setup: Setup) -> list[Step]:
    """Return one step per model."""
    made = []
    for name in NAMES:
        plan = PaperModel.parse(models.preset(setup, name))
        settings = {
            "preset": models.preset(setup, name), "seed": setup.seed, "device": setup.device, "cores": setup.cores,
            "batch": models.batch_size(setup, plan), "cycle": cycle(setup, plan), "depth": DEPTH, "window": PULL_WINDOW,
            "seconds": [setup.effort * limit for limit in LIMITS],
            "horizons": SteadyMeter.HORIZONS, "store_memory": models.store_memory(plan),
            "optimizer": dataclasses.asdict(models.OPTIMIZER), "dense_lr": models.DENSE_LR,
            "ranks": ranks(setup, plan), "mem": dram(plan), "lookahead": lookahead(setup, plan),
            "memory": models.fits_top_tier(setup, plan),
        }  # fmt: skip

        def run(context: StepContext, plan: PaperModel = plan) -> Json:
            return _Stretch(setup, plan, context).run()

        expected = 30 + 5 * SECONDS * setup.effort + plan.keys / 4e6
        made.append(Step(name=name, settings=settings, expected_seconds=expected, run=run))
    return made


def ranks(setup: Setup, plan: PaperModel) -> list[int]:
    """Return the numbers of ranks of the MPI baseline, which must be installed and keep all rows in half of the memory.

    A short run has one number for the smallest model only: starting ranks takes longer than its training.
    """
    if not setup.mpi or mpi_baseline.row_bytes(plan) > setup.dram // 2:
        return []
    counts = mpi_baseline.ranks(setup)
    return counts if setup.effort >= 0.1 else counts[-1:] if plan.name == NAMES[0] else []


class _Stretch:
    """The measurements of one model, one after the other."""

    def __init__(self, setup: Setup, plan: PaperModel, context: StepContext) -> None:
        self._setup, self._plan, self._context = setup, plan, context
        self._ads = SyntheticAds.preset(
            models.preset(setup, plan.name), batch_size=models.batch_size(setup, plan), seed=setup.seed
        )
        self._batches: list[Batch] = []
        self._seconds: dict[str, float] = {}
        self._parts: dict[str, Json] = {
            "plan": json.loads(json.dumps(dataclasses.asdict(plan))),
            "batch_examples": self._ads.batch_size,
            "cycle": cycle(setup, plan),
            "lookahead": lookahead(setup, plan),
        }
        self._resident = 0  # bytes of the process before the table was made

    def run(self) -> Json:
        """Return all measurements, with the seconds that each took."""
        from experiments import training

        folder = self._context.folder / "rows"
        shutil.rmtree(folder, ignore_errors=True)
        with self._timed("batches"):
            self._prepare()
        self._fill(folder)
        tiers = self._keep("tiers", self._tiers(folder))
        with self._timed("disk"):
            seconds = max(0.05, min(1.0, self._setup.effort) * disk_probe.SECONDS)
            self._keep("disk", _probe(folder, tiers, seconds))
        self._keep("memory", self._memory() if models.fits_top_tier(self._setup, self._plan) else None)
        self._keep("cold", self._cold(folder))
        shutil.rmtree(folder)
        self._batches = []
        training.free_page_locked()
        rival = self._keep("rival", {})
        for count in ranks(self._setup, self._plan):
            rival[str(count)] = self._rival(count, short=bool(rival))
            self._keep("rival", rival)
        return self._parts

    def _keep(self, name: str, part: Json) -> Json:
        """Add a part to the result, print its speed, and write the parts so far: a time limit may end the process."""
        self._parts |= {name: part, "seconds": self._seconds}
        kept = {**self._parts, "commit": machine.commit()}
        atomic_file.atomic_write(self._context.folder / PARTS, json.dumps(kept).encode())
        runs = part.values() if name == "rival" else [part or {}]
        speeds = ", ".join(f"{run['examples_per_s']:,.0f}" for run in runs if "examples_per_s" in run)
        if speeds:
            print(f"steady {self._plan.name}: {name}, {speeds} examples/s", file=sys.stderr, flush=True)
        return part

    @contextlib.contextmanager
    def _timed(self, part: str) -> Any:
        begin = time.perf_counter()
        yield
        self._seconds[part] = time.perf_counter() - begin
        self._context.report_progress(len(self._seconds) / 10)

    def _prepare(self) -> None:
        """Generate the batches; equal offsets are kept once."""
        from experiments import training

        for batch in itertools.islice(self._ads, cycle(self._setup, self._plan)):
            if self._batches and np.array_equal(batch.offsets, self._batches[0].offsets):
                batch.offsets = self._batches[0].offsets
            self._batches.append(training.page_locked(batch))

    def _fill(self, folder: Path) -> None:
        from experiments import training

        with self._timed("fill"):
            small = training.make_table(self._plan.dim, models.OPTIMIZER, self._setup, hbm=1 << 20, mem=8 << 20)
            with contextlib.closing(small) as table:
                memory = models.store_memory(self._plan)
                models.fill_store(folder, table.dram, self._ads, memory, StepContext(self._context.folder, 1e9))

    def _tiers(self, folder: Path) -> Json:
        with contextlib.closing(self._table(ssd=folder, **self._tier_budgets())) as table:
            with self._timed("place"):
                placed = popularity.place(table, self._ads)
            with self._timed("tiers"):
                return {**self._train(table, ramp=RAMP_SECONDS, seconds=SECONDS), **placed}

    def _cold(self, folder: Path) -> Json:
        with contextlib.closing(self._table(ssd=folder, **self._tier_budgets())) as table, self._timed("cold"):
            return self._train(table, ramp=0, seconds=COLD_SECONDS, horizons=0)

    def _memory(self) -> Json:
        with contextlib.closing(self._table(**models.whole_budgets(self._setup, self._plan))) as table:
            with self._timed("fill memory"):
                bulk_load.fill_top(table, bulk_load.pieces(self._ads, 1 << 20))
            with self._timed("memory"):
                return self._train(table, ramp=RAMP_SECONDS, seconds=SECONDS)

    def _rival(self, count: int, *, short: bool) -> Json:
        """Measure the MPI baseline. It has no look-ahead, so `CYCLE` batches are repeated."""
        with self._timed(f"rival, {count} ranks"):
            config = mpi_baseline.config(self._setup, self._plan, count)
            context = StepContext(self._context.folder, 600.0)
            limits = (RIVAL_SKIP, RIVAL_SHORT if short else SECONDS)
            skip, seconds = (max(1.0, self._setup.effort * limit) for limit in limits)
            prepared = min(cycle(self._setup, self._plan), CYCLE)
            return mpi_baseline.measure(config, count, skip + seconds, context, skip=skip, prepared=prepared)

    def _tier_budgets(self) -> dict[str, Any]:
        plan = self._plan
        ahead = lookahead(self._setup, plan)
        return {"hbm": plan.hbm, "mem": dram(plan), "ssd_mem": models.store_memory(plan), "lookahead": ahead}

    def _table(self, **budgets: Any) -> Any:
        from experiments import training

        self._resident = resident_bytes()
        return training.make_table(self._plan.dim, models.OPTIMIZER, self._setup, **budgets)

    def _train(self, table: Any, *, ramp: float, seconds: float, horizons: int = SteadyMeter.HORIZONS) -> Json:
        """Train a new model on the batches in a cycle and measure it; limits are in seconds of the full run."""
        import torch

        from experiments import training
        from thermocline.models import ModelConfig, build

        torch.manual_seed(self._setup.seed)
        plan, effort = self._plan, self._setup.effort
        config = ModelConfig(name="dnn", dim=plan.dim, hidden=plan.hidden, dropout=0.0, batch_norm=False)
        model = build(config, table, plan.fields)
        if table.hbm is not None:
            model.to(table.hbm.device)
        meter = SteadyMeter(
            table, ramp=effort * ramp, seconds=effort * seconds, horizons=horizons, commit=effort * COMMIT_SECONDS,
            resident_before=self._resident,
        )  # fmt: skip
        dense = torch.optim.Adam(model.parameters(), lr=models.DENSE_LR)
        graphs = training.train_metered(
            itertools.cycle(self._batches), model, dense, meter, depth=DEPTH, pull_window=PULL_WINDOW
        )
        return {**meter.record(), "graphs": graphs}


def _probe(folder: Path, tiers: Json, seconds: float) -> Json:
    """Measure the disk on the store's files; `replay` reads at random with the mean size of the tiers' reads."""
    steady, page = tiers["steady"], disk_probe.PAGE
    sizes = {"page": page, "large": disk_probe.LARGE}
    if steady["reads"]:
        sizes["replay"] = max(page, min(1 << 20, round(steady["bytes_read"] / steady["reads"] / page) * page))
    if max(file.stat().st_size for file in folder.iterdir()) < _SMALL_STORE:
        disk_probe.write_file(folder / "probe", _SMALL_STORE)
    rates = {name: disk_probe.reads_per_second(folder, size, seconds=seconds) for name, size in sizes.items()}
    return {name: {"size": size, "reads_per_s": rates[name]} for name, size in sizes.items()}


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show the results: steady_report.py."""
    return steady_report.section(setup, {name: results[name] for name in NAMES if name in results})


EXPERIMENT = Experiment(title="Models A to E in the steady state", steps=steps, section=section, independent=True)
