"""Accuracy of `thermocline plan`: predicted against measured step times of random small trainings.

Claim    Predicted processor time and wall time per step are within 20 % of the measured ones.
Method   The machine is calibrated first. Trainings are drawn at random from `--seed` (models, sizes, batches,
         optimizers, ranks, memory). Each is predicted, then run by `tc.Trainer` in separate processes with warm caches
         and all rows present. Other load affects processor time little; wall time needs an idle machine, so the load
         of other processes is printed. Two probes record the speed of the machine before and after each training,
         relative to the calibration: the speed of a virtual machine varies. `--again` adds a round (calibration,
         predictions, trainings) to a result file; the median over rounds counts. A seed whose errors were used to
         change the model is not a test any more: take another.
Command  python benchmarks/plan.py --seed N [--cases N] [--hardware FILE] [--json FILE [--again]] [--dir FOLDER]
Target   Every ratio within 1 +- 0.2, and the medians.
"""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY

# isort: split
import argparse
import bisect
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, noise, print_claims, write_json
from plan_training import MIN_LOG_BYTES, Training

from thermocline.models import row_dim
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.calibrate import measure
from thermocline.planner.cost_model import Cluster, StepCost, predict
from thermocline.planner.hardware import Hardware
from thermocline.planner.op_counter import reference_network_seconds
from thermocline.planner.workload import rows_in, workload_of

WITHIN = 0.2
KINDS = ("memory", "memory + SSD", "2 ranks", "memory", "2 ranks, memory + SSD", "memory")
"""Kinds of the trainings, in this order, repeated."""
SECONDS = 2.0
"""Predicted duration of the measured steps, without SSD."""
MERGE_SECONDS = 20.0
"""Longest predicted duration of the measured steps with SSD: they put as many rows as four logs, which are merged."""
WARM_SECONDS = 60.0
"""Longest predicted duration of the warm steps."""


def draw_training(rng: random.Random, kind: str) -> Training:
    """Draw a random training; sizes are uniform in their logarithm."""

    def log_uniform(low: float, high: float) -> int:
        return round(low * (high / low) ** rng.random())

    fields = rng.randint(6, 40)
    ranks, ssd = (2 if "ranks" in kind else 1), "SSD" in kind
    return Training(
        keys=log_uniform(1_200_000, 2_400_000) if ssd else log_uniform(300_000, 1_500_000),
        fields=fields,
        nonzeros=fields * rng.choice((1, 1, 2, 3)),
        zipf=rng.choice((0.9, 1.05, 1.2)),
        model=rng.choice(("lr", "fm", "dnn", "widedeep", "deepfm", "dcn", "dcnv2", "dlrm")),
        dim=log_uniform(4, 64),
        hidden=tuple(log_uniform(32, 512) for _ in range(rng.randint(1, 3))),
        dropout=rng.choice((0.0, 0.2)),
        batch_norm=rng.random() < 0.3,
        batch=log_uniform(500, 6000) // ranks,
        window=rng.choice((1, 1, 3)),
        optimizer=rng.choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
        dense_optimizer=rng.choice(("sgd", "adagrad", "adam", "adam")),
        ranks=ranks,
        share=round(rng.uniform(0.1, 0.4), 2) if ssd else 1.0,
        warm=20,
        steps=1,
    )


def with_steps(training: Training, predicted: StepCost, keys: KeyDistribution, mem_rows: float) -> Training:
    """Set steps for `SECONDS`, with SSD for several merges, and warm steps, until DRAM was filled several times."""
    steps = round(min(600, max(12, SECONDS / predicted.seconds)))
    warm = 20
    if mem_rows < training.keys:
        merges = math.ceil(4 * 0.1 * training.keys / predicted.figures["from_disk"])
        steps = max(steps, min(merges, round(MERGE_SECONDS / predicted.seconds)))
        warm = max(60, 3 * steps_to_fill(training, keys, mem_rows, round(WARM_SECONDS / 3 / predicted.seconds)))
    return dataclasses.replace(training, steps=steps, warm=warm)


