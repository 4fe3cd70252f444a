"""Compare the processor time per step of two checkouts that run the same workloads alternately.

Claim    The new checkout is not slower than the old one, and computes the same bits.
Method   Per round and workload, one child process per checkout, in the order A B, B A, A B, ... A child runs
         compare_workloads.py for about 3 s on the package of one checkout and reports the processor time (user and
         system, all threads) of its timed steps, without imports and set-up. Statistic: median over rounds of
         new / old, with a one-sided 95 % bound (bootstrap over the paired ratios, fixed seed). A digest of the
         computed values must be equal in all runs.
Command  python benchmarks/compare_checkouts.py --old ../before --new . --json FILE
Target   Upper 95 % bound of new / old <= 1.05 for every workload, at least 15 rounds.

Both checkouts need a built C++ module (`make build-inplace`). Exit status: 0 targets met, 1 a target missed or results
differ, 2 usage error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, console, environment, noise, print_claims, spread, write_json

WORKLOADS = ("ssd", "mem", "train", "hbm_train")
MIN_ROUNDS, RESAMPLES, CONFIDENCE, SEED = 15, 10_000, 0.95, 14
Run = dict[str, Any]


def upper_bound(ratios: list[float]) -> float:
    """One-sided 95 % bootstrap bound of the median of paired ratios."""
    random = np.random.default_rng(SEED)
    resampled = random.choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    return float(np.quantile(np.median(resampled, axis=1), CONFIDENCE))


def run_workload(checkout: Path, workload: str, python: str, scale: float) -> Run:
    """Run one workload on the package of `checkout`; raise SystemExit if it fails or imports another package."""
    source = (checkout / "src").resolve()
    command = [python, str(Path(__file__).with_name("compare_workloads.py")), workload, "--scale", str(scale)]
    search = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search})
    if done.returncode:
        raise SystemExit(f"{workload} failed with exit status {done.returncode} in {checkout}:\n{done.stderr.strip()}")
    result: Run = json.loads(done.stdout.splitlines()[-1])
    if source not in Path(result.pop("package")).parents:
        raise SystemExit(f"{workload} in {checkout} imported a thermocline outside of {source}")
    return result


def compare(workload: str, checkouts: dict[str, Path], args: argparse.Namespace) -> dict[str, list[Run]] | None:
    """Run both checkouts in alternating order. None if the workload needs a GPU that is not available."""
    runs: dict[str, list[Run]] = {name: [] for name in checkouts}
    for number in range(args.rounds):
        for name in checkouts if number % 2 == 0 else reversed(checkouts):
            result = run_workload(checkouts[name], workload, args.python, args.scale)
            if result["skipped"]:
                console.print(f"[yellow]{workload}: skipped, no CUDA device[/]")
                return None
            runs[name].append(result)
        pair = [runs[name][-1]["processor_s"] for name in ("old", "new")]
        console.print(
            f"{workload} {number + 1}/{args.rounds}: old {pair[0] * 1e3:.2f} ms, new {pair[1] * 1e3:.2f} ms per step, "
            f"ratio {pair[1] / pair[0]:.3f}"
        )
    return runs


def summarise(runs: dict[str, list[Run]]) -> Run:
    figures: Run = {"digests": sorted({run["digest"] for side in runs.values() for run in side})}
    for clock in ("processor_s", "wall_s"):
        old, new = ([run[clock] for run in runs[name]] for name in ("old", "new"))
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        figures[clock] = {
            "old": spread(old),
            "new": spread(new),
            "ratio": float(np.median(ratios)),
            "upper_bound": upper_bound(ratios),
            "ratios": ratios,
        }
    return figures


def claims_of(workload: str, figures: Run, limit: float) -> list[Claim]:
    clock = figures["processor_s"]
    detail = (
        f"median ratio {clock['ratio']:.3f}; {clock['old']['median'] * 1e3:.2f} -> "
        f"{clock['new']['median'] * 1e3:.2f} ms of processor time per step; wall time ratio "
        f"{figures['wall_s']['ratio']:.3f} (bound {figures['wall_s']['upper_bound']:.3f})"
    )
    digests = figures["digests"]
    return [
        Claim(f"{workload}: new / old, upper bound", clock["upper_bound"], limit, at_most=True, detail=detail),
        Claim(f"{workload}: distinct results", len(digests), 1, "", at_most=True, detail=", ".join(digests)),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, metavar="DIR", help="checkout before the change")
    parser.add_argument("--new", type=Path, required=True, metavar="DIR", help="checkout after the change")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"pairs of runs (default {MIN_ROUNDS})")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the children")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="comma-separated workloads (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of steps of a child")
    parser.add_argument("--limit", type=float, default=1.05, help="target of the upper bound (default 1.05)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args()
    for checkout in (args.old, args.new):
        if not list((checkout / "src" / "thermocline" / "core").glob("_core*.so")):
            parser.error(f"{checkout} has no built module in src/thermocline/core: run `make build-inplace` there")
    if unknown := set(args.only.split(",")) - set(WORKLOADS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {','.join(WORKLOADS)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def main() -> None:
    args = arguments()
    checkouts = {"old": args.old, "new": args.new}
    if args.rounds < MIN_ROUNDS:
        console.print(f"[yellow]{args.rounds} rounds: the target needs at least {MIN_ROUNDS}[/]")
    claims: list[Claim] = []
    record: Run = {"environment": environment(("torch", "numpy")), "rounds": args.rounds, "workloads": {}}
    with noise() as others:
        for workload in args.only.split(","):
            runs = compare(workload, checkouts, args)
            if runs is not None:
                record["workloads"][workload] = summarise(runs)
                claims += claims_of(workload, record["workloads"][workload], args.limit)
    print_claims("new checkout against old", claims)
    if args.json:
        write_json(args.json, {**record, **others}, claims)
    raise SystemExit(0 if all(claim.met for claim in claims) else 1)


if __name__ == "__main__":
    main()
