"""The GPU table against HierarchicalKV, operation by operation, on one GPU.

Claim    Every operation is 2x as fast as HierarchicalKV ("find rows" at dim 64: 1.7x).
Method   Settings of HierarchicalKV's benchmark: 2^20 distinct keys per operation, 60 % present, load factors 0.5 and
         0.75 (keys per entry of our index, 12.8 bytes per entry). Its hits are the keys inserted last, ours are random.
         "find rows" copies rows out; "find or insert" returns slots, initializes new rows and copies found rows out;
         "insert with eviction" writes all given rows and, in a full table, first copies the victims out. CUDA events,
         cold L2 cache, medians. Figures of HierarchicalKV are constants, measured on an H200, in 2^30 keys/s.
Command  python benchmarks/hbm.py --json FILE      128M entries, about two minutes
         python benchmarks/hbm.py --quick          8M entries
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from common import Claim, console, environment, print_claims, spread, write_json
from gpu_time import Work, time_ms
from hbm_rows import assign_rows, find_rows, read_or_initialize

from thermocline.kernels.evict import EVICTED, LOST, NEW, SHORT
from thermocline.kernels.find import find
from thermocline.kernels.index import Index
from thermocline.kernels.insert import InsertPlan, Residents, find_or_insert
from thermocline.kernels.random import mix64_reference, table_mix
from thermocline.kernels.rows import copy_in, copy_out

KEYS = 2**20
HITS = 0.6
THEIR_UNIT = 2**30

# HierarchicalKV, built and run on one H200: {dim: {operation: (load 0.5, load 0.75, load 1.0)}}.
HIERARCHICAL_KV: dict[int, dict[str, tuple[float, float, float]]] = {
    8: {
        "find slots": (7.16, 6.21, 4.70),
        "find rows": (3.80, 3.41, 3.90),
        "find or insert": (2.19, 2.02, 1.19),
        "assign": (3.32, 3.01, 3.26),
        "insert with eviction": (2.02, 1.88, 0.85),
    },
    32: {
        "find slots": (7.29, 6.47, 4.65),
        "find rows": (3.66, 3.65, 3.78),
        "find or insert": (2.10, 1.96, 1.28),
        "assign": (3.01, 2.98, 3.11),
        "insert with eviction": (1.66, 1.56, 0.79),
    },
    64: {
        "find slots": (7.38, 6.64, 4.74),
        "find rows": (3.41, 3.48, 3.38),
        "find or insert": (1.94, 1.80, 1.27),
        "assign": (2.69, 2.79, 3.01),
        "insert with eviction": (1.54, 1.43, 0.81),
    },
}


def seconds(work: Work, rounds: int, before: Callable[[], None] = lambda: None) -> list[float]:
    """Device seconds of work(0), work(1) ..."""
    times = time_ms(work, rounds, before=before, warm=2, flush_bytes=256 * 2**20, ahead_cycles=1_500_000)
    return [time / 1000 for time in times]


@dataclasses.dataclass(slots=True)
class Bench:
    """A table of `entries` index entries, filled to `load`; keys are mixed integers."""

    dim: int
    entries: int
    load: float
    slots: int
    index: Index = dataclasses.field(init=False)
    residents: Residents = dataclasses.field(init=False)
    arena: torch.Tensor = dataclasses.field(init=False)
    used: int = 0
    now: int = 1
    fresh: int = 0
    """Number of the next key never used."""

    def __post_init__(self) -> None:
        self.index = Index.empty(self.entries, "cuda")
        self.residents = Residents.empty(self.slots, "cuda")
        self.arena = torch.empty(self.slots, self.dim, device="cuda").normal_()
        while self.used < int(self.load * self.entries):
            count = min(4 * KEYS, int(self.load * self.entries) - self.used)
            self.insert(self.new_keys(count))

    def new_keys(self, count: int) -> torch.Tensor:
        first, self.fresh = self.fresh, self.fresh + count
        return mix64_reference(torch.arange(first, self.fresh, device="cuda"))

    def keys(self, hits: float) -> torch.Tensor:
        """Distinct keys in random order: the fraction `hits` are random residents, the others are new."""
        present = int(KEYS * hits)
        slots = torch.randperm(self.used // 16, device="cuda")[:present] * 16
        slots = (slots + torch.randint(0, 16, (present,), device="cuda")).clamp(max=self.used - 1)
        keys = torch.cat([self.residents.keys[slots], self.new_keys(KEYS - present)])
        return keys[torch.randperm(KEYS, device="cuda")]

    def insert(self, keys: torch.Tensor, new: int | None = None) -> InsertPlan:
        """Insert `keys`, of which `new` (default: all) are absent; other keys may be evicted."""
        plan = find_or_insert(
            self.index, self.residents, keys, used=self.used, now=self.now, completed=self.now - 1, unique=True
        )
        self.used = min(self.slots, self.used + (len(keys) if new is None else new))
        self.now += 1
        return plan


def operations(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds per operation; inserting operations run last."""
    read = [bench.keys(HITS) for _ in range(4)]
    there = [bench.keys(1.0) for _ in range(4)]
    slots = torch.empty(KEYS, dtype=torch.int32, device="cuda")
    rows = torch.empty(KEYS, bench.dim, device="cuda").normal_()
    out = torch.empty(KEYS, bench.dim, device="cuda")
    all_of_them = torch.tensor([KEYS], device="cuda")
    mix = table_mix(1, 2)
    full = bench.used == bench.slots
    plans: list[InsertPlan] = []

    def find_or_insert_rows(keys: torch.Tensor, new: int) -> None:
        plan = bench.insert(keys, new)
        read_or_initialize(plan, bench.arena, out, mix, 0.01)
        plans.append(plan)

    def insert_rows(keys: torch.Tensor, new: int) -> None:
        plan = bench.insert(keys, new)
        if full:
            copy_out(bench.arena, plan.victims, out, plan.counts[EVICTED.value :])
        copy_in(bench.arena, plan.slots, rows, all_of_them)
        plans.append(plan)

    times = {
        "find slots": seconds(lambda n: find(bench.index, read[n % 4], out=slots), rounds),
        "find slots, all there": seconds(lambda n: find(bench.index, there[n % 4], out=slots), rounds),
        "find rows": seconds(lambda n: find_rows(bench.index, bench.arena, read[n % 4], out), rounds),
        "find rows, all there": seconds(lambda n: find_rows(bench.index, bench.arena, there[n % 4], out), rounds),
        "assign": seconds(lambda n: assign_rows(bench.index, bench.arena, read[n % 4], rows), rounds),
        "find or insert slots, all there": seconds(lambda n: bench.insert(there[n % 4], 0), rounds // 2),
    }
    new = KEYS - int(KEYS * HITS)
    state = [bench.index.words, bench.residents.keys, bench.residents.last_use]
    saved = [tensor.clone() for tensor in state]
    used = bench.used

    def restore() -> None:  # each round inserts into the same state
        for tensor, copy in zip(state, saved, strict=True):
            tensor.copy_(copy)
        bench.used = used

    inserting: dict[str, Callable[[torch.Tensor, int], object]] = {
        "find or insert slots": lambda keys, new: plans.append(bench.insert(keys, new)),
        "find or insert": find_or_insert_rows,
        "insert with eviction": insert_rows,
    }
    for name, work in inserting.items():
        times[name] = seconds(lambda n, work=work: work(read[n % 4], new), rounds // 2, restore)  # type: ignore[misc]
    for plan in plans:
        counts = plan.counts.tolist()
        assert counts[LOST.value] == counts[SHORT.value] == 0
        assert counts[NEW.value] == new
        assert counts[EVICTED.value] == (new if full else 0)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to FILE")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the entries, fewer rounds")
    parser.add_argument("--dims", type=int, nargs="+", default=[8, 32, 64])
    options = parser.parse_args()
    torch.manual_seed(1)
    rounds = 12 if options.quick else 40
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name(),
        "keys": KEYS,
        "hits": HITS,
        "results": [],
    }
    claims = []
    for dim in options.dims:
        entries = (128 if dim < 64 else 64) * 2**20 // (16 if options.quick else 1)
        for index, load in enumerate((0.5, 0.75, 0.9, 1.0)):
            # At 1.0 all slots are used, and the index has load 0.75.
            filled = min(load, 0.75) if load == 1.0 else load
            spare = 0 if load == 1.0 else KEYS
            bench = Bench(dim, entries, filled, int(filled * entries) + spare)
            for name, times in operations(bench, rounds).items():
                speed = spread([KEYS / time for time in times])
                result = {"dim": dim, "entries": entries, "load": load, "operation": name, "keys_per_second": speed}
                record["results"].append(result)
                theirs = HIERARCHICAL_KV[dim].get(name, ())
                column = 2 if load == 1.0 else index
                note = ""
                if load != 0.9 and theirs:
                    ratio = speed["median"] / (theirs[column] * THEIR_UNIT)
                    note = f"  {ratio:5.2f} x HierarchicalKV"
                    target = 1.7 if (name, dim) == ("find rows", 64) else 2.0
                    if load < 0.9:
                        detail = f"{speed['median'] / 1e9:.2f} against {theirs[column] * THEIR_UNIT / 1e9:.2f} G keys/s"
                        claims.append(Claim(f"{name}, dim {dim}, load {load}", ratio, target, detail=detail))
                console.print(f"dim {dim:3} load {load:4}  {name:34} {speed['median'] / 1e9:7.2f} G keys/s{note}")
            del bench
            torch.cuda.empty_cache()
    print_claims("The GPU table against HierarchicalKV", claims)
    if options.json:
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
