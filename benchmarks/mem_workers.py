"""Engine processes of benchmarks/mem.py: each reads "step N" lines and prints the milliseconds of that step as JSON.

    python benchmarks/mem_workers.py ENGINE OPTIMIZER FOLDER THREADS

FOLDER contains ids.npy and keys.npy (row numbers and 64-bit keys of the same batches) and sizes.json. Needs NumPy and
the engine only: the environment of FBGEMM does not contain this package.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

LR = 0.01
EPS = 1e-8


class Stopwatch:
    """Wall milliseconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = (now - self.last) * 1e3
        self.last = now


class Engine(Protocol):
    def step(self, batch: int, number: int, watch: Stopwatch) -> np.ndarray[Any, Any]:
        """Run one training step; return the pooled vectors before the update."""


class Sizes:
    def __init__(self, folder: Path) -> None:
        sizes = json.loads((folder / "sizes.json").read_text())
        self.rows: int = sizes["rows"]
        self.dim: int = sizes["dim"]
        self.bag: int = sizes["bag"]
        self.ids = np.load(folder / "ids.npy", mmap_mode="c")
        self.keys = np.load(folder / "keys.npy", mmap_mode="c")
        self.row_keys = np.load(folder / "row_keys.npy", mmap_mode="c")
        self.offsets = np.arange(0, self.ids.shape[1] + 1, self.bag, dtype=np.int64)
        random = np.random.default_rng(7)
        self.grad = random.normal(size=(len(self.offsets) - 1, self.dim)).astype(np.float32)
        self.weights = random.random((self.rows, self.dim), dtype=np.float32) * np.float32(0.02) - np.float32(0.01)


class Ours:
    def __init__(self, sizes: Sizes, optimizer: str, threads: int) -> None:
        import thermocline as tc

        kinds = {
            "sgd": tc.SGD(lr=LR),
            "adagrad": tc.Adagrad(lr=LR, eps=EPS),
            "rowwise": tc.RowWiseAdagrad(lr=LR, eps=EPS),
        }
        kind = kinds[optimizer]
        floats = sizes.dim + kind.state_floats(sizes.dim)
        self.working_set = tc.WorkingSet.of
        self.threads = threads
        self.sizes = sizes
        self.tier = tc.DramTier(
            sizes.dim, kind, budget=int(sizes.rows * (floats * 4 + 40) * 1.15) + 10**7, threads=threads
        )
        rows = np.zeros((100_000, floats), np.float32)
        for begin in range(0, sizes.rows, len(rows)):
            part = sizes.weights[begin : begin + len(rows)]
            rows[: len(part), : sizes.dim] = part
            self.tier.push(sizes.row_keys[begin : begin + len(part)], rows[: len(part)], dirty=False)
        self.out = np.empty_like(sizes.grad)

    def step(self, batch: int, number: int, watch: Stopwatch) -> np.ndarray[Any, Any]:
        working_set = self.working_set(self.sizes.keys[batch], threads=self.threads)
        watch.lap("dedup")
        tier, offsets = self.tier.core, self.sizes.offsets
        pins = self.tier.pin(working_set.keys)
        slots = pins.slots()
        id_slots, grad_rows, coefs = tier.plan(slots, working_set.inverse, working_set.order, offsets, None, False)
        watch.lap("pull+plan")
        tier.pool(id_slots, offsets, None, False, self.out)
        watch.lap("pool")
        tier.mark_dirty(slots)
        step = self.tier.step(number, None, 1.0)
        tier.update(slots, working_set.starts, grad_rows, coefs, self.sizes.grad, step)
        watch.lap("update")
        pins.release()
        watch.lap("release")
        return self.out


class Torch:
    def __init__(self, sizes: Sizes, optimizer: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.ids = [torch.from_numpy(ids) for ids in sizes.ids]
        self.offsets = torch.from_numpy(sizes.offsets)
        self.grad = torch.from_numpy(sizes.grad)
        weights = torch.from_numpy(sizes.weights)
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights, freeze=False, mode="sum", sparse=True, include_last_offset=True
        )
        kinds: dict[str, Callable[[Any], Any]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=LR),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPS),
        }
        self.optimizer = kinds[optimizer](self.bag.parameters())

    def step(self, batch: int, number: int, watch: Stopwatch) -> np.ndarray[Any, Any]:
        out = self.bag(self.ids[batch], self.offsets)
        watch.lap("forward")
        out.backward(self.grad)
        watch.lap("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        watch.lap("step")
        result: np.ndarray[Any, Any] = out.detach().numpy()
        return result


class Fbgemm:
    def __init__(self, sizes: Sizes, optimizer: str, threads: int) -> None:
        import torch
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe

        torch.set_num_threads(threads)
        kinds = {"sgd": tbe.OptimType.EXACT_SGD, "rowwise": tbe.OptimType.EXACT_ROWWISE_ADAGRAD}
        self.tbe = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(sizes.rows, sizes.dim, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=EPS,
        )
        self.tbe.split_embedding_weights()[0].copy_(torch.from_numpy(sizes.weights))
        self.ids = [torch.from_numpy(ids) for ids in sizes.ids]
        self.offsets = torch.from_numpy(sizes.offsets)
        self.grad = torch.from_numpy(sizes.grad)

    def step(self, batch: int, number: int, watch: Stopwatch) -> np.ndarray[Any, Any]:
        out = self.tbe(self.ids[batch], self.offsets)
        watch.lap("forward")
        out.backward(self.grad)
        watch.lap("backward+update")
        result: np.ndarray[Any, Any] = out.detach().numpy()
        return result


ENGINES: dict[str, Callable[[Sizes, str, int], Engine]] = {"ours": Ours, "torch": Torch, "fbgemm": Fbgemm}


def main() -> None:
    name, optimizer, folder, threads = sys.argv[1:]
    sizes = Sizes(Path(folder))
    engine = ENGINES[name](sizes, optimizer, int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        number = int(line.split()[1])
        watch, cpu = Stopwatch(), time.process_time()
        out = engine.step((number - 1) % len(sizes.ids), number, watch)
        cpu = (time.process_time() - cpu) * 1e3
        checksum = float(np.abs(out, dtype=np.float64).sum())
        print(json.dumps({"laps": watch.laps, "cpu": cpu, "checksum": checksum}), flush=True)


if __name__ == "__main__":
    main()
