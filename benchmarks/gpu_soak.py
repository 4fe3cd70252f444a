"""Long training with recorded steps (CUDA graphs): memory does not grow, and bits stay those of steps without graphs.

Claims   In 8 minutes of training the memory of torch on the GPU does not grow at all, the memory in use on the GPU and
         the resident memory of the process by at most 1 %: largest sample of the last third against the middle third.
         After 20,000 steps all rows and dense parameters have the bits of the same training without graphs.
Method   The model of hbm_step.py through `tc.Trainer`, a fifth of the rows in HBM and all in DRAM, so that rows move in
         every step. Prepared batches in page-locked memory, repeated in a cycle. A sample every second.
Command  python benchmarks/gpu_soak.py --part soak --json FILE       an H200, under nine minutes
         python benchmarks/gpu_soak.py --part bits --json FILE       an H200, about three minutes
         TRITON_INTERPRET=1 python benchmarks/gpu_soak.py --tiny
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json
from dlrm_workload import dense_device, interpreted_or_gpu
from hbm_step import DIM, Model, batches_of, key_of

import thermocline as tc
from thermocline.tiers.hbm import bytes_for

sys.path.append(str(Path(__file__).resolve().parent.parent))

from experiments.steady_meter import resident_bytes

LIMITS = {"torch_allocated": 1.0, "torch_reserved": 1.0, "gpu_used": 1.01, "resident": 1.01}
"""Largest ratio of the last third's samples to those of the middle third."""
RECORDED = 0.99
"""Least share of the steps that are recorded."""


def memory() -> dict[str, int]:
    """Return bytes in use; on a machine without a GPU, the process only."""
    sample = {"resident": resident_bytes()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        sample |= {"torch_allocated": torch.cuda.memory_allocated(), "torch_reserved": torch.cuda.memory_reserved()}
        sample["gpu_used"] = total - free
    return sample


def growth(samples: Sequence[dict[str, Any]], name: str) -> float:
    """Return the largest sample of the last third over that of the middle third."""
    values, third = [sample[name] for sample in samples], len(samples) // 3
    return float(max(values[2 * third :]) / max(values[third : 2 * third]))


class Sampler(tc.Callback):
    """Samples the memory between steps, and ends the training after `seconds`; 0: it ends by itself."""

    def __init__(self, seconds: float, interval: float) -> None:
        self.samples: list[dict[str, Any]] = []
        self._seconds, self._interval = seconds, interval
        self._begin = time.perf_counter()

    def on_start(self, trainer: tc.Trainer) -> None:
        self._begin = time.perf_counter()

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        now = time.perf_counter() - self._begin
        if now >= self._interval * len(self.samples):
            self.samples.append({"seconds": now, "step": trainer.progress.step, **memory()})
        if self._seconds and now >= self._seconds:
            trainer.stop()


def train(args: argparse.Namespace, graphs: str, *, steps: int | None, sampler: Sampler) -> dict[str, Any]:
    """Train a new model and table; return a digest of all rows and parameters, and the number of recorded steps."""
    table = tc.Table(
        DIM, tc.Adagrad(lr=0.05), hbm=bytes_for(args.keys // 5, 2 * DIM), mem=args.keys * 256 + (64 << 20),
        device=interpreted_or_gpu(),
    )  # fmt: skip
    model = Model(table).to(dense_device())
    adam = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    config = tc.TrainConfig(
        steps=steps, graphs=graphs, display=False, tensorboard=False, checkpoint_minutes=None,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer = tc.Trainer(model, adam, config=config, callbacks=[sampler])
    torch.manual_seed(1)
    batches, _ = batches_of(args.batch, args.keys)
    begin = time.perf_counter()
    trainer.fit(itertools.cycle(batches))
    seconds = time.perf_counter() - begin
    digest = hashlib.sha256(np.ascontiguousarray(table.read(key_of(np.arange(args.keys)))).tobytes())
    for parameter in model.net.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    assert table.hbm is not None
    result = {
        "steps": trainer.progress.step,
        "recorded": trainer.graph_step.replays,
        "reason": trainer.graph_step.reason,
        "ms": seconds / trainer.progress.step * 1000,
        "evicted": table.hbm.stats().evictions / trainer.progress.step,
        "digest": digest.hexdigest(),
    }
    table.close()
    return result


def soak(args: argparse.Namespace, record: dict[str, Any]) -> list[Claim]:
    sampler = Sampler(args.seconds, args.interval)
    record["soak"] = train(args, "auto", steps=args.steps if args.tiny else None, sampler=sampler)
    record["soak"]["samples"] = sampler.samples
    console.print({name: value for name, value in record["soak"].items() if name != "samples"}, sampler.samples[-1])
    claims = [
        Claim(f"growth of {name}", growth(sampler.samples, name), LIMITS[name], "x", at_most=True)
        for name in LIMITS
        if name in sampler.samples[0]
    ]
    claims.append(Claim("seconds of training", sampler.samples[-1]["seconds"], 0.95 * args.seconds, "s"))
    return [*claims, *recorded_claim(record["soak"])]


def bits(args: argparse.Namespace, record: dict[str, Any]) -> list[Claim]:
    for graphs in ("auto", "off"):
        record[graphs] = train(args, graphs, steps=args.steps, sampler=Sampler(0, args.interval))
        console.print(graphs, record[graphs])
    equal = record["auto"]["digest"] == record["off"]["digest"]
    claim = Claim(f"bits after {args.steps:,} steps equal to those without graphs (1: yes)", float(equal), 1, unit="")
    return [claim, *recorded_claim(record["auto"])]


def recorded_claim(run: dict[str, Any]) -> list[Claim]:
    """Claim that nearly all steps were recorded; without a GPU none can be."""
    if not torch.cuda.is_available():
        return []
    return [Claim("share of recorded steps", run["recorded"] / run["steps"], RECORDED, unit="", detail=run["reason"])]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("soak", "bits", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=480.0, help="training time of the soak")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the comparison of bits")
    parser.add_argument("--batch", type=int, default=1024, help="examples per batch")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--tiny", action="store_true", help="a few keys and steps, for a dry run")
    parser.add_argument("--json", help="write all figures to FILE")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.seconds, args.interval, args.steps, args.batch, args.keys = 0.0, 0.0, 6, 1, 390
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    claims = []
    if args.part != "bits":
        claims += soak(args, record)
    if args.part != "soak":
        claims += bits(args, record)
    print_claims("Long training with recorded steps", claims)
    if args.json:
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
