"""Helpers of the training tests: random batches, a reference training loop, small budgets.

`Reference` and `ReferenceBag` are simple versions of `tc.Table` and `tc.EmbeddingBag`: rows in a dict, pooled vectors
computed one by one, their gradients by torch's autograd, and one gradient per occurrence of a key.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import thermocline as tc
from helpers.ssd import SMALL
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import FP32
from thermocline.embedding.reference import sum_in_blocks
from thermocline.embedding.table_spec import LookAheadLimits

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": tc.SGD(lr=0.1),
    "adagrad": tc.Adagrad(lr=0.05),
    "rowwise": tc.RowWiseAdagrad(lr=0.05),
    "adam": tc.Adam(lr=0.01),
    "partial": tc.PartialRowWiseAdam(lr=0.01),
}

CATCH_UP: dict[str, Optimizer] = {
    "sgd+catch_up": tc.SGD(lr=0.1, weight_decay=0.02, lazy="catch_up"),
    "adagrad+catch_up": tc.Adagrad(lr=0.05, weight_decay=0.02, initial_accumulator=0.1, lazy="catch_up"),
    "rowwise+catch_up": tc.RowWiseAdagrad(lr=0.05, weight_decay=0.02, lazy="catch_up"),
    "partial+catch_up": tc.PartialRowWiseAdam(lr=0.01, weight_decay=0.02, lazy="catch_up"),
    "adam+catch_up": tc.Adam(lr=0.01, weight_decay=0.02, lazy="catch_up", catch_up_steps=20),
}
"""Optimizers whose rows replay missed steps; the last one replays fewer than rows of the tests miss."""


def bits(array: Any) -> bytes:
    """Return the bytes of an array, to compare bits: -0 differs from 0, and NaN equals itself."""
    values = array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array
    return np.ascontiguousarray(values).tobytes()


def weights_of(module: torch.nn.Module) -> bytes:
    """Return the bytes of every dense parameter."""
    return b"".join(bits(parameter) for parameter in module.parameters())


def make_batches(
    count: int,
    *,
    examples: int = 8,
    fields: int = 3,
    keys: int = 500,
    max_ids: int = 3,
    weighted: bool = False,
    skew: float = 1.0,
    seed: int = 0,
) -> list[tc.Batch]:
    """Make random batches with empty bags, repeated keys and labels. `skew` above 1 makes small keys frequent."""
    rng = np.random.default_rng(seed)
    batches = []
    for n in range(count):
        sizes = rng.integers(0, max_ids + 1, examples * fields)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = (keys * rng.random(offsets[-1]) ** skew).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        weights = rng.normal(size=offsets[-1]).astype(np.float32) if weighted else None
        label = torch.from_numpy(rng.integers(0, 2, examples).astype(np.float32))
        batches.append(tc.Batch(ids, offsets, fields, weights, label=label, position={"batch": n + 1}))
    return batches


def all_keys(batches: Sequence[tc.Batch]) -> np.ndarray[Any, Any]:
    return np.unique(np.concatenate([batch.ids for batch in batches]))


@functools.cache
def budget_for(
    rows: int,
    dim: int,
    optimizer: Optimizer,
    precision: tc.Precision = FP32,
    *,
    lookahead: bool = False,
    reserved: int = 0,
) -> int:
    """Return the smallest `mem` of a table over a store that holds `rows` rows, within 256 bytes.

    lookahead  the table has one: a part of `mem` is for the batches in flight
    reserved   bytes of `mem` for the batches in flight of a look-ahead with other limits
    """
    row_bytes = precision.row_bytes(dim, optimizer)
    with tempfile.TemporaryDirectory() as folder, tc.SsdStore.open(folder, row_bytes=row_bytes, **SMALL) as store:

        def enough(budget: int) -> bool:
            limits = LookAheadLimits.of(1, budget, row_bytes) if lookahead else None
            ahead = reserved if limits is None else limits.bytes
            options: dict[str, Any] = {"precision": precision, "store": store, "threads": 1}
            try:
                return tc.DramTier(dim, optimizer, budget=budget, reserved=ahead, **options).capacity >= rows
            except tc.BudgetError:
                return False

        low, high = 0, 1 << 14
        while not enough(high):
            low, high = high, 2 * high
        while high - low > 256:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class Reference:
    """A reference table with the interface of a training loop: `step` applies the gradients of all pooled vectors."""

    def __init__(self, like: tc.Table, *, seed: int = 0, initial: Any = None) -> None:
        table = int.from_bytes(hashlib.blake2b(like.name.encode(), digest_size=8).digest(), "little")
        self.table = tc.ReferenceTable(
            like.dim, like.optimizer, seed=seed, table=table, initial=initial, precision=like.precision
        )
        self.lr = like.optimizer.lr
        self.steps = 0
        self.tape: list[tuple[ReferenceBag, tc.Batch, torch.Tensor]] = []

    def step(self, *, lr: float | None = None, scale: float = 1.0, max_norm: float | None = None) -> float | None:
        self.steps += 1
        keys: list[int] = []
        gradients: list[Any] = []
        for bag, batch, pooled in self.tape:
            if pooled.grad is not None:
                bag.collect_gradients(batch, pooled.grad.numpy(), keys, gradients)
        self.tape = []
        norm = None
        if max_norm is not None:
            norm = self.norm(keys, gradients) * abs(scale)
            scale *= max_norm / norm if norm > max_norm else 1.0
        if keys:
            rate = self.lr if lr is None else lr
            self.table.update(keys, np.stack(gradients), None, "none", step=self.steps, lr=rate, scale=scale)
        self.table.rates[self.steps] = self.lr if lr is None else lr
        return norm

    def norm(self, keys: list[int], gradients: list[Any]) -> float:
        if not keys:
            return 0.0
        by_key: dict[int, list[Any]] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            by_key.setdefault(key, []).append(gradient)
        sums = np.stack([sum_in_blocks(occurrences) for occurrences in by_key.values()])
        return float(np.sqrt(np.square(sums, dtype=np.float64).sum()))

    def assert_equals(self, table: tc.Table, keys: Any) -> None:
        """Assert that `table` has the same rows for `keys`, which may be untrained."""
        expected, actual = self.table.read(keys), table.read(np.asarray(keys, np.uint64))
        if bits(expected) != bits(actual):
            wrong = np.flatnonzero((expected.view(np.uint32) != actual.view(np.uint32)).any(1))
            raise AssertionError(
                f"{len(wrong)} of {len(keys)} rows differ, first key {keys[wrong[0]]}: expected "
                f"{expected[wrong[0]]}, got {actual[wrong[0]]}"
            )


class ReferenceBag:
    """Pools a batch to a leaf float32[examples, fields, dim], or float32[ids, dim] with pooling "none"."""

    def __init__(self, table: Reference, fields: int | Sequence[int], pooling: Pooling | Sequence[Pooling] = "sum"):
        self.table = table
        self.fields = list(range(fields)) if isinstance(fields, int) else list(fields)
        self.kinds = [pooling] * len(self.fields) if isinstance(pooling, str) else list(pooling)

    def __call__(self, batch: tc.Batch) -> torch.Tensor:
        rows = self.table.table
        rows.touch(np.unique(batch.select(self.fields)[0]))
        if self.kinds == ["none"]:
            ids, _, weights = batch.select(self.fields)
            pooled = rows.pool(ids, None, "none", weights)
        else:
            pooled = np.empty((len(batch), len(self.fields), rows.dim), np.float32)
            for position, (field, kind) in enumerate(zip(self.fields, self.kinds, strict=True)):
                ids, offsets, weights = batch.select([field])
                pooled[:, position] = rows.pool(ids, offsets, kind, weights)
        leaf = torch.from_numpy(pooled).requires_grad_()
        self.table.tape.append((self, batch, leaf))
        return leaf

    def collect_gradients(self, batch: tc.Batch, grad: Any, keys: list[int], gradients: list[Any]) -> None:
        """Append a key and a gradient per id, by pooling kind, then example, then field."""
        count = 0
        for kind in dict.fromkeys(self.kinds):
            for example in range(len(batch)):
                for position, field in enumerate(self.fields):
                    if self.kinds[position] == kind:
                        begin, end = batch.offsets[example * batch.fields + field :][:2].tolist()
                        for p in range(begin, end):
                            g = grad[count] if kind == "none" else grad[example, position]
                            count += 1
                            keys.append(int(batch.ids[p]))
                            gradients.append(g * self.coefficient(batch, kind, p, end - begin))

    @staticmethod
    def coefficient(batch: tc.Batch, kind: str, p: int, size: int) -> np.float32:
        weight = np.float32(1) if batch.weights is None else batch.weights[p]
        return weight / np.float32(size) if kind == "mean" else weight


class Net(torch.nn.Module):
    """A small network over the pooled vectors of one or more bags."""

    def __init__(self, bags: Sequence[Any], width: int, *, hidden: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList(bags) if isinstance(bags[0], torch.nn.Module) else list(bags)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.dense = torch.nn.Sequential(
                torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
            )

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        device = self.dense[0].weight.device
        pooled = [bag(batch).flatten(1).to(device) for bag in self.bags]
        return self.dense(torch.cat(pooled, 1)).squeeze(1)  # type: ignore[no-any-return]


def loss_of(model: Any, batch: tc.Batch) -> torch.Tensor:
    logits = model(batch)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label.to(logits.device))


def one_torch_thread() -> None:
    """Use one torch thread: the number of threads changes the bits of torch's results."""
    torch.set_num_threads(1)


def train_on(model: Net, tables: Sequence[Any], batches: Iterator[tc.Batch] | Sequence[tc.Batch], **step: Any) -> None:
    """Train with one step of every table and of a dense Adam per batch."""
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    for batch in batches:
        loss_of(model, batch).backward()
        for table in tables:
            table.step(**step)
        dense.step()
        dense.zero_grad()
