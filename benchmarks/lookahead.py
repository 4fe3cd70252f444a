"""Two cores, no GPU: a tenth of the rows in DRAM and all on SSD, against all rows in DRAM.

Claims   dnn      DNN of 400x400x400, two torch threads: 0.9 of the speed in memory
         linear   one linear layer, one torch thread: 0.7
Method   20 million keys, dim 16, Adagrad, batches of 4,096 x 26 ids with Zipf 1.05, generated before the clock and
         repeated in a cycle. Every key has a row. With SSD the most popular rows are in DRAM before the first step, as
         after a long training; rows, look-ahead and buffers share a tenth of the budget that holds all rows. Both sides
         alternate; with SSD, a lap begins with an untimed ramp-up until the look-ahead has stopped growing. Figures are
         medians of the laps; processor time is that of all threads per step. The cold start, with an empty DRAM tier,
         is a lap of its own.
Command  taskset -c 0,1 python benchmarks/lookahead.py --folder DISK --json FILE      one model: four minutes, 4 GB
         python benchmarks/lookahead.py --quick                                       seconds, small sizes
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Claim, console, environment, noise, print_claims, select_claims, spread, write_json
from rich.table import Table as TextTable
from train_sides import LR, Mlp, same_start, train_step

import thermocline as tc
from thermocline.embedding.bulk_load import fill_store, fill_top, pieces

sys.path.append(str(Path(__file__).resolve().parent.parent))

from experiments.popularity import place
from experiments.steady_meter import SteadyMeter, resident_bytes

FIELDS, DIM, ZIPF, DEPTH = 26, 16, 1.05, 4
SHARE = 0.1
"""Share of the rows' memory that the side with SSD has."""
TARGETS = {"dnn": 0.9, "linear": 0.7}
TORCH_THREADS = {"dnn": 2, "linear": 1}
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    keys: int
    batch: int
    cycle: int
    """Batches generated before the clock."""
    rounds: int
    """Laps per side."""
    seconds: float
    """Least time of a lap after its ramp-up."""
    ramp: float
    """Longest ramp-up."""
    horizons: int
    """Least length of a lap with SSD after its ramp-up, in horizons."""
    cold: float
    """Seconds of the lap from a cold start."""
    lookahead: int | str
    """Argument of the table: "auto", or batches."""


FULL = Sizes(
    keys=20_000_000, batch=4096, cycle=1000, rounds=3, seconds=8.0, ramp=40.0, horizons=2, cold=4.0, lookahead="auto"
)  # fmt: skip
QUICK = Sizes(keys=100_000, batch=256, cycle=40, rounds=1, seconds=0.1, ramp=0.2, horizons=1, cold=0.1, lookahead=4)


def make_model(kind: str) -> torch.nn.Module:
    if kind == "dnn":
        return same_start(lambda: Mlp(FIELDS, DIM, (400, 400, 400)))
    return same_start(lambda: Linear(FIELDS * DIM))


