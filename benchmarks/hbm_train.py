"""A training step with all rows in HBM: dynamicemb's published workload, torch, and growing tables.

Claims   step      10 features, 1,048,570 ids, dim 128, fp32, power law 1.05 over 4M keys per feature, a vector per id.
                   The training stream (gather; sum of gradients + optimizer) takes at most 0.67 ms with SGD, 0.94 ms
                   with Adam. "Everything" adds find-or-insert, sort and segments, which a pipeline runs ahead, on the
                   same stream: at most FBGEMM TBE's published 0.96 and 1.35 ms. Gradients are given, random.
         torch     bags of 10 ids over 1M keys per feature: everything is 1.5x as fast as nn.EmbeddingBag + torch.optim
                   with sparse gradients on row numbers. (Dense gradients would read and write the whole model, 5 GB.)
         growth    everything at 2e8 keys <= 1.2x the time at 2e6, Adagrad, dim 16
Method   CUDA events, cold L2 cache, medians; the host has launched all work before it starts, and its launch time is
         recorded. Published figures are constants, of one H100; an H200 has about 1.4x its bandwidth.
Command  python benchmarks/hbm_train.py --json FILE            an H200, about two minutes
         python benchmarks/hbm_train.py --only step --quick    a tenth of the rows
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from common import Claim, console, environment, print_claims, spread, write_json
from gpu_time import Work, time_ms

from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.index import Index
from thermocline.kernels.insert import Residents, find_or_insert
from thermocline.kernels.optimizer_rules import OptimizerStep
from thermocline.kernels.pool import pool_rows
from thermocline.kernels.random import mix64_reference
from thermocline.kernels.segments import Segments, find_segments
from thermocline.kernels.update import update_rows

FEATURES, IDS_PER_FEATURE, DIM, ALPHA = 10, 104_857, 128, 1.05
BATCHES = 4
SPARE = 1 << 22
# {optimizer: (training stream, everything)}, milliseconds; everything is FBGEMM TBE's figure on an H100.
TARGETS = {"SGD": (0.67, 0.96), "Adam": (0.94, 1.35)}
PUBLISHED = {"SGD": {"FBGEMM TBE": 0.96, "dynamicemb": 1.92}, "Adam": {"FBGEMM TBE": 1.35, "dynamicemb": 2.19}}


def host_ms(work: Work, rounds: int) -> list[float]:
    """Host milliseconds to launch work(0), work(1) ..."""
    times = []
    for n in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work(n)
        times.append((time.perf_counter() - begin) * 1000)
    return times


def power_law(features: int, ids: int, keys: int, seed: int) -> torch.Tensor:
    """int64[features * ids]: key numbers, feature by feature, with probability ~ rank ** -ALPHA."""
    generator = torch.Generator("cuda").manual_seed(seed)
    uniform = torch.rand(features, ids, generator=generator, device="cuda", dtype=torch.float64)
    g = 1.0 - ALPHA
    rank = ((uniform * (keys**g - 1.0) + 1.0) ** (1.0 / g)).long().clamp(1, keys) - 1
    return (rank + torch.arange(features, device="cuda")[:, None] * keys).reshape(-1)


@dataclasses.dataclass(slots=True, eq=False)
class Hbm:
    """A table with all rows in HBM: index, residents and arena."""

    dim: int
    optimizer: Optimizer
    keys: int
    index: Index = dataclasses.field(init=False)
    residents: Residents = dataclasses.field(init=False)
    arena: torch.Tensor = dataclasses.field(init=False)
    now: int = 0

    def __post_init__(self) -> None:
        self.index = Index.empty(int(self.keys / 0.75), "cuda")
        slots = self.keys + SPARE  # slots for a batch of new keys, so that the table does not evict
        self.residents = Residents.empty(slots, "cuda")
        floats = self.dim + self.optimizer.state_floats(self.dim)
        self.arena = torch.empty(slots, floats, device="cuda")
        for part in self.arena.split(1 << 22):
            part.uniform_(0.01, 1.0)
        done = 0
        while done < self.keys:  # in random order: adjacent ranks are not adjacent in memory
            count = min(1 << 22, self.keys - done)
            self.plan(key_of(shuffled(torch.arange(done, done + count, device="cuda"), self.keys)), used=done)
            done += count

    def plan(self, keys: torch.Tensor, used: int | None = None) -> torch.Tensor:
        """Slots of keys; absent keys are inserted."""
        self.now += 1
        used = self.keys if used is None else used
        return find_or_insert(self.index, self.residents, keys, used=used, now=self.now, completed=self.now - 1).slots

    @property
    def weights(self) -> torch.Tensor:
        return self.arena[:, : self.dim]

    @property
    def state(self) -> torch.Tensor | None:
        return self.arena[:, self.dim :] if self.arena.shape[1] > self.dim else None


def shuffled(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Images of `numbers` under a fixed permutation of 0 .. count - 1."""
    return (numbers * 1_000_000_007 + 12345) % count


