"""End to end on a GPU: the source's model E, scaled, with 10 % of its rows in HBM, 40 % in DRAM, the rest on SSD.

    python benchmarks/hbm_e2e.py --preset E/10000 --folder DISK --json FILE

Every row is on SSD before anything is timed, and DRAM is full. The same batches (made beforehand, none twice) are
trained by the same loop with all rows in HBM, and through the three tiers; examples/s of the second half, when hot rows
have risen. Beside it: how many rows were asked of the store per step, its reads, and how fast this disk answers random
reads of a page.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json

import thermocline as tc
from thermocline.data.presets import Plan
from thermocline.tables.hbm import bytes_for


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table, plan: Plan) -> None:
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


def fill(table: tc.Table, keys: np.ndarray[Any, Any]) -> None:
    """A row for every key: where the table keeps them, SSD if it has one."""
    for piece in np.array_split(keys, max(1, len(keys) // (1 << 20))):
        rows = table.tier.initial_rows(piece)
        if table.store is not None:
            table.store.put(piece, rows)
        else:
            table.tier.push(piece, rows, dirty=False)
    if table.store is not None:
        table.store.commit()


def all_keys(ads: tc.SyntheticAds, batches: list[tc.Batch]) -> np.ndarray[Any, Any]:
    """The keys of the batches, and as many others as the preset has: random ones, which no batch asks for."""
    used = np.unique(np.concatenate([batch.ids for batch in batches]))
    others = np.random.default_rng(1).integers(0, 2**64, sum(ads.keys) - len(used), dtype=np.uint64)
    return np.concatenate([used, others])


def train(table: tc.Table, plan: Plan, batches: list[tc.Batch], depth: int, window: int) -> dict[str, Any]:
    model = Model(table, plan).cuda()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    warm, begin = len(batches) // 2 // window * window, 0.0
    before: dict[str, Any] = {}
    with tc.prefetch(batches, table, depth=depth, pull_window=window) as ready:
        for n, batch in enumerate(ready):
            if n == warm:
                torch.cuda.synchronize()
                begin, before = time.perf_counter(), counters(table)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.cuda())
            loss.backward()
            table.step()
            adam.step()
            adam.zero_grad()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        stages = {stage.name: stage.busy_seconds / len(batches) * 1000 for stage in ready.stats}
    steps = len(batches) - warm
    moved = {name: (value - before[name]) / steps for name, value in counters(table).items()}
    examples = sum(batch.examples for batch in batches[warm:])
    return {
        "examples_per_second": examples / seconds,
        "ms": seconds / steps * 1000,
        "per_step": moved,
        "busy_ms": stages,
    }


def counters(table: tc.Table) -> dict[str, Any]:
    assert table.hbm is not None
    gpu, memory = table.hbm.stats(), table.tier.stats()
    counts = {"hbm_misses": gpu.misses, "evicted": gpu.evictions, "not_in_dram": memory.reads - memory.read_hits}
    return {**counts, "ssd_reads": table.store.stats().reads if table.store is not None else 0}


def disk_reads_per_second(folder: Path, seconds: float = 2.0, workers: int = 64) -> float:
    """Random pages of the store's files, past the page cache."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    handles = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // 4096) for path in files]
    counts = [0] * workers
    end = time.monotonic() + seconds

    def read(worker: int) -> None:
        import mmap

        page, draw = mmap.mmap(-1, 4096), np.random.default_rng(worker)
        while time.monotonic() < end:
            for place in draw.random(64):
                handle, pages = handles[int(place * len(handles))]
                os.preadv(handle, [page], 4096 * int(place * 7919 % 1 * pages))
                counts[worker] += 1

    threads = [threading.Thread(target=read, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="E/10000")
    parser.add_argument("--batch", type=int, default=1024, help="examples per batch")
    parser.add_argument("--steps", type=int, default=120, help="half of them to warm up")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--folder", default=".", help="on the disk to use")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    plan = Plan.of(options.preset)
    ads = tc.SyntheticAds.preset(options.preset, batch_size=options.batch)
    batches = list(itertools.islice(iter(ads), options.steps))
    keys = all_keys(ads, batches)
    optimizer, floats = tc.RowWiseAdagrad(lr=0.01), plan.dim + 1
    console.print(
        f"{plan.name}/{plan.scale:g}: {len(keys):,} keys of {plan.row_bytes} bytes, {len(batches[0].ids):,} ids a batch"
    )
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name(),
        "preset": options.preset,
    }
    everything = tc.Table(
        plan.dim,
        optimizer,
        hbm=bytes_for(int(1.02 * len(keys)), floats),
        mem=len(keys) * 100 + (64 << 20),
        device="cuda",
    )
    fill(everything, keys)
    bag = tc.EmbeddingBag(everything, plan.fields)
    for batch in batches:  # brings all their rows to the GPU
        everything.prepare(batch).pins.let_go()  # type: ignore[union-attr]
    record["all in HBM"] = train(everything, plan, batches, options.depth, options.window)
    console.print("all in HBM", record["all in HBM"])
    del everything, bag
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(len(keys) // 10, floats),
            mem=int(0.4 * len(keys) * 84),
            ssd=Path(folder) / "rows",
            device="cuda",
        )
        fill(table, keys)
        table.tier.push(
            keys[-len(keys) // 3 :], table.tier.initial_rows(keys[-len(keys) // 3 :]), dirty=False
        )  # DRAM is full
        record["tiers"] = train(table, plan, batches, options.depth, options.window)
        console.print("tiers", record["tiers"], table)
        record["disk_reads_per_second"] = disk_reads_per_second(Path(folder))
        table.close()
    tiers, whole = record["tiers"], record["all in HBM"]["examples_per_second"]
    reads = tiers["per_step"]["ssd_reads"]
    floor = options.batch * record["disk_reads_per_second"] / reads if reads else float("inf")
    detail = f"{tiers['examples_per_second']:,.0f} of min({whole:,.0f} in HBM, {floor:,.0f} by the disk) examples/s"
    claims = [
        Claim(
            "through HBM, DRAM and SSD, against the slower of HBM and disk",
            tiers["examples_per_second"] / min(whole, floor),
            0.8,
            detail=detail,
        )
    ]
    print_claims("End to end", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
