"""Checks `thermocline plan` against the machine it runs on: predicted and measured step times of small trainings.

    python benchmarks/plan.py [--seed N] [--cases N] [--hardware FILE] [--json FILE [--again]] [--dir FOLDER]

The machine is measured first (`thermocline plan --measure`). Then trainings are drawn by chance, from `--seed`: models,
sizes, batches, optimizers, ranks, memory. Each is predicted before it runs, with warm caches and all rows there, by
`tc.Trainer`, in processes of its own. Two figures of each are compared: processor seconds per step, which other load
disturbs little, and wall seconds per step, which mean something on a quiet machine only: how busy others kept it is
printed beside. So is the machine's own speed before and after each training, as two probes see it, over that when it
was measured: a virtual machine's varies, which no model can know. So `--again` adds a whole round, machine, predictions
and trainings, to those of the file: what counts of each figure is its median over the rounds. A seed whose errors
someone has looked at to change the model is no test any more: take another.
"""

from __future__ import annotations

import thermocline as tc  # before torch: see benchmarks/train.py

# isort: split
import argparse
import dataclasses
import json
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
from plan_training import Training

from thermocline.planner.calibrate import measure
from thermocline.planner.cost_model import Cluster, Prediction, predict
from thermocline.planner.hardware import Hardware
from thermocline.planner.op_counter import reference_seconds
from thermocline.planner.workload import workload_of

WITHIN = 0.2
KINDS = ("memory", "memory + SSD", "2 ranks", "memory", "2 ranks, memory + SSD", "memory")
"""In turns."""
SECONDS = 2.0
"""Of the part that is measured, as predicted."""


def drawn(rng: random.Random, kind: str) -> Training:
    """A training by chance; sizes are spread evenly by their logarithm."""

    def about(low: float, high: float) -> int:
        return round(low * (high / low) ** rng.random())

    fields = rng.randint(6, 40)
    ranks, ssd = (2 if "ranks" in kind else 1), "SSD" in kind
    return Training(
        keys=about(300_000, 600_000 if ssd else 1_500_000),
        fields=fields,
        nonzeros=fields * rng.choice((1, 1, 2, 3)),
        zipf=rng.choice((0.9, 1.05, 1.2)),
        model=rng.choice(("lr", "fm", "dnn", "widedeep", "deepfm", "dcn", "dcnv2", "dlrm")),
        dim=about(4, 64),
        hidden=tuple(about(32, 512) for _ in range(rng.randint(1, 3))),
        dropout=rng.choice((0.0, 0.2)),
        batch_norm=rng.random() < 0.3,
        batch=about(500, 6000) // ranks,
        window=rng.choice((1, 1, 3)),
        optimizer=rng.choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
        dense_optimizer=rng.choice(("sgd", "adagrad", "adam", "adam")),
        ranks=ranks,
        share=round(rng.uniform(0.1, 0.4), 2) if ssd else 1.0,
        warm=20,
        steps=1,
    )


def long_enough(training: Training, predicted: Prediction) -> Training:
    """With steps for some seconds; and with SSD, until memory has been filled several times over, and merging runs."""
    steps = round(min(600, max(12, SECONDS / predicted.seconds)))
    warm = 20
    if training.share < 1:
        filled = training.keys * training.share / max(1.0, predicted.figures["from_disk"])
        warm = round(min(400, max(60, 3 * filled)))
    return dataclasses.replace(training, steps=steps, warm=warm)


def run(training: Training, folder: Path) -> dict[str, Any]:
    """Trains in processes of its own; what they measured."""
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
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


class Probes:
    """Processor time of a network and of deduplicating ids, over what it was at first."""

    def __init__(self) -> None:
        self._ids = [tc.SyntheticAds(keys=400_000, fields=26, batch_size=4096, seed=n).batch(0).ids for n in range(8)]
        self._first = self._now()

    def _now(self) -> np.ndarray[Any, Any]:
        start = time.process_time()
        for ids in self._ids:
            tc.WorkingSet.of(ids)
        return np.array([reference_seconds(3), time.process_time() - start])

    def __call__(self) -> dict[str, float]:
        network, dedup = (self._now() / self._first).tolist()
        return {"network": network, "dedup": dedup}


def compare(training: Training, hardware: Hardware, folder: Path, probes: Probes) -> dict[str, Any]:
    work = workload_of(training.config())
    rows = float("inf") if training.share == 1 else training.keys * training.share
    predicted = predict(work, Cluster(mem_rows=rows, ranks=training.ranks), hardware)
    training = long_enough(training, predicted)
    before = probes()
    with tempfile.TemporaryDirectory(dir=folder) as name, noise() as others:
        measured = run(training, Path(name))
    slower = {"before": before, "after": probes()}
    if training.share < 1:  # a budget in bytes holds so many rows
        predicted = predict(work, Cluster(mem_rows=measured["mem_rows"], ranks=training.ranks), hardware)
    return {
        "training": dataclasses.asdict(training),
        "measured": {**measured, **others, "slower": slower},
        "predicted": predicted.to_json(),
        "processor_ratio": predicted.processor_seconds / measured["processor_seconds"],
        "wall_ratio": predicted.seconds / measured["step_seconds"],
    }


