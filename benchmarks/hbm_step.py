"""Wall time of a whole training step with all rows in HBM: `tc.Trainer`, an own loop, and plain torch.

Claims   26 one-hot fields, dim 16, 10M keys, MLP 400x400x400. Through `tc.Trainer` a step of 1,024 / 4,096 / 16,384
         examples takes at most 0.6 / 1.0 / 2.2 ms in fp32, one of 65,536 at most 2.5 ms with the network in bf16; in an
         own loop with `tc.prefetch` at most as long as plain torch in the same run, with the network in the same
         precision. With rows below fp32 (`--rows`) a step takes at most as long as with rows in fp32.
Method   Keys follow a power law of exponent 1.05 in each field; all are in HBM before the clock starts. Batches are
         made before, ids and labels in page-locked memory; metrics are on, the display is off. torch gets row numbers
         instead of keys, on the device: nn.EmbeddingBag with sparse gradients and torch.optim.Adagrad, rows in fp32.
         All sides train the network with fused Adam, bf16 by autocast. Wall time of all steps after the first ones,
         divided by their number; the median of three runs of each side, which take turns.
Command  python benchmarks/hbm_step.py --json FILE        an H200, about two minutes
         python benchmarks/hbm_step.py --batches 65536 --precision bf16 --json FILE
         python benchmarks/hbm_step.py --batches 4096,16384 --rows fp32,fp16,int8 --sides auto --json FILE
         TRITON_INTERPRET=1 python benchmarks/hbm_step.py --tiny
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json
from dlrm_workload import dense_device, interpreted_or_gpu, page_locked, synchronize

import thermocline as tc
from thermocline.embedding.bulk_load import fill_top
from thermocline.tiers.hbm import bytes_for

FIELDS, DIM, HIDDEN = 26, 16, (400, 400, 400)
TARGETS = {("fp32", 1024): 0.6, ("fp32", 4096): 1.0, ("fp32", 16384): 2.2, ("bf16", 65536): 2.5}
"""Milliseconds of a step through `tc.Trainer`, by precision of the network and examples."""
BATCHES = 32
WARM = 40
"""Steps before the clock."""
_bce = torch.nn.functional.binary_cross_entropy_with_logits


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    width = FIELDS * DIM
    for size in HIDDEN:
        layers += [torch.nn.Linear(width, size), torch.nn.ReLU()]
        width = size
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).to(dense_device())


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBag(table, FIELDS)
        self.net = network()

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.net(self.bag(batch).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def key_numbers(examples: int, keys: int, seed: int) -> np.ndarray[Any, Any]:
    """int64[examples * FIELDS]: numbers of keys, with probability ~ rank ** -1.05 in each field."""
    per_field, g = keys // FIELDS, -0.05
    uniform = np.random.default_rng(seed).random((examples, FIELDS))
    rank = np.clip(((uniform * (per_field**g - 1.0) + 1.0) ** (1.0 / g)).astype(np.int64), 1, per_field) - 1
    return (rank + np.arange(FIELDS) * per_field).reshape(-1)


def key_of(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def batches_of(examples: int, keys: int) -> tuple[list[tc.Batch], list[np.ndarray[Any, Any]]]:
    numbers = [key_numbers(examples, keys, seed) for seed in range(BATCHES)]
    offsets = np.arange(examples * FIELDS + 1)
    labels = [page_locked(torch.randint(0, 2, (examples,)).float()) for _ in numbers]
    ids = [page_locked(torch.from_numpy(key_of(part).view(np.int64))).numpy().view(np.uint64) for part in numbers]
    batches = [tc.Batch(part, offsets, FIELDS, label=label) for part, label in zip(ids, labels, strict=True)]
    return batches, numbers


class Cycle:
    """The batches again and again; notes the time and the busy times of the stages after `warm` steps."""

    def __init__(self, batches: list[tc.Batch], warm: int, steps: int) -> None:
        self.batches, self.warm, self.steps = batches, warm, steps

    def __len__(self) -> int:
        return self.warm + self.steps

    def __iter__(self) -> Any:
        return (self.batches[n % len(self.batches)] for n in range(len(self)))


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(dense_device(), torch.bfloat16, enabled=precision == "bf16")


def own_loop(table: tc.Table, data: Cycle, window: int, precision: str) -> dict[str, Any]:
    model = Model(table)
    adam = torch.optim.Adam(model.net.parameters(), lr=1e-3, fused=True)
    begin = 0.0
    with tc.prefetch(data, table, depth=4, pull_window=window) as ready:
        for n, batch in enumerate(ready):
            if n == data.warm:
                synchronize()
                begin, before = time.perf_counter(), [stage.busy_seconds for stage in ready.stats]
            with autocast(precision):
                logits = model(batch)
            loss = _bce(logits.float(), batch.label.to(dense_device(), non_blocking=True))
            loss.backward()
            table.step()
            adam.step()
            adam.zero_grad()
        synchronize()
        seconds = time.perf_counter() - begin
        stages = {
            stage.name: round((stage.busy_seconds - past) / data.steps * 1000, 3)
            for stage, past in zip(ready.stats, before, strict=True)
        }
    return {"ms": seconds / data.steps * 1000, "busy_ms": stages}


class Clock(tc.Callback):
    """Measures the steps of a trainer after the first ones."""

    def __init__(self, data: Cycle) -> None:
        self.data = data
        self.ms = 0.0
        self.busy: dict[str, float] = {}

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.data.warm:
            synchronize()
            self.before = [stage.busy_seconds for stage in trainer._stages]
            self.begin = time.perf_counter()
        elif trainer.progress.step == len(self.data):
            synchronize()
            self.ms = (time.perf_counter() - self.begin) / self.data.steps * 1000
            for stage, past in zip(trainer._stages, self.before, strict=True):
                self.busy[stage.name] = round((stage.busy_seconds - past) / self.data.steps * 1000, 3)


def trainer(table: tc.Table, data: Cycle, window: int, graphs: str, precision: str) -> dict[str, Any]:
    model, clock = Model(table), Clock(data)
    adam = torch.optim.Adam(model.net.parameters(), lr=1e-3)  # the trainer makes it fused
    config = tc.TrainConfig(
        steps=len(data),
        display=False,
        pull_window=window,
        graphs=graphs,  # type: ignore[arg-type]
        dense_precision=precision,  # type: ignore[arg-type]
    )
    tc.Trainer(model, adam, config=config, callbacks=[clock]).fit(data)
    return {"ms": clock.ms, "busy_ms": clock.busy}


def plain_torch(numbers: list[np.ndarray[Any, Any]], data: Cycle, keys: int, precision: str) -> dict[str, Any]:
    device = dense_device()
    bag = torch.nn.EmbeddingBag(keys, DIM, mode="sum", sparse=True, device=device)
    net = network()
    sparse = torch.optim.Adagrad(bag.parameters(), lr=0.05)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    rows = [torch.from_numpy(part).to(device) for part in numbers]
    offsets = torch.arange(len(rows[0]), device=device)
    begin = 0.0
    for n in range(len(data)):
        if n == data.warm:
            synchronize()
            begin = time.perf_counter()
        label = data.batches[n % len(rows)].label.to(device, non_blocking=True)
        with autocast(precision):
            logits = net(bag(rows[n % len(rows)], offsets).view(len(label), -1)).squeeze(1)
        _bce(logits.float(), label).backward()
        sparse.step()
        adam.step()
        sparse.zero_grad()
        adam.zero_grad()
    synchronize()
    return {"ms": (time.perf_counter() - begin) / data.steps * 1000}


def new_table(keys: int, examples: int, kind: str) -> tc.Table:
    slots, precision, adagrad = keys + 8 * examples * FIELDS, tc.Precision(kind), tc.Adagrad(lr=0.05)  # type: ignore[arg-type]
    hbm = bytes_for(slots, precision.row_bytes(DIM, adagrad) // 4)
    table = tc.Table(DIM, adagrad, precision=precision, hbm=hbm, mem="4GB", device=interpreted_or_gpu())
    fill_top(table, (key_of(np.arange(first, min(first + (1 << 20), keys))) for first in range(0, keys, 1 << 20)))
    return table


def run(
    side: str,
    table: tc.Table,
    numbers: list[np.ndarray[Any, Any]],
    data: Cycle,
    window: int,
    keys: int,
    precision: str,
) -> dict[str, Any]:
    if side == "torch":
        result = plain_torch(numbers, data, keys, precision)
        torch.cuda.empty_cache()
        return result
    if side == "loop":
        return own_loop(table, data, window, precision)
    return trainer(table, data, window, side, precision)


def measure(examples: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all sides, windows and row precisions for one batch size."""
    batches, numbers = batches_of(examples, args.keys)
    data = Cycle(batches, WARM, args.steps)
    windows = [int(window) for window in args.windows.split(",")]
    kinds = args.rows.split(",")
    tables = {kind: new_table(args.keys, examples, kind) for kind in kinds}
    sides = [(side, window, kind) for window in windows for side in args.sides.split(",") for kind in kinds]
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):  # interleaved: the speed of the host varies
        for side, window, kind in sides:
            if side == "torch" and (window, kind) != (windows[0], kinds[0]):
                continue
            name = side if side == "torch" else side_name(side, window, kind)
            result = run(side, tables[kind], numbers, data, window, args.keys, args.precision)
            runs.setdefault(name, []).append(result)
            console.print(examples, name, result)
    for table in tables.values():
        table.close()
    tables.clear()
    torch.cuda.empty_cache()
    return {
        name: {"ms": statistics.median(result["ms"] for result in results), "runs": results}
        for name, results in runs.items()
    }


