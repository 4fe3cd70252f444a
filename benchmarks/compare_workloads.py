"""Workloads of compare_checkouts.py: one process runs one workload on the thermocline of its PYTHONPATH.

    PYTHONPATH=CHECKOUT/src python benchmarks/compare_workloads.py train

Prints one JSON object: processor and wall seconds per step, the folder of the imported package, and a digest of the
computed values. The code uses the public API only, so that it runs on checkouts with different module layouts.
"""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY, which OpenMP reads when torch loads it

# isort: split
import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FIELDS, DIM = 26, 16


class Digest:
    """SHA-256 over the bits of every value that a workload computes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, values: Any) -> None:
        self._hash.update(np.ascontiguousarray(values).tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


class StepTimer:
    """Processor time of all threads and wall time from `start` to `stop`, per step."""

    def start(self) -> None:
        self._begin = time.process_time(), time.perf_counter()

    def stop(self, steps: int) -> dict[str, float]:
        processor, wall = time.process_time() - self._begin[0], time.perf_counter() - self._begin[1]
        return {"processor_s": processor / steps, "wall_s": wall / steps, "steps": steps}


def run_ssd(scale: float, digest: Digest) -> dict[str, float]:
    """Random gets and puts on a merged store, a commit every four steps, one merge of the whole log at the end."""
    rows, batch, row_bytes, steps = 500_000, 40_000, 128, max(4, round(40 * scale))
    random, timer = np.random.default_rng(1), StepTimer()
    keys = random.permutation(np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    with (
        tempfile.TemporaryDirectory(prefix="thermocline-compare-") as folder,
        tc.SsdStore.open(Path(folder) / "store", row_bytes=row_bytes, mem_budget="64MB") as store,
    ):
        for piece in np.array_split(keys, 10):
            store.put(piece, np.repeat(piece, row_bytes // 8).view(np.uint8).reshape(len(piece), row_bytes))
        store.commit()
        store.merge()
        picks = [random.choice(rows, batch, replace=False) for _ in range(2 * steps)]
        timer.start()
        for step in range(steps):
            present, values = store.get(keys[picks[2 * step]])
            digest.add(present)
            digest.add(values[:1000])
            store.put(keys[picks[2 * step + 1]], values)
            if step % 4 == 3:
                store.commit()
        store.merge()
        figures = timer.stop(steps)
        digest.add(store.get(keys[:50_000])[1])
    return figures


def run_mem(scale: float, digest: Digest) -> dict[str, float]:
    """Deduplicate ids, pin rows in the DRAM tier, apply one gradient per unique key, unpin; sometimes read."""
    tier_class = tc.DramTier if hasattr(tc, "DramTier") else tc.MemTier  # its name before the redesign
    ads = tc.SyntheticAds(keys=500_000, fields=FIELDS, batch_size=8192, tensors=False)
    tier = tier_class(DIM, tc.Adagrad(lr=0.05), budget="128MB")
    steps, timer = max(4, round(250 * scale)), StepTimer()
    batches = [ads.batch(number) for number in range(10)]
    gradients = np.random.default_rng(2).standard_normal((8192 * FIELDS, DIM), dtype=np.float32)

    def step(number: int) -> None:
        batch = batches[number % len(batches)]
        working_set = tc.WorkingSet.of(batch.ids)
        slots = tier.pull(working_set.keys)
        tier.apply_gradients(slots, gradients[: len(slots)], step=number + 1)
        tier.unpin(slots, dirty=True)
        if number % 10 == 0:
            digest.add(tier.read(working_set.keys))

    for number in range(len(batches)):
        step(number)
    timer.start()
    for number in range(steps):
        step(len(batches) + number)
    return timer.stop(steps)


def run_train(scale: float, digest: Digest) -> dict[str, float]:
    """A training loop on the CPU: DRAM holds a part of the rows, the SSD store the others."""
    with tempfile.TemporaryDirectory(prefix="thermocline-compare-") as folder:
        table = tc.Table(DIM, tc.Adagrad(lr=0.05), mem="24MB", ssd=Path(folder) / "rows", ssd_mem="32MB", device="cpu")
        return _train(table, "cpu", 1024, max(4, round(120 * scale)), digest)


def run_hbm_train(scale: float, digest: Digest) -> dict[str, float] | None:
    """A training loop on the GPU: HBM holds a part of the rows, DRAM the others. None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    table = tc.Table(DIM, tc.Adagrad(lr=0.05), hbm="64MB", mem="1GB", device="cuda")
    return _train(table, "cuda", 4096, max(4, round(200 * scale)), digest)


def _train(table: Any, device: str, batch_size: int, steps: int, digest: Digest) -> dict[str, float]:
    """Train `steps` untimed and `steps` timed steps of a three-layer network on one table."""
    import torch

    torch.manual_seed(0)
    timer, bag = StepTimer(), tc.EmbeddingBag(table, FIELDS)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(FIELDS * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    ).to(device)
    dense = torch.optim.Adagrad(network.parameters(), lr=0.05)
    ads = tc.SyntheticAds(keys=1_000_000, fields=FIELDS, batch_size=batch_size)

    def train(first: int) -> None:
        batches = [ads.batch(number) for number in range(first, first + steps)]
        losses = []
        timer.start()
        with tc.prefetch(batches, table, depth=4) as prepared:
            for batch in prepared:
                logits = network(bag(batch)).squeeze(1)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label.to(device))
                loss.backward()
                table.step()
                dense.step()
                dense.zero_grad()
                losses.append(loss.detach())
        digest.add(torch.stack(losses).cpu().numpy())  # also waits for the GPU

    try:
        train(0)
        train(steps)
        return timer.stop(steps)
    finally:
        table.close()


Workload = Callable[[float, Digest], dict[str, float] | None]
WORKLOADS: dict[str, Workload] = {"ssd": run_ssd, "mem": run_mem, "train": run_train, "hbm_train": run_hbm_train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of steps")
    args = parser.parse_args()
    digest = Digest()
    figures = WORKLOADS[args.workload](args.scale, digest)
    package = str(Path(tc.__file__).parent)
    print(json.dumps({"package": package, "digest": str(digest), "skipped": figures is None, **(figures or {})}))


if __name__ == "__main__":
    main()
