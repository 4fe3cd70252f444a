"""Checks `thermocline plan` against the machine it runs on: predicted and measured step times of small trainings.

    python benchmarks/plan.py [--quick] [--json FILE] [--dir FOLDER]

The machine is measured first (`thermocline plan --measure`), with shapes that none of the trainings has. Then every
training runs with warm caches and all rows there, by `tc.Trainer`. Two figures of each are compared: processor seconds
per step, which other load disturbs little, and wall seconds per step, which mean something on a quiet machine only: how
busy others kept it is printed beside.
"""

from __future__ import annotations

import thermocline as tc  # before torch: see benchmarks/train.py

# isort: split
import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, noise, print_claims, write_json
from train_sides import all_keys, pieces

from thermocline.callbacks import Callback
from thermocline.models import build, row_dim
from thermocline.plan.hardware import Hardware
from thermocline.plan.measure import measure
from thermocline.plan.predict import Cluster, Prediction, predict
from thermocline.plan.workload import workload_of
from thermocline.run import dense_optimizers, row_optimizer

WITHIN = 0.2

COMMON = """
[data]
format = "synth"
[data.synth]
keys = {keys}
fields = {fields}
nonzeros = {nonzeros}
[model]
name = "{model}"
dim = {dim}
hidden = {hidden}
dropout = 0.0
batch_norm = false
embedding_l2 = 0.0
[train]
batch_size = {batch}
optimizer = "{optimizer}"
lr = 0.01
dense_optimizer = "adam"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One workload; sizes differ from those that `measure` uses."""

    keys: int
    fields: int
    nonzeros: int
    model: str
    dim: int
    hidden: tuple[int, ...]
    batch: int
    optimizer: str
    share: float
    """Of the rows that are in memory; 1: all, without SSD."""
    warm: int
    steps: int

    def config(self) -> tc.Config:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return tc.Config.parse(COMMON.format(**{**values, "hidden": list(self.hidden)})).resolve()


MEMORY = Training(
    keys=800_000,
    fields=20,
    nonzeros=60,
    model="fm",
    dim=15,
    hidden=(),
    batch=3000,
    optimizer="adagrad",
    share=1.0,
    warm=30,
    steps=60,
)
TRAININGS = {
    "FM, memory": MEMORY,
    "DNN, memory": dataclasses.replace(
        MEMORY, fields=30, nonzeros=30, model="dnn", dim=20, hidden=(256, 128), optimizer="adam"
    ),
    "DNN, memory + SSD": dataclasses.replace(
        MEMORY,
        keys=1_000_000,
        nonzeros=20,
        model="dnn",
        dim=16,
        hidden=(64,),
        batch=1000,
        share=0.1,
        warm=300,
        steps=200,
    ),
}


class Clock(Callback):
    """Time and processor time of the steps after the warm ones."""

    def __init__(self, warm: int, steps: int, table: tc.Table) -> None:
        self._warm, self._steps, self._table = warm, steps, table
        self._step = 0
        self.start = self.end = (0.0, 0.0, 0, 0, 0, 0)

    def on_step(self, trainer: Any, loss: object) -> None:
        self._step += 1
        if self._step not in (self._warm, self._warm + self._steps):
            return
        stats, store = self._table.tier.stats(), self._table.store
        put, written = (0, 0) if store is None else (store.stats().bytes_put, store.stats().bytes_written)
        now = (time.perf_counter(), time.process_time(), stats.hits, stats.misses, put, written)
        if self._step == self._warm:
            self.start = now
        else:
            self.end = now

    def result(self) -> dict[str, float]:
        seconds, processor, hits, misses, put, written = (b - a for a, b in zip(self.start, self.end, strict=True))
        return {
            "step_seconds": seconds / self._steps,
            "processor_seconds": processor / self._steps,
            "hits": hits / (hits + misses),
            "from_disk": misses / self._steps,
            "write_amplification": written / put if put else 0.0,
        }


def run(training: Training, folder: Path) -> tuple[dict[str, float], float]:
    """Trains; returns what was measured, and the rows that memory holds."""
    config = training.config()
    ads = tc.SyntheticAds(
        keys=training.keys, fields=training.fields, nonzeros=training.nonzeros, batch_size=training.batch,
        examples=training.batch * (training.warm + training.steps),
    )  # fmt: skip
    keys = all_keys(ads)
    dim, optimizer = row_dim(config.model), row_optimizer(config)
    row_bytes = 4 * (dim + optimizer.state_floats(dim))
    mem = round(len(keys) * training.share * (row_bytes + 60) * 1.05) + (8 << 20)
    ssd = None if training.share == 1 else folder / "rows"
    table = tc.Table(dim, optimizer, mem=mem, ssd=ssd, ssd_mem=max(32 << 20, 8 * len(keys)))
    for piece in pieces(keys):
        rows = table.tier.initial_rows(piece)
        if table.store is None:
            table.tier.push(piece, rows)
        else:
            table.store.put(piece, rows.view(np.uint8).reshape(len(piece), -1))
    if table.store is not None:
        table.store.merge()
    model = build(config.model, table, ads.fields)
    clock = Clock(training.warm, training.steps, table)
    settings = tc.TrainConfig(display=False, log_every=10**6)
    trainer = tc.Trainer(model, dense_optimizers(config, model), config=settings, callbacks=[clock])
    trainer.fit(ads)
    rows_held = float(table.tier.capacity)
    table.close()
    return clock.result(), rows_held


def compare(training: Training, hardware: Hardware, folder: Path) -> dict[str, Any]:
    with noise() as others:
        measured, rows = run(training, folder)
    cluster = Cluster() if training.share == 1 else Cluster(mem_rows=rows)
    predicted: Prediction = predict(workload_of(training.config()), cluster, hardware)
    return {
        "training": dataclasses.asdict(training),
        "measured": {**measured, **others},
        "predicted": predicted.to_json(),
        "processor_ratio": predicted.processor_seconds / measured["processor_seconds"],
        "wall_ratio": predicted.seconds / measured["step_seconds"],
    }


def claims_of(results: dict[str, Any]) -> list[Claim]:
    out = []
    for name, result in results.items():
        measured, predicted = result["measured"], result["predicted"]
        for what, key in (("processor", "processor_seconds"), ("wall", "step_seconds")):
            off = abs(result[f"{what}_ratio"] - 1)
            detail = f"predicted {predicted[key] * 1e3:.2f}, measured {measured[key] * 1e3:.2f} ms a step"
            if what == "wall":
                detail += f"; others had {measured['others_cpu']:.0%} of the cores"
                detail += f"; hits {predicted['figures']['hits']:.3f} and {measured['hits']:.3f}"
            out.append(Claim(f"{name}: {what} time off by", off, WITHIN, unit="", at_most=True, detail=detail))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write results there")
    parser.add_argument("--hardware", metavar="FILE", help="figures of this machine measured before")
    parser.add_argument("--dir", help="folder for the data; default: a new one beside the other temporary files")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        if args.hardware:
            hardware = Hardware.load(args.hardware)
        else:
            hardware = measure(name, lambda: console.print("measured a part of the machine"))
        results = {}
        for title, training in TRAININGS.items():
            if args.quick:
                training = dataclasses.replace(training, steps=training.steps // 2)
            console.print(f"training: {title}")
            results[title] = compare(training, hardware, Path(name))
    claims = claims_of(results)
    print_claims("predicted against measured", claims)
    if args.json:
        record = {"environment": environment(("torch", "numpy")), "hardware": hardware.to_toml(), "results": results}
        write_json(args.json, {**record, "torch_threads": torch.get_num_threads()}, claims)


if __name__ == "__main__":
    main()
