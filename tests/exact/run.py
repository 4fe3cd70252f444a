"""One training, told every way: what must not change its bits.

Two tables of different dims, three bags, eight fields of Zipf-like keys, a small network with Adam; `reference()` is
the same training over dicts of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from helpers.ssd import SMALL
from helpers.train import (
    OPTIMIZERS,
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    bits,
    budget_for,
    make_batches,
    one_torch_thread,
    train_on,
    weights_of,
)

import thermocline as tc
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.table_spec import Policy
from thermocline.tiers.dram import DramStats

if TYPE_CHECKING:
    from thermocline.tiers.hbm import HbmStats

DIMS = {"wide": 8, "narrow": 3}
BAGS: list[tuple[str, Any, Any]] = [
    ("wide", [0, 1, 2, 3], ["sum", "mean", "sum", "mean"]),
    ("wide", [3, 4], "sum"),
    ("narrow", [4, 5, 6, 7], "mean"),
]
WIDTH = sum(DIMS[name] * len(fields) for name, fields, _ in BAGS)
FRESH = [11, 2**63, 2**64 - 1]
PRECISIONS = {
    "fp32": tc.Precision(),
    "bf16": tc.Precision(kind="bf16"),
    "int8": tc.Precision(kind="int8"),
    "learned": tc.Precision(kind="int6", range=0.1, scale_lr=0.01),
    "int4": tc.Precision(kind="int4", rounding="nearest", range=0.02),
}


def recipe(text: str) -> tuple[Optimizer, tc.Precision, int]:
    """What a training is: "adam", "adam/int8" on rows of that precision, "adam@2" with other data and first values."""
    text, _, seed = text.partition("@")
    optimizer, _, kind = text.partition("/")
    return OPTIMIZERS[optimizer], PRECISIONS[kind or "fp32"], int(seed or 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Ways:
    """What a run may choose without changing its bits."""

    memory: float | None = None
    """Share of the rows that memory holds, the rest on SSD; None: memory only."""
    depth: int = 1
    pull_window: int = 1
    threads: int = 1
    policy: Policy = "lru_lfu"
    hbm: float | None = None
    """Share of the rows that HBM holds; None: no such tier."""

    def __str__(self) -> str:
        where = "memory" if self.memory is None else f"{self.memory:.0%}"
        where = where if self.hbm is None else f"hbm{self.hbm:.0%}-{where}"
        return f"{where}-depth{self.depth}-window{self.pull_window}-threads{self.threads}-{self.policy}"


@functools.cache
def batches(count: int = 320, seed: int = 0) -> list[tc.Batch]:
    """320 batches of some 20 keys per table: windows of eight fit 5 % of the rows, more than one may have to wait.

    Fewer of them are smaller, too: for the GPU's kernels, interpreted.
    """
    examples = 4 if count == 320 else 2
    return make_batches(
        count, examples=examples, fields=8, keys=20000, max_ids=2, skew=1.3, weighted=True, seed=7 + seed
    )


@functools.cache
def keys_of(name: str, count: int = 320, seed: int = 0) -> np.ndarray[Any, Any]:
    fields = sorted({field for table, chosen, _ in BAGS if table == name for field in chosen})
    return np.unique(np.concatenate([batch.select(fields)[0] for batch in batches(count, seed)]))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Every bit that training made."""

    rows: dict[str, bytes]
    dense: bytes
    stats: dict[str, DramStats] = dataclasses.field(compare=False, default_factory=dict)
    merges: int = dataclasses.field(compare=False, default=0)
    hbm: dict[str, HbmStats] = dataclasses.field(compare=False, default_factory=dict)