def key_of(numbers: torch.Tensor) -> torch.Tensor:
    return mix64_reference(numbers + 1)


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    keys: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor | None
    segments: Segments
    grad_rows: torch.Tensor | None
    coefs: torch.Tensor | None


def plan(table: Hbm, keys: torch.Tensor, offsets: torch.Tensor | None, known: tuple[int, int, int] | None) -> Batch:
    """Run all work ahead of training; `known`: the segment counts, which a pipeline has read by then."""
    slots = table.plan(keys)
    segments = find_segments(slots)
    if known is not None:
        segments = segments.known(*known)
    rows, coefs = (None, None)
    if offsets is not None:
        rows, coefs = index_gradients(len(keys), segments.order, offsets, None, False, "cuda")
    return Batch(keys, slots, offsets, segments, rows, coefs)


class Steps:
    """Training steps of one table over several batches."""

    def __init__(self, table: Hbm, batches: list[torch.Tensor], bag: int | None) -> None:
        self.table = table
        self.offsets = None if bag is None else torch.arange(0, len(batches[0]) + 1, bag, device="cuda")
        vectors = len(batches[0]) if self.offsets is None else len(self.offsets) - 1
        self.grad = torch.empty(vectors, table.dim, device="cuda").normal_()
        self.out = torch.empty(vectors, table.dim, device="cuda")
        self.batches = []
        for keys in batches:
            batch = plan(table, keys, self.offsets, None)
            segments, hot, blocks = batch.segments.counts.tolist()
            batch.segments = batch.segments.known(segments, hot, blocks)
            self.batches.append(batch)
        self.number = 0

    def plan(self, n: int) -> Batch:
        batch = self.batches[n % len(self.batches)]
        return plan(self.table, batch.keys, self.offsets, batch.segments.sizes)

    def forward(self, batch: Batch) -> None:
        pool_rows(self.table.weights, batch.slots, batch.offsets, out=self.out)

    def update(self, batch: Batch) -> None:
        self.number += 1
        step = OptimizerStep.of(self.table.optimizer, self.number)
        update_rows(self.table.weights, self.table.state, batch.segments, self.grad, batch.grad_rows, batch.coefs, step)

    def train(self, batch: Batch) -> None:
        self.forward(batch)
        self.update(batch)

    def of(self, n: int) -> Batch:
        return self.batches[n % len(self.batches)]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda").random_(0, 100)
    target = torch.empty_like(source)
    median = spread(time_ms(lambda n: target.copy_(source), 10))["median"]
    return 2 * len(source) / median * 1000


def step_claim(keys: int, rounds: int, bandwidth: float, figures: dict[str, Any]) -> list[Claim]:
    claims = []
    for optimizer in (SGD(), Adam()):
        name = type(optimizer).__name__
        table = Hbm(DIM, optimizer, FEATURES * keys)
        batches = [key_of(power_law(FEATURES, IDS_PER_FEATURE, keys, seed)) for seed in range(BATCHES)]
        steps = Steps(table, batches, None)
        ids = len(batches[0])
        times = {
            "find or insert": time_ms(lambda n, s=steps: s.table.plan(s.of(n).keys), rounds),
            "segments": time_ms(lambda n, s=steps: find_segments(s.of(n).slots), rounds),
            "gather": time_ms(lambda n, s=steps: s.forward(s.of(n)), rounds),
            "update": time_ms(lambda n, s=steps: s.update(s.of(n)), rounds),
            "training stream": time_ms(lambda n, s=steps: s.train(s.of(n)), rounds),
            "everything": time_ms(lambda n, s=steps: s.train(s.plan(n)), rounds),
        }
        sizes = [batch.segments.sizes for batch in steps.batches]
        unique = sum(size[0] for size in sizes) / len(sizes)
        row = 4 * DIM
        # Each unique row is read once and each vector written once; then each gradient and each unique row with its
        # optimizer state are read, and the row is written.
        least = (unique + ids) * row + ids * row + unique * 2 * table.arena.stride(0) * 4
        floor = least / bandwidth * 1000
        figures[name] = {
            "rows": FEATURES * keys,
            "sizes": sizes,
            "milliseconds": {part: spread(values) for part, values in times.items()},
            "floor_ms": floor,
            "host_milliseconds": {
                "training stream": spread(host_ms(lambda n, s=steps: s.train(s.of(n)), rounds)),
                "everything": spread(host_ms(lambda n, s=steps: s.train(s.plan(n)), rounds)),
            },
            "published_ms_h100": PUBLISHED[name],
        }
        for part, target in zip(("training stream", "everything"), TARGETS[name], strict=True):
            value = spread(times[part])["median"]
            detail = f"{unique:,.0f} unique; FBGEMM TBE on an H100: {PUBLISHED[name]['FBGEMM TBE']} ms"
            if part == "training stream":
                detail = f"lower bound at {bandwidth / 1e9:,.0f} GB/s: {floor:.3f} ms"
            claims.append(Claim(f"{name}: {part}", value, target, "ms", at_most=True, detail=detail))
        del table, steps
        torch.cuda.empty_cache()
    return claims


