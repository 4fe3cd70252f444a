"""The training loop: rows in memory against memory + SSD, and against plain PyTorch; the cost of checkpoints.

Claims   ssd          10 % of the rows in memory + SSD >= 0.8 of the speed in memory; step time <= 1.15 of the slowest
                      stage or of processor time / cores
         torch        all rows in memory, against nn.EmbeddingBag + torch.optim: FM >= 2x, DNN >= 1x
         checkpoint   save with 1 % dirty rows <= 3 % of the time of a full save
         every        saves every N steps <= 5 % of the time
Method   All rows exist before the first step. Both sides train the same batches, generated outside the timing, with the
         same torch threads, alternating lap by lap; figures are medians. Losses must agree.
Command  python benchmarks/train.py --quick                       small sizes, under two minutes
         python benchmarks/train.py --json FILE                   full size: half an hour, 12 GB of DRAM, 10 GB of disk
         python benchmarks/train.py --only torch --json FILE      one claim; FILE collects claims of equal sizes
"""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY, which OpenMP reads when torch loads it

# isort: split
import argparse
import dataclasses
import gc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Claim,
    console,
    data_folder,
    earlier_results,
    environment,
    noise,
    print_claims,
    progress_bar,
    select_claims,
    spread,
    write_json,
)
from train_sides import LR, Fm, Lap, Mlp, Ours, Plain, all_keys, same_start

from thermocline.data.synthetic import SyntheticAds

CLAIMS = ("ssd", "torch", "checkpoint", "every")
FIELDS, DIM, HIDDEN, ZIPF = 26, 16, (400, 400, 400), 1.05
DEPTH = 4
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    keys: int
    """Keys of the DNN's data; all have rows."""
    preset: str
    """Preset of the FM's data."""
    batch: int
    warm: int
    """Untimed laps with SSD, in which the popular rows enter memory."""
    rounds: int
    """Timed laps per side."""
    steps: int
    """Steps per lap."""
    saved_rows: int
    """Rows of the checkpointed table."""
    every: int
    """Steps between checkpoints."""
    checkpoints: int