def steps_to_fill(training: Training, keys: KeyDistribution, mem_rows: float, most: int) -> int:
    """Return the steps after which as many keys were used as DRAM has rows, at most `most`."""
    numbers = range(1, most)
    return 1 + bisect.bisect_left(
        numbers, mem_rows, key=lambda steps: keys.unique_keys(training.batch * training.ranks * steps)
    )


def run(training: Training, folder: Path) -> dict[str, Any]:
    """Train in separate processes; return the figures that rank 0 printed."""
    spec = folder / "training.json"
    spec.write_text(json.dumps(dataclasses.asdict(training)))
    program = [str(Path(__file__).with_name("plan_training.py")), str(spec), str(folder)]
    if training.ranks > 1:
        ranks = ["--standalone", "--nproc-per-node", str(training.ranks)]
        program = ["-m", "torch.distributed.run", *ranks, *program]
    source = str(Path(tc.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo"}
    if training.ranks > 1:
        env["OMP_NUM_THREADS"] = "1"
    out = subprocess.run(
        [sys.executable, *program], env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    figures: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return figures


class Probes:
    """Processor time of a network and of deduplication, relative to the first measurement."""

    def __init__(self) -> None:
        self._ids = [tc.SyntheticAds(keys=400_000, fields=26, batch_size=4096, seed=n).batch(0).ids for n in range(8)]
        self._first = self._measure()

    def _measure(self) -> np.ndarray[Any, Any]:
        start = time.process_time()
        for ids in self._ids:
            tc.WorkingSet.of(ids)
        return np.array([reference_network_seconds(3), time.process_time() - start])

    def __call__(self) -> dict[str, float]:
        network, dedup = (self._measure() / self._first).tolist()
        return {"network": network, "dedup": dedup}


def compare(training: Training, hardware: Hardware, folder: Path, probes: Probes) -> dict[str, Any]:
    work = workload_of(training.config())
    rows = mem_rows(training)
    cluster = Cluster(mem_rows=rows, ranks=training.ranks, min_log_bytes=MIN_LOG_BYTES)
    predicted = predict(work, cluster, hardware)
    training = with_steps(training, predicted, work.key_distribution, rows)
    before = probes()
    with tempfile.TemporaryDirectory(dir=folder) as name, noise() as others:
        measured = run(training, Path(name))
    slowdown = {"before": before, "after": probes()}
    if training.share < 1:  # with the number of rows that fit the budget in bytes
        predicted = predict(work, dataclasses.replace(cluster, mem_rows=measured["mem_rows"]), hardware)
    return {
        "training": dataclasses.asdict(training),
        "measured": {**measured, **others, "slower": slowdown},
        "predicted": predicted.to_json(),
        "processor_ratio": predicted.processor_seconds / measured["processor_seconds"],
        "wall_ratio": predicted.seconds / measured["step_seconds"],
    }


def mem_rows(training: Training) -> float:
    """Rows that fit the budget of the tables; inf: without SSD."""
    if training.share == 1:
        return float("inf")
    config = training.config()
    return rows_in(config, row_dim(config.model), training.memory())


def title(number: int, training: Training) -> str:
    t = training
    text = f"{number + 1}: {t.model}, dim {t.dim}, {t.nonzeros} ids, batch {t.batch}"
    text += f" x {t.ranks} ranks" if t.ranks > 1 else ""
    return text + (f", {min(1.0, mem_rows(t) / t.keys):.0%} of the rows in memory" if t.share < 1 else "")


def over_rounds(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures per training, medians over the rounds."""
    out = {}
    for name in rounds[0]["results"]:
        runs = [one["results"][name] for one in rounds]

        def median(side: str, figure: str, runs: list[Any] = runs) -> float:
            return float(np.median([run[side][figure] for run in runs]))

        figures = ("processor_seconds", "step_seconds")
        measured = {figure: median("measured", figure) for figure in (*figures, "hits", "others_cpu")}
        predicted = {figure: median("predicted", figure) for figure in figures}
        predicted["hits"] = float(np.median([run["predicted"]["figures"]["hits"] for run in runs]))
        slowdowns = [value for run in runs for when in run["measured"]["slower"].values() for value in when.values()]
        out[name] = {
            "training": runs[0]["training"],
            "measured": measured,
            "predicted": predicted,
            "slower": [min(slowdowns), max(slowdowns)],
            "processor_ratio": predicted["processor_seconds"] / measured["processor_seconds"],
            "wall_ratio": predicted["step_seconds"] / measured["step_seconds"],
        }
    return out


def claims_of(results: dict[str, Any]) -> list[Claim]:
    out = []
    for name, result in results.items():
        measured, predicted = result["measured"], result["predicted"]
        for clock, key in (("processor", "processor_seconds"), ("wall", "step_seconds")):
            error = abs(result[f"{clock}_ratio"] - 1)
            detail = f"predicted {predicted[key] * 1e3:.2f}, measured {measured[key] * 1e3:.2f} ms per step"
            if clock == "wall":
                least, most = result["slower"]
                detail += f"; other processes used {measured['others_cpu']:.0%} of the cores; probes took {least:.2f} "
                detail += f"to {most:.2f} times their first duration"
                if result["training"]["share"] < 1:
                    detail += f"; hit rate {predicted['hits']:.3f} predicted, {measured['hits']:.3f} measured"
            out.append(Claim(f"{name}: error of {clock} time", error, WITHIN, unit="", at_most=True, detail=detail))
    for clock in ("processor", "wall"):
        errors = [abs(result[f"{clock}_ratio"] - 1) for result in results.values()]
        within = sum(error <= WITHIN for error in errors)
        detail = f"{within} of {len(errors)} within {WITHIN:.0%}, worst {max(errors):.0%}"
        out.append(Claim(f"median error of {clock} time", float(np.median(errors)), WITHIN, "", True, detail))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--again", action="store_true", help="add a round to the file of --json")
    parser.add_argument("--hardware", metavar="FILE", help="calibration of this machine; default: calibrate now")
    parser.add_argument("--dir", help="folder for the data; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random trainings")
    parser.add_argument("--cases", type=int, default=12, help="number of trainings")
    parser.add_argument("--only", type=int, nargs="*", help="run only these numbers")
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    if args.again:
        if not args.json:
            parser.error("--again needs --json FILE: the file with the earlier rounds")
        before = json.loads(Path(args.json).read_text())
        if before["seed"] != args.seed:
            parser.error(f"{args.json} has --seed {before['seed']}, not {args.seed}")
        rounds = before["rounds"]
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        if args.hardware:
            hardware = Hardware.load(args.hardware)
        else:
            hardware = measure(name, lambda: console.print("calibrated a part of the machine"))
        probes, results, rng = Probes(), dict[str, Any](), random.Random(args.seed)
        for number in range(args.cases):
            training = draw_training(rng, KINDS[number % len(KINDS)])
            if args.only and number + 1 not in args.only:
                continue
            name_of_case = title(number, training)
            console.print(name_of_case)
            results[name_of_case] = result = compare(training, hardware, Path(name), probes)
            console.print(
                f"  predicted / measured: processor {result['processor_ratio']:.2f}, wall {result['wall_ratio']:.2f}"
            )
    rounds.append({"hardware": hardware.to_toml(), "results": results})
    claims = claims_of(over_rounds(rounds))
    if args.json:
        record = {"environment": environment(("torch", "numpy")), "seed": args.seed}
        record |= {"torch_threads": torch.get_num_threads(), "rounds": rounds}
        write_json(args.json, record, claims)
    print_claims("predicted against measured", claims)


if __name__ == "__main__":
    main()
