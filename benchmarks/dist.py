"""Training over several ranks: traffic and speed by k, by hops, with overlap; accuracy of k-step merging; scopes.

    python benchmarks/dist.py --quick
    python benchmarks/dist.py --only links,hops,overlap,ads --json FILE
    python benchmarks/dist.py --only movielens --movielens FOLDER --json FILE

links, hops and overlap run on two virtual machines of two ranks: network namespaces joined by a link of a given rate
(tests/helpers/machines.py: Linux, root and iproute2). The four ranks share this machine's processors, so a link of 1
Gbit/s is fast in comparison. ads and movielens simulate four ranks in one process, scopes four and eight; scopes also
counts the bytes of as many processes. FOLDER is that of benchmarks/accuracy.py. Results are added to FILE; a part that
runs replaces its earlier result.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
from accuracy import write_split
from common import Claim, console, environment, noise, print_claims, spread, write_json
from dist_ranks import WARM, dense_bytes, exchange_data
from dist_simulation import Task, accuracy_of
from helpers.machines import Machines, unavailable_reason
from helpers.ranks import run_ranks
from rich.progress import track
from rich.table import Table as Grid

import thermocline as tc
from thermocline.distributed.key_sharding import owner_of

KS = (1, 5, 10, 20, 50, 100)
RATES = ("1gbit", "100mbit")
BATCH = 256
NODES = ((0, 1), (2, 3))
LR_FACTOR = math.isqrt(sum(map(len, NODES)))
"""Factor of the dense learning rate with merged models. A rank's gradients are noisier than their mean, by up to the
square root of the number of ranks, and Adam divides by that, so that the same rate gives smaller steps."""
FACTORS = (1, 2)
"""Further factors of the dense learning rate: each mode uses the better of two."""
# Records store DenseSync.mode under the key "way".
MERGED = {"gradients": 1, "params": 1, "v_frozen": 2, "all": 3}
"""Tensors per parameter that a synchronization sends, by mode."""
Part = dict[str, Any]


def results(ends: Any) -> list[Any]:
    for rank, end in enumerate(ends):
        if end.status:
            raise SystemExit(f"rank {rank} failed:\n{end.output}")
    return [end.result for end in ends]


# ---- dense parameters over a link


def links(args: argparse.Namespace) -> Part:
    """Measure throughput and bytes per step for every k and rate, interleaved."""
    settings = [tc.DenseSync(every=k) for k in KS] + [tc.DenseSync(exact=False), tc.DenseSync(every=20, merge="params")]
    settings.append(tc.DenseSync(every=20, merge="all"))
    runs: list[Part] = []
    with noise() as load, Machines(2) as machines:
        for number in track(range(args.rounds), "links", console=console):
            for rate in RATES:
                for node in range(2):
                    machines.set_link(node, rate)
                call = ("dist_ranks:dense_speeds", settings, BATCH, 5 if args.quick else 20)
                ranks = results(machines.run(*call, seconds=1800, timeout=600))
                for n in range(len(settings)):
                    link = sum(rank[n]["link_per_step"] for rank in ranks[::2])
                    sent = sum(rank[n]["sent_per_step"] for rank in ranks)
                    runs.append(
                        {**ranks[0][n], "sent_per_step": sent, "link_per_step": link, "rate": rate, "round": number}
                    )
    return {"batch_per_rank": BATCH, "parameters": 698_001, **load, "runs": runs}


def pick(runs: list[Part], figure: str, **which: Any) -> list[float]:
    return [run[figure] for run in runs if which.items() <= run.items()]


def links_claims(part: Part) -> list[Claim]:
    runs, out = part["runs"], []
    plain = {"every": 1, "exact": True}
    for rate in RATES:
        pairs = zip(
            pick(runs, "examples_per_s", rate=rate, every=20, way="v_frozen"),
            pick(runs, "examples_per_s", rate=rate, **plain), strict=True,
        )  # fmt: skip
        gain = statistics.median(ours / base for ours, base in pairs)
        target = 2.0 if rate == "100mbit" else 1.0
        out.append(Claim(f"k = 20 over k = 1, {rate}/s", gain, target, detail="examples/s, median of rounds"))
    base = statistics.median(pick(runs, "sent_per_step", **plain))
    for k, mode in [(k, "v_frozen") for k in KS[1:]] + [(20, "params"), (20, "all")]:
        sent = statistics.median(pick(runs, "sent_per_step", every=k, way=mode))
        detail = (
            f"{sent / 1e3:,.0f} KB per step between nodes, both directions, after step k; all-reduce {base / 1e3:,.0f}"
        )
        share, target = sent / base * k, MERGED[mode]
        out.append(
            Claim(f"bytes of {mode}, k = {k}, over all-reduce's / k", share, target, at_most=True, detail=detail)
        )
    return out


def print_links(part: Part) -> None:
    grid = Grid(
        title="examples/s (median, p20 to p80); KB per step between nodes, both directions: counted, on the link"
    )
    for column in ("k", "mode", *RATES, "counted", "on the link"):
        grid.add_column(column)
    runs = part["runs"]
    for key in dict.fromkeys((run["every"], run["way"], run["exact"]) for run in runs):
        which = dict(zip(("every", "way", "exact"), key, strict=True))
        speeds = [spread(pick(runs, "examples_per_s", rate=rate, **which)) for rate in RATES]
        shown = [f"{s['median']:,.0f} ({s['p20']:,.0f} to {s['p80']:,.0f})" for s in speeds]
        sizes = [
            f"{statistics.median(pick(runs, f'{size}_per_step', **which)) / 1e3:,.1f}" for size in ("sent", "link")
        ]
        grid.add_row(str(key[0]), key[1] + ("" if key[2] else ", torch's order"), *shown, *sizes)
    console.print(grid)


# ---- rows over a link


def hops(args: argparse.Namespace) -> Part:
    """Measure flat against two hops, with k = 1 and k = 20."""
    runs: list[Part] = []
    steps = 20 if args.quick else 40  # a multiple of 20
    with noise() as load, Machines(2) as machines:
        for number in track(range(args.rounds), "hops", console=console):
            for rate in RATES:
                for node in range(2):
                    machines.set_link(node, rate)
                for hop_mode in ("flat", "two"):
                    for every in (1, 20):
                        call = ("dist_ranks:exchange_speed", hop_mode, BATCH, steps, every)
                        ranks = results(machines.run(*call, seconds=900, timeout=300))
                        total = {
                            name: sum(rank[name] for rank in ranks) for name in ranks[0] if name.endswith("between")
                        }
                        total |= {"link": sum(rank["link"] for rank in ranks[::2])}
                        runs.append({**ranks[0], **total, "rate": rate, "round": number})
    return {"batch_per_rank": BATCH, **load, "needed": rows_needed(steps), "runs": runs}


def hops_claims(part: Part) -> list[Claim]:
    runs, out = part["runs"], []
    for rate in RATES if len({run["round"] for run in runs}) >= 3 else ():  # fewer rounds are too noisy
        for every in (1, 20):
            which = {"rate": rate, "every": every}
            pairs = zip(
                *(pick(runs, "examples_per_s", hops=hop_mode, **which) for hop_mode in ("two", "flat")), strict=True
            )
            gain = statistics.median(two / flat for two, flat in pairs)
            out.append(Claim(f"two hops over flat, {rate}/s, k = {every}", gain, 1.0, detail="examples/s"))
    for hop_mode, needed in part["needed"].items():
        rows = statistics.median(pick(runs, "rows_items_between", hops=hop_mode))
        detail = f"{rows:,.0f} rows; required {needed:,} (unique per {'node' if hop_mode == 'two' else 'rank'})"
        name = f"rows between nodes, {hop_mode}, over those required"
        out.append(Claim(name, rows / needed, 1.0, at_most=True, detail=detail))
    return out


def overlap(args: argparse.Namespace) -> Part:
    """Measure the exchange of rows while the network computes against that between steps, k = 20."""
    runs: list[Part] = []
    steps = 20 if args.quick else 40
    with noise() as load, Machines(2) as machines:
        for number in track(range(args.rounds), "overlap", console=console):
            for rate in RATES:
                for node in range(2):
                    machines.set_link(node, rate)
                for early in (False, True):
                    call = ("dist_ranks:exchange_speed", "two", BATCH, steps, 20, 4, early)
                    ranks = results(machines.run(*call, seconds=900, timeout=300))
                    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0] if name.endswith("between")}
                    runs.append({**ranks[0], **total, "rate": rate, "round": number})
    return {"batch_per_rank": BATCH, **load, "runs": runs}


def overlap_claims(part: Part) -> list[Claim]:
    runs, out = part["runs"], []
    for rate in RATES:
        pairs = zip(*(pick(runs, "examples_per_s", rate=rate, overlap=early) for early in (True, False)), strict=True)
        gain = statistics.median(on / off for on, off in pairs)
        out.append(Claim(f"overlap over none, {rate}/s", gain, 1.0, detail="examples/s, median of rounds"))
    return out


def print_overlap(part: Part) -> None:
    runs = part["runs"]
    for early in (False, True):
        speeds = [f"{statistics.median(pick(runs, 'examples_per_s', rate=r, overlap=early)):,.0f}" for r in RATES]
        first, rest = (
            statistics.median(pick(runs, f"{kind}_items_between", overlap=early)) for kind in ("early_rows", "rows")
        )
        console.print(
            f"overlap {early}: {', '.join(speeds)} examples/s ({', '.join(RATES)}); {first / (first + rest):.1%} of "
            "the rows between nodes are sent while the network computes"
        )


def rows_needed(steps: int) -> dict[str, int]:
    """Return the rows that must cross between nodes: keys of the other node, unique per rank (flat) or node (two)."""
    required = {"flat": 0, "two": 0}
    for step in itertools.islice(
        zip(*(exchange_data(rank, 4, BATCH, steps) for rank in range(4)), strict=True), WARM, None
    ):
        for node, ranks in enumerate(NODES):
            keys = [np.unique(step[rank].ids) for rank in ranks]
            for hop_mode, requested in (("flat", keys), ("two", [np.unique(np.concatenate(keys))])):
                required[hop_mode] += sum(int((owner_of(part, 4) // 2 != node).sum()) for part in requested)
    return required


def print_hops(part: Part) -> None:
    grid = Grid(title="medians: examples/s; KB per step between nodes, both directions")
    for column in ("hops", "k", *RATES, "keys", "rows", "gradients", "total on the link"):
        grid.add_column(column)
    runs = part["runs"]
    for key in dict.fromkeys((run["hops"], run["every"]) for run in runs):
        which = dict(zip(("hops", "every"), key, strict=True))
        speeds = [f"{statistics.median(pick(runs, 'examples_per_s', rate=rate, **which)):,.0f}" for rate in RATES]
        names = [f"{kind}_bytes_between" for kind in ("keys", "rows", "gradients")] + ["link"]
        sizes = [statistics.median(pick(runs, name, **which)) / runs[0]["steps"] / 1e3 for name in names]
        grid.add_row(key[0], str(key[1]), *speeds, *(f"{size:,.1f}" for size in sizes))
    console.print(grid)


# ---- accuracy


def accuracy(args: argparse.Namespace, task: Task, title: str) -> Part:
    """Train with gradients averaged every step at two dense rates, and models merged every k steps at `LR_FACTOR` times
    these rates.

    All runs of a seed start with the same parameters and see the same examples in the same order. Runs that the record
    already has, with the same set-up, are not repeated.
    """
    setup = {n: value for n, value in dataclasses.asdict(task).items() if n not in ("folder", "seed", "dense_lr")}
    old = args.record.get(title, {})
    runs: list[Part] = list(old["runs"]) if old.get("setup") == setup else []
    part = {"ranks": sum(map(len, NODES)), "setup": setup, "runs": runs}
    merged = [tc.DenseSync(every=int(k), merge="v_frozen") for k in args.ks.split(",")]
    settings = [(tc.DenseSync(), factor) for factor in FACTORS]
    settings += [(sync, LR_FACTOR * factor) for factor, sync in itertools.product(FACTORS, merged)]
    todo = [
        (sync, {"way": sync.mode, "every": sync.every, "dense_lr": task.lr * factor, "seed": task.seed + seed})
        for (sync, factor), seed in itertools.product(settings, range(args.seeds))
    ]
    todo = [(sync, run) for sync, run in todo if not any(run.items() <= done.items() for done in runs)]
    for sync, run in track(todo, title, console=console):
        seeded = dataclasses.replace(task, seed=run["seed"], dense_lr=run["dense_lr"])
        runs.append({**run, **accuracy_of(NODES, seeded, sync)})
        console.print(runs[-1])
        save(args, title, part)
    return part


def ads(args: argparse.Namespace) -> Part:
    return accuracy(args, Task(None, 16, BATCH, 1, 100 if args.quick else 2000, 1e-3, 1e-3, 0), "ads")


def movielens(args: argparse.Namespace) -> Part:
    if args.movielens is None:
        raise SystemExit("movielens requires --movielens FOLDER, as in benchmarks/accuracy.py")
    with tempfile.TemporaryDirectory(prefix="thermocline-dist-") as folder:
        write_split(args.movielens, Path(folder), 2021)
        return accuracy(args, Task(folder, 8, BATCH, 1 if args.quick else 4, 0, 1e-3, 1e-3, 2021), "movielens")


def by_seed(runs: list[Part], **which: Any) -> dict[int, Part]:
    """Return, by seed, the matching run with the best validation AUC."""
    matching = sorted((run for run in runs if which.items() <= run.items()), key=lambda run: run["valid_auc"])
    return {run["seed"]: run for run in matching}


def auc_loss(base: dict[int, Part], runs: dict[int, Part]) -> list[float]:
    """Return by how much the test AUC of `runs` is below that of `base`, by seed."""
    return [base[seed]["auc"] - runs[seed]["auc"] for seed in sorted(base.keys() & runs.keys())]


def format_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):+.4f} ({min(values):+.4f} to {max(values):+.4f})" if values else ""


def accuracy_claims(part: Part, name: str) -> list[Claim]:
    """Compare both modes, each at its rate with the better validation AUC, by seed."""
    runs, out = part["runs"], []
    for k in (k for k in KS if 1 < k <= 50):
        values = auc_loss(by_seed(runs, way="gradients"), by_seed(runs, way="v_frozen", every=k))
        if values:
            claim = f"{name}: AUC of k = {k} behind averaged gradients"
            detail = f"{format_spread(values)}, {len(values)} seeds, each at its better rate"
            out.append(Claim(claim, statistics.mean(values), 0.001, "", True, detail))
    return out


def print_accuracy(part: Part) -> None:
    runs = part["runs"]
    grid = Grid(title="test AUC, mean of seeds; loss against averaged gradients and against k = 1: mean (min to max)")
    for column in (
        "",
        "dense rate",
        "AUC",
        "gradients at the same rate",
        f"at 1/{LR_FACTOR} of it",
        "merged every step",
    ):
        grid.add_column(column)
    for mode, k, rate in sorted({(run["way"], run["every"], run["dense_lr"]) for run in runs}):
        own = by_seed(runs, way=mode, every=k, dense_lr=rate)
        bases = [
            by_seed(runs, way="gradients", dense_lr=rate),
            by_seed(runs, way="gradients", dense_lr=rate / LR_FACTOR),
        ]
        bases.append(by_seed(runs, way="v_frozen", every=1, dense_lr=rate))
        name = "gradients averaged" if mode == "gradients" else f"merged, k = {k}"
        auc = statistics.mean(run["auc"] for run in own.values())
        grid.add_row(name, f"{rate:g}", f"{auc:.4f}", *(format_spread(auc_loss(base, own)) for base in bases))
    console.print(grid)


# ---- scope of merges


def scopes(args: argparse.Namespace) -> Part:
    """Measure AUC and bytes per step of k = 20 merged between ranks and between nodes, against averaged gradients.

    The dense rate is multiplied by the root of the number of models that step alone.
    """
    task = Task(None, 16, BATCH, 1, 100 if args.quick else 500, 1e-3, 2e-3, 0)
    runs: list[Part] = []
    for nodes in (NODES, ((0, 1), (2, 3), (4, 5), (6, 7))):
        world = sum(map(len, nodes))
        settings = [
            (tc.DenseSync(), 1),
            (tc.DenseSync(every=20), world),
            (tc.DenseSync(every=20, scope="nodes"), len(nodes)),
        ]
        sent = run_ranks(nodes, dense_bytes, [sync for sync, _ in settings], 40)
        for n, (sync, models) in enumerate(settings):
            run: Part = {
                "nodes": len(nodes),
                "ranks": world,
                "way": sync.mode,
                "scope": sync.scope,
                "every": sync.every,
            }
            run |= {name: sum(rank[n][name] for rank in sent) for name in ("within", "between")}
            for seed in track(range(args.seeds), f"{len(nodes)} x 2, {sync.mode}, {sync.scope}", console=console):
                rate = task.dense_lr * math.sqrt(models)
                seeded = dataclasses.replace(task, seed=seed, dense_lr=rate)
                runs.append({**run, "dense_lr": rate, "seed": seed, **accuracy_of(nodes, seeded, sync)})
                save(args, "scopes", {"setup": dataclasses.asdict(task), "runs": runs})
    return {"setup": dataclasses.asdict(task), "runs": runs}


def scopes_claims(part: Part) -> list[Claim]:
    runs, out = part["runs"], []
    for nodes in sorted({run["nodes"] for run in runs}):
        base = by_seed(runs, nodes=nodes, way="gradients")
        for scope in ("ranks", "nodes"):
            own = by_seed(runs, nodes=nodes, way="v_frozen", scope=scope)
            values = auc_loss(base, own)
            if values:
                claim = f"{nodes} x 2 ranks: AUC of k = 20, scope {scope}, behind averaged gradients"
                detail = f"{format_spread(values)}, {len(values)} seeds"
                out.append(Claim(claim, statistics.mean(values), 0.001, "", True, detail))
    return out


def print_scopes(part: Part) -> None:
    runs = part["runs"]
    grid = Grid(title="test AUC, mean of seeds; KB per step that all ranks send, after the first k steps")
    for column in ("ranks", "", "dense rate", "AUC", "behind averaged gradients", "within nodes", "between nodes"):
        grid.add_column(column)
    for key in dict.fromkeys((run["nodes"], run["way"], run["scope"]) for run in runs):
        which = dict(zip(("nodes", "way", "scope"), key, strict=True))
        own, base = by_seed(runs, **which), by_seed(runs, nodes=key[0], way="gradients")
        run = next(iter(own.values()))
        name = "gradients averaged" if key[1] == "gradients" else f"k = {run['every']}, scope {key[2]}"
        auc = statistics.mean(run["auc"] for run in own.values())
        loss = format_spread(auc_loss(base, own)) if key[1] != "gradients" else ""
        sizes = [f"{run[side] / 1e3:,.0f}" for side in ("within", "between")]
        grid.add_row(f"{key[0]} x 2", name, f"{run['dense_lr']:.4f}", f"{auc:.4f}", loss, *sizes)
    console.print(grid)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Part], Callable[[Part], None], Callable[[Part], list[Claim]]]] = {
    "links": (links, print_links, links_claims),
    "hops": (hops, print_hops, hops_claims),
    "overlap": (overlap, print_overlap, overlap_claims),
    "ads": (ads, print_accuracy, lambda part: accuracy_claims(part, "SyntheticAds")),
    "movielens": (movielens, print_accuracy, lambda part: accuracy_claims(part, "MovieLens-100k")),
    "scopes": (scopes, print_scopes, scopes_claims),
}


def claims_of(record: Part) -> list[Claim]:
    return [claim for name, (_, _, claims) in PARTS.items() if name in record for claim in claims(record[name])]


def save(args: argparse.Namespace, name: str, part: Part) -> None:
    args.record[name] = {"environment": environment(["torch", "numpy"]), **part}
    if args.json:
        write_json(args.json, args.record, claims_of(args.record))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    parser.add_argument("--only", default="links,hops,ads", help="parts: links, hops, overlap, ads, movielens, scopes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="add results to this file")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of links, hops and overlap; default: 5")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of ads, movielens and scopes; default: 3")
    parser.add_argument("--ks", default=",".join(map(str, KS)), help="values of k for ads and movielens")
    parser.add_argument("--movielens", metavar="FOLDER", type=Path, help="folder of ml-100k.inter, .user and .item")
    args = parser.parse_args()
    if args.quick:
        args.rounds = args.seeds = 1
    return args


def main() -> None:
    args = arguments()
    args.record = {}
    if args.json and args.json.exists():
        args.record = json.loads(args.json.read_text())
        args.record.pop("claims")
    for name in args.only.split(","):
        measure, show, _ = PARTS[name]
        if name in ("links", "hops", "overlap") and (reason := unavailable_reason()):
            console.print(f"[yellow]{name} skipped: {reason}[/]")
            continue
        part = measure(args)
        save(args, name, part)
        show(part)
    print_claims("several ranks", claims_of(args.record))


if __name__ == "__main__":
    main()