def torch_claim(keys: int, rounds: int, figures: dict[str, Any]) -> list[Claim]:
    """Bags of 10 ids. torch gets row numbers instead of keys: it has no hash table."""
    claims = []
    ids = FEATURES * IDS_PER_FEATURE // 10 * 10
    offsets = torch.arange(0, ids, 10, device="cuda")
    numbers = [power_law(FEATURES, IDS_PER_FEATURE, keys, seed)[:ids] for seed in range(BATCHES)]
    for optimizer in (SGD(), Adam()):
        name = type(optimizer).__name__
        steps = Steps(Hbm(DIM, optimizer, FEATURES * keys), [key_of(part) for part in numbers], 10)
        ours = spread(time_ms(lambda n, s=steps: s.train(s.plan(n)), rounds))
        stream = spread(time_ms(lambda n, s=steps: s.train(s.of(n)), rounds))
        del steps
        torch.cuda.empty_cache()
        bag = torch.nn.EmbeddingBag(FEATURES * keys, DIM, mode="sum", sparse=True, device="cuda")
        theirs = {"SGD": torch.optim.SGD, "Adam": torch.optim.SparseAdam}[name](bag.parameters(), lr=0.01)
        rows = [shuffled(part, FEATURES * keys) for part in numbers]
        grad = torch.empty(len(offsets), DIM, device="cuda").normal_()

        def train(n: int, bag: Any = bag, theirs: Any = theirs, rows: Any = rows, grad: Any = grad) -> None:
            bag(rows[n % BATCHES], offsets).backward(grad)
            theirs.step()
            theirs.zero_grad()

        peer = spread(time_ms(train, rounds))
        figures[name] = {"ours everything": ours, "ours training stream": stream, "torch sparse": peer}
        value = peer["median"] / ours["median"]
        detail = f"{ours['median']:.2f} ms, of it {stream['median']:.2f} training; torch {peer['median']:.2f} ms"
        claims.append(Claim(f"{name}: torch.nn.EmbeddingBag + torch.optim", value, 1.5, detail=detail))
        del bag, theirs, grad, rows
        torch.cuda.empty_cache()
    return claims


def growth_claim(sizes: tuple[int, int], rounds: int, figures: dict[str, Any]) -> list[Claim]:
    medians = []
    for keys in sizes:
        table = Hbm(16, Adagrad(), keys)
        # Equal ranks in both tables, spread over the keys: equal numbers of ids, unique keys and hot keys.
        ranks = [power_law(1, FEATURES * IDS_PER_FEATURE, sizes[0], seed) for seed in range(BATCHES)]
        steps = Steps(table, [key_of(rank * (keys // sizes[0])) for rank in ranks], 10)
        times = {
            "everything": time_ms(lambda n, s=steps: s.train(s.plan(n)), rounds),
            "training stream": time_ms(lambda n, s=steps: s.train(s.of(n)), rounds),
            "find or insert": time_ms(lambda n, s=steps: s.table.plan(s.of(n).keys), rounds),
            "segments": time_ms(lambda n, s=steps: find_segments(s.of(n).slots), rounds),
        }
        figures[f"{keys:.0e}"] = {part: spread(values) for part, values in times.items()}
        figures[f"{keys:.0e}"]["sizes"] = [list(batch.segments.sizes) for batch in steps.batches]
        medians.append(spread(times["everything"])["median"])
        del table, steps
        torch.cuda.empty_cache()
    detail = f"{medians[0]:.3f} and {medians[1]:.3f} ms for {FEATURES * IDS_PER_FEATURE // 10 * 10:,} ids"
    name = f"step at {sizes[1]:.0e} keys against {sizes[0]:.0e}"
    return [Claim(name, medians[1] / medians[0], 1.2, at_most=True, detail=detail)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, fewer rounds")
    parser.add_argument("--only", default="step,torch,growth", help="comma-separated claims")
    parser.add_argument("--json", help="write all figures to FILE")
    args = parser.parse_args()
    keys, rounds = (400_000, 10) if args.quick else (4_000_000, 40)
    growth = (2_000_000, 20_000_000) if args.quick else (2_000_000, 200_000_000)
    bandwidth = copy_bandwidth()
    record: dict[str, Any] = {
        **environment(["torch", "triton"]),
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_s": bandwidth,
        "quick": args.quick,
    }
    torch.cuda.empty_cache()
    claims: list[Claim] = []
    for name in args.only.split(","):
        figures: dict[str, Any] = record.setdefault(name, {})
        if name == "step":
            claims += step_claim(keys, rounds, bandwidth, figures)
        elif name == "torch":
            claims += torch_claim(keys // 4, rounds, figures)
        elif name == "growth":
            claims += growth_claim(growth, rounds, figures)
        else:
            parser.error(f"--only {name}: choose from step, torch, growth")
    console.print(f"{record['gpu']}, device copy {bandwidth / 1e9:,.0f} GB/s, commit {record['commit']}")
    print_claims("A training step with every row in HBM", claims)
    if args.json:
        write_json(args.json, record, claims)


if __name__ == "__main__":
    main()
