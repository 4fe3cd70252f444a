"""End to end on a GPU: the source's model E, scaled, with 10 % of its rows in HBM, 40 % in DRAM, the rest on SSD.

    python benchmarks/hbm_e2e.py --preset E/10000 --folder DISK --json FILE

Every row is on SSD before anything is timed; the keys that are asked for most are in HBM and, after them, in DRAM, as
they are after a long training. The same batches (made beforehand, none twice) are trained by the same loop with all
rows in HBM, and through the three tiers; examples/s of the second half. Beside it: how many rows were asked of the
store per step, its reads, and how fast this disk answers random reads of a page.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, write_json

import thermocline as tc
from thermocline.data.presets import Plan
from thermocline.tables.hbm import bytes_for

Keys = np.ndarray[Any, np.dtype[np.uint64]]

_BEGUN = time.perf_counter()


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


def fill(table: tc.Table, keys: Keys, *, to_store: bool) -> None:
    """A row for every key: on SSD, or in DRAM."""
    for piece in np.array_split(keys, max(1, len(keys) // (1 << 20))):
        rows = table.tier.initial_rows(piece)
        if to_store and table.store is not None:
            table.store.put(piece, rows)
        else:
            table.tier.push(piece, rows, dirty=False)
    if to_store and table.store is not None:
        table.store.commit()


def keys_by_popularity(ads: tc.SyntheticAds, *shares: float) -> list[Keys]:
    """Every key there is, cut by rank within its field at these shares; keys as csrc/data/synth.h makes them."""
    groups: list[list[Keys]] = [[] for _ in (*shares, 1)]
    first = 0
    for count in ads.keys:
        cuts = [0, *(int(share * count) for share in shares), count]
        for group, (begin, end) in zip(groups, itertools.pairwise(cuts), strict=True):
            group.append(np.arange(first + begin, first + end, dtype=np.uint64))
        first += count
    return [_mix(np.concatenate(group) ^ np.uint64(0x5CA1AB1E0DDBA11D)) for group in groups]


def _mix(x: Keys) -> Keys:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x ^= x >> np.uint64(33)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def rise(table: tc.Table, keys: Keys) -> None:
    """Rows to the GPU."""
    assert table.hbm is not None
    for piece in np.array_split(keys, max(1, len(keys) // (1 << 20))):
        pins = table.hbm.pin(table.hbm.stage([piece]))
        table.hbm.load(pins)
        pins.let_go()


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


def said(what: str) -> None:
    console.print(f"{time.perf_counter() - _BEGUN:.0f} s: {what}")


def counters(table: tc.Table) -> dict[str, Any]:
    assert table.hbm is not None
    gpu, memory = table.hbm.stats(), table.tier.stats()
    counts = {"hbm_misses": gpu.misses, "evicted": gpu.evictions, "not_in_dram": memory.reads - memory.read_hits}
    return {**counts, "ssd_reads": table.store.stats().reads if table.store is not None else 0}


def disk_reads_per_second(folder: Path, workers: int = 12) -> float:
    """Random pages of the store's files, past the page cache; by processes, which do not wait for one another."""
    probe = [sys.executable, "-c", _PROBE, str(folder)]
    running = [subprocess.Popen([*probe, str(n)], stdout=subprocess.PIPE, text=True) for n in range(workers)]
    return sum(float(process.communicate()[0]) for process in running)


_PROBE = """
import mmap, os, random, sys, threading, time
from pathlib import Path
files = [path for path in Path(sys.argv[1]).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
handles = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // 4096) for path in files]
counts, begin = [0] * 16, time.time() // 1 + 2  # all begin at the same second

def read(worker):
    page, draw = mmap.mmap(-1, 4096), random.Random(f"{sys.argv[2]}/{worker}")
    time.sleep(max(0.0, begin - time.time()))
    while time.time() < begin + 2:
        handle, pages = handles[draw.randrange(len(handles))]
        os.preadv(handle, [page], 4096 * draw.randrange(pages))
        counts[worker] += 1

threads = [threading.Thread(target=read, args=(n,)) for n in range(len(counts))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sum(counts) / 2)
"""


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
    hot, warm, cold = keys_by_popularity(ads, 0.095, 0.48)
    keys = np.concatenate([hot, warm, cold])
    missing = np.isin(batches[0].ids[:10000], hot, invert=True).mean()
    console.print(f"{missing:.1%} of a batch's ids are not among the hottest tenth of the keys")
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
        mem="4GB",  # holds nothing: what has not been trained has its initial row
        device="cuda",
    )
    rise(everything, keys)
    said("all rows in HBM")
    record["all in HBM"] = train(everything, plan, batches, options.depth, options.window)
    console.print("all in HBM", record["all in HBM"])
    del everything
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = tc.Table(
            plan.dim,
            optimizer,
            hbm=bytes_for(len(keys) // 10, floats),
            mem=int(0.4 * len(keys) * 84),
            ssd=Path(folder) / "rows",
            ssd_mem=(64 << 20) + 4 * len(keys),
            device="cuda",
        )
        fill(table, keys, to_store=True)
        said("all rows on SSD")
        fill(table, warm, to_store=False)
        rise(table, hot)
        said("hot rows in DRAM and HBM")
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
