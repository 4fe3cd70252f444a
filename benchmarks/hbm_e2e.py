"""End to end on a GPU: a scaled model E of the MLSys 2020 paper, 10 % of its rows in HBM, 40 % in DRAM, all on SSD.

Claims   Through three tiers, training reaches 80 % of the slower of all rows in HBM and the disk's random reads of the
         same number and mean size; E/1000: 40,000 examples/s with at most 40 KB read from SSD per example. The
         look-ahead uses at most its budget, which is a part of the DRAM's 40 %.
Method   All rows are on SSD before timing; the most popular keys are in HBM and the next ones in DRAM, as after a long
         training. Both sides train the same batches, generated before, none of them twice; examples/s of the second
         half. Rows and reads of the store per step, memory, and the disk's random read rate are recorded.
Command  python benchmarks/hbm_e2e.py --preset E/10000 --folder DISK --json FILE
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

import thermocline as tc
from thermocline.arrays import Keys
from thermocline.data.paper_models import PaperModel
from thermocline.embedding.bulk_load import fill_store, fill_top, pieces
from thermocline.tiers.hbm import bytes_for

sys.path.append(str(Path(__file__).resolve().parent.parent))

from experiments.disk_probe import reads_per_second

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


def train(
    table: tc.Table, plan: PaperModel, batches: list[tc.Batch], steps: int, depth: int, window: int
) -> dict[str, Any]:
    """Train on the first `steps` batches; the look-ahead loads the rows of the others meanwhile, as in a long run."""
    model = Model(table, plan).cuda()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    warm, begin = steps // 2 // window * window, 0.0
    before: dict[str, Any] = {}
    with tc.prefetch(batches, table, depth=depth, pull_window=window) as ready:
        for n, batch in enumerate(itertools.islice(ready, steps)):
            if n == warm:
                torch.cuda.synchronize()
                begin, before = time.perf_counter(), counters(table, ready)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.cuda())
            loss.backward()
            table.step()
            adam.step()
            adam.zero_grad()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        stages = {stage.name: stage.busy_seconds / steps * 1000 for stage in ready.stats}
        moved = {name: (value - before[name]) / (steps - warm) for name, value in counters(table, ready).items()}
    examples = sum(batch.examples for batch in batches[warm:steps])
    return {
        "examples_per_second": examples / seconds,
        "lookahead": None if ready.lookahead is None else dataclasses.asdict(ready.lookahead),
        "ms": seconds / (steps - warm) * 1000,
        "per_step": moved,
        "busy_ms": stages,
    }


def print_progress(text: str) -> None:
    console.print(f"{time.perf_counter() - _START:.0f} s: {text}")


def counters(table: tc.Table, ready: tc.Prefetch) -> dict[str, Any]:
    assert table.hbm is not None
    gpu, memory = table.hbm.stats(), table.dram.stats()
    counts = {"hbm_misses": gpu.misses, "evicted": gpu.evictions, "not_in_dram": memory.reads - memory.read_hits}
    store = None if table.store is None else table.store.stats()
    counts |= (
        {"ssd_reads": 0, "ssd_bytes": 0} if store is None else {"ssd_reads": store.reads, "ssd_bytes": store.bytes_read}
    )
    if (ahead := ready.lookahead) is not None:
        counts |= {"rows_ahead": ahead.rows_loaded, "late_rows": ahead.late_rows}
        counts |= {"collect_ms": 1000 * ahead.collect_seconds, "load_ms": 1000 * ahead.load_seconds}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="E/10000")
    parser.add_argument("--batch", type=int, default=1024, help="examples per batch")
    parser.add_argument("--steps", type=int, default=120, help="steps, half of them to warm up")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--lookahead", default="auto", help='"auto", a number of batches, or a size')
    parser.add_argument("--tiers-only", action="store_true", help="skip the run with all rows in HBM")
    parser.add_argument("--folder", default=".", help="folder on the disk to use")
    parser.add_argument("--json", help="write all figures to FILE")
    options = parser.parse_args()
    plan = PaperModel.parse(options.preset)
    ads = tc.SyntheticAds.preset(options.preset, batch_size=options.batch)
    batches = list(itertools.islice(iter(ads), options.steps + options.steps // 2))
    hot = (0.0, 0.095)
    missing = np.isin(batches[0].ids[:10000], np.concatenate(list(by_popularity(ads, *hot))), invert=True).mean()
    console.print(f"{missing:.1%} of a batch's ids are not among the most popular tenth of the keys")
    optimizer, floats, keys = tc.RowWiseAdagrad(lr=0.01), plan.dim + 1, sum(ads.keys)
    console.print(
        f"{plan.name}/{plan.scale:g}: {keys:,} keys of {plan.row_bytes} bytes, {len(batches[0].ids):,} ids a batch"
    )
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name(),
        "preset": options.preset,
    }
    whole = float("inf")
    if not options.tiers_only:
        all_in_hbm = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(int(1.02 * keys), floats),
            mem="4GB",  # stays empty: untrained keys have their initial row
            device="cuda",
        )
        fill_top(all_in_hbm, pieces(ads, 1 << 20))
        print_progress("all rows in HBM")
        record["all in HBM"] = train(all_in_hbm, plan, batches, options.steps, options.depth, options.window)
        console.print("all in HBM", record["all in HBM"])
        whole = record["all in HBM"]["examples_per_second"]
        del all_in_hbm
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(keys // 10, floats),
            mem=int(0.4 * keys * 84),
            ssd=Path(folder) / "rows",
            lookahead=int(options.lookahead) if options.lookahead.isdigit() else options.lookahead,
            ssd_mem=(64 << 20) + 4 * keys,
            device="cuda",
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
        record["tiers"] = train(table, plan, batches, options.steps, options.depth, options.window)
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
        claims.append(
            Claim("memory of the look-ahead, of its budget", ahead["most_bytes"] / ahead["budget"], 1, at_most=True)
        )
    if options.preset == "E/1000":
        read = per_step["ssd_bytes"] / options.batch / 1000
        claims += [
            Claim("E/1000 through the tiers", tiers["examples_per_second"], 40000, unit="examples/s"),
            Claim("E/1000: read from SSD per example", read, 40, unit="KB", at_most=True),
        ]
    print_claims("End to end", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