class Linear(torch.nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 1)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.layer(pooled.flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def whole_budget(keys: int) -> int:
    """Bytes of DRAM that hold all rows."""
    return round(keys * (8 * DIM + 56) * 1.05) + (32 << 20)


def make_table(sizes: Sizes, folder: Path | None) -> tc.Table:
    """Table with all rows in DRAM, or with SHARE of that memory above a store in `folder`."""
    whole = whole_budget(sizes.keys)
    if folder is None:
        return tc.Table(DIM, tc.Adagrad(lr=LR), mem=whole)
    budgets = {"mem": int(SHARE * whole), "ssd_mem": (32 << 20) + 4 * sizes.keys}
    return tc.Table(DIM, tc.Adagrad(lr=LR), ssd=folder, lookahead=sizes.lookahead, **budgets)


class Side:
    """A table and a model on it."""

    def __init__(self, table: tc.Table, kind: str) -> None:
        self.table, self.top = table, make_model(kind)
        self.bag = tc.EmbeddingBag(table, FIELDS)
        self.dense = torch.optim.Adagrad(self.top.parameters(), lr=LR)

    def lap(self, batches: Sequence[tc.Batch], first: int, *, ramp: float, seconds: float, horizons: int) -> Result:
        """Train on the cycle of batches from number `first` on; return the meter's record, with the batches trained."""
        source = itertools.islice(itertools.cycle(batches), first % len(batches), None)
        meter = SteadyMeter(
            self.table, ramp=ramp, seconds=seconds, horizons=horizons, commit=1e9, resident_before=resident_bytes()
        )
        trained = 0
        with tc.prefetch(source, self.table, depth=DEPTH) as ready:
            for batch in ready:
                logits = self.top(self.bag(batch))
                train_step(logits, batch.label)
                self.table.step()
                self.dense.step()
                self.dense.zero_grad()
                trained += 1
                if not meter.after_batch(batch.examples, ready.lookahead, ready.stats):
                    break
            meter.stages_at_end = ready.stats
        return {**meter.record(), "trained": trained}


def cpu_ms(lap: Result) -> float:
    """Milliseconds of processor time per step."""
    return float(1000 * lap["steady"]["cpu_seconds"] / lap["steady"]["batches"])


def compare(kind: str, sizes: Sizes, ads: tc.SyntheticAds, batches: list[tc.Batch], folder: Path) -> Result:
    """Alternate laps of both sides, then measure the cold start."""
    torch.set_num_threads(TORCH_THREADS[kind])
    store = folder / kind
    sides = {"memory": Side(make_table(sizes, None), kind), "ssd": Side(make_table(sizes, store), kind)}
    below = sides["ssd"].table
    assert below.store is not None
    fill_top(sides["memory"].table, pieces(ads, 1 << 18))
    fill_store(below.store, ads, below.dram.initial_rows, piece=1 << 19)
    below.store.commit()
    placed = place(below, ads)
    laps: dict[str, list[Result]] = {name: [] for name in sides}
    at = dict.fromkeys(sides, 0)
    with noise() as around:
        for number in range(sizes.rounds):
            for name in sides if number % 2 else reversed(sides):
                lap = sides[name].lap(
                    batches, at[name], ramp=sizes.ramp, seconds=sizes.seconds, horizons=sizes.horizons
                )
                at[name] += lap["trained"]
                laps[name].append(lap)
    below.commit()
    for side in sides.values():
        side.table.close()
    cold = Side(make_table(sizes, store), kind)
    start = cold.lap(batches, at["ssd"], ramp=0.0, seconds=sizes.cold, horizons=0)
    cold.table.close()
    return {**laps, "cold": start, **placed, **around}


def summarise(result: Result) -> Result:
    """Medians of the laps."""
    figures = {}
    for name in ("memory", "ssd"):
        laps = result[name]
        figures[name] = {
            "examples_per_second": spread([lap["examples_per_s"] for lap in laps]),
            "cpu_ms_per_step": spread([cpu_ms(lap) for lap in laps]),
            "kb_per_example": spread(
                [lap["steady"].get("bytes_read", 0) / lap["steady"]["examples"] / 1000 for lap in laps]
            ),
            "horizon": max(lap["horizon"] for lap in laps),
            "ramp_seconds": spread([lap["ramp_seconds"] for lap in laps]),
            "memory_share": max(lap["memory"]["counted"] / lap["memory"]["budget"] for lap in laps),
        }
    figures["cold"] = {
        "examples_per_second": result["cold"]["examples_per_s"],
        "cpu_ms_per_step": cpu_ms(result["cold"]),
    }
    return figures


def claims_of(results: dict[str, Result]) -> list[Claim]:
    claims = []
    for kind, result in results.items():
        figures = summarise(result)
        memory, ssd = (figures[name]["examples_per_second"]["median"] for name in ("memory", "ssd"))
        processor = " and ".join(f"{figures[name]['cpu_ms_per_step']['median']:.1f}" for name in ("ssd", "memory"))
        detail = f"{ssd:,.0f} of {memory:,.0f} examples/s; {processor} ms of processor time per step"
        name, busy = f"{kind}: a tenth in DRAM + SSD, against DRAM", result["others_cpu"]
        claims.append(Claim(name, ssd / memory, TARGETS[kind], detail=detail, others_cpu=busy))
        share = figures["ssd"]["memory_share"]
        claims.append(Claim(f"{kind}: memory in flight / budget", share, 1.0, at_most=True))
    return claims


def print_figures(results: dict[str, Result]) -> None:
    table = TextTable(title="Medians of the laps")
    for column in ("model", "side", "examples/s", "ms of processor time per step", "KB read per example", "horizon"):
        table.add_column(column, justify="left" if column in ("model", "side") else "right")
    for kind, result in results.items():
        figures = summarise(result)
        for name in ("memory", "ssd"):
            side = figures[name]
            values = [side[key]["median"] for key in ("examples_per_second", "cpu_ms_per_step", "kb_per_example")]
            table.add_row(kind, name, f"{values[0]:,.0f}", f"{values[1]:.1f}", f"{values[2]:.1f}", str(side["horizon"]))
        cold = figures["cold"]
        speed = f"{cold['examples_per_second']:,.0f}"
        table.add_row(kind, "ssd, cold start", speed, f"{cold['cpu_ms_per_step']:.1f}", "", "")
    console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures mean nothing")
    parser.add_argument("--only", help=f"some of {','.join(TARGETS)}")
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args(words)
    sizes, start = QUICK if options.quick else FULL, time.perf_counter()
    ads = tc.SyntheticAds(keys=sizes.keys, fields=FIELDS, zipf=ZIPF, batch_size=sizes.batch)
    batches = list(itertools.islice(ads, sizes.cycle))
    results: dict[str, Result] = {}
    for kind in select_claims(options.only, list(TARGETS)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results[kind] = compare(kind, sizes, ads, batches, Path(folder))
    print_figures(results)
    claims = claims_of(results)
    print_claims(f"Look-ahead on {len(os.sched_getaffinity(0))} cores", claims)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    if options.json:
        record = {**environment(["torch"]), "sizes": dataclasses.asdict(sizes)}
        summaries = {kind: summarise(result) for kind, result in results.items()}
        write_json(options.json, {**record, "summary": summaries, "results": results}, claims)


if __name__ == "__main__":
    main()
