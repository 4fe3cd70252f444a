"""Random stalls and failures in every stage of the prefetching loop: no deadlock, no lost row, the books balance.

Every seed trains the same batches, on memory for little more than one window over an SSD store, through as many
pipelines as its failures need: after each failure the books must balance and no thread may be left, and training goes
on with the first batch that was not trained. In the end every row and every dense weight is the reference's.
"""

from __future__ import annotations

import _thread
import dataclasses
import functools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ssd import SMALL
from helpers.train import (
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    bits,
    budget_for,
    loss_of,
    make_batches,
    one_torch_thread,
    weights_of,
)

import thermocline as tc
from thermocline.tiers.dram import DramTier

pytestmark = pytest.mark.timeout(120)
LONG = os.environ.get("THERMOCLINE_LONG") == "1"
SEEDS = range(2000 if LONG else 40)
COUNT = 40
OPTIMIZERS = {"a": tc.Adagrad(lr=0.05), "b": tc.Adam(lr=0.01)}
STAGES = ["source", "collect", "pull", "load", "body", "interrupt", "break", "close"]


class Injected(Exception):
    pass


@functools.cache
def batches() -> list[tc.Batch]:
    return make_batches(COUNT, keys=2000, weighted=True, skew=1.5, seed=11)


def most_keys(window: int) -> int:
    return max(len(all_keys(batches()[n : n + window])) for n in range(COUNT))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thermocline-")]


@dataclasses.dataclass
class Loop:
    """A model and its state, whoever pools for it."""

    tables: list[Any]
    model: Net
    trained: int = 0

    def __post_init__(self) -> None:
        self.dense = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)

    def train(self, batch: tc.Batch) -> None:
        self.dense.zero_grad()
        loss_of(self.model, batch).backward()
        for table in self.tables:
            table.step()
        self.dense.step()
        self.trained += 1


def a_reference() -> Loop:
    one_torch_thread()
    sides = [Reference(tc.Table(4, optimizer, mem="1MB", name=name)) for name, optimizer in OPTIMIZERS.items()]
    return Loop(sides, Net([ReferenceBag(sides[0], 3, ["sum", "mean", "sum"]), ReferenceBag(sides[1], [2])], 16))


@functools.cache
def expected(count: int = COUNT) -> tuple[list[bytes], bytes]:
    loop = a_reference()
    for batch in batches()[:count]:
        loop.train(batch)
    return [bits(side.table.read(all_keys(batches()))) for side in loop.tables], weights_of(loop.model)


