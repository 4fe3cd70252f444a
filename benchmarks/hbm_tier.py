"""Rows beyond HBM: a training step with a tenth of the rows on the GPU and all rows in DRAM, prefetched.

Claims   A step takes at most 3.5 ms, and at most 1.2x the time of its missing rows on the host link.
Method   dynamicemb's published workload: 1,048,570 ids per step (10 features), dim 128, fp32, power law 1.05, SGD, a
         vector per id, given gradients. Wall time per step in the steady state with `tc.prefetch`: planning, rows in
         both directions, training stream; the median of three rounds over all depths. Batches are prepared in
         page-locked memory. The link is measured with page-locked copies of as many rows. Printed beside: the parts
         of moving rows, and reads and pushes of as many rows by the host alone, for which the training is over.
Command  python benchmarks/hbm_tier.py --json FILE      an H200, 40M rows of dim 128, two minutes
         python benchmarks/hbm_tier.py --quick          a tenth of the rows
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Claim, console, environment, print_claims, spread, write_json
from dlrm_workload import page_locked
from hbm_train import DIM, FEATURES, IDS_PER_FEATURE, key_of, power_law

import thermocline as tc
from thermocline.tiers.dram import KnownSlots
from thermocline.tiers.hbm import HbmTier, bytes_for

DEPTHS = (1, 2, 4, 6)
TARGET = 3.5
"""Milliseconds of a step."""


def batches(count: int, keys: int, locked: bool) -> list[tc.Batch]:
    """Batches whose ids are in page-locked memory, or not."""
    out = []
    for seed in range(count):
        numbers = key_of(power_law(FEATURES, IDS_PER_FEATURE, keys, seed))
        ids = (page_locked(numbers) if locked else numbers.cpu()).numpy().view(np.uint64)
        out.append(tc.Batch(ids, np.array([0, len(ids)]), 1))
    return out


def filled(keys: int, hbm_rows: int, threads: int | None) -> tc.Table:
    """A table with a row in DRAM for every key."""
    rows = FEATURES * keys
    table = tc.Table(
        DIM, tc.SGD(lr=0.01), hbm=bytes_for(hbm_rows, DIM), mem=int(rows * (4 * DIM + 40) * 1.05), device="cuda",
        threads=threads,
    )  # fmt: skip
    values = np.random.default_rng(0).random((1 << 20, DIM), np.float32)
    for first in range(0, rows, len(values)):
        numbers = torch.arange(first, min(first + len(values), rows), device="cuda")
        table.dram.push(key_of(numbers).cpu().numpy(), values[: len(numbers)], dirty=False)
    return table


def link_seconds(rows: int) -> dict[str, float]:
    """Seconds to copy `rows` rows between page-locked memory and the GPU, per direction."""
    host = torch.empty(rows, DIM, pin_memory=True).normal_()
    device = torch.empty(rows, DIM, device="cuda")
    times: dict[str, list[float]] = {"in": [], "out": []}
    for _ in range(10):
        for name, target, source in (("in", device, host), ("out", host, device)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in times.items()}


class Parts:
    """Seconds in the parts of moving rows, by wrappers around the methods that do them."""

    def __init__(self, tier: HbmTier) -> None:
        self.seconds: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []
        transfer = tier._transfer
        self._wrap(transfer, "enqueue", "pull: enqueue")
        self._wrap(transfer, "load", "load: whole")
        self._wrap(transfer, "_wait_write_back", "load: wait for earlier pushes")
        self._wrap(transfer, "_in_rows", "load: wait for staging")
        self._wrap(transfer, "_out_rows", "pull: wait for staging")
        self._wrap(transfer, "_wait_for", "push or load: wait for the device")
        self._wrap(transfer, "_read", "load: read rows")
        self._wrap(transfer, "write_back", "push: write rows")

    def _wrap(self, owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)
        self.seconds[name] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        setattr(owner, method, timed)
        self._undo.append(lambda: delattr(owner, method))

    def close(self) -> None:
        for undo in self._undo:
            undo()


def host_rows(table: tc.Table, keys: int, rows: int, rounds: int = 20) -> dict[str, float]:
    """Milliseconds to read and to push rows of the DRAM tier, alone and both at once, and to copy their bytes.

    At once, as in training, rows are pushed to the slots that their loads noted.
    """
    generator = np.random.default_rng(1)
    read = torch.empty(rows, DIM, pin_memory=True).numpy()
    pushed = torch.ones(rows, DIM, pin_memory=True).numpy()
    names = ("read", "push", "push by slot", "read beside push", "push beside read", "both", "memcpy, one thread")
    times: dict[str, list[float]] = {name: [] for name in names}

    def some() -> Any:
        numbers = generator.permutation(np.unique(generator.integers(0, FEATURES * keys, 2 * rows)))[:rows]
        return key_of(torch.from_numpy(numbers).cuda()).cpu().numpy().view(np.uint64)

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        times[name].append((time.perf_counter() - begin) * 1000)

    def read_rows(name: str, wanted: Any) -> None:
        timed(name, lambda: table.dram.read_into(wanted, read))

    def push_rows(name: str, wanted: Any, known: KnownSlots | None = None) -> None:
        timed(name, lambda: table.dram.push_stored(wanted, pushed, unique=True, known=known))

    def slots_of(wanted: Any) -> KnownSlots:
        version, slots = table.dram.slots_version, np.empty(len(wanted), np.uint32)
        table.dram.read_into(wanted, read, slots)
        return KnownSlots(slots, version)

    for _ in range(rounds):
        evicted, others = some(), some()
        slots, other_slots = slots_of(evicted), slots_of(others)  # now: later reads and pushes replace them in caches
        read_rows("read", some())
        push_rows("push", some())
        push_rows("push by slot", evicted, slots)
        wanted = some()
        thread = threading.Thread(target=push_rows, args=("push beside read", others, other_slots))
        begin = time.perf_counter()
        thread.start()
        read_rows("read beside push", wanted)
        thread.join()
        times["both"].append((time.perf_counter() - begin) * 1000)
        timed("memcpy, one thread", lambda: np.copyto(read, pushed))
    return {name: float(np.median(values)) for name, values in times.items()}


def run(table: tc.Table, source: list[tc.Batch], depth: int, warm: int) -> dict[str, Any]:
    """Wall milliseconds, misses and evictions per step, after `warm` steps."""
    tier = table.hbm
    assert isinstance(tier, HbmTier)
    parts = Parts(tier)
    bag = tc.EmbeddingBag(table, 1, pooling="none")
    grad = torch.randn(FEATURES * IDS_PER_FEATURE, DIM, device="cuda") * 0.01
    marks, before, stages = [], tier.stats(), {}
    before_parts, before_usage = dict(parts.seconds), resource.getrusage(resource.RUSAGE_SELF)
    with tc.prefetch(source, table, depth=depth) as ready:
        for n, batch in enumerate(ready):
            if n == warm:
                before = tier.stats()
                stages = {stage.name: stage.busy_seconds for stage in ready.stats}
                before_parts, before_usage = dict(parts.seconds), resource.getrusage(resource.RUSAGE_SELF)
            torch.autograd.backward(bag(batch), grad)
            table.step()
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        end = time.perf_counter()
        busy = {stage.name: stage.busy_seconds - stages.get(stage.name, 0.0) for stage in ready.stats}
    parts.close()
    after, steps, usage = tier.stats(), len(source) - warm, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": (end - marks[warm - 1]) / steps * 1000,
        "steps": spread(list(np.diff(marks[warm - 1 :]) * 1000)),
        "missing": (after.misses - before.misses) / steps,
        "evicted": (after.evictions - before.evictions) / steps,
        "busy_ms": {name: seconds / steps * 1000 for name, seconds in busy.items()},
        "parts_ms": {name: (parts.seconds[name] - before_parts[name]) / steps * 1000 for name in parts.seconds},
        "cpu_ms": (usage.ru_utime + usage.ru_stime - before_usage.ru_utime - before_usage.ru_stime) / steps * 1000,
        "sleeps": (usage.ru_nvcsw - before_usage.ru_nvcsw) / steps,
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median time per step."""
    return sorted(runs, key=lambda figures: figures["ms"])[len(runs) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each depth, in turns; medians count")
    parser.add_argument("--threads", type=int, help="threads of the DRAM tier; default: all cores")
    parser.add_argument("--pageable", action="store_true", help="ids of the batches are not in page-locked memory")
    options = parser.parse_args()
    keys = 400_000 if options.quick else 4_000_000
    record: dict[str, Any] = {**environment(["torch", "triton"]), "gpu": torch.cuda.get_device_name(), "keys": keys}
    table = filled(keys, FEATURES * keys // 10, options.threads)
    console.print(f"filled: {table}")
    source = batches(options.steps, keys, not options.pageable)
    for number in range(options.rounds):
        for depth in DEPTHS:
            figures = run(table, source, depth, len(source) // 3)
            record.setdefault(f"depth {depth}", {"runs": []})["runs"].append(figures)
            console.print(f"round {number}, depth {depth}: {figures}")
    for depth in DEPTHS:
        record[f"depth {depth}"] |= median_run(record[f"depth {depth}"]["runs"])
    tenth = record["depth 4"]
    record["host"] = host = host_rows(table, keys, int(tenth["missing"]))
    console.print(f"host, {tenth['missing']:.0f} rows, ms: {host}")
    record["link"] = link = link_seconds(int(tenth["missing"]))
    console.print(f"link, {tenth['missing']:.0f} rows: {link}")
    floor = max(link.values()) * 1000
    claims = [
        Claim(
            "10 % of the rows in HBM, SGD, per step", tenth["ms"], TARGET, "ms", True, f"{tenth['missing']:.0f} misses"
        ),
        Claim(
            "step time / time of the missing rows on the link", tenth["ms"] / floor, 1.2, "x", True, f"{floor:.2f} ms"
        ),
    ]
    print_claims("Rows beyond HBM", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