def probe(count: int = 320, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.concatenate([all_keys(batches(count, seed)), np.array(FRESH, np.uint64)])


def make_table(name: str, optimizer: str, ways: Ways, folder: Path, count: int = 320) -> tc.Table:
    chosen, precision, seed = recipe(optimizer)
    options: dict[str, Any] = {"mem": "16MB"}
    if ways.memory is not None:
        rows = int(ways.memory * len(keys_of(name, count, seed)))
        options = {"mem": budget_for(rows, DIMS[name], chosen, precision), "ssd": folder / name, "ssd_options": SMALL}
    if ways.hbm is not None:
        from thermocline.kernels import INTERPRETED
        from thermocline.tiers.hbm import bytes_for

        words = precision.row_bytes(DIMS[name], chosen) // 4
        options["hbm"] = bytes_for(int(ways.hbm * len(keys_of(name, count, seed))), words)
        options["device"] = "interpreter" if INTERPRETED else "cuda"
    options |= {"name": name, "seed": 5 + seed, "policy": ways.policy, "threads": ways.threads}
    return tc.Table(DIMS[name], chosen, precision=precision, **options)


def make_model(tables: dict[str, tc.Table], seed: int = 0) -> Net:
    bags = [tc.EmbeddingBag(tables[name], fields, pooling=pooling) for name, fields, pooling in BAGS]
    return Net(bags, WIDTH, seed=seed)


@functools.cache
def reference(optimizer: str, count: int = 320, device: str = "cpu") -> Result:
    """The bits everything else is compared with. `device`: of the dense network, whose bits depend on it."""
    one_torch_thread()
    seed = recipe(optimizer)[2]
    sides = {name: Reference(make_table(name, optimizer, Ways(), Path())) for name in DIMS}
    for side in sides.values():
        side.table.seed = 5 + seed
    bags = [ReferenceBag(sides[name], fields, pooling) for name, fields, pooling in BAGS]
    model = Net(bags, WIDTH, seed=seed).to(device)
    train_on(model, list(sides.values()), batches(count, seed))
    return Result({name: bits(side.table.read(probe(count, seed))) for name, side in sides.items()}, weights_of(model))


def train(optimizer: str, ways: Ways, folder: Path, count: int = 320, device: str = "cpu") -> Result:
    """The same training by Thermocline, any of the ways."""
    one_torch_thread()
    seed = recipe(optimizer)[2]
    tables = {name: make_table(name, optimizer, ways, folder, count) for name in DIMS}
    model = make_model(tables, seed).to(device)
    source = tc.prefetch(batches(count, seed), *tables.values(), depth=ways.depth, pull_window=ways.pull_window)
    train_on(model, list(tables.values()), source)
    for table in tables.values():
        table.dram.check()
        if table.hbm is not None:
            table.hbm.check()
    stores = [table.store for table in tables.values() if table.store is not None]
    result = Result(
        {name: bits(table.read(probe(count, seed))) for name, table in tables.items()},
        weights_of(model),
        {name: table.dram.stats() for name, table in tables.items()},
        sum(store.stats().merges for store in stores),
        {name: table.hbm.stats() for name, table in tables.items() if table.hbm is not None},
    )
    for table in tables.values():
        table.close()
    return result


def assert_same_bits(result: Result, optimizer: str, count: int = 320, device: str = "cpu") -> None:
    expected = reference(optimizer, count, device)
    probed = len(probe(count, recipe(optimizer)[2]))
    for name, rows in expected.rows.items():
        mine = np.frombuffer(result.rows[name], np.uint32).reshape(probed, -1)
        its = np.frombuffer(rows, np.uint32).reshape(probed, -1)
        wrong = (mine != its).any(1)
        assert not wrong.any(), f"table {name}: {wrong.sum()} of {len(wrong)} rows differ from the reference"
    assert result.dense == expected.dense, "dense weights differ from the reference run"


def trained_something(optimizer: str) -> bool:
    """The test of the tests: rows and network moved."""
    table = make_table("wide", optimizer, Ways(), Path())
    start = Net([ReferenceBag(Reference(table), 1)], WIDTH)
    moved = bits(table.read(probe())) != reference(optimizer).rows["wide"]
    return moved and not torch.equal(
        torch.frombuffer(bytearray(weights_of(start)), dtype=torch.float32),
        torch.frombuffer(bytearray(reference(optimizer).dense), dtype=torch.float32),
    )
