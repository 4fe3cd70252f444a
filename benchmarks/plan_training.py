"""One training of benchmarks/plan.py: `python benchmarks/plan_training.py SPEC.json FOLDER`.

Runs as one process or as ranks started by torchrun. All rows exist before the first step; warm steps precede the
measured ones. Rank 0 prints one line of JSON: processor seconds of all ranks, wall seconds, hit rate.
"""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY

# isort: split
import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from train_sides import all_keys, pieces

from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.launch import join_ranks
from thermocline.models import build, row_dim
from thermocline.training.callbacks import Callback
from thermocline.training.run import dense_optimizers, row_optimizer

MIN_LOG_BYTES = 1 << 20
"""Least log size of the store: below the default, so that small stores merge within a short training."""
COMMON = """
[data]
format = "synth"
[data.synth]
keys = {keys}
fields = {fields}
nonzeros = {nonzeros}
zipf = {zipf}
[model]
name = "{model}"
dim = {dim}
hidden = {hidden}
dropout = {dropout}
batch_norm = {batch_norm}
embedding_l2 = 0.0
[tiers]
device = "cpu"
[train]
batch_size = {batch}
pull_window = {window}
optimizer = "{optimizer}"
lr = 0.01
dense_optimizer = "{dense_optimizer}"
[dist.dense_sync]
every = {every}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    keys: int
    fields: int
    nonzeros: int
    zipf: float = 1.05
    model: str
    dim: int
    hidden: tuple[int, ...]
    dropout: float = 0.0
    batch_norm: bool = False
    batch: int
    window: int = 1
    optimizer: str
    dense_optimizer: str = "adam"
    ranks: int = 1
    every: int = 1
    """dist.dense_sync.every."""
    share: float = 1.0
    """Fraction of the rows that fit in DRAM, which has at least 8 MiB per rank; 1: all rows, without SSD."""
    warm: int
    steps: int

    def config(self) -> tc.Config:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"hidden": list(self.hidden), "batch_norm": str(self.batch_norm).lower()}
        return tc.Config.parse(COMMON.format(**values)).resolve()

    def memory(self) -> int:
        """Bytes of DRAM for `share` of the rows, all ranks together."""
        config = self.config()
        dim = row_dim(config.model)
        row_bytes = 4 * (dim + row_optimizer(config).state_floats(dim))
        return max(round(self.keys * self.share * (row_bytes + 60) * 1.05), (8 << 20) * self.ranks)


class Clock(Callback):
    """Wall and processor time of the measured steps."""

    def __init__(self, training: Training, table: tc.Table) -> None:
        self._training, self._table = training, table
        self._step = 0
        self._start = self._end = np.zeros(8)
        self._threads: list[dict[str, float]] = []

    def on_step(self, trainer: Any, loss: object) -> None:
        self._step += 1
        warm, steps = self._training.warm, self._training.steps
        if self._step not in (warm, warm + steps):
            return
        stats, store = self._table.dram.stats(), self._table.store
        disk = [0.0] * 4
        if store is not None:
            used = store.stats()
            disk = [used.bytes_put, used.bytes_written, used.reads, used.bytes_read]
        self._threads.append(thread_seconds())
        now = np.array([time.perf_counter(), time.process_time(), stats.hits, stats.misses, *disk])
        if self._step == warm:
            self._start = now
        else:
            self._end = now

    def result(self, all_gather: Any) -> dict[str, float]:
        """Figures per step: sums over ranks, but the maximum of the wall time."""
        spent = all_gather(self._end - self._start)
        steps = self._training.steps
        _, processor, hits, misses, put, written, reads, read = spent.sum(0).tolist()
        return {
            "step_seconds": float(spent[:, 0].max()) / steps,
            "processor_seconds": processor / steps,
            "hits": hits / max(1.0, hits + misses),
            "from_disk": misses / steps,
            "write_amplification": written / put if put else 0.0,
            "reads": reads / steps,
            "bytes_read": read / steps,
            "bytes_written": written / steps,
        }

    def threads(self) -> dict[str, float]:
        """Processor seconds per step of this rank's threads, by name."""
        before, after = self._threads
        return {name: (used - before.get(name, 0.0)) / self._training.steps for name, used in after.items()}


def thread_seconds() -> dict[str, float]:
    """Processor time of each Python thread by name; all other threads together as "kernels"."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    sums: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(task.name, "kernels")
        sums[name] = sums.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) * 1e-9
    return sums


def main(training: Training, folder: Path) -> None:
    config = training.config()
    groups = join_ranks(config.dist) if training.ranks > 1 else None
    rank, world = (0, 1) if groups is None else (groups.topology.rank, groups.topology.world)
    ads = tc.SyntheticAds(
        keys=training.keys, fields=training.fields, nonzeros=training.nonzeros, zipf=training.zipf,
        batch_size=training.batch, shard=(rank, world),
    )  # fmt: skip
    dim, optimizer = row_dim(config.model), row_optimizer(config)
    ssd = None if training.share == 1 else folder / "rows"
    options: dict[str, Any] = {"mem": training.memory() // world, "ssd": ssd, "device": "cpu", "lookahead": 0}
    options |= {"ssd_mem": max(32 << 20, 8 * training.keys), "ssd_options": {"min_log_bytes": MIN_LOG_BYTES}}
    if groups is None:
        table = tc.Table(dim, optimizer, **options)
    else:
        table = tc.ShardedTable(dim, optimizer, groups=groups, **options)
    fill(table, all_keys(ads), rank, world)
    model = build(config.model, table, ads.fields)
    clock = Clock(training, table)
    steps = training.warm + training.steps
    settings = tc.TrainConfig(display=False, log_every=10**6, pull_window=training.window, steps=steps)
    trainer = tc.Trainer(
        model, dense_optimizers(config, model), config=settings, callbacks=[clock], dense_sync=config.dist.dense_sync
    )
    trainer.fit(ads)

    def all_gather(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values[None] if groups is None else groups.train.all_gather(values, "ending")

    figures: dict[str, Any] = {
        **clock.result(all_gather),
        "mem_rows": float(table.dram.capacity) * world,
        "threads": clock.threads(),
    }
    if rank == 0:
        print(json.dumps(figures), flush=True)
    table.close()
    if groups is not None:
        groups.close()


def fill(table: tc.Table, keys: Any, rank: int, world: int) -> None:
    """Insert the initial rows of this rank's keys: into DRAM, or into the SSD store if there is one."""
    if world > 1:
        keys = keys[owner_of(keys, world) == rank]
    for piece in pieces(keys):
        rows = table.dram.initial_rows(piece)
        if table.store is None:
            table.dram.push(piece, rows)
        else:
            table.store.put(piece, rows.view(np.uint8).reshape(len(piece), -1))
    if table.store is not None:
        table.store.merge()


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    main(Training(**{**spec, "hidden": tuple(spec["hidden"])}), Path(sys.argv[2]))