def side_name(side: str, window: int, kind: str) -> str:
    return f"{side} window {window}" + ("" if kind == "fp32" else f" rows {kind}")


def claims_of(examples: int, figures: dict[str, Any], args: argparse.Namespace) -> list[Claim]:
    claims, window = [], int(args.windows.split(",")[0])
    fp32 = {side: figures.get(side_name(side, window, "fp32")) for side in ("auto", "loop")}
    ours, peer = fp32["auto"], figures.get("torch")
    target = TARGETS.get((args.precision, examples))
    if ours and target:
        claims.append(Claim(f"{examples:,} through Trainer", ours["ms"], target, "ms", at_most=True))
    if (loop := fp32["loop"]) and peer:
        claims.append(Claim(f"{examples:,} in an own loop, against torch", loop["ms"], peer["ms"], "ms", at_most=True))
    for kind in args.rows.split(","):
        below = figures.get(side_name("auto", window, kind))
        if kind != "fp32" and below and ours:
            name = f"{examples:,} through Trainer, rows in {kind}, against fp32"
            claims.append(Claim(name, below["ms"], ours["ms"], "ms", at_most=True))
    return claims


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1024,4096,16384", help="batch sizes")
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, one after the other; medians count")
    parser.add_argument("--windows", default="1", help="pull windows to measure; the claims are about the first")
    parser.add_argument("--sides", default="torch,loop,off,auto", help="torch, loop, and the trainer's graphs modes")
    parser.add_argument("--precision", default="fp32", help="of the network: fp32, tf32 (Trainer only) or bf16")
    parser.add_argument("--rows", default="fp32", help="precisions of the rows, one after the other")
    parser.add_argument("--tiny", action="store_true", help="a few keys and examples, for a dry run")
    parser.add_argument("--json", help="write all figures to FILE")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.batches, args.keys, args.steps, args.rounds = "2", 2 * FIELDS, 2, 1
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "keys": args.keys,
        "precision": args.precision,
    }
    claims: list[Claim] = []
    for examples in map(int, args.batches.split(",")):
        record[str(examples)] = measure(examples, args)
        claims += claims_of(examples, record[str(examples)], args)
    print_claims("A training step with every row in HBM, wall time", claims)
    if args.json:
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