def title(number: int, training: Training) -> str:
    t = training
    words = f"{number + 1}: {t.model}, dim {t.dim}, {t.nonzeros} ids, batch {t.batch}"
    words += f" x {t.ranks} ranks" if t.ranks > 1 else ""
    return words + (f", {t.share:.0%} of the rows in memory" if t.share < 1 else "")


def over_rounds(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Each training's figures, medians over the rounds."""
    out = {}
    for name in rounds[0]["results"]:
        found = [one["results"][name] for one in rounds]

        def median(side: str, figure: str, found: list[Any] = found) -> float:
            return float(np.median([one[side][figure] for one in found]))

        figures = ("processor_seconds", "step_seconds")
        measured = {figure: median("measured", figure) for figure in (*figures, "hits", "others_cpu")}
        predicted = {figure: median("predicted", figure) for figure in figures}
        predicted["hits"] = float(np.median([one["predicted"]["figures"]["hits"] for one in found]))
        slower = [value for one in found for when in one["measured"]["slower"].values() for value in when.values()]
        out[name] = {
            "training": found[0]["training"],
            "measured": measured,
            "predicted": predicted,
            "slower": [min(slower), max(slower)],
            "processor_ratio": predicted["processor_seconds"] / measured["processor_seconds"],
            "wall_ratio": predicted["step_seconds"] / measured["step_seconds"],
        }
    return out


def claims_of(results: dict[str, Any]) -> list[Claim]:
    out = []
    for name, result in results.items():
        measured, predicted = result["measured"], result["predicted"]
        for what, key in (("processor", "processor_seconds"), ("wall", "step_seconds")):
            off = abs(result[f"{what}_ratio"] - 1)
            detail = f"predicted {predicted[key] * 1e3:.2f}, measured {measured[key] * 1e3:.2f} ms a step"
            if what == "wall":
                least, most = result["slower"]
                detail += f"; others had {measured['others_cpu']:.0%} of the cores; probes took {least:.2f} to "
                detail += f"{most:.2f} times as long as at first"
                if result["training"]["share"] < 1:
                    detail += f"; hits {predicted['hits']:.3f} and {measured['hits']:.3f}"
            out.append(Claim(f"{name}: {what} time off by", off, WITHIN, unit="", at_most=True, detail=detail))
    for what in ("processor", "wall"):
        off = [abs(result[f"{what}_ratio"] - 1) for result in results.values()]
        within = sum(value <= WITHIN for value in off)
        detail = f"{within} of {len(off)} within {WITHIN:.0%}, worst {max(off):.0%}"
        out.append(Claim(f"median: {what} time off by", float(np.median(off)), WITHIN, "", True, detail))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write results there")
    parser.add_argument("--again", action="store_true", help="one more round, beside those in the file of --json")
    parser.add_argument("--hardware", metavar="FILE", help="figures of this machine measured before")
    parser.add_argument("--dir", help="folder for the data; default: a new one beside the other temporary files")
    parser.add_argument("--seed", type=int, default=0, help="which trainings are drawn")
    parser.add_argument("--cases", type=int, default=12, help="how many")
    parser.add_argument("--only", type=int, nargs="*", help="of them, these numbers")
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    if args.again:
        if not args.json:
            parser.error("--again needs --json: the file with the rounds before")
        before = json.loads(Path(args.json).read_text())
        if before["seed"] != args.seed:
            parser.error(f"{args.json} is of seed {before['seed']}, not {args.seed}")
        rounds = before["rounds"]
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        if args.hardware:
            hardware = Hardware.load(args.hardware)
        else:
            hardware = measure(name, lambda: console.print("measured a part of the machine"))
        probes, results, rng = Probes(), dict[str, Any](), random.Random(args.seed)
        for number in range(args.cases):
            training = drawn(rng, KINDS[number % len(KINDS)])
            if args.only and number + 1 not in args.only:
                continue
            words = title(number, training)
            console.print(words)
            results[words] = found = compare(training, hardware, Path(name), probes)
            console.print(f"  processor {found['processor_ratio']:.2f}, wall {found['wall_ratio']:.2f} of the measured")
    rounds.append({"hardware": hardware.to_toml(), "results": results})
    claims = claims_of(over_rounds(rounds))
    if args.json:
        record = {"environment": environment(("torch", "numpy")), "seed": args.seed}
        record |= {"torch_threads": torch.get_num_threads(), "rounds": rounds}
        write_json(args.json, record, claims)
    print_claims("predicted against measured", claims)


if __name__ == "__main__":
    main()
