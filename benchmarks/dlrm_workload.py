"""Shared by mlperf_dcnv2.py and dlrm_beyond_hbm.py: Criteo-shaped batches, the two networks, timed training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import spread
from torch import Tensor, nn

import thermocline as tc
from thermocline.arrays import Keys
from thermocline.kernels.random import mix64_reference
from thermocline.training.callbacks import Callback

ALPHA = 1.05
DENSE, DIM = 13, 128
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
CRITEO = (
    *(0, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 0, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14),
    *(0, 0, 0, 590152, 12973, 108, 36),
)
"""Rows per feature of MLPerf's DLRM-DCNv2. 0: one of the five features that MLPerf limits to 40 million."""
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per feature and example of MLPerf's DLRM-DCNv2: 214 in all."""
ONE_HOT = (1,) * len(CRITEO)


def rows_per_feature(total: int) -> list[int]:
    """Return Criteo's rows per feature, with the five largest equal, and `total` rows in all."""
    small = [min(count, max(3, total // 100)) for count in CRITEO]
    share, rest = divmod(total - sum(small), CRITEO.count(0))
    large = iter([share + rest] + [share] * (CRITEO.count(0) - 1))
    return [next(large) if criteo == 0 else count for criteo, count in zip(CRITEO, small, strict=True)]


def key_of(numbers: Tensor) -> Tensor:
    """Return the key of each row number, as int64 bit patterns."""
    return mix64_reference(numbers + 1)


def keys_of_rows(rows: Sequence[int], begin: float = 0.0, end: float = 1.0, piece: int = 1 << 20) -> Iterator[Keys]:
    """Yield the keys of every feature from fraction `begin` to `end` of its rows, the most frequent first."""
    for first, count in zip(itertools.accumulate(rows, initial=0), rows, strict=False):
        for start in range(first + int(begin * count), first + int(end * count), piece):
            numbers = torch.arange(start, min(first + int(end * count), start + piece), device=dense_device())
            yield key_of(numbers).cpu().numpy().view(np.uint64)


def make_batch(rows: Sequence[int], hotness: Sequence[int], examples: int, seed: int) -> tc.Batch:
    """Make a batch in page-locked memory: ids by a power law of exponent ALPHA per feature, random labels."""
    device = dense_device()
    generator = torch.Generator(device).manual_seed(seed)
    g, columns = 1.0 - ALPHA, []
    for first, count, ids in zip(itertools.accumulate(rows, initial=0), rows, hotness, strict=False):
        uniform = torch.rand(examples, ids, generator=generator, device=device, dtype=torch.float64)
        rank = ((uniform * (count**g - 1.0) + 1.0) ** (1.0 / g)).long().clamp(1, count) - 1
        columns.append(key_of(rank + first))
    keys = page_locked(torch.cat(columns, 1).flatten())
    bags = torch.tensor(hotness).repeat(examples)
    offsets = page_locked(torch.cat([torch.zeros(1, dtype=torch.int64), bags.cumsum(0)]))
    dense = page_locked(torch.randn(examples, DENSE, generator=generator, device=device))
    label = page_locked((torch.rand(examples, generator=generator, device=device) < 0.3).float())
    return tc.Batch(keys.numpy().view(np.uint64), offsets.numpy(), len(hotness), dense=dense, label=label)


def dense_device() -> str:
    """Return the device of networks and generated data."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def page_locked(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, page-locked if there is a GPU."""
    return tensor.cpu().pin_memory() if torch.cuda.is_available() else tensor


# ---- networks


def mlp(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU in between; a last layer of width 1 has none."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((inputs, *widths)):
        layers += [nn.Linear(before, after)] + [nn.ReLU()] * (after > 1)
    return nn.Sequential(*layers)


class LowRankCross(nn.Module):
    """x + x0 * (V U x + b)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        product: Tensor = x0 * self.up(self.down(x))
        return x + product


class Network(nn.Module):
    """Bag and bottom MLP, interaction of their 27 vectors, top MLP: Batch -> logits."""

    def __init__(self, table: tc.Table, *, bottom: Sequence[int] = BOTTOM, top: Sequence[int] = TOP) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBag(table, len(CRITEO))
        self.bottom = mlp(DENSE, bottom)
        self.vectors = 1 + len(CRITEO)
        self.top = mlp(self.make_interaction(table.dim), top)

    def make_interaction(self, dim: int) -> int:
        """Create the interaction's parameters; return the width of its output."""
        raise NotImplementedError

    def interact(self, vectors: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: tc.Batch) -> Tensor:
        rows = self.bag(batch)
        dense = self.bottom(batch.dense.to(rows.device, non_blocking=True))
        vectors = torch.cat([dense.unsqueeze(1), rows.to(dense.dtype)], 1)
        logits: Tensor = self.top(self.interact(vectors)).squeeze(1)
        return logits


class DcnV2(Network):
    """MLPerf's DLRM-DCNv2: three low-rank cross layers over the concatenated vectors."""

    rank = 512

    def make_interaction(self, dim: int) -> int:
        width = self.vectors * dim
        self.cross = nn.ModuleList(LowRankCross(width, min(self.rank, width)) for _ in range(3))
        return width

    def interact(self, vectors: Tensor) -> Tensor:
        x0 = x = vectors.flatten(1)
        for layer in self.cross:
            x = layer(x0, x)
        return x


class Dlrm(Network):
    """DLRM: dot products of all pairs of vectors, and the dense vector."""

    def make_interaction(self, dim: int) -> int:
        pairs = torch.triu_indices(self.vectors, self.vectors, 1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs[0] * self.vectors + pairs[1], persistent=False)
        return len(self.pairs) + dim

    def interact(self, vectors: Tensor) -> Tensor:
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        return torch.cat([products.index_select(1, self.pairs), vectors[:, 0]], 1)


# ---- training


class StepTimes(Callback):
    """Times at the ends of steps, and the counters of the HBM tier at the end of step `warm`."""

    def __init__(self, table: tc.Table, warm: int) -> None:
        self.table, self.warm = table, warm
        self.marks: list[float] = []
        self.before: Any = None
        self.loss: Any = None

    def on_step(self, trainer: tc.Trainer, loss: Tensor) -> None:
        if trainer.progress.step == self.warm:
            synchronize()
            self.before = self.table.hbm.stats()  # type: ignore[union-attr]
        self.loss = loss
        self.marks.append(time.perf_counter())


def train(
    model: Network, batches: Sequence[tc.Batch], steps: int, warm: int, *, depth: int = 4, window: int = 1, **dense: Any
) -> dict[str, Any]:
    """Train `steps` steps over `batches`, repeated, with `tc.Trainer`; return figures of the steps after `warm`."""
    table = model.bag.table
    assert table.hbm is not None
    model.to(table.hbm.device)
    config = tc.TrainConfig(steps=steps, epochs=10**6, display=False, depth=depth, pull_window=window, **dense)
    times = StepTimes(table, warm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = tc.Trainer(model, optimizer, config=config, callbacks=[times])
    endless = (batches[n % len(batches)] for n in itertools.count())
    trainer.fit(itertools.islice(endless, steps))
    synchronize()
    seconds = time.perf_counter() - times.marks[warm - 1]
    after, measured = table.hbm.stats(), steps - warm
    examples = batches[0].examples
    moved = {name: getattr(after, name) - getattr(times.before, name) for name in ("misses", "evictions", "rows")}
    return {
        "examples": examples,
        "ids": len(batches[0].ids),
        "samples_per_second": examples * measured / seconds,
        "ms": seconds / measured * 1000,
        "step_ms": spread(list(np.diff(times.marks[warm - 1 :]) * 1000)),
        "steps": measured,
        "unique_rows": moved["rows"] / measured,
        "rows_in": moved["misses"] / measured,
        "rows_out": moved["evictions"] / measured,
        "hit_rate": 1 - moved["misses"] / max(1, moved["rows"]),
        "loss": float(times.loss),
    }


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interpreted_or_gpu() -> str:
    """Return the device of tables: the GPU, or Triton's interpreter for a dry run."""
    return "cuda" if torch.cuda.is_available() else "interpreter"
