"""A training whose result must not depend on `RunOptions`, by Thermocline (`train`) and by `ReferenceTable`.

Two tables of different dims, three bags, eight fields of skewed keys and a small network with Adam.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from helpers.ssd import SMALL
from helpers.train import (
    CATCH_UP,
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
from thermocline.embedding import table_spec
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
UNTRAINED = [11, 2**63, 2**64 - 1]
shared_dir: Path | None = None
"""Folder in which test processes share references; None: each process computes its own. Set by conftest.py."""

PRECISIONS = {
    "fp32": tc.Precision(),
    "bf16": tc.Precision(kind="bf16"),
    "int8": tc.Precision(kind="int8"),
    "learned": tc.Precision(kind="int6", range=0.1, scale_lr=0.01),
    "int4": tc.Precision(kind="int4", rounding="nearest", range=0.02),
}


def recipe(text: str) -> tuple[Optimizer, tc.Precision, int]:
    """Parse "optimizer[/precision][@seed]": "adam" is fp32 with seed 0. The seed is that of data and initial values."""
    text, _, seed = text.partition("@")
    optimizer, _, kind = text.partition("/")
    return (OPTIMIZERS | CATCH_UP)[optimizer], PRECISIONS[kind or "fp32"], int(seed or 0)


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """Options that must not change the result."""

    dram: float | None = None
    """Fraction of the rows that DRAM holds, the rest on SSD; None: all rows, no SSD."""
    depth: int = 1
    pull_window: int = 1
    threads: int = 1
    policy: Policy = "lru_lfu"
    hbm: float | None = None
    """Fraction of the rows that HBM holds; None: no HBM tier."""
    lookahead: int | str = 0
    """Batches whose rows are loaded from SSD together, or "auto", also in less memory than it needs otherwise."""

    def __str__(self) -> str:
        tiers = "dram" if self.dram is None else f"dram{self.dram:.0%}"
        tiers = tiers if self.hbm is None else f"hbm{self.hbm:.0%}-{tiers}"
        pipeline = f"depth{self.depth}-window{self.pull_window}-ahead{self.lookahead}"
        return f"{tiers}-{pipeline}-threads{self.threads}-{self.policy}"


@functools.cache
def batches(count: int = 320, seed: int = 0) -> list[tc.Batch]:
    """Make batches of about 20 keys per table. A window of eight fits 5 % of the rows; a second one may have to wait.

    Other counts than 320 have fewer examples per batch, for kernels under Triton's interpreter.
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
    """The result of a training, as bytes, and counters."""

    rows: dict[str, bytes]
    dense: bytes
    stats: dict[str, DramStats] = dataclasses.field(compare=False, default_factory=dict)
    merges: int = dataclasses.field(compare=False, default=0)
    hbm: dict[str, HbmStats] = dataclasses.field(compare=False, default_factory=dict)


def probe(count: int = 320, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return all trained keys and some untrained ones."""
    return np.concatenate([all_keys(batches(count, seed)), np.array(UNTRAINED, np.uint64)])


def make_table(name: str, optimizer: str, options: RunOptions, folder: Path, count: int = 320) -> tc.Table:
    chosen, precision, seed = recipe(optimizer)
    arguments: dict[str, Any] = {"mem": "16MB"}
    if options.dram is not None:
        rows = int(options.dram * len(keys_of(name, count, seed)))
        mem = budget_for(rows, DIMS[name], chosen, precision, lookahead=bool(options.lookahead))
        arguments = {"mem": mem, "lookahead": options.lookahead, "ssd": folder / name, "ssd_options": SMALL}
    if options.hbm is not None:
        from thermocline.kernels import INTERPRETED
        from thermocline.tiers.hbm import bytes_for

        words = precision.row_bytes(DIMS[name], chosen) // 4
        arguments["hbm"] = bytes_for(int(options.hbm * len(keys_of(name, count, seed))), words)
        arguments["device"] = "interpreter" if INTERPRETED else "cuda"
    arguments |= {"name": name, "seed": 5 + seed, "policy": options.policy, "threads": options.threads}
    with mock.patch.object(table_spec, "_LEAST_MEM", 0):  # "auto" is off in little memory
        return tc.Table(DIMS[name], chosen, precision=precision, **arguments)


def make_model(tables: dict[str, tc.Table], seed: int = 0) -> Net:
    bags = [tc.EmbeddingBag(tables[name], fields, pooling=pooling) for name, fields, pooling in BAGS]
    return Net(bags, WIDTH, seed=seed)


@functools.cache
def reference(optimizer: str, count: int = 320, device: str = "cpu") -> Result:
    """Train on `ReferenceTable`; `device` is that of the dense network, whose result depends on it."""
    if shared_dir is None:
        return _train_reference(optimizer, count, device)
    with open(shared_dir / f"reference-{optimizer.replace('/', '-')}-{count}-{device}", "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if data := file.read():
            shared: Result = pickle.loads(data)
            return shared
        result = _train_reference(optimizer, count, device)
        file.write(pickle.dumps(result))
        return result


def _train_reference(optimizer: str, count: int, device: str) -> Result:
    one_torch_thread()
    seed = recipe(optimizer)[2]
    references = {name: Reference(make_table(name, optimizer, RunOptions(), Path())) for name in DIMS}
    for table in references.values():
        table.table.seed = 5 + seed
    bags = [ReferenceBag(references[name], fields, pooling) for name, fields, pooling in BAGS]
    model = Net(bags, WIDTH, seed=seed).to(device)
    train_on(model, list(references.values()), batches(count, seed))
    rows = {name: bits(table.table.read(probe(count, seed))) for name, table in references.items()}
    return Result(rows, weights_of(model))


def train(optimizer: str, options: RunOptions, folder: Path, count: int = 320, device: str = "cpu") -> Result:
    """Train on `tc.Table`."""
    one_torch_thread()
    seed = recipe(optimizer)[2]
    tables = {name: make_table(name, optimizer, options, folder, count) for name in DIMS}
    model = make_model(tables, seed).to(device)
    source = tc.prefetch(batches(count, seed), *tables.values(), depth=options.depth, pull_window=options.pull_window)
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
        actual_bits = np.frombuffer(result.rows[name], np.uint32).reshape(probed, -1)
        expected_bits = np.frombuffer(rows, np.uint32).reshape(probed, -1)
        wrong = (actual_bits != expected_bits).any(1)
        assert not wrong.any(), f"table {name}: {wrong.sum()} of {len(wrong)} rows differ from the reference"
    assert result.dense == expected.dense, "dense weights differ from the reference run"


def training_changes_weights(optimizer: str) -> bool:
    """Whether training changed the rows and the dense network."""
    table = make_table("wide", optimizer, RunOptions(), Path())
    start = Net([ReferenceBag(Reference(table), 1)], WIDTH)
    changed = bits(table.read(probe())) != reference(optimizer).rows["wide"]
    return changed and not torch.equal(
        torch.frombuffer(bytearray(weights_of(start)), dtype=torch.float32),
        torch.frombuffer(bytearray(reference(optimizer).dense), dtype=torch.float32),
    )