FULL = Sizes(
    keys=20_000_000,
    preset="A/400",
    batch=4096,
    warm=8,
    rounds=7,
    steps=50,
    saved_rows=20_000_000,
    every=1000,
    checkpoints=2,
)
QUICK = dataclasses.replace(
    FULL,
    keys=500_000,
    preset="A/16000",
    batch=2048,
    warm=2,
    rounds=3,
    steps=8,
    saved_rows=4_000_000,
    every=40,
    checkpoints=2,
)


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar; yields a function that adds one."""
    number = itertools.count(1)
    with progress_bar(title, total) as progress:
        yield lambda: progress(next(number))


def dnn_data(sizes: Sizes) -> SyntheticAds:
    return SyntheticAds(keys=sizes.keys, fields=FIELDS, zipf=ZIPF, batch_size=sizes.batch)


def dnn() -> torch.nn.Module:
    return same_start(lambda: Mlp(FIELDS, DIM, HIDDEN))


def lap_batches(ads: SyntheticAds, lap: int, steps: int) -> list[tc.Batch]:
    return [ads.batch(lap * steps + i) for i in range(steps)]


def in_memory(dim: int, keys: int) -> tc.Table:
    """Table with a budget for every key."""
    row = 8 * dim
    return tc.Table(dim, tc.Adagrad(lr=LR), mem=round(keys * (row + 56) * 1.05) + (32 << 20))


def on_ssd(dim: int, keys: int, share: float, path: Path, sizes: Sizes) -> tc.Table:
    """Table with a budget for `share` of the keys, but at least for the batches in flight."""
    table = in_memory(dim, keys)
    stats = table.dram.stats()
    table.close()
    rows = max(share * keys, 1.25 * (DEPTH + 1) * sizes.batch * FIELDS * 0.5)
    mem = round(stats.budget * rows / stats.capacity)
    return tc.Table(dim, tc.Adagrad(lr=LR), mem=mem, ssd=path, ssd_mem=max(32 << 20, 8 * keys))


def summary(laps: list[Lap]) -> Result:
    rates = spread([lap.rate for lap in laps])
    return {"examples_per_second": rates, "laps": [dataclasses.asdict(lap) for lap in laps]}


def overlap(lap: Lap) -> float:
    """Step time over its lower bound: the slowest stage, or processor time / cores."""
    cores = len(os.sched_getaffinity(0))
    return lap.seconds / max(*lap.stages.values(), lap.cpu_seconds / cores)


# ---- ssd


def run_ssd(sizes: Sizes, folder: Path) -> Result:
    ads, keys = dnn_data(sizes), all_keys(dnn_data(sizes))
    sides = {
        "memory": Ours(in_memory(DIM, len(keys)), FIELDS, dnn(), depth=DEPTH),
        "ssd": Ours(on_ssd(DIM, len(keys), 0.1, folder / "ssd", sizes), FIELDS, dnn(), depth=DEPTH),
    }
    laps: dict[str, list[Lap]] = {name: [] for name in sides}
    with counted("memory against memory + SSD", sizes.rounds + sizes.warm + 1) as advance:
        for side in sides.values():
            side.fill(keys)
        advance()
        before = {}
        for lap in range(sizes.rounds + sizes.warm):
            if lap == sizes.warm:
                before = {name: side.table.dram.stats() for name, side in sides.items()}
            batches = lap_batches(ads, lap, sizes.steps)
            for name in sides if lap % 2 else reversed(sides):
                taken = sides[name].run(batches)
                if lap >= sizes.warm:
                    laps[name].append(taken)
            advance()
    stats = {name: side.table.dram.stats() for name, side in sides.items()}
    hits = {name: (s.hits - before[name].hits, s.misses - before[name].misses) for name, s in stats.items()}
    if any(a.loss != b.loss for a, b in zip(*laps.values(), strict=True)):
        raise SystemExit("wrong results: losses with SSD and in memory are not bit-identical")
    for side in sides.values():
        side.close()
    return {
        **{name: summary(values) for name, values in laps.items()},
        "overlap": {name: spread([overlap(lap) for lap in values]) for name, values in laps.items()},
        "memory_rows": {name: s.capacity for name, s in stats.items()},
        "hit_rate": {name: hit / (hit + missed) for name, (hit, missed) in hits.items()},
    }


# ---- torch


def duel(title: str, ads: SyntheticAds, dim: int, top: Callable[[], torch.nn.Module], sizes: Sizes) -> Result:
    keys = all_keys(ads)
    ours = Ours(in_memory(dim, len(keys)), ads.fields, same_start(top), depth=DEPTH)
    laps: dict[str, list[Lap]] = {"ours": [], "torch": []}
    with counted(title, sizes.rounds + 2) as advance:
        ours.fill(keys)
        plain = Plain(ours.table.dram.initial_rows, keys, ads.fields, dim, same_start(top))
        advance()
        for lap in range(sizes.rounds + 1):  # the first is untimed
            batches = lap_batches(ads, lap, sizes.steps)
            indexed = plain.indexed(batches)
            turns = [("ours", lambda b=batches: ours.run(b)), ("torch", lambda i=indexed: plain.run(i))]
            for name, run in turns if lap % 2 else reversed(turns):
                taken = run()
                if lap >= 1:
                    laps[name].append(taken)
            advance()
    ours.close()
    difference = max(abs(a.loss - b.loss) for a, b in zip(*laps.values(), strict=True))
    if difference > 0.01:
        raise SystemExit(f"{title}: losses of ours and torch differ by {difference:.4f}")
    gc.collect()
    return {**{name: summary(values) for name, values in laps.items()}, "losses_apart": difference}


def run_torch(sizes: Sizes) -> Result:
    fm = SyntheticAds.preset(sizes.preset, batch_size=sizes.batch, zipf=ZIPF)
    return {
        "fm": duel(f"FM, preset {sizes.preset}", fm, fm.plan.dim, Fm, sizes),
        "dnn": duel("DNN", dnn_data(sizes), DIM, lambda: Mlp(FIELDS, DIM, HIDDEN), sizes),
    }


# ---- checkpoints


def run_checkpoint(sizes: Sizes, folder: Path) -> Result:
    """Time saves of a table in memory with all rows dirty, and with 1 %."""
    table, model = in_memory(DIM, sizes.saved_rows), dnn()
    dense = torch.optim.Adagrad(model.parameters(), lr=LR)
    rng, seconds = np.random.default_rng(5), {"full": [], "dirty": []}
    keys = np.arange(sizes.saved_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    checkpoints = tc.Checkpoints(folder / "checkpoint", [table], model, dense)
    few = sizes.saved_rows // 100
    step = 0

    def save(kind: str, changed: np.ndarray) -> None:
        nonlocal step
        step += 1
        for first in range(0, len(changed), 1 << 18):
            piece = changed[first : first + (1 << 18)]
            rows = table.dram.initial_rows(piece)
            rows += np.float32(step)
            table.dram.push(piece, rows)
        start = time.perf_counter()
        checkpoints.save(step)
        seconds[kind].append(time.perf_counter() - start)

    with counted("checkpoints", 2) as advance:
        for _ in range(2):
            save("full", keys)
            for _ in range(5):
                save("dirty", keys[rng.choice(sizes.saved_rows, few, replace=False)])
            advance()
    checkpoints.close()
    table.close()
    return {"rows": sizes.saved_rows, "dirty_rows": few, **{kind: spread(values) for kind, values in seconds.items()}}


def run_every(sizes: Sizes, folder: Path) -> Result:
    """Time checkpoints during training, while the pipeline prefetches."""
    ads, keys = dnn_data(sizes), all_keys(dnn_data(sizes))
    side = Ours(on_ssd(DIM, len(keys), 0.1, folder / "every", sizes), FIELDS, dnn(), depth=DEPTH)
    checkpoints = tc.Checkpoints(folder / "every-run", [side.table], side.top, side.dense)
    shares, saves = [], []
    ads.examples = sizes.every * sizes.checkpoints * sizes.batch
    with counted(f"a checkpoint every {sizes.every} steps", sizes.checkpoints + 1) as advance:
        side.fill(keys)
        checkpoints.save(0)
        advance()
        since = time.perf_counter()

        def after_step(step: int, batch: tc.Batch) -> None:
            nonlocal since
            if step % sizes.every:
                return
            start = time.perf_counter()
            checkpoints.save(step, batch.position)
            now = time.perf_counter()
            saves.append(now - start)
            shares.append(saves[-1] / (now - since))
            since = now
            advance()

        side.run(ads, after_step)
    checkpoints.close()
    side.close()
    return {"steps": sizes.every, "share": spread(shares), "save_s": spread(saves)}


# ---- claims


def rate(result: Result) -> float:
    return float(result["examples_per_second"]["median"])


def claims_of(results: Result) -> list[Claim]:
    out = []
    if "ssd" in results:
        r = results["ssd"]
        fast, slow = rate(r["memory"]), rate(r["ssd"])
        detail = f"{slow:,.0f} against {fast:,.0f} examples/s; {r['hit_rate']['ssd']:.0%} of rows found in memory"
        out.append(Claim("10 % in memory + SSD", slow / fast, 0.8, detail=detail))
        for name, value in r["overlap"].items():
            detail = "step time / max(slowest stage, processor time / cores)"
            out.append(Claim(f"overlap, {name}", value["median"], 1.15, at_most=True, detail=detail))
    for name, target in (("fm", 2.0), ("dnn", 1.0)):
        if name in results.get("torch", {}):
            r = results["torch"][name]
            detail = f"{rate(r['ours']):,.0f} against {rate(r['torch']):,.0f} examples/s"
            out.append(
                Claim(f"against torch, {name.upper()}", rate(r["ours"]) / rate(r["torch"]), target, detail=detail)
            )
    if "checkpoint" in results:
        r = results["checkpoint"]
        few, full = r["dirty"]["median"], r["full"]["median"]
        detail = f"{few * 1e3:.0f} ms for {r['dirty_rows']:,} rows, {full * 1e3:.0f} ms for {r['rows']:,}"
        out.append(Claim("checkpoint of 1 % dirty rows", few / full, 0.03, at_most=True, detail=detail))
    if "every" in results:
        r = results["every"]
        detail = f"every {r['steps']} steps, {r['save_s']['median'] * 1e3:.0f} ms each"
        out.append(Claim("time spent in checkpoints", r["share"]["median"], 0.05, at_most=True, detail=detail))
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE, which collects claims of equal sizes")
    parser.add_argument("--keys", type=int, help="keys of the DNN's data")
    parser.add_argument("--rounds", type=int, help="timed laps per side")
    parser.add_argument("--steps", type=int, help="steps per lap")
    parser.add_argument("--torch-threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--dir", help="where the folder of the data is made; default: among temporary files")
    parser.add_argument("--only", help=f"comma-separated claims of {','.join(CLAIMS)}")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes = QUICK if args.quick else FULL
    given = {name: getattr(args, name) for name in ("keys", "rounds", "steps") if getattr(args, name)}
    sizes = dataclasses.replace(sizes, **given)
    wanted = select_claims(args.only, CLAIMS)
    torch.set_num_threads(args.torch_threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, set explicitly to avoid a warning
    folder = data_folder(args.dir)
    note = "small sizes, not comparable to full size" if args.quick or given else "full size"
    console.print(
        f"{note}; DNN {'x'.join(map(str, HIDDEN))}, {FIELDS} fields, {sizes.keys:,} keys, Zipf {ZIPF}, batches of "
        f"{sizes.batch}; FM preset {sizes.preset};\nAdagrad everywhere; {args.torch_threads} torch threads; "
        f"{sizes.rounds} laps of {sizes.steps} steps; load average {os.getloadavg()[0]:.1f}"
    )
    setup = {**dataclasses.asdict(sizes), "torch_threads": args.torch_threads}
    results: Result = earlier_results(args.json, setup)
    runs = {
        "ssd": lambda: run_ssd(sizes, folder),
        "torch": lambda: run_torch(sizes),
        "checkpoint": lambda: run_checkpoint(sizes, folder),
        "every": lambda: run_every(sizes, folder),
    }
    try:
        for name in wanted:
            with noise() as busy:
                result = runs[name]()
            results[name] = {**result, **busy}
            if busy["others_cpu"] > 0.1:
                console.print(f"[yellow]{name}: other processes used {busy['others_cpu']:.0%} of the cores[/]")
            if args.json:
                record = {"environment": environment(["thermocline", "numpy", "torch"]), "sizes": setup}
                write_json(args.json, {**record, "quick": args.quick, "results": results}, claims_of(results))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_claims("training loop", claims_of(results))


if __name__ == "__main__":
    main()