class Chaos:
    """Stalls and failures by a seeded plan; `armed` is the stage that fails next, at its `countdown`-th call."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.stalls = self.random.choice([0.0, 0.05, 0.3])
        self.armed: str | None = None
        self.countdown = 0
        self.failures = 0
        pin, collect, bind = DramTier.pin, tc.Table.collect, tc.Table.bind
        monkeypatch.setattr(DramTier, "pin", lambda tier, keys: (self.at("pull"), pin(tier, keys))[1])
        monkeypatch.setattr(tc.Table, "collect", lambda table, batch: (self.at("collect"), collect(table, batch))[1])
        monkeypatch.setattr(tc.Table, "bind", lambda table, *args: (self.at("load"), bind(table, *args))[1])

    def arm(self) -> None:
        with self.lock:
            self.armed = self.random.choice(STAGES)
            self.countdown = self.random.randint(1, 12)

    def disarm(self) -> None:
        with self.lock:
            self.armed = None

    def at(self, stage: str) -> bool:
        """Stalls perhaps. Fails, or returns True for the loop's own ways to leave, if it is the stage's turn."""
        with self.lock:
            stall = self.random.random() < self.stalls
            seconds = self.random.choice([0.0, 0.0005, 0.003])
            due = False
            if stage == self.armed:
                self.countdown -= 1
                due = self.countdown == 0
                if due:
                    self.armed = None
                    self.failures += 1
        if stall:
            time.sleep(seconds)
        if due and stage in ("source", "collect", "pull", "load", "body"):
            raise self.random.choice([Injected, OSError, MemoryError, KeyboardInterrupt])(stage)
        return due

    def source(self, first: int) -> Iterator[tc.Batch]:
        for batch in batches()[first:]:
            self.at("source")
            yield batch


def run_until_failure(loop: Loop, chaos: Chaos, depth: int, window: int) -> None:
    """A pipeline from the first untrained batch to the end, or until something happens."""
    source = tc.prefetch(chaos.source(loop.trained), *loop.tables, depth=depth, pull_window=window)
    for batch in source:
        chaos.at("body")
        loop.train(batch)
        if chaos.at("interrupt"):
            raise KeyboardInterrupt
        if chaos.at("break"):
            break
        if chaos.at("close"):
            source.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_training_survives_anything(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_torch_thread()
    chaos = Chaos(seed, monkeypatch)
    depth, window = chaos.random.choice([1, 2, 3, 4, 8]), chaos.random.choice([1, 1, 2, 4])
    share = chaos.random.choice([1.0, 1.3, 3.0])
    tables = [
        tc.Table(
            4,
            optimizer,
            mem=budget_for(int(share * most_keys(window)) + 3, 4, optimizer),
            ssd=tmp_path / name,
            name=name,
            threads=chaos.random.choice([1, 2]),
            policy=chaos.random.choice(["lru_lfu", "lru", "lfu"]),
            ssd_options=SMALL,
        )
        for name, optimizer in OPTIMIZERS.items()
    ]
    bags = [tc.EmbeddingBag(tables[0], 3, pooling=["sum", "mean", "sum"]), tc.EmbeddingBag(tables[1], [2])]
    loop = Loop(tables, Net(bags, 16))
    failures = chaos.random.randint(1, 6)
    seen: list[str] = []
    while loop.trained < COUNT:
        if chaos.failures < failures:
            chaos.arm()
        before = chaos.failures, loop.trained
        try:
            run_until_failure(loop, chaos, depth, window)
        except (Injected, OSError, MemoryError, KeyboardInterrupt) as error:
            seen.append(str(error))
        chaos.disarm()
        assert our_threads() == []
        for table in tables:
            table.discard_gradients()
            table.dram.check()
        assert (chaos.failures, loop.trained) != before
    assert set(seen) <= {"", *STAGES}, "only what was injected"
    rows = [bits(table.read(all_keys(batches()))) for table in tables]
    assert (rows, weights_of(loop.model)) == expected()
    for table in tables:
        assert table.store is not None
        table.commit()
        table.store.check()
        table.close()


@pytest.mark.parametrize("seed", range(400 if LONG else 12))
def test_control_c_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Real interrupts, between any two instructions of the loop: no thread left, balanced books, the last commit."""
    one_torch_thread()
    rng = random.Random(seed)
    depth, window = rng.choice([1, 2, 4]), rng.choice([1, 2])
    optimizer = OPTIMIZERS["a"]
    budget = budget_for(int(1.5 * most_keys(window)), 4, optimizer)
    table = tc.Table(4, optimizer, mem=budget, ssd=tmp_path / "a", name="a", ssd_options=SMALL)
    bag = tc.EmbeddingBag(table, 3)
    table.commit(b"0")
    interrupts = done = 0
    while done < COUNT:
        control_c = threading.Timer(rng.random() * 0.1, _thread.interrupt_main)
        try:
            try:
                if interrupts < 5:
                    control_c.start()
                for batch in tc.prefetch(batches()[done:], table, depth=depth, pull_window=window):
                    bag(batch).pow(2).sum().backward()
                    table.step()
                    done += 1
                    if done % 7 == 0 or done == COUNT:
                        table.commit(str(done).encode())
            finally:
                while control_c.is_alive():
                    time.sleep(0.001)
        except KeyboardInterrupt:
            interrupts += 1
        assert our_threads() == []
        table.discard_gradients()
        table.dram.check()
        table.reopen()
        assert table.store is not None
        done = int(table.store.note)
    assert interrupts > 0
    reference = Reference(table)
    twin = ReferenceBag(reference, 3)
    for batch in batches():
        twin(batch).pow(2).sum().backward()
        reference.step()
    reference.assert_equals(table, all_keys(batches()))
    table.close()
