"""End to end on a GPU: a scaled model E of the MLSys 2020 paper, 10 % of its rows in HBM, 40 % in DRAM, all on SSD.

Claims   Through three tiers, training reaches 80 % of the slower of all rows in HBM and the disk's random reads of the
         same number and mean size; E/1000: 40,000 examples/s with at most 40 KB read from SSD per example. The
         look-ahead uses at most its budget, which is a part of the DRAM's 40 %: of the bytes of all rows, with rows,
         their index and metadata, look-ahead and buffers inside.
Method   All rows are on SSD before timing; the most popular keys are in HBM and the next ones in DRAM, as after a long
         training. Both sides train the same batches, generated before, none of them twice. Through the tiers the clock
         runs over whole sweeps of the look-ahead: each reads the store once, so a part of a sweep may have all its
         reads or none. Rows and reads of the store per step and of each sweep, memory, and the disk's random read rate
         are recorded.
Command  python benchmarks/hbm_e2e.py --preset E/10000 --folder DISK --json FILE
         TRITON_INTERPRET=1 python benchmarks/hbm_e2e.py --tiny --folder DISK
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json
from dlrm_workload import interpreted_or_gpu

import thermocline as tc
from thermocline.arrays import Keys
from thermocline.data.paper_models import PaperModel
from thermocline.embedding.bulk_load import fill_store, fill_top, pieces
from thermocline.pipeline.lookahead import LookAheadStats
from thermocline.tiers.hbm import bytes_for

sys.path.append(str(Path(__file__).resolve().parent.parent))

from experiments.disk_probe import reads_per_second
from experiments.models import dram_budget

TINY = ("A/1e5", 1, 2, 24, "2")
"""Preset, examples per batch, warm-up, batches and look-ahead of a dry run."""
_START = time.perf_counter()


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table, plan: PaperModel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = tc.EmbeddingBag(table, plan.fields)
        widths = (plan.fields * plan.dim, *plan.hidden)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.mlp(self.bag(batch).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def by_popularity(ads: tc.SyntheticAds, begin: float, end: float) -> Iterator[Keys]:
    """Keys of every field from fraction `begin` to `end` of its keys, most popular first, in pieces."""
    first = 0
    for count in ads.keys:
        last = first + int(end * count)
        for piece in range(first + int(begin * count), last, 1 << 20):
            yield ads.some_keys(piece, min(last, piece + (1 << 20)))
        first += count


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """State of a training between two steps."""

    steps: int
    seconds: float
    counts: dict[str, float]

    @classmethod
    def now(cls, steps: int, table: tc.Table, ready: tc.Prefetch) -> Mark:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return cls(steps, time.perf_counter(), counters(table, ready))


class MeasuredSteps:
    """Steps of a training between which its counters are read: at the ends of sweeps, or without a look-ahead two."""

    def __init__(self, ahead: LookAheadStats | None, *, warm: int, sweeps: int, batches: int) -> None:
        """
        warm      steps before the first mark; without a look-ahead, also between the two marks
        sweeps    whole sweeps to measure
        batches   of the whole training: a sweep without batches left to collect does not count
        """
        self._ahead, self._warm, self._batches = ahead, warm, batches
        self._left = 2 if ahead is None else sweeps + 1
        self._seen = 0  # sweeps

    def ends_here(self, steps: int) -> bool:
        """Return whether to make a mark after this step. To be called after every step."""
        if self._ahead is None:
            ends = steps in (self._warm, 2 * self._warm)
        else:
            ends, self._seen = self._ahead.sweeps > self._seen, self._ahead.sweeps
            ends = ends and steps >= self._warm and self._ahead.collected < self._batches
        self._left -= ends
        return ends

    @property
    def over(self) -> bool:
        """Whether no further mark will be made."""
        return self._left == 0 or (self._ahead is not None and self._ahead.collected >= self._batches)


def train(
    table: tc.Table, plan: PaperModel, batches: list[tc.Batch], *, warm: int, sweeps: int, depth: int, window: int
) -> dict[str, Any]:
    """Train; measure whole sweeps of the look-ahead, from the first one that ends after `warm` steps.

    Without a look-ahead, measure as many steps as the warm-up has.
    """
    model = Model(table, plan)
    if torch.cuda.is_available():
        model = model.cuda()
    device = next(model.mlp.parameters()).device
    adam = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    marks: list[Mark] = []
    with tc.prefetch(batches, table, depth=depth, pull_window=window) as ready:
        ahead = ready.lookahead
        measured = MeasuredSteps(ahead, warm=warm, sweeps=sweeps, batches=len(batches))
        for steps, batch in enumerate(ready):
            if measured.ends_here(steps):
                marks.append(Mark.now(steps, table, ready))
            if measured.over:
                break
            label = batch.label.to(device)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), label)
            loss.backward()
            table.step()
            adam.step()
            adam.zero_grad()
        stages = {stage.name: stage.busy_seconds / max(1, stage.items) * 1000 for stage in ready.stats}
    if len(marks) < 2:
        raise SystemExit(f"{len(batches)} batches have no whole sweep after {warm} steps: raise --batches")
    examples = batches[0].examples
    return {
        **between(marks[0], marks[-1], examples),
        "sweeps": [between(*pair, examples) for pair in itertools.pairwise(marks)] if ahead else [],
        "lookahead": None if ahead is None else dataclasses.asdict(ahead),
        "busy_ms": stages,
    }


def between(begin: Mark, end: Mark, examples: int) -> dict[str, Any]:
    """Return speed and counts per step from one mark to the other, for batches of `examples` examples."""
    steps, seconds = end.steps - begin.steps, end.seconds - begin.seconds
    per_step = {name: (value - begin.counts[name]) / steps for name, value in end.counts.items()}
    return {
        "steps": steps,
        "examples_per_second": steps * examples / seconds,
        "kb_per_example": per_step["ssd_bytes"] / examples / 1000,
        "ms": seconds / steps * 1000,
        "per_step": per_step,
    }


def print_progress(text: str) -> None:
    console.print(f"{time.perf_counter() - _START:.0f} s: {text}")


def counters(table: tc.Table, ready: tc.Prefetch) -> dict[str, float]:
    assert table.hbm is not None
    gpu, memory = table.hbm.stats(), table.dram.stats()
    counts: dict[str, float] = {"hbm_misses": gpu.misses, "evicted": gpu.evictions}
    counts["not_in_dram"] = memory.reads - memory.read_hits
    store = None if table.store is None else table.store.stats()
    counts |= (
        {"ssd_reads": 0, "ssd_bytes": 0} if store is None else {"ssd_reads": store.reads, "ssd_bytes": store.bytes_read}
    )
    if (ahead := ready.lookahead) is not None:
        counts |= {"rows_ahead": ahead.rows_loaded, "late_rows": ahead.late_rows, "collected": ahead.collected}
        counts |= {"collect_ms": 1000 * ahead.collect_seconds, "load_ms": 1000 * ahead.load_seconds}
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="E/10000")
    parser.add_argument("--batch", type=int, default=1024, help="examples per batch")
    parser.add_argument("--warm", type=int, default=60, help="steps before the measurement")
    parser.add_argument("--sweeps", type=int, default=2, help="sweeps of the look-ahead to measure")
    parser.add_argument("--batches", type=int, help="batches to generate; 3 times --warm unless given")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--lookahead", default="auto", help='"auto", a number of batches, or a size')
    parser.add_argument("--tiers-only", action="store_true", help="skip the run with all rows in HBM")
    parser.add_argument("--tiny", action="store_true", help="a small model and few examples, for a dry run")
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.preset, options.batch, options.warm, options.batches, options.lookahead = TINY
    plan = PaperModel.parse(options.preset)
    ads = tc.SyntheticAds.preset(options.preset, batch_size=options.batch)
    batches = list(itertools.islice(iter(ads), options.batches or 3 * options.warm))
    share = 0.005 if options.tiny else 0.1  # of the rows in HBM
    hot = (0.0, 0.95 * share)
    missing = np.isin(batches[0].ids[:10000], np.concatenate(list(by_popularity(ads, *hot))), invert=True).mean()
    console.print(f"{missing:.1%} of a batch's ids are not among the keys of HBM")
    optimizer, floats, keys = tc.RowWiseAdagrad(lr=0.01), plan.dim + 1, sum(ads.keys)
    console.print(
        f"{plan.name}/{plan.scale:g}: {keys:,} keys of {plan.row_bytes} bytes, {len(batches[0].ids):,} ids a batch"
    )
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "preset": options.preset,
    }
    measure = {name: getattr(options, name) for name in ("warm", "sweeps", "depth", "window")}
    whole = float("inf")
    if not options.tiers_only:
        all_in_hbm = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(int(1.02 * keys), floats),
            mem="4GB",  # stays empty: untrained keys have their initial row
            device=interpreted_or_gpu(),
        )
        fill_top(all_in_hbm, pieces(ads, 1 << 20))
        print_progress("all rows in HBM")
        record["all in HBM"] = train(all_in_hbm, plan, batches, **measure)
        console.print("all in HBM", record["all in HBM"])
        whole = record["all in HBM"]["examples_per_second"]
        del all_in_hbm
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(int(share * keys), floats),
            mem=dram_budget(plan),
            ssd=Path(folder) / "rows",
            lookahead=int(options.lookahead) if options.lookahead.isdigit() else options.lookahead,
            ssd_mem=(64 << 20) + 4 * keys,
            device=interpreted_or_gpu(),
        )
        assert table.store is not None
        fill_store(table.store, ads, table.dram.initial_rows)
        table.store.commit()
        print_progress("all rows on SSD")
        warm = (hot[1], hot[1] + 0.98 * table.dram.capacity / keys)

        def push(piece: Keys) -> None:
            table.dram.push(piece, table.dram.initial_rows(piece), dirty=False, unique=True)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in pool.map(push, by_popularity(ads, *warm)):
                pass
        fill_top(table, by_popularity(ads, *hot))
        print_progress("hot rows in DRAM and HBM")
        record["tiers"] = train(table, plan, batches, **measure)
        console.print("tiers", record["tiers"], table, table.dram.stats())
        per_step, memory = record["tiers"]["per_step"], table.dram.stats()
        reads = per_step["ssd_reads"]
        record["read_bytes"] = -(-int(per_step["ssd_bytes"] / max(1, reads)) // 4096) * 4096
        if reads:
            record["disk_reads_per_second"] = reads_per_second(Path(folder), record["read_bytes"])
        table.close()
    tiers = record["tiers"]
    floor = options.batch * record["disk_reads_per_second"] / reads if reads else float("inf")
    detail = f"{tiers['examples_per_second']:,.0f} of min({whole:,.0f} in HBM, {floor:,.0f} by the disk) examples/s"
    claims = [
        Claim(
            "through HBM, DRAM and SSD, against the slower of HBM and disk",
            tiers["examples_per_second"] / min(whole, floor),
            0.8,
            detail=detail,
        ),
        Claim(
            "memory of DRAM tier and look-ahead, of 40 % of the rows",
            memory.bytes_total / memory.budget,
            1,
            at_most=True,
        ),
    ]
    if (ahead := tiers["lookahead"]) is not None:
        claims += [
            Claim("memory of the look-ahead, of its budget", ahead["most_bytes"] / ahead["budget"], 1, at_most=True),
            Claim("whole sweeps of the look-ahead measured", len(tiers["sweeps"]), options.sweeps, unit=""),
        ]
    if options.preset == "E/1000":
        claims += [
            Claim("E/1000 through the tiers", tiers["examples_per_second"], 40000, unit="examples/s"),
            Claim("E/1000: read from SSD per example", tiers["kb_per_example"], 40, unit="KB", at_most=True),
        ]
    print_claims("End to end", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
